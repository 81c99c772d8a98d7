"""Subgraphs against dense references; partitions by their properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdeq.data.block_graphs import block_model
from cdeq.data.graphs import Graph, NodeTask, normalised_adjacency
from cdeq.data.sparse import SparseMatrix, csr_from_entries
from cdeq.data.subgraphs import (
    cut_fraction,
    grouped_tasks,
    induced,
    part_tasks,
    partition,
    sampled_task,
    with_halo,
)


def grid(height: int, width: int) -> torch.Tensor:
    """Edges of a grid graph."""
    number = torch.arange(height * width).view(height, width)
    across = torch.stack([number[:, :-1].flatten(), number[:, 1:].flatten()])
    down = torch.stack([number[:-1].flatten(), number[1:].flatten()])
    return torch.cat([across, down], dim=1)


def blocks(nodes: int, count: int, degree: float, inside: float, seed: int) -> torch.Tensor:
    """Random edges, a share `inside` of them between nodes of equal number modulo `count`."""
    generator = torch.Generator().manual_seed(seed)
    edges = int(nodes * degree / 2)
    a, b = torch.randint(nodes, (2, edges), generator=generator)
    same = b // count * count + a % count
    chosen = torch.rand(edges, generator=generator) < inside
    return torch.stack([a, torch.where(chosen & (same < nodes), same, b)])


def random_task(nodes: int, edges: torch.Tensor, seed: int = 0, sparse: bool = False) -> NodeTask:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(nodes, 5, generator=generator)
    features: torch.Tensor | SparseMatrix = dense
    if sparse:
        rows, columns = (dense > 0.5).nonzero(as_tuple=True)
        shape = (nodes, 5)
        features = SparseMatrix.of(
            csr_from_entries(rows, columns, dense[rows, columns].contiguous(), shape)
        )
    split = torch.randint(3, (nodes,), generator=generator)
    labels = torch.randint(4, (nodes,), generator=generator)
    graph = Graph(normalised_adjacency(edges, nodes), features)
    return NodeTask(graph, labels, split == 0, split == 1, split == 2)


def dense_links(adjacency: torch.Tensor) -> torch.Tensor:
    """Which pairs of nodes are joined, (N, N), nodes with themselves aside."""
    links = adjacency.to_dense() > 0
    return links & ~torch.eye(len(links), dtype=torch.bool)


def dense_induced(adjacency: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
    """D^-1/2 (A + I) D^-1/2 of the links among `nodes`, in double precision."""
    links = dense_links(adjacency)[nodes][:, nodes].double() + torch.eye(len(nodes)).double()
    scale = links.sum(dim=1).rsqrt()
    return scale[:, None] * links * scale


@st.composite
def graphs(draw) -> tuple[int, torch.Tensor]:
    """A number of nodes, and edges among them: lone nodes, loops, repeats and several components included."""
    nodes = draw(st.integers(1, 40))
    place = st.integers(0, nodes - 1)
    edges = draw(st.lists(st.tuples(place, place), max_size=80))
    return nodes, torch.tensor(edges, dtype=torch.long).reshape(-1, 2).t()


@settings(max_examples=40)
@given(graphs(), st.integers(0, 10**6))
def test_an_induced_subgraph_is_the_dense_one(graph, seed):
    nodes, edges = graph
    task = random_task(nodes, edges)
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, nodes + 1, (), generator=generator))
    chosen = torch.randperm(nodes, generator=generator)[:count]
    part = induced(task, chosen)
    expected = dense_induced(task.graph.adjacency, chosen)
    torch.testing.assert_close(
        part.graph.adjacency.to_dense().double(), expected, atol=1e-6, rtol=0
    )
    assert torch.equal(part.graph.features, task.graph.features[chosen])
    for name in ("labels", "train", "valid", "test"):
        assert torch.equal(getattr(part, name), getattr(task, name)[chosen])


def test_all_nodes_induce_the_graph_itself():
    task = random_task(30, grid(5, 6))
    whole = induced(task, torch.arange(30))
    assert torch.equal(whole.graph.adjacency.to_dense(), task.graph.adjacency.to_dense())


def test_an_induced_subgraph_keeps_double_precision():
    task = random_task(30, grid(5, 6))
    graph = Graph(task.graph.adjacency.double(), task.graph.features.double())
    part = induced(task._replace(graph=graph), torch.arange(7))
    assert part.graph.adjacency.dtype == part.graph.features.dtype == torch.float64


def test_sparse_features_and_their_transpose_follow_the_nodes():
    task = random_task(30, grid(5, 6), sparse=True)
    chosen = torch.tensor([29, 3, 4, 17, 0])
    features = induced(task, chosen).graph.features
    expected = task.graph.features.matrix.to_dense()[chosen]
    assert expected.count_nonzero() > 0
    assert torch.equal(features.matrix.to_dense(), expected)
    assert torch.equal(features.transpose.to_dense(), expected.t())


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (torch.tensor([0, 0]), "more than once"),
        (torch.tensor([0, 30]), "from 0 to 29"),
        (torch.tensor([-1]), "from 0 to 29"),
        (torch.tensor([], dtype=torch.long), "empty"),
        (torch.ones(30, dtype=torch.bool), "mask.nonzero"),
        (torch.zeros(2, 2, dtype=torch.long), "vector"),
    ],
)
def test_nodes_that_make_no_subgraph_are_refused(nodes, words):
    task = random_task(30, grid(5, 6))
    with pytest.raises(ValueError, match=words):
        induced(task, nodes)
    with pytest.raises(ValueError, match=words):
        with_halo(task.graph.adjacency, nodes, 1)


@settings(max_examples=40)
@given(graphs(), st.integers(0, 4), st.integers(0, 10**6))
def test_a_halo_is_what_powers_of_the_adjacency_reach(graph, hops, seed):
    nodes, edges = graph
    adjacency = normalised_adjacency(edges, nodes)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(nodes, generator=generator)[: max(nodes // 4, 1)]
    reached = torch.zeros(nodes, dtype=torch.double)
    reached[chosen] = 1
    for _ in range(hops):
        reached = reached + dense_links(adjacency).double() @ reached
    found = with_halo(adjacency, chosen, hops)
    assert torch.equal(found[: len(chosen)], chosen)
    assert torch.equal(found.sort().values, reached.nonzero().flatten())


def test_a_halo_of_negative_hops_is_refused():
    with pytest.raises(ValueError, match="hops"):
        with_halo(normalised_adjacency(grid(3, 3), 9), torch.arange(2), -1)


def test_the_parts_splits_hold_each_node_once():
    task = random_task(60, grid(6, 10))
    parts = partition(task.graph.adjacency, 4)
    tasks = part_tasks(task, parts, hops=1)
    for name in ("train", "valid", "test"):
        own = [
            part[getattr(near, name)[: len(part)]] for part, near in zip(parts, tasks, strict=True)
        ]
        assert torch.equal(torch.cat(own).sort().values, getattr(task, name).nonzero().flatten())
        assert sum(int(getattr(near, name).sum()) for near in tasks) == int(
            getattr(task, name).sum()
        )
    for part, near in zip(parts, tasks, strict=True):
        assert len(near.labels) > len(part), "a part of a connected graph has a halo"
        assert torch.equal(near.labels[: len(part)], task.labels[part])


def test_with_a_halo_a_parts_own_nodes_keep_their_degree():
    task = random_task(60, grid(6, 10))
    degree = dense_links(task.graph.adjacency).sum(dim=1)
    for part, near in zip(
        (parts := partition(task.graph.adjacency, 5)), part_tasks(task, parts), strict=True
    ):
        inside = dense_links(near.graph.adjacency).sum(dim=1)
        assert torch.equal(inside[: len(part)], degree[part])


@pytest.mark.slow
@settings(max_examples=60)
@given(graphs(), st.data())
def test_parts_are_disjoint_cover_and_are_balanced(graph, data):
    nodes, edges = graph
    count = data.draw(st.integers(1, nodes))
    parts = partition(normalised_adjacency(edges, nodes), count, seed=data.draw(st.integers(0, 99)))
    assert len(parts) == count
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(nodes))
    equal = nodes / count
    for part in parts:
        assert abs(len(part) - equal) <= max(0.2 * equal, 1)
        assert torch.equal(part, part.sort().values)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("edges", "nodes", "count", "most"),
    [
        (grid(40, 50), 2000, 8, 0.12),
        # Random parts would cut 90 %, the blocks themselves 27 %; two parts may share a block.
        (blocks(4000, 10, 14.0, 0.7, seed=0), 4000, 10, 0.55),
        # Of 100 components of 10 nodes each, most stay whole.
        (grid(1, 1000)[:, torch.arange(999) % 10 != 9], 1000, 7, 0.05),
    ],
    ids=["grid", "blocks", "components"],
)
def test_few_edges_are_cut(edges, nodes, count, most, seed):
    adjacency = normalised_adjacency(edges, nodes)
    parts = partition(adjacency, count, seed=seed)
    assert cut_fraction(adjacency, parts) < most
    sizes = torch.tensor([len(part) for part in parts])
    assert (sizes - nodes / count).abs().max() <= 0.2 * nodes / count
    shuffled = torch.randperm(nodes, generator=torch.Generator().manual_seed(seed))
    by_chance = cut_fraction(adjacency, list(shuffled.split(sizes.tolist())))
    assert by_chance > 0.9 * (1 - 1 / count), "the measure itself tells good parts from bad"


def test_the_cut_fraction_is_counted_by_hand():
    adjacency = normalised_adjacency(torch.tensor([[0, 1, 2, 0], [1, 2, 3, 0]]), 4)
    assert cut_fraction(adjacency, [torch.tensor([0, 1]), torch.tensor([2, 3])]) == 1 / 3
    assert cut_fraction(adjacency, [torch.arange(4)]) == 0


def test_the_same_seed_gives_the_same_parts():
    adjacency = normalised_adjacency(grid(20, 20), 400)
    first, again, other = (partition(adjacency, 5, seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_bad_numbers_of_parts_are_refused():
    adjacency = normalised_adjacency(grid(3, 3), 9)
    for count in (0, 10):
        with pytest.raises(ValueError, match="parts must be from 1 to the graph's 9 nodes"):
            partition(adjacency, count)
    oblong = csr_from_entries(torch.tensor([0]), torch.tensor([2]), torch.ones(1), (2, 3))
    with pytest.raises(ValueError, match="square"):
        partition(oblong, 1)


@pytest.mark.slow
@settings(max_examples=40)
@given(graphs(), st.data())
def test_a_sample_is_an_induced_subgraph_of_its_size(graph, data):
    nodes, edges = graph
    size = data.draw(st.integers(1, nodes))
    task = random_task(nodes, edges)
    # The label of a node is its own number, so that a sample says what it took.
    task = task._replace(labels=torch.arange(nodes))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    sample = sampled_task(task, size=size, generator=generator)
    chosen = sample.labels
    assert len(chosen.unique()) == size
    expected = dense_induced(task.graph.adjacency, chosen)
    torch.testing.assert_close(
        sample.graph.adjacency.to_dense().double(), expected, atol=1e-6, rtol=0
    )
    assert torch.equal(sample.graph.features, task.graph.features[chosen])


def test_samples_hang_together_and_differ():
    task = random_task(10_000, grid(100, 100))
    generator = torch.Generator().manual_seed(0)
    samples = [sampled_task(task, size=500, generator=generator) for _ in range(2)]
    for sample in samples:
        edges = (sample.graph.adjacency.values().numel() - 500) / 2
        # 500 nodes drawn alone would have 500 * 4 / 2 * 5 % = 50 edges among them.
        assert edges > 400
    again = sampled_task(task, size=500, generator=torch.Generator().manual_seed(0))
    assert torch.equal(samples[0].graph.features, again.graph.features)
    assert not torch.equal(samples[0].graph.features, samples[1].graph.features)


def test_over_many_samples_every_node_is_seen():
    task = random_task(50, torch.tensor([[0, 1, 2], [1, 2, 3]]))._replace(labels=torch.arange(50))
    generator = torch.Generator().manual_seed(0)
    seen = [sampled_task(task, size=10, generator=generator).labels for _ in range(60)]
    assert len(torch.cat(seen).unique()) == 50


def test_walks_pass_over_rows_without_entries():
    empty = csr_from_entries(torch.tensor([0]), torch.tensor([0]), torch.ones(1), (6, 6))
    task = random_task(6, torch.zeros(2, 0, dtype=torch.long))
    task = task._replace(graph=Graph(empty, task.graph.features))
    sample = sampled_task(task, size=6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample.graph.adjacency.to_dense(), torch.eye(6))


def test_bad_sizes_of_samples_are_refused():
    task = random_task(9, grid(3, 3))
    for size in (0, 10):
        with pytest.raises(ValueError, match="size must be from 1 to the graph's 9 nodes"):
            sampled_task(task, size=size, generator=torch.Generator())


def test_grouped_parts_cover_the_graph_with_the_edges_between_them():
    task = block_model(120, classes=3, degree=6.0, features=4, seed=0)
    adjacency = task.graph.adjacency
    parts = partition(adjacency, 12)
    groups = grouped_tasks(task, parts, 3)
    assert sum(len(group.labels) for group in groups) == 120
    assert sum(int(group.train.sum()) for group in groups) == int(task.train.sum())
    rows = torch.cat([group.graph.features for group in groups])
    assert torch.equal(rows.sort(dim=0).values, task.graph.features.sort(dim=0).values)
    again = grouped_tasks(task, parts, 3)
    assert all(torch.equal(a.labels, b.labels) for a, b in zip(groups, again, strict=True))
    [whole] = grouped_tasks(task, parts, 1)
    assert torch.equal(whole.graph.adjacency.to_dense(), adjacency.to_dense())
    with pytest.raises(ValueError, match="groups"):
        grouped_tasks(task, parts, 13)
