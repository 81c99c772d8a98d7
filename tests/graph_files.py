"""Small files in the formats of public graphs, and the truth about them."""

from __future__ import annotations

import gzip
import struct

import numpy as np

# Pickles as Python 2 wrote them, opcode by opcode.


def name(module: str, attribute: str) -> bytes:
    return b"c" + f"{module}\n{attribute}\n".encode()


def string(value: bytes) -> bytes:
    """BINSTRING, the str of Python 2."""
    return b"T" + struct.pack("<i", len(value)) + value


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def array(values: np.ndarray, module: str = "numpy.core.multiarray", code: str = "") -> bytes:
    values = np.ascontiguousarray(values)
    shape = b"(" + b"".join(map(number, values.shape)) + b"t"
    empty = name(module, "_reconstruct") + name("numpy", "ndarray") + b"K\x00\x85" + string(b"b")
    kind = (code or values.dtype.str[1:]).encode()
    order = string(values.dtype.str[:1].encode())
    dtype = name("numpy", "dtype") + string(kind) + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + order + b"NNN" + number(-1) + number(-1) + b"K\x00tb"
    state = b"(K\x01" + shape + dtype + b"\x89" + string(values.tobytes()) + b"t"
    return empty + b"\x87R" + state + b"b"


def csr(
    dense: np.ndarray, module: str = "scipy.sparse.csr", inner: str = "numpy.core.multiarray"
) -> bytes:
    rows, columns = dense.nonzero()
    indptr = np.concatenate([[0], np.bincount(rows, minlength=len(dense)).cumsum()])
    parts = {
        "indptr": indptr.astype("i4"),
        "indices": columns.astype("i4"),
        "data": dense[rows, columns],
    }
    shape = string(b"_shape") + number(dense.shape[0]) + number(dense.shape[1]) + b"\x86"
    arrays = b"".join(string(k.encode()) + array(v, inner) for k, v in parts.items())
    return name(module, "csr_matrix") + b")\x81}(" + shape + arrays + b"ub"


def neighbours(graph: dict[int, list[int]]) -> bytes:
    items = (number(k) + b"](" + b"".join(map(number, v)) + b"e" for k, v in graph.items())
    return (
        name("collections", "defaultdict")
        + name("__builtin__", "list")
        + b"\x85R("
        + b"".join(items)
        + b"u"
    )


def pickled(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


class Attack:
    """Pickles as a call of its choice."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


KNOWN, TESTED, WORDS = 520, 6, 9


def write_planetoid(folder, title="citeseer", seed=0):
    """520 nodes with 3 classes and 8 more, of which 6 are tested, in shuffled order. Returns dense truth."""
    folder.mkdir(exist_ok=True, parents=True)
    generator = np.random.default_rng(seed)
    nodes = KNOWN + TESTED + 2
    words = (generator.random((nodes, WORDS)) < 0.4).astype("<f4")
    words[5] = 0
    classes = np.eye(3, dtype="<i4")[generator.integers(0, 3, nodes)]
    missing = [KNOWN + 2, KNOWN + 5]
    testing = generator.permutation([i for i in range(KNOWN, nodes) if i not in missing])
    words[missing], classes[missing] = 0, 0
    graph = {i: generator.integers(0, nodes, 3).tolist() for i in range(nodes)}
    files = {
        "x": csr(words[:12]),
        "y": array(classes[:12]),
        "allx": csr(words[:KNOWN]),
        "ally": array(classes[:KNOWN]),
        "tx": csr(words[testing]),
        "ty": array(classes[testing]),
        "graph": neighbours(graph),
    }
    for part, body in files.items():
        (folder / f"ind.{title}.{part}").write_bytes(pickled(body))
    (folder / f"ind.{title}.test.index").write_text("".join(f"{i}\n" for i in testing))
    return words, classes, testing, graph


def write_npz(path, *, dense=False, seed=0, nodes=200, **changes):
    """A directed graph of 3 classes and two components: even nodes below 150, and the rest. Returns dense truth."""
    generator = np.random.default_rng(seed)
    edges = (generator.random((nodes, nodes)) < 0.05).astype("f4")
    group = (np.arange(nodes) % 2 == 0) & (np.arange(nodes) < 150)
    edges[group[:, None] != group] = 0
    for members in (np.flatnonzero(group), np.flatnonzero(~group)):
        edges[members[:-1], members[1:]] = 1
    attributes = (generator.random((nodes, 7)) < 0.5).astype("f4") * generator.integers(1, 4, 7)
    labels = generator.integers(0, 3, nodes)
    arrays = {"labels": labels, "node_names": np.array(["a"] * nodes)}
    for key, matrix in {"adj": edges, "attr": attributes}.items():
        if key == "attr" and dense:
            arrays["attr_matrix"] = matrix
            continue
        rows, columns = matrix.nonzero()
        # Backwards within each row, as no sorted CSR has it.
        order = np.lexsort((-columns, rows))
        arrays |= {
            f"{key}_data": matrix[rows, columns][order].astype("f4"),
            f"{key}_indices": columns[order].astype("i4"),
            f"{key}_indptr": np.append(0, np.bincount(rows, minlength=nodes).cumsum()).astype("i4"),
            f"{key}_shape": np.array(matrix.shape),
        }
    np.savez(path, **{**arrays, **changes})
    return edges, attributes, labels, group


def write_gz(path, table, form="{}"):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(
            ",".join(form.format(v) for v in row) + "\n" for row in np.array(table).tolist()
        )


def write_ogb(folder, nodes=40, form="{:.6f}", graph="ogbn_arxiv", split="time"):
    generator = np.random.default_rng(0)
    features = generator.standard_normal((nodes, 5)).round(6)
    edges = generator.integers(0, nodes, (90, 2))
    labels = generator.integers(0, 4, (nodes, 1))
    order = generator.permutation(nodes)[:, None]
    root = folder / graph
    write_gz(root / "raw/node-feat.csv.gz", features, form)
    write_gz(root / "raw/edge.csv.gz", edges)
    write_gz(root / "raw/node-label.csv.gz", labels)
    write_gz(root / "raw/num-node-list.csv.gz", [[nodes]])
    write_gz(root / "raw/num-edge-list.csv.gz", [[90]])
    for part, rows in zip(("train", "valid", "test"), np.split(order, [20, 30]), strict=True):
        write_gz(root / "split" / split / f"{part}.csv.gz", rows)
    return features, edges, labels.ravel(), order.ravel()
