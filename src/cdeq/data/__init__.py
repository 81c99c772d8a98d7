"""What is learned from: data sets and their layouts."""

from cdeq.data.block_graphs import block_model
from cdeq.data.embedded import (
    Examples,
    Splits,
    Text,
    digits_graph,
    digits_images,
    pydoc_text,
    text_windows,
)
from cdeq.data.folders import MissingDataError, data_folder
from cdeq.data.graph_sets import GRAPH_SETS, is_graph_available, load_graph
from cdeq.data.graphs import Graph, NodeTask, nearest_neighbours, normalised_adjacency
from cdeq.data.huggingface import from_hf
from cdeq.data.image_folders import IMAGENET_STANDARD, FolderBatches, FolderImages
from cdeq.data.image_sets import (
    IMAGE_SETS,
    is_image_set_available,
    load_images,
    read_class_folders,
    require_image_files,
)
from cdeq.data.images import Augmentation, Images, ImageSet, Standard
from cdeq.data.label_chains import chain_graphs
from cdeq.data.npz_graphs import read_npz_graph
from cdeq.data.ogb import read_ogb
from cdeq.data.planetoid import read_planetoid
from cdeq.data.pyg import from_pyg, pyg_batch
from cdeq.data.text import Corpus, Streams, Vocabulary
from cdeq.data.text_sets import (
    TEXT_SETS,
    is_text_available,
    load_hub_text,
    load_text,
    read_text_folder,
)
from cdeq.data.unpickle import UnsafePickleError

__all__ = [
    "GRAPH_SETS",
    "IMAGENET_STANDARD",
    "IMAGE_SETS",
    "TEXT_SETS",
    "Augmentation",
    "Corpus",
    "Examples",
    "FolderBatches",
    "FolderImages",
    "Graph",
    "ImageSet",
    "Images",
    "MissingDataError",
    "NodeTask",
    "Splits",
    "Standard",
    "Streams",
    "Text",
    "UnsafePickleError",
    "Vocabulary",
    "block_model",
    "chain_graphs",
    "data_folder",
    "digits_graph",
    "digits_images",
    "from_hf",
    "from_pyg",
    "is_graph_available",
    "is_image_set_available",
    "is_text_available",
    "load_graph",
    "load_hub_text",
    "load_images",
    "load_text",
    "nearest_neighbours",
    "normalised_adjacency",
    "pydoc_text",
    "pyg_batch",
    "read_class_folders",
    "read_npz_graph",
    "read_ogb",
    "read_planetoid",
    "read_text_folder",
    "require_image_files",
    "text_windows",
]
