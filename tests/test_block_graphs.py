"""The block model: as many edges as asked, as homophilous, reproducible; features around their class means."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdeq.data import block_model
from cdeq.data.block_graphs import block_edges
from cdeq.data.sparse import row_indices


def edges_of(task):
    """Directed edges (2, E) without the self-loops."""
    adjacency = task.graph.adjacency
    rows, columns = row_indices(adjacency), adjacency.col_indices()
    return torch.stack([rows, columns])[:, rows != columns]


def test_degree_and_homophily_are_what_was_asked():
    task = block_model(20_000, seed=0, classes=5, degree=10, homophily=0.8, features=4)
    first, second = edges_of(task)
    assert len(first) == 200_000  # 20000 * 10 / 2 edges, in both directions
    # 100000 independent draws: one standard deviation of the share is 0.0013.
    share = (task.labels[first] == task.labels[second]).double().mean()
    assert abs(share - 0.8) < 0.007
    assert task.labels.bincount().tolist() == [4000] * 5
    # Degrees are nearly Poisson: the variance equals the mean.
    degrees = first.bincount(minlength=20_000).double()
    assert abs(degrees.var() / 10 - 1) < 0.06


@pytest.mark.slow
def test_every_pair_is_equally_likely():
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(8, 8)
    for _ in range(1000):
        counts.index_put_(
            tuple(block_edges(labels, 6, 0.5, generator=generator)),
            torch.tensor(1.0),
            accumulate=True,
        )
    assert counts.tril().sum() == 0
    same = labels[:, None] == labels
    within, between = counts[same.triu(1)], counts[(~same).triu(1)]
    assert len(within) == 12
    assert len(between) == 16
    # Expected 3000 / 12 = 250 and 3000 / 16 = 187.5; six standard deviations are 95 and 82.
    assert (within - 250).abs().max() < 95
    assert (between - 187.5).abs().max() < 82


@settings(max_examples=40)
@given(
    nodes=st.integers(8, 60),
    classes=st.integers(1, 4),
    fill=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_edges_are_distinct_to_the_last_free_pair(nodes, classes, fill, seed):
    """Homophily 1: up to all pairs within the classes."""
    labels = torch.arange(nodes) % classes
    sizes = labels.bincount()
    wanted = int(fill * int((sizes * (sizes - 1) // 2).sum()))
    generator = torch.Generator().manual_seed(seed)
    first, second = block_edges(labels, wanted, 1.0, generator=generator)
    assert (first < second).all()
    assert torch.equal(labels[first], labels[second])
    assert len(torch.unique(first * nodes + second)) == wanted


def test_too_many_edges_are_refused():
    with pytest.raises(ValueError, match="lower the degree"):
        block_model(20, seed=0, classes=4, degree=10, homophily=1.0)
    with pytest.raises(ValueError, match="change the homophily"):
        block_model(20, seed=0, classes=1, degree=4, homophily=0.5)


def test_features_lie_around_their_class_means():
    task = block_model(30_000, seed=1, classes=3, degree=2, features=16, noise=0.5)
    x, y = task.graph.features, task.labels
    assert x.shape == (30_000, 16)
    assert x.dtype == torch.float32
    means = torch.stack([x[y == c].mean(dim=0) for c in range(3)])
    assert abs((x - means[y]).std() - 0.5) < 0.005
    assert (means.norm(dim=1) > 0.4).all()
    clean = block_model(300, seed=1, classes=3, degree=2, features=16, noise=0.0)
    assert len(clean.graph.features.unique(dim=0)) == 3


def test_the_seed_decides_everything():
    a, b, c = (block_model(500, seed=s, degree=4, features=3) for s in (5, 5, 6))
    for left, right in zip(a[1:], b[1:], strict=True):
        assert torch.equal(left, right)
    assert torch.equal(a.graph.features, b.graph.features)
    assert torch.equal(edges_of(a), edges_of(b))
    assert not torch.equal(edges_of(a), edges_of(c))
    assert not torch.equal(a.graph.features, c.graph.features)


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    block_model(50, seed=5, degree=4, features=3)
    assert torch.equal(before, torch.get_rng_state())


def test_splits():
    task = block_model(1000, seed=0, degree=4, features=2)
    assert [int(mask.sum()) for mask in task[2:]] == [540, 180, 280]
    assert (task.train.long() + task.valid.long() + task.test.long()).eq(1).all()
    task = block_model(1000, seed=0, degree=4, features=2, per_class_train=7, valid=0.1)
    assert task.labels[task.train].bincount().tolist() == [7] * 10
    assert [int(mask.sum()) for mask in task[2:]] == [70, 100, 830]
    task = block_model(100, seed=0, degree=4, features=2, train=0.5, valid=0.5)
    assert not task.test.any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": 0}, "classes"),
        ({"classes": 51}, "classes"),
        ({"features": 0}, "features"),
        ({"degree": -1.0}, "degree"),
        ({"noise": -1.0}, "noise"),
        ({"homophily": 1.5}, "homophily"),
        ({"train": 0.9}, "train"),
        ({"per_class_train": 6}, "per_class_train must be 1 to 5"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        block_model(50, seed=0, **{"degree": 4.0, **arguments})
