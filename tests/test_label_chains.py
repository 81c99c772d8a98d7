"""Chains: the label stands at one end alone, no path joins two of them, splits and seeds are as asked."""

from __future__ import annotations

import pytest
import torch

from cdeq.data import chain_graphs


def test_only_the_first_node_of_a_chain_has_its_class():
    task = chain_graphs(7, seed=0, classes=3, chains=4, features=5)
    features, labels = task.graph.features.view(12, 7, 5), task.labels.view(12, 7)
    assert labels.tolist() == [[label] * 7 for label in (0, 1, 2) for _ in range(4)]
    assert (features[:, 1:] == 0).all()
    assert torch.equal(features[:, 0], torch.eye(5)[labels[:, 0]])


def test_edges_join_neighbours_on_one_chain_both_ways():
    length, chains = 6, 4
    task = chain_graphs(length, seed=0, chains=chains // 2)
    joined = task.graph.adjacency.to_dense() > 0
    one = torch.eye(length) + torch.diag(torch.ones(length - 1), 1)
    expected = torch.block_diag(*[(one + one.T) > 0] * chains)
    assert torch.equal(joined, expected)
    reached = torch.linalg.matrix_power(joined.double(), length) > 0
    assert torch.equal(reached, torch.block_diag(*[torch.ones(length, length) > 0] * chains))


def test_a_node_hears_of_its_label_after_as_many_steps_as_hops():
    task = chain_graphs(9, seed=0, chains=1)
    known = task.graph.features
    for hops in range(9):
        heard = known.view(2, 9, -1).sum(dim=2) > 0
        assert (heard.sum(dim=1) == hops + 1).all()
        known = task.graph.adjacency @ known


def test_every_node_is_in_one_part_of_the_split():
    task = chain_graphs(50, seed=3)  # 2 classes, 20 chains of each: 2000 nodes
    assert [int(mask.sum()) for mask in (task.train, task.valid, task.test)] == [100, 200, 1700]
    assert (task.train.int() + task.valid.int() + task.test.int() == 1).all()
    task = chain_graphs(10, seed=0, train=0.5, valid=0.5)
    assert not task.test.any()


def test_the_seed_draws_the_split_and_the_noise_and_nothing_else():
    a, b, c = (chain_graphs(10, seed=seed, noise=0.1) for seed in (5, 5, 6))
    assert torch.equal(a.train, b.train)
    assert torch.equal(a.graph.features, b.graph.features)
    assert not torch.equal(a.train, c.train)
    assert not torch.equal(a.graph.features, c.graph.features)
    assert torch.equal(a.labels, c.labels)
    before = torch.random.get_rng_state()
    chain_graphs(10, seed=5, noise=0.1)
    assert torch.equal(before, torch.random.get_rng_state())


def test_noise_is_uniform_around_what_is_there_without():
    loud, quiet = (chain_graphs(40, seed=1, noise=noise).graph.features for noise in (0.3, 0.0))
    difference = loud - quiet
    assert difference.abs().max() <= 0.3 + 1e-6
    # 160,000 draws: the standard deviation is 0.3 / sqrt(3), to 0.2%.
    assert abs(difference.std() / 0.3 * 3**0.5 - 1) < 0.01
    assert abs(difference.mean()) < 0.002


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "length must be at least 1, not 0"),
        ({"classes": 0}, "classes must be at least 1"),
        ({"chains": -1}, "chains must be at least 1"),
        ({"classes": 3, "features": 2}, "features must be at least the 3 classes, not 2"),
        ({"noise": -0.1}, "noise must not be negative"),
        ({"train": 0.8, "valid": 0.3}, "must be shares of the nodes"),
        ({"train": -0.1}, "must be shares of the nodes"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        chain_graphs(**{"length": 5, "seed": 0, **arguments})
