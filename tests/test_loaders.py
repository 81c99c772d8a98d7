"""Tables of Hugging Face and loaders of torch_geometric go into `distill` and `evaluate`."""

import pytest
import torch
from torch.utils.data import DataLoader

import cdeq
from cdeq.data import Graph, from_hf, pyg_batch
from cdeq.models import IGNN
from cdeq.trajectories.nesting import split_batch
from teachers import Tanh, inputs

FIT = cdeq.FitConfig(updates=2)
pytestmark = pytest.mark.usefixtures("no_plan")


# Hugging Face.


def rows(count=10):
    pixels = inputs(count)
    return {"pixels": pixels.tolist(), "label": [i % 3 for i in range(count)]}


@pytest.fixture
def table():
    return pytest.importorskip("datasets").Dataset.from_dict(rows())


@pytest.mark.slow
def test_a_table_gives_its_columns_as_batches(table):
    batches = from_hf(table, x="pixels", y="label", batch_size=4)
    assert len(batches) == 3
    for _ in range(2):  # from its beginning each time
        xs, ys = zip(*batches, strict=True)
        assert [len(x) for x in xs] == [4, 4, 2]
        assert torch.allclose(torch.cat(xs), inputs(10))
        assert torch.cat(ys).tolist() == rows()["label"]
    [(x,), *_] = from_hf(table, x=["pixels", "label"])
    assert set(x) == {"pixels", "label"}
    [(x,)] = from_hf(table.to_iterable_dataset(), x="pixels")
    assert torch.allclose(x, inputs(10))


@pytest.mark.slow
def test_a_transform_and_a_loader_of_dicts_are_taken_as_they_are(table):
    def doubled(batch):
        return {"pixels": [2 * torch.tensor(row) for row in batch["pixels"]]}

    [(x,)] = from_hf(table.with_transform(doubled), x="pixels")
    assert torch.allclose(x, 2 * inputs(10))
    loader = DataLoader(table.with_format("torch"), batch_size=5)
    batches = from_hf(loader, x="pixels", y="label")
    assert len(batches) == 2
    assert torch.allclose(torch.cat([x for x, _ in batches]), inputs(10))


@pytest.mark.slow
def test_what_is_wrong_with_a_table_is_said(table):
    with pytest.raises(ValueError, match=r"no column 'image'; there are pixels, label"):
        from_hf(table, x="image")
    with pytest.raises(ValueError, match=r"no column 'image'; there are pixels"):
        list(from_hf([{"pixels": [1.0]}], x="image"))
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        from_hf(table, x="pixels", batch_size=0)
    with pytest.raises(ValueError, match=r"column 'words' are not numbers of one shape"):
        list(from_hf([{"words": ["a", "b"]}], x="words"))
    with pytest.raises(TypeError, match=r"cdeq\.data\.from_hf\(table, x="):
        cdeq.distill(Tanh(), table)


@pytest.mark.slow
def test_a_table_is_distilled_as_its_tensors_are(table):
    batches = from_hf(table, x="pixels", y="label", batch_size=5)
    student = cdeq.distill(Tanh(), batches, recipe="anchored", fit=FIT)
    plain = cdeq.distill(Tanh(), list(batches), recipe="anchored", fit=FIT)
    assert torch.equal(student(inputs()), plain(inputs()))
    results = cdeq.evaluate(student, batches, steps=(1,), repeats=1)
    assert results.rows


# torch_geometric.


def graphs(count=4):
    data = pytest.importorskip("torch_geometric.data")
    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        nodes = 5 + i
        edges = torch.stack([torch.arange(nodes), torch.arange(nodes).roll(1)])
        x = torch.randn(nodes, 5, generator=generator)
        yield data.Data(x=x, edge_index=edges, y=torch.arange(nodes) % 3)


@pytest.mark.slow
def test_a_loader_of_graphs_goes_into_distill_and_evaluate():
    loader = pytest.importorskip("torch_geometric.loader").DataLoader(list(graphs()), batch_size=2)
    torch.manual_seed(0)
    teacher = IGNN(features=5, width=8, classes=3)
    student = cdeq.distill(teacher, loader, recipe="anchored", fit=FIT)
    pairs = [pyg_batch(batch) for batch in loader]
    assert [len(y) for _, y in pairs] == [11, 15]
    plain = cdeq.distill(teacher, pairs, recipe="anchored", fit=FIT)
    assert torch.equal(student(pairs[0][0]), plain(pairs[0][0]))
    assert cdeq.evaluate(student, loader, steps=(1,), repeats=1).rows


def test_labels_outside_the_training_nodes_are_not_seen():
    [data] = graphs(1)
    (graph, y) = split_batch(data)
    assert isinstance(graph, Graph)
    assert y.tolist() == [0, 1, 2, 0, 1]
    data.train_mask = torch.tensor([True, False, True, False, False])
    assert split_batch(data)[1].tolist() == [0, -100, 2, -100, -100]
    with pytest.raises(ValueError, match=r"say which nodes to score, as \[task.labelled"):
        cdeq.evaluate(IGNN(features=5, width=8, classes=3), [data])
    data.y = None
    assert split_batch(data)[1] is None


def test_what_is_wrong_with_a_graph_is_said():
    [data] = graphs(1)
    with pytest.raises(TypeError, match=r"a graph is one batch: give a loader, or .* \[data\]"):
        cdeq.distill(IGNN(features=5, width=8, classes=3), data)
    data.y = torch.tensor([1])
    with pytest.raises(ValueError, match=r"y must be a class for each of the 5 nodes, not \(1,\)"):
        split_batch(data)
    data.x = None
    with pytest.raises(ValueError, match="must have a tensor x"):
        split_batch(data)
