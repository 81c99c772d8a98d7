"""The public graphs by name: which files each needs, where they come from, and how to read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cdeq.data.folders import data_folder, require_in_folder
from cdeq.data.graphs import NodeTask
from cdeq.data.npz_graphs import read_npz_graph
from cdeq.data.ogb import OGB_SPLITS, ogb_files, read_ogb
from cdeq.data.planetoid import PLANETOID_NAMES, PLANETOID_PARTS, read_planetoid


@dataclass(frozen=True, kw_only=True)
class GraphSet:
    """A public graph: its files below the data folder, their public home, and read(folder, seed, cache)."""

    files: tuple[str, ...]
    home: str
    read: Callable[[Path, int, Path | None], NodeTask]


def _planetoid(name: str) -> GraphSet:
    return GraphSet(
        files=tuple(f"planetoid/ind.{name}.{part}" for part in PLANETOID_PARTS),
        home="the Planetoid repository on GitHub (kimiyoung/planetoid), folder data",
        read=lambda folder, seed, cache: read_planetoid(folder / "planetoid", name),
    )


def _npz(file: str) -> GraphSet:
    path = f"gnn-benchmark/{file}.npz"
    return GraphSet(
        files=(path,),
        home="the gnn-benchmark repository on GitHub (shchur/gnn-benchmark), folder data/npz",
        read=lambda folder, seed, cache: read_npz_graph(folder / path, seed=seed),
    )


def _ogb(name: str) -> GraphSet:
    folder = name.replace("-", "_")
    return GraphSet(
        files=tuple(f"ogb/{file}" for file in ogb_files(name).values()),
        home=(
            f"the Open Graph Benchmark (ogb.stanford.edu), data set {name}: "
            f"unpack it and name its folder {folder}"
        ),
        read=lambda data, seed, cache: read_ogb(data / "ogb", name, cache=cache),
    )


GRAPH_SETS: dict[str, GraphSet] = {
    **{name: _planetoid(name) for name in PLANETOID_NAMES},
    "amazon-computers": _npz("amazon_electronics_computers"),
    "amazon-photo": _npz("amazon_electronics_photo"),
    "coauthor-cs": _npz("ms_academic_cs"),
    "coauthor-physics": _npz("ms_academic_phy"),
    **{name: _ogb(name) for name in OGB_SPLITS},
}


def load_graph(
    name: str,
    folder: str | Path | None = None,
    *,
    seed: int = 0,
    cache: str | Path | None = None,
) -> NodeTask:
    """A public graph from the data folder (`data_folder(folder)`).

    `seed` draws the split of the Amazon and Coauthor graphs; the others come with theirs. `cache` is a folder where
    the OGB graphs are kept parsed.
    """
    require_graph_files(name, folder)
    kept = None if cache is None else Path(cache)
    return _graph_set(name).read(data_folder(folder), seed, kept)


def require_graph_files(name: str, folder: str | Path | None = None) -> None:
    """A `MissingDataError` that says what to do, if files of a graph are not in the data folder."""
    chosen = _graph_set(name)
    require_in_folder(name, chosen.files, chosen.home, folder)


def is_graph_available(name: str, folder: str | Path | None = None) -> bool:
    """Whether all files of a graph are in the data folder."""
    place = data_folder(folder)
    return all((place / file).is_file() for file in _graph_set(name).files)


def _graph_set(name: str) -> GraphSet:
    if name not in GRAPH_SETS:
        raise ValueError(f"no graph {name!r}; there are {', '.join(GRAPH_SETS)}")
    return GRAPH_SETS[name]
