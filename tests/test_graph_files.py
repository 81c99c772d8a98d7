"""Readers of public graph files: right on small files written here, and on the real ones where CDEQ_DATA has them."""

from __future__ import annotations

import contextlib
import gzip
import os
import pickle
import struct
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdeq.data import (
    GRAPH_SETS,
    MissingDataError,
    UnsafePickleError,
    data_folder,
    from_pyg,
    is_available,
    load_graph,
    normalised_adjacency,
    read_npz_graph,
    read_ogb,
    read_planetoid,
)
from cdeq.data import ogb as ogb_module
from cdeq.data.graphs import csr_from_arrays, row_normalised
from cdeq.data.npz_graphs import largest_component_mask
from cdeq.data.sparse import SparseMatrix, row_indices
from cdeq.data.unpickle import CsrArrays, parse_pickle, read_pickle

# --- Pickles as Python 2 wrote them, opcode by opcode. ---


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


@pytest.mark.parametrize("numpy_module", ["numpy.core.multiarray", "numpy._core.multiarray"])
@pytest.mark.parametrize("scipy_module", ["scipy.sparse.csr", "scipy.sparse._csr"])
def test_arrays_and_matrices_of_old_and_new_names(numpy_module, scipy_module):
    dense = np.array([[0, 1.5, 0], [2, 0, -3]], dtype="<f4")
    read = parse_pickle(pickled(csr(dense, scipy_module, numpy_module)))
    assert isinstance(read, CsrArrays)
    again = csr_from_arrays(read.indptr, read.indices, read.data, read.shape)
    assert again.to_dense().numpy().tolist() == dense.tolist()
    wide = np.arange(6, dtype=">i8").reshape(2, 3)
    native = parse_pickle(pickled(array(wide, numpy_module)))
    assert native.dtype == np.int64
    assert native.tolist() == wide.tolist()
    assert parse_pickle(pickled(neighbours({3: [1, 2], 4: []}))) == {3: [1, 2], 4: []}


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_what_today_writes_is_read(protocol):
    value = [
        np.arange(4),
        (np.eye(3, dtype="f4").T,),
        {"a": np.float64(0.5)},
        -(2**40),
        "ü",
        b"\xff",
    ]
    ours = parse_pickle(pickle.dumps(value, protocol))
    assert np.array_equal(ours[0], value[0])
    assert np.array_equal(ours[1][0], value[1][0])
    assert ours[2:] == value[2:]
    graph = defaultdict(list, {0: [1], 1: [0]})
    assert parse_pickle(pickle.dumps(graph, protocol)) == graph
    sparse = pytest.importorskip("scipy.sparse")
    matrix = sparse.random(6, 5, 0.4, format="csr", random_state=0)
    read = parse_pickle(pickle.dumps(matrix, protocol))
    assert np.array_equal(read.data, matrix.data)
    assert read.shape == (6, 5)


class Attack:
    """Pickles as a call of its choice."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("function", "named"),
    [(os.system, "system"), (eval, "eval"), (exec, "exec"), (getattr, "getattr")],
)
def test_attacks_by_reduce_run_nothing(function, named, protocol, tmp_path):
    marker = tmp_path / "ran"
    code = f"touch {marker}" if function is os.system else f"open({str(marker)!r}, 'w')"
    path = tmp_path / "evil"
    path.write_bytes(pickle.dumps({"x": [Attack(function, code)]}, protocol))
    refused = UnsafePickleError if protocol in (2, 3, 4) else ValueError
    with pytest.raises(refused, match=named if protocol in (2, 3, 4) else None):
        read_pickle(path)
    assert not marker.exists()


SIMPLE = array(np.arange(3, dtype="<i4"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (name("__builtin__", "eval") + string(b"1") + b"\x85R", "__builtin__.eval"),
        (name("posix", "system") + string(b"true") + b"\x85R", "posix.system"),
        (name("numpy", "load") + string(b"f") + b"\x85R", "numpy.load"),
        (name("collections", "OrderedDict") + b")R", "OrderedDict"),
        (b"(" + string(b"true") + b"ios\nsystem\n", "os system"),  # INST
        (b"\x82\x01", "EXT1"),
        (b"Pfile\n", "PERSID"),
        (b"S'\\y'\n", "STRING"),  # an odd escape warns inside pickletools
        (string(b"os") + string(b"system") + b"\x93", "os.system"),  # STACK_GLOBAL in protocol 2
        # State set on a name, on a list, on a number: all refused.
        (
            name("scipy.sparse.csr", "csr_matrix") + b"N}" + string(b"__setstate__") + b"Ns\x86b",
            "state",
        ),
        (b"]}b", "state of a list"),
        (b"K\x01}b", "state of a int"),
        # A call of an array, a number, of known names with unknown arguments.
        (SIMPLE + b")R", "call"),
        (b"K\x01)R", "call"),
        (name("collections", "defaultdict") + name("numpy", "dtype") + b"\x85R", "call"),
        (name("_codecs", "encode") + string(b"x") + string(b"rot13") + b"\x86R", "call"),
        (name("numpy.core.multiarray", "_reconstruct") + name("numpy", "dtype") + b"\x85R", "call"),
        # Pointers as bytes: an array of objects.
        (array(np.arange(3, dtype="<i8"), code="O8"), "O8"),
    ],
)
def test_what_arrays_do_not_need_is_refused(body, message):
    with pytest.raises(UnsafePickleError, match=message):
        parse_pickle(pickled(body))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"plain text",
        b"\x80\x02",
        b"\x80\x05N.",
        pickled(b""),
        pickled(b"NN"),
        pickled(b"(N"),
        pickled(b"h\x07"),
        pickled(b"\x85"),
        pickled(b"Ne"),
        pickled(b"}(Nu"),
        pickled(b"}NNs"),
        pickled(b"N" + b"\x85" * 200_000 + b"q\x00}h\x00Ns"),  # a key too deep to be hashed
        pickled(name("numpy", "dtype") + string(b"i4") + b"K\x00K\x01\x87R"),
        pickled(SIMPLE.replace(string(np.arange(3, dtype="<i4").tobytes()), string(b"12345"))),
        pickled(name("scipy.sparse.csr", "csr_matrix") + b")\x81]b"),
        pickled(name("scipy.sparse.csr", "csr_matrix") + b")\x81}b"),
    ],
)
def test_malformed_pickles_are_said_to_be_so(content):
    with pytest.raises(ValueError, match=r"evil.* is not a complete pickle"):
        parse_pickle(content, source="evil")


def test_a_pickle_cut_anywhere_is_refused():
    whole = pickled(csr(np.eye(3, dtype="<f4")))
    for end in range(len(whole)):
        with pytest.raises(ValueError, match="pickle"):
            parse_pickle(whole[:end])


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damage_gives_a_value_or_a_value_error(data):
    content = bytearray(pickled(csr(np.eye(3, dtype="<f4"))))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        parse_pickle(bytes(content))


# --- Planetoid ---

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


def test_planetoid_puts_every_node_in_its_place(tmp_path):
    words, classes, testing, graph = write_planetoid(tmp_path)
    task = read_planetoid(tmp_path, "citeseer")
    dense = task.graph.features.matrix.to_dense().numpy()
    lengths = np.linalg.norm(words, axis=1, keepdims=True)
    np.testing.assert_allclose(dense, words / np.where(lengths > 0, lengths, 1), rtol=1e-6)
    assert torch.equal(task.graph.features.transpose.to_dense(), torch.from_numpy(dense.T))
    assert task.labels.tolist() == classes.argmax(axis=1).tolist()
    assert task.train.nonzero().flatten().tolist() == list(range(12))
    assert task.valid.nonzero().flatten().tolist() == list(range(12, 512))
    assert task.test.nonzero().flatten().tolist() == sorted(testing)
    adjacency = np.eye(len(words))
    for node, others in graph.items():
        adjacency[node, others] = adjacency[others, node] = 1
    scale = adjacency.sum(axis=1) ** -0.5
    np.testing.assert_allclose(
        task.graph.adjacency.to_dense().numpy(), scale[:, None] * adjacency * scale, rtol=1e-6
    )


def test_planetoid_files_that_do_not_fit(tmp_path):
    write_planetoid(tmp_path)
    with pytest.raises(ValueError, match="cora, citeseer, pubmed"):
        read_planetoid(tmp_path, "nell")
    with pytest.raises(ValueError, match="belong together"):
        read_planetoid(tmp_path, "citeseer", valid=509)
    index = tmp_path / "ind.citeseer.test.index"
    lines = index.read_text().split()
    for wrong, message in [
        (lines[:-1], "belong together"),
        ([*lines[:-1], "3"], "belong together"),
        ([*lines[:-1], lines[0]], "once"),
        (["one"], "whole number"),
    ]:
        index.write_text("\n".join(wrong))
        with pytest.raises(ValueError, match=message):
            read_planetoid(tmp_path, "citeseer")
    index.write_text("\n".join(lines))
    (tmp_path / "ind.citeseer.graph").write_bytes(pickle.dumps({0: 1}, 2))
    with pytest.raises(ValueError, match=r"citeseer\.graph names nodes"):
        read_planetoid(tmp_path, "citeseer")
    (tmp_path / "ind.citeseer.ally").write_bytes(pickle.dumps(Attack(os.system, "true"), 2))
    with pytest.raises(UnsafePickleError, match=r"ind\.citeseer\.ally.*system"):
        read_planetoid(tmp_path, "citeseer")


# --- .npz graphs ---


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


@pytest.mark.parametrize("dense", [False, True])
def test_npz_graphs(tmp_path, dense):
    path = tmp_path / "graph.npz"
    edges, attributes, labels, group = write_npz(path, dense=dense)
    task = read_npz_graph(path, seed=3, per_class=5, valid_per_class=6)
    features = task.graph.features
    assert isinstance(features, torch.Tensor if dense else SparseMatrix)
    lengths = np.linalg.norm(attributes, axis=1, keepdims=True)
    expected = attributes / np.where(lengths > 0, lengths, 1)
    found = features if dense else features.matrix.to_dense()
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
    assert found.dtype == torch.float32
    pairs = torch.from_numpy(np.stack(edges.nonzero()))
    assert torch.equal(task.graph.adjacency.to_dense(), normalised_adjacency(pairs, 200).to_dense())
    assert task.labels.tolist() == labels.tolist()
    assert task.labels[task.train].bincount().tolist() == [5] * 3
    assert task.labels[task.valid].bincount().tolist() == [6] * 3
    assert (task.train.long() + task.valid.long() + task.test.long()).eq(1).all()

    part = read_npz_graph(path, seed=3, per_class=5, valid_per_class=6, largest_component=True)
    assert part.labels.tolist() == labels[~group].tolist()
    found = part.graph.features if dense else part.graph.features.matrix.to_dense()
    np.testing.assert_allclose(found.numpy(), expected[~group], rtol=1e-6)
    pairs = torch.from_numpy(np.stack(edges[~group][:, ~group].nonzero()))
    nodes = int((~group).sum())
    assert torch.equal(
        part.graph.adjacency.to_dense(), normalised_adjacency(pairs, nodes).to_dense()
    )


def test_the_seed_draws_the_npz_split(tmp_path):
    path = tmp_path / "graph.npz"
    write_npz(path)
    a, b, c = (read_npz_graph(path, seed=s, per_class=5, valid_per_class=6) for s in (1, 1, 2))
    assert torch.equal(a.train, b.train)
    assert torch.equal(a.valid, b.valid)
    assert not torch.equal(a.train, c.train)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": np.zeros(3, int)}, "labels"),
        ({"labels": np.array([{}] * 200, dtype=object)}, "plain numbers"),
        ({"adj_indices": np.zeros(2, "i4")}, "lengths differ"),
        ({"adj_shape": np.array([200, 100])}, "graph.npz"),
        ({"attr_indptr": np.r_[0, 5, 3, np.full(198, 5)]}, "lengths differ|decrease"),
        ({"attr_shape": np.array([200, 3])}, "CSR"),
    ],
)
def test_damaged_npz_graphs(tmp_path, changes, message):
    path = tmp_path / "graph.npz"
    write_npz(path, **changes)
    with pytest.raises(ValueError, match=message):
        read_npz_graph(path, seed=0, per_class=5, valid_per_class=5)


def test_npz_graphs_too_small_or_no_zip(tmp_path):
    path = tmp_path / "graph.npz"
    write_npz(path)
    with pytest.raises(ValueError, match="too few for 20 to train and 300"):
        read_npz_graph(path, seed=0, valid_per_class=300)
    np.savez(path, labels=np.zeros(3, int))
    with pytest.raises(ValueError, match="no array 'adj_indptr'"):
        read_npz_graph(path, seed=0)
    path.write_bytes(pickle.dumps(Attack(os.system, "true")))
    with pytest.raises(ValueError, match=r"graph\.npz"):
        read_npz_graph(path, seed=0)


@settings(max_examples=100, deadline=None)
@given(nodes=st.integers(1, 40), data=st.data())
def test_the_largest_component_is_that_of_a_search(nodes, data):
    ends = st.integers(0, nodes - 1)
    pairs = data.draw(st.lists(st.tuples(ends, ends), max_size=50))
    near = {i: {i} for i in range(nodes)}
    for a, b in pairs:
        near[a].add(b)
        near[b].add(a)
    components, seen = [], set()
    for start in range(nodes):
        component, front = set(), {start} - seen
        while front:
            component |= front
            front = set().union(*(near[i] for i in front)) - component
        seen |= component
        components.append(component)
    largest = max(components, key=len)  # the first of equal ones
    edges = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).t()
    assert set(largest_component_mask(edges, nodes).nonzero().flatten().tolist()) == largest


def test_rows_have_length_one():
    dense = torch.tensor([[3.0, -4.0], [0.0, 0.0], [0.5, 0.0]])
    expected = torch.tensor([[0.6, -0.8], [0.0, 0.0], [1.0, 0.0]])
    torch.testing.assert_close(row_normalised(dense), expected)
    sparse = csr_from_arrays(
        np.array([0, 2, 2, 3]), np.array([1, 0, 0]), np.array([-4, 3, 0.5]), (3, 2)
    )
    torch.testing.assert_close(row_normalised(sparse).to_dense(), expected)


# --- OGB ---


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


@pytest.mark.parametrize("form", ["{:.6f}", "{}", "{:.3e}", "{:.17g}"])
@pytest.mark.parametrize("block", [1 << 24, 64, 7])
def test_ogb(tmp_path, monkeypatch, form, block):
    monkeypatch.setattr(ogb_module, "BLOCK", block)
    features, edges, labels, order = write_ogb(tmp_path, form=form)
    task = read_ogb(tmp_path, "ogbn-arxiv")
    exact = np.array([[float(form.format(v)) for v in row] for row in features.tolist()])
    np.testing.assert_allclose(task.graph.features.numpy(), exact.astype("f4"), rtol=1.2e-7)
    assert task.graph.features.dtype == torch.float32
    assert task.labels.tolist() == labels.tolist()
    expected = normalised_adjacency(torch.from_numpy(edges.T), 40)
    assert torch.equal(task.graph.adjacency.to_dense(), expected.to_dense())
    found = [mask.nonzero().flatten().tolist() for mask in task[2:]]
    assert found == [sorted(part) for part in np.split(order, [20, 30])]


decimals = st.decimals(-(10**6), 10**6, places=None, allow_nan=False).map(lambda d: f"{d:f}"[:25])
plain = st.integers(-(10**6), 10**6).map(str)
exponents = st.floats(-1e30, 1e30).map(repr)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(decimals | plain, min_size=1, max_size=30)
    | st.lists(decimals | plain | exponents, min_size=1, max_size=30)
)
def test_decimals_are_read_as_python_reads_them(texts):
    """To the last bit, on the fast path and on numpy's."""
    found = ogb_module.parse_numbers((",".join(texts) + "\n").encode(), np.float64)
    assert found.tolist() == [float(text) for text in texts]


@pytest.mark.parametrize(
    "text", ["1.2.3", "1,,2", "1,x", "1.-2", ".", "-", "--1", "1 2", "-.", "1,.,2", "1-"]
)
def test_no_numbers_are_no_numbers(tmp_path, text):
    path = tmp_path / "table.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("1.0,2.0\n" * text.count(",") + text + "\n")
    with pytest.raises(ValueError, match=r"table\.csv\.gz"):
        ogb_module.read_numbers(path, np.float32)


def test_ogb_files_that_do_not_fit(tmp_path):
    write_ogb(tmp_path)
    raw = tmp_path / "ogbn_arxiv/raw"
    whole = (raw / "node-feat.csv.gz").read_bytes()
    (raw / "node-feat.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="node-feat"):
        read_ogb(tmp_path, "ogbn-arxiv")
    (raw / "node-feat.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match="node-feat"):
        read_ogb(tmp_path, "ogbn-arxiv")
    for rows in (39, 41):
        write_gz(raw / "node-feat.csv.gz", np.ones((rows, 5)))
        with pytest.raises(ValueError, match=r"node-feat.*40"):
            read_ogb(tmp_path, "ogbn-arxiv")
    write_ogb(tmp_path)
    write_gz(raw / "edge.csv.gz", [[0, 40]] * 90)
    with pytest.raises(ValueError, match="there are 40"):
        read_ogb(tmp_path, "ogbn-arxiv")
    write_gz(raw / "num-node-list.csv.gz", [[20], [20]])
    with pytest.raises(ValueError, match="single graph"):
        read_ogb(tmp_path, "ogbn-arxiv")
    with pytest.raises(ValueError, match="ogbn-products"):
        read_ogb(tmp_path, "ogbn-mag")


def test_the_ogb_cache_serves_until_a_source_changes(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    write_ogb(tmp_path)
    first = read_ogb(tmp_path, "ogbn-arxiv", cache=cache)
    parses, parsed = [], ogb_module._parsed
    monkeypatch.setattr(ogb_module, "_parsed", lambda paths: parses.append(1) or parsed(paths))
    second = read_ogb(tmp_path, "ogbn-arxiv", cache=cache)
    assert not parses
    assert torch.equal(first.graph.features, second.graph.features)
    assert torch.equal(first.graph.adjacency.to_dense(), second.graph.adjacency.to_dense())
    assert all(torch.equal(a, b) for a, b in zip(first[1:], second[1:], strict=True))

    labels = tmp_path / "ogbn_arxiv/raw/node-label.csv.gz"
    write_gz(labels, (first.labels[:, None] + 1).numpy())
    os.utime(labels, ns=(1, 1))
    third = read_ogb(tmp_path, "ogbn-arxiv", cache=cache)
    assert torch.equal(third.labels, first.labels + 1)
    assert len(parses) == 1
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes()[:100])
    assert torch.equal(read_ogb(tmp_path, "ogbn-arxiv", cache=cache).labels, third.labels)
    assert len(parses) == 2
    assert torch.equal(read_ogb(tmp_path, "ogbn-arxiv", cache=cache).labels, third.labels)
    assert len(parses) == 2


# --- torch_geometric ---


@pytest.fixture
def pyg_data():
    data = pytest.importorskip("torch_geometric.data").Data
    masks = torch.eye(3, dtype=torch.bool).repeat(1, 2)
    return data(
        x=torch.tensor([[0.0, 2.0], [1.0, 0.0], [0.0, 0.0], [3.0, 4.0], [0.0, 1.0], [1.0, 1.0]]),
        edge_index=torch.tensor([[0, 1, 1, 4], [1, 0, 2, 5]]),
        y=torch.tensor([0, 1, 0, 1, 0, 1]),
        train_mask=masks[0],
        val_mask=masks[1],
        test_mask=masks[2],
    )


@pytest.mark.parametrize("layout", ["dense", "coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_from_pyg(pyg_data, layout):
    dense = pyg_data.x
    pyg_data.x = {"dense": dense, "coo": dense.to_sparse(), "csr": dense.to_sparse_csr()}[layout]
    pyg_data.y = pyg_data.y[:, None]
    task = from_pyg(pyg_data)
    features = task.graph.features
    assert torch.equal(features if layout == "dense" else features.matrix.to_dense(), dense)
    expected = normalised_adjacency(torch.tensor([[0, 1, 4], [1, 2, 5]]), 6)
    assert torch.equal(task.graph.adjacency.to_dense(), expected.to_dense())
    assert task.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert torch.equal(task.train, pyg_data.train_mask)
    assert torch.equal(task.valid, pyg_data.val_mask)
    assert torch.equal(task.test, pyg_data.test_mask)


def test_from_pyg_with_another_split(pyg_data):
    del pyg_data.val_mask
    with pytest.raises(ValueError, match=r"no val_mask: pass split=\(train, valid, test\)"):
        from_pyg(pyg_data)
    split = (torch.tensor([0, 5]), torch.arange(6) == 1, torch.tensor([2]))
    task = from_pyg(pyg_data, split=split)
    assert [mask.nonzero().flatten().tolist() for mask in task[2:]] == [[0, 5], [1], [2]]
    with pytest.raises(ValueError, match="there are 6"):
        from_pyg(pyg_data, split=(torch.tensor([6]), *split[1:]))
    with pytest.raises(ValueError, match="uint8"):
        from_pyg(pyg_data, split=(torch.zeros(6, dtype=torch.uint8), *split[1:]))


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("x", None, "tensor x"),
        ("edge_index", None, "tensor edge_index"),
        ("y", torch.zeros(6, 4), "one class a node"),
        ("y", torch.zeros(5, dtype=torch.long), "one class a node"),
        ("edge_index", torch.tensor([[0], [6]]), "there are 6"),
        ("edge_index", torch.tensor([[0, 1, 2]]), "edges"),
        ("train_mask", torch.zeros(6, 10, dtype=torch.bool), "several splits"),
        ("train_mask", torch.zeros(5, dtype=torch.bool), "masks"),
    ],
)
def test_from_pyg_says_what_is_wrong(pyg_data, attribute, value, message):
    setattr(pyg_data, attribute, value)
    with pytest.raises(ValueError, match=message):
        from_pyg(pyg_data)


# --- Folders and names ---


def test_the_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("CDEQ_DATA", str(tmp_path / "env"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_folder(tmp_path / "given") == tmp_path / "given"
    assert data_folder("~/mine") == tmp_path / "mine"
    assert data_folder() == tmp_path / "env"
    monkeypatch.setenv("CDEQ_DATA", "")
    assert data_folder(None) == tmp_path / "xdg/cdeq"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert data_folder(None) == tmp_path / ".cache/cdeq"


@pytest.mark.parametrize("graph", GRAPH_SETS)
def test_missing_files_are_named_with_their_home(tmp_path, graph):
    assert not is_available(graph, tmp_path)
    with pytest.raises(MissingDataError) as raised:
        load_graph(graph, tmp_path)
    message = str(raised.value)
    for part in (graph, GRAPH_SETS[graph].files[0], str(tmp_path), "--data-dir", "CDEQ_DATA"):
        assert part in message
    assert GRAPH_SETS[graph].home in message


def test_graphs_by_name(tmp_path, monkeypatch):
    write_planetoid(tmp_path / "planetoid", "cora")
    (tmp_path / "gnn-benchmark").mkdir()
    write_npz(tmp_path / "gnn-benchmark/ms_academic_cs.npz", nodes=400)
    write_ogb(tmp_path / "ogb", graph="ogbn_products", split="sales_ranking")
    monkeypatch.setenv("CDEQ_DATA", str(tmp_path))
    available = [graph for graph in GRAPH_SETS if is_available(graph)]
    assert available == ["cora", "coauthor-cs", "ogbn-products"]
    assert len(load_graph("cora").labels) == 528
    a, b = load_graph("coauthor-cs", seed=0), load_graph("coauthor-cs", tmp_path, seed=1)
    assert a.train.sum() == 60
    assert not torch.equal(a.train, b.train)
    assert len(load_graph("ogbn-products", cache=tmp_path / "cache").labels) == 40
    assert (tmp_path / "cache/ogbn-products.safetensors").is_file()
    with pytest.raises(ValueError, match="no graph 'karate'; there are cora"):
        load_graph("karate")
    (tmp_path / "planetoid/ind.cora.ty").unlink()
    with pytest.raises(MissingDataError, match=r"planetoid/ind\.cora\.ty, looked for"):
        load_graph("cora")


# --- The real files ---


@pytest.mark.parametrize(
    ("graph", "nodes", "features", "classes", "directed_edges", "splits"),
    [
        ("cora", 2708, 1433, 7, 10556, (140, 500, 1000)),
        ("citeseer", 3327, 3703, 6, 9104, (120, 500, 1000)),
        ("pubmed", 19717, 500, 3, 88648, (60, 500, 1000)),
        ("amazon-computers", 13752, 767, 10, 491722, (200, 300, 13252)),
        ("coauthor-physics", 34493, 8415, 5, 495924, (100, 150, 34243)),
    ],
)
def test_real_graphs(graph, nodes, features, classes, directed_edges, splits):
    if not os.environ.get("CDEQ_DATA") or not is_available(graph):
        pytest.skip(f"the files of {graph} are not here: set CDEQ_DATA")
    task = load_graph(graph)
    adjacency = task.graph.adjacency
    assert task.graph.features.shape == (nodes, features)
    assert len(task.labels.unique()) == int(task.labels.max()) + 1 == classes
    assert len(adjacency.values()) == directed_edges + nodes  # self-loops
    assert tuple(int(mask.sum()) for mask in task[2:]) == splits
    assert adjacency.dtype == task.graph.features.matrix.dtype == torch.float32
    transpose = SparseMatrix.of(adjacency).transpose
    assert torch.equal(adjacency.crow_indices(), transpose.crow_indices())
    assert torch.equal(adjacency.col_indices(), transpose.col_indices())
    assert torch.equal(adjacency.values(), transpose.values())
    words = task.graph.features.matrix
    sums = torch.zeros(nodes, dtype=torch.float64)
    sums.index_add_(0, row_indices(words), words.values().double().square())
    assert ((sums - 1).abs().lt(1e-6) | (sums == 0)).all()
