"""Node classification of the Open Graph Benchmark (Hu et al. 2020), from the files its downloads unpack to.

Shapes: N nodes, E edges, F features.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from cdeq.data.cache import keep_tensors, kept_tensors, key_of
from cdeq.data.graphs import NodeTask, mask_of, node_task, task_of_tensors, tensors_of_task

OGB_SPLITS = {"ogbn-arxiv": "time", "ogbn-products": "sales_ranking"}
CACHE_VERSION = 2
BLOCK = 1 << 24  # bytes of text parsed at once
EXACT_FIELD = 15  # characters of a number: whole numbers below 2^53 are exact as doubles
POWERS = np.power(10.0, np.arange(EXACT_FIELD))  # exact, too


def ogb_files(name: str) -> dict[str, str]:
    """The files of a graph below the folder of all, under short names."""
    if name not in OGB_SPLITS:
        raise ValueError(f"no OGB graph {name!r}; there are {', '.join(OGB_SPLITS)}")
    folder = name.replace("-", "_")
    raw, split = f"{folder}/raw", f"{folder}/split/{OGB_SPLITS[name]}"
    return {
        "nodes": f"{raw}/num-node-list.csv.gz",
        "edge count": f"{raw}/num-edge-list.csv.gz",
        "edges": f"{raw}/edge.csv.gz",
        "features": f"{raw}/node-feat.csv.gz",
        "labels": f"{raw}/node-label.csv.gz",
        "train": f"{split}/train.csv.gz",
        "valid": f"{split}/valid.csv.gz",
        "test": f"{split}/test.csv.gz",
    }


def read_ogb(folder: str | Path, name: str, *, cache: str | Path | None = None) -> NodeTask:
    """ogbn-arxiv or ogbn-products below `folder`: dense features (N, F) as given, the official split.

    Edges count in both directions. With a folder `cache` the parsed graph is kept there as safetensors, and read from
    there while the sizes and times of the source files stay what they were.
    """
    paths = {part: Path(folder) / file for part, file in ogb_files(name).items()}
    if cache is None:
        return _parsed(paths)
    kept, about = Path(cache) / f"{name}.safetensors", _about(paths)
    parts = kept_tensors(kept, about)
    if parts is not None:
        return task_of_tensors(parts)
    task = _parsed(paths)
    keep_tensors(kept, tensors_of_task(task), about)
    return task


def _parsed(paths: dict[str, Path]) -> NodeTask:
    nodes = _only_number(paths["nodes"])
    features = read_numbers(paths["features"], np.float32, rows=nodes)
    edges = read_numbers(paths["edges"], np.int64, rows=_only_number(paths["edge count"]))
    labels = read_numbers(paths["labels"], np.int64, rows=nodes)
    if labels.shape[1] != 1:
        raise ValueError(f"{paths['labels']} must hold one class for each node")
    train, valid, test = (
        mask_of(torch.from_numpy(read_numbers(paths[part], np.int64)).flatten(), nodes)
        for part in ("train", "valid", "test")
    )
    return node_task(
        torch.from_numpy(edges).t(),
        torch.from_numpy(features),
        torch.from_numpy(labels).flatten(),
        (train, valid, test),
    )


def _only_number(path: Path) -> int:
    counts = read_numbers(path, np.int64)
    if counts.size != 1:
        raise ValueError(f"{path} must hold one number: a single graph, not {counts.size}")
    return int(counts[0, 0])


def read_numbers(path: Path, dtype: type, *, rows: int | None = None) -> np.ndarray:
    """A gzipped table of numbers without header, (rows, columns); a ValueError if it has other than `rows` rows."""
    try:
        blocks = []
        columns, found = 0, 0
        table: np.ndarray | None = None
        for text in _line_blocks(path):
            columns = columns or 1 + text[: text.index(b"\n")].count(b",")
            block = parse_numbers(text, dtype)
            lines = text.count(b"\n")
            if block.size != lines * columns or text.count(b",") != lines * (columns - 1):
                raise ValueError(f"not {columns} numbers in every line")
            block = block.reshape(lines, columns)
            if rows is None:
                blocks.append(block)
                continue
            if table is None:
                table = np.empty((rows, columns), dtype)  # once, so that large files fit twice
            if found + lines > rows:
                raise ValueError(f"more than the {rows} lines expected")
            table[found : found + lines] = block
            found += lines
        if rows is None:
            return np.concatenate(blocks) if blocks else np.empty((0, 1), dtype)
        if table is None or found != rows:
            raise ValueError(f"{found} lines where {rows} are expected")
        return table
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _line_blocks(path: Path) -> Iterator[bytes]:
    """The text of a gzipped file in blocks of whole lines, each line ended."""
    rest = b""
    with gzip.open(path, "rb") as file:
        while block := file.read(BLOCK):
            lines, newline, tail = block.rpartition(b"\n")
            if newline:
                yield rest + lines + newline
                rest = tail
            else:
                rest += tail
    if rest:
        yield rest + b"\n"


def parse_numbers(text: bytes, dtype: type) -> np.ndarray:
    """All numbers of lines of text, separated by commas, flat.

    Decimals are read as whole numbers without their point and then divided by a power of ten, both exact in double
    precision: several times as fast as reading floats. Text beyond that (exponents, many digits) is read as floats.
    """
    shifts = _decimal_shifts(text)
    whole_numbers = np.issubdtype(dtype, np.integer)
    if shifts is not None and not (whole_numbers and shifts.any()):
        digits = text.translate(bytes.maketrans(b",", b" "), b".")
        whole = np.fromstring(digits, np.int64, sep=" ")
        return whole if whole_numbers else (whole / POWERS[shifts]).astype(dtype)
    if whole_numbers:
        raise ValueError("not all are whole numbers")
    return np.loadtxt(
        text.decode().splitlines(), dtype, comments=None, delimiter=",", ndmin=2
    ).ravel()


def _decimal_shifts(text: bytes) -> np.ndarray | None:
    """How many digits follow the point in each number; None if some number is not a short plain decimal."""
    if not text or text.translate(None, b"0123456789,-.\n"):
        return None
    characters = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero((characters == ord(",")) | (characters == ord("\n")))
    lengths = np.diff(ends, prepend=-1) - 1
    if lengths.max() > EXACT_FIELD or lengths.min() < 1:
        return None
    # A number is a minus or none, then at least one digit, with one point or none among them.
    minuses = np.flatnonzero(characters == ord("-"))
    before = characters[minuses - 1]  # of the first character, the last: a newline
    if ((before != ord(",")) & (before != ord("\n"))).any():
        return None
    undecided = ends[characters[ends - 1] < ord("0")]  # ends in a point, after a digit, or is none
    if (characters[undecided - 2] < ord("0")).any() or (
        characters[undecided - 1] == ord("-")
    ).any():
        return None
    points = np.flatnonzero(characters == ord("."))
    if len(points) == len(ends) and (points < ends).all() and (points[1:] > ends[:-1]).all():
        return ends - points - 1  # the common case, a point in each number
    fields = np.searchsorted(ends, points)
    if (np.diff(fields) < 1).any():
        return None
    shifts = np.zeros(len(ends), np.int64)
    shifts[fields] = ends[fields] - points - 1
    return shifts


def _about(paths: dict[str, Path]) -> dict[str, str]:
    """What the parsed graph depends on."""
    files = {part: [path.stat().st_size, path.stat().st_mtime_ns] for part, path in paths.items()}
    dtype = str(torch.get_default_dtype())
    return {"key": key_of(version=CACHE_VERSION, dtype=dtype, files=files)}
