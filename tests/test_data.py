"""The embedded data sets: right sizes, disjoint splits, the same for the same seed."""

from __future__ import annotations

import sys

import pytest
import torch

from cdeq.data import (
    digits_graph,
    digits_images,
    nearest_neighbours,
    normalised_adjacency,
    pydoc_text,
    text_windows,
)


def test_digit_images_are_split_and_standardised():
    splits = digits_images(0)
    assert [len(part.y) for part in splits] == [1197, 200, 400]
    for part in splits:
        assert part.x.shape == (len(part.y), 1, 8, 8)
        assert part.x.dtype == torch.float32
        assert part.y.dtype == torch.int64
        assert part.y.unique().tolist() == list(range(10))
    assert abs(splits.train.x.mean()) < 1e-5
    assert abs(splits.train.x.std() - 1) < 1e-5


def test_digit_images_depend_on_the_seed_alone():
    a, b, c = digits_images(3), digits_images(3), digits_images(4)
    assert torch.equal(a.test.x, b.test.x)
    assert not torch.equal(a.test.y, c.test.y)


def test_digit_images_are_disjoint():
    splits = digits_images(0)
    scale = 1e3
    rows = [{tuple(r) for r in (p.x.flatten(1) * scale).round().tolist()} for p in splits]
    assert sum(map(len, rows)) == 1797  # no image occurs twice in the data
    assert not rows[0] & rows[1]
    assert not rows[0] & rows[2]
    assert not rows[1] & rows[2]


@pytest.mark.slow
def test_digit_graph_splits():
    task = digits_graph(0, neighbours=5, per_class=7, valid=100)
    counts = torch.stack([task.train, task.valid, task.test]).long().sum(dim=0)
    assert counts.eq(1).all()
    assert task.train.sum() == 70
    assert task.labels[task.train].bincount().tolist() == [7] * 10
    assert task.valid.sum() == 100
    again, other = digits_graph(0, neighbours=5, per_class=7, valid=100), digits_graph(1)
    assert torch.equal(task.train, again.train)
    assert not torch.equal(digits_graph(0).train, other.train)
    dense = task.graph.adjacency.to_dense()
    assert torch.equal(dense, dense.T)
    assert (dense > 0).sum(dim=1).min() >= 6


def test_a_task_gives_the_labels_of_some_nodes():
    task = digits_graph(0)
    graph, labels = task.labelled(task.valid)
    assert graph is task.graph
    assert torch.equal(labels[task.valid], task.labels[task.valid])
    assert labels[~task.valid].eq(torch.nn.CrossEntropyLoss().ignore_index).all()


def test_normalised_adjacency_by_hand():
    dense = normalised_adjacency(torch.tensor([[0, 1, 0, 2], [1, 0, 1, 2]]), 3).to_dense()
    expected = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(dense, expected)


def test_normalised_adjacency_has_largest_eigenvalue_one():
    edges = torch.randint(20, (2, 50), generator=torch.Generator().manual_seed(0))
    eigenvalues = torch.linalg.eigvalsh(normalised_adjacency(edges, 20).to_dense().double())
    assert abs(eigenvalues[-1] - 1) < 1e-6
    assert eigenvalues[0] > -1


def test_nearest_neighbours_on_a_line():
    edges = nearest_neighbours(torch.tensor([[0.0], [1.0], [3.0], [3.5]]), 1)
    assert edges.tolist() == [[0, 1, 2, 3], [1, 0, 3, 2]]


def test_text_splits_share_no_paragraph():
    text = pydoc_text()
    sizes = torch.tensor([len(part) for part in text[:3]], dtype=torch.float64)
    shares = sizes / sizes.sum()
    assert sizes.sum() > 200_000
    torch.testing.assert_close(shares, torch.tensor([0.8, 0.1, 0.1]).double(), atol=0.03, rtol=0)
    train, valid, test = (set(text.decode(part).split("\n\n")) - {""} for part in text[:3])
    assert not train & valid
    assert not train & test
    assert not valid & test


@pytest.mark.slow
def test_text_alphabet():
    text = pydoc_text(characters=30)
    assert text.vocabulary == 31
    assert text.train.dtype == torch.int64
    assert text.train.min() >= 0
    assert text.train.max() == 30
    assert "e" in text.alphabet
    assert "\N{REPLACEMENT CHARACTER}" in text.decode(text.train)
    again = pydoc_text(characters=30)
    assert again.alphabet == text.alphabet
    assert torch.equal(again.test, text.test)


def test_windows_predict_the_next_token():
    windows = text_windows(torch.arange(10), 3)
    assert windows.x.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert windows.y.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert len(text_windows(torch.arange(10), 3, stride=2).x) == 4
    with pytest.raises(ValueError, match="more than 10 tokens"):
        text_windows(torch.arange(10), 10)


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"cdeq\[demo\]"):
        digits_images()
