"""A random graph for the tests of graph networks."""

import torch

from cdeq.data.graphs import Graph, normalised_adjacency
from checks import numbers

FEATURES = 5


def random_graph(nodes: int = 24, dtype: torch.dtype = torch.float64) -> Graph:
    """About four edges for each node, and normal features."""
    edges = torch.randint(nodes, (2, 2 * nodes), generator=torch.Generator().manual_seed(0))
    adjacency = normalised_adjacency(edges, nodes).to(dtype)
    return Graph(adjacency, numbers(nodes, FEATURES, dtype=dtype))
