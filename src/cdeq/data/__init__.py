"""What is learned from: data sets and their layouts."""

from cdeq.data.embedded import (
    Examples,
    Splits,
    Text,
    digits_graph,
    digits_images,
    pydoc_text,
    text_windows,
)
from cdeq.data.graphs import Graph, NodeTask, nearest_neighbours, normalised_adjacency

__all__ = [
    "Examples",
    "Graph",
    "NodeTask",
    "Splits",
    "Text",
    "digits_graph",
    "digits_images",
    "nearest_neighbours",
    "normalised_adjacency",
    "pydoc_text",
    "text_windows",
]
