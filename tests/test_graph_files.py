"""Readers of public graph files: right on small files written here, and on the real ones where CDEQ_DATA has them."""

from __future__ import annotations

import os
import pickle

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
    is_graph_available,
    load_graph,
    normalised_adjacency,
    read_npz_graph,
    read_planetoid,
)
from cdeq.data.graphs import csr_from_arrays, row_normalised
from cdeq.data.npz_graphs import largest_component_mask
from cdeq.data.sparse import SparseMatrix, row_indices
from graph_files import Attack, write_npz, write_ogb, write_planetoid


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


@pytest.mark.slow
@settings(max_examples=100)
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
        ("y", torch.zeros(6, 4), "one class for each node"),
        ("y", torch.zeros(5, dtype=torch.long), "one class for each node"),
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
    assert not is_graph_available(graph, tmp_path)
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
    available = [graph for graph in GRAPH_SETS if is_graph_available(graph)]
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
    if not os.environ.get("CDEQ_DATA") or not is_graph_available(graph):
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
