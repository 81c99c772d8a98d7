"""Learned solvers: mixing, counts, Picard at the start, the objective by hand, and what training buys."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdeq.data.graphs import Graph, normalised_adjacency
from cdeq.equilibrium.contract import from_functions
from cdeq.models.graph.ignn import IGNN
from cdeq.models.learned_solvers import (
    IGNNSolver,
    LearnedSolver,
    MixingNetwork,
    SolverLossWeights,
    SolverObjective,
    centred,
    mixed_state,
)
from cdeq.models.learned_solvers.mixing import mixed_residual, weighted_sum
from cdeq.training.loop import FitConfig, fit
from checks import distances, equilibrium, picard_states, require_gradients, same_tensors
from slow_maps import rollout
from teachers import randomized

NODES, FEATURES, WIDTH = 200, 6, 12


class Counting(IGNN):
    """An IGNN that counts evaluations of its map."""

    evaluations = 0

    def step(self, z, context):
        self.evaluations += 1
        return super().step(z, context)


def setting(dtype=torch.float32, nodes=NODES):
    """A teacher, a random graph, and its equilibrium."""
    torch.manual_seed(0)
    teacher = Counting(features=FEATURES, width=WIDTH, classes=3, kappa=0.95).to(dtype)
    edges = torch.randint(nodes, (2, 3 * nodes))
    adjacency = normalised_adjacency(edges, nodes).to(dtype)
    x = Graph(adjacency, torch.randn(nodes, FEATURES, dtype=dtype))
    star = equilibrium(teacher, x)
    teacher.evaluations = 0
    return teacher, SimpleNamespace(x=x, endpoint=star)


def random_solver(dtype=torch.float64, seed=1, **config):
    """A solver with none of its weights at zero."""
    torch.manual_seed(seed)
    return randomized(IGNNSolver(width=WIDTH, **config).to(dtype))


# Mixing.


@pytest.mark.slow
@given(st.lists(st.floats(-100, 100), min_size=1, max_size=8))
def test_centred_weights_sum_to_one_and_keep_their_differences(values):
    alpha_hat = torch.tensor(values, dtype=torch.float64)
    alpha = centred(alpha_hat)
    assert alpha.sum().item() == pytest.approx(1, abs=1e-10)
    torch.testing.assert_close(alpha - alpha[0], alpha_hat - alpha_hat[0], rtol=0, atol=1e-10)


@settings(max_examples=25)
@given(n=st.integers(1, 6), beta=st.floats(0, 2), batched=st.booleans(), seed=st.integers(0, 99))
def test_mixed_state_is_the_dense_formula_on_tensors_and_tuples(n, beta, batched, seed):
    g = torch.Generator().manual_seed(seed)
    shapes = [(4, 3), (4, 2, 5)]
    z, f = (
        [tuple(torch.randn(s, generator=g, dtype=torch.float64) for s in shapes) for _ in range(n)]
        for _ in range(2)
    )
    alpha = torch.randn((4, n) if batched else (n,), generator=g, dtype=torch.float64)
    damping = torch.full((4,) if batched else (), beta, dtype=torch.float64)
    letters = "ibs,bi->bs" if batched else "ibs,i->bs"
    mixed = mixed_state(z, f, alpha, damping)
    mixed_r = mixed_residual(z, f, alpha)
    assert isinstance(mixed, tuple)
    for part, shape in enumerate(shapes):
        zs, fs = (torch.stack([s[part] for s in states]).flatten(2) for states in (z, f))
        wanted = torch.einsum(letters, beta * fs + (1 - beta) * zs, alpha).reshape(shape)
        torch.testing.assert_close(mixed[part], wanted)
        wanted = torch.einsum(letters, fs - zs, alpha).reshape(shape)
        torch.testing.assert_close(mixed_r[part], wanted)
    only_first = mixed_state([s[0] for s in z], [s[0] for s in f], alpha, damping)
    torch.testing.assert_close(only_first, mixed[0])


def test_mixing_passes_gradients_to_states_and_weights():
    z = [torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(6)]
    alpha = torch.randn(3, dtype=torch.float64, requires_grad=True)
    beta = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda alpha, beta, *z: mixed_state(z[:3], z[3:], alpha, beta), (alpha, beta, *z)
    )


def test_half_precision_is_mixed_in_single():
    states = [torch.full((2,), v, dtype=torch.bfloat16) for v in (256.0, 1.0, -256.0)]
    mixed = weighted_sum(states, torch.ones(3))
    assert mixed.dtype == torch.bfloat16
    assert mixed.tolist() == [1.0, 1.0]  # in bfloat16, 256 + 1 = 256


def test_wrong_numbers_of_states_are_refused():
    z = [torch.zeros(2)] * 2
    with pytest.raises(ValueError, match="as many weights"):
        weighted_sum(z, torch.ones(3))
    with pytest.raises(ValueError, match="1 images"):
        mixed_state(z, z[:1], torch.ones(2), torch.tensor(1.0))


# The predictor.


def test_the_weights_have_the_shapes_of_the_history_and_forget_nothing():
    solver = random_solver(window=4)
    for n in range(1, 5):
        seen = [torch.randn(21, dtype=torch.float64, requires_grad=True) for _ in range(n)]
        alpha_hat, beta = solver.predictor(seen)
        assert alpha_hat.shape == (n,)
        assert beta.shape == ()
        assert 0 < beta < 2
        # Every weight depends on every residual remembered.
        for output in [*alpha_hat, beta]:
            gradients = torch.autograd.grad(output, seen, retain_graph=True)
            assert all(bool(g.any()) for g in gradients)
    with pytest.raises(ValueError, match="between 1 and 4"):
        solver.predictor([torch.zeros(21, dtype=torch.float64)] * 5)


def test_a_batch_of_histories_is_as_many_histories():
    predictor = random_solver().predictor
    histories = torch.randn(5, 3, 21, dtype=torch.float64)  # (B, n, C)
    alpha_hat, beta = predictor(list(histories.unbind(1)))
    assert alpha_hat.shape == (5, 3)
    for i, history in enumerate(histories):
        alone = predictor(list(history))
        torch.testing.assert_close(alone, (alpha_hat[i], beta[i]))


def test_a_description_is_the_formula_and_its_direction_knows_no_scale():
    teacher, batch = setting(torch.float64, nodes=30)
    context = teacher.inject(batch.x)
    mixing = random_solver().predictor
    z = torch.rand(30, WIDTH, dtype=torch.float64)
    image = teacher.step(z, context)
    r = image - z
    inner = r / r.square().mean().sqrt() @ mixing.project.weight.t() + mixing.project.bias
    nodes = (context.adjacency.to_dense() @ inner).clamp_min(0).abs().mean(dim=0)
    described = mixing.describe(z, image, context)
    torch.testing.assert_close(described[:-1], nodes)
    torch.testing.assert_close(described[-1], (r.norm() / z.norm()).log10())
    nearer = mixing.describe(z, z + 1e-3 * r, context)
    torch.testing.assert_close(nearer[:-1], described[:-1])
    torch.testing.assert_close(nearer[-1], described[-1] - 3)


def test_a_residual_of_zero_has_a_finite_description_and_gradient():
    teacher, batch = setting(nodes=30)
    context = teacher.inject(batch.x)
    mixing = random_solver(torch.float32).predictor
    for z in (torch.zeros(30, WIDTH), torch.rand(30, WIDTH)):
        image = z.clone().requires_grad_()
        description = mixing.describe(z, image, context)
        assert bool(description.isfinite().all())
        (gradient,) = torch.autograd.grad(description.sum(), image)
        assert gradient.abs().max() < 100


# The rollout.


def test_untrained_it_is_picard_from_zero():
    teacher, batch = setting()
    context = teacher.inject(batch.x)
    states = list(IGNNSolver(width=WIDTH).rollout(teacher, context, 12))
    assert not states[0].any()
    torch.testing.assert_close(states, picard_states(teacher, batch.x, 12), rtol=1e-5, atol=1e-5)


def test_each_state_costs_one_evaluation_and_none_is_made_before_it_is_asked_for():
    teacher, batch = setting()
    context = teacher.inject(batch.x)
    solver = random_solver(torch.float32)
    with torch.no_grad():
        for k, z in enumerate(solver.rollout(teacher, context, 9)):
            assert teacher.evaluations == k
            assert z.shape == (NODES, WIDTH)
            assert not z.requires_grad
    assert k == teacher.evaluations == 9
    assert len(list(solver.rollout(teacher, context, 0))) == 1
    with pytest.raises(ValueError, match="negative"):
        list(solver.rollout(teacher, context, -1))


def test_the_rollout_is_the_equation_in_dense_double_precision():
    teacher, batch = setting(torch.float64, nodes=30)
    context = teacher.inject(batch.x)
    solver = random_solver(window=3)
    z_0 = solver.initial(context)
    b = context.injection
    wanted = b @ solver.initial.compress.weight.t() + solver.initial.compress.bias
    wanted = wanted @ solver.initial.expand.weight.t() + solver.initial.expand.bias
    torch.testing.assert_close(z_0, wanted * (wanted > 0))

    visited, states = [z_0], list(solver.rollout(teacher, context, 6))
    for k, mixing in enumerate(solver.mixings(teacher, context, z_0, 6)):
        window = visited[-3:]
        assert len(mixing.states) == len(mixing.images) == mixing.alpha.numel() == len(window)
        assert mixing.alpha.sum().item() == pytest.approx(1)
        images = [teacher.step(z, context) for z in window]
        described = [
            solver.predictor.describe(z, f, context) for z, f in zip(window, images, strict=True)
        ]
        alpha_hat, beta = solver.predictor(described)
        torch.testing.assert_close(mixing.alpha, centred(alpha_hat))
        z = sum(
            a * (beta * f + (1 - beta) * z)
            for a, f, z in zip(mixing.alpha, images, window, strict=True)
        )
        torch.testing.assert_close(states[k + 1], z)
        visited.append(states[k + 1])


def test_renumbering_the_nodes_renumbers_the_states():
    teacher, batch = setting(torch.float64, nodes=30)
    adjacency, features = batch.x
    order = torch.randperm(30, generator=torch.Generator().manual_seed(3))
    rows, columns = adjacency.to_dense()[order][:, order].nonzero().t()
    renumbered = Graph(normalised_adjacency(torch.stack([rows, columns]), 30), features[order])
    renumbered = Graph(renumbered.adjacency.double(), renumbered.features)
    solver = random_solver()
    states, theirs = (rollout(solver, teacher, x, 5) for x in (batch.x, renumbered))
    expected = [z[order] for z in states]
    torch.testing.assert_close(theirs, expected, rtol=1e-6, atol=1e-6)  # rsqrt in single


def test_gradients_reach_both_networks_and_no_frozen_weight():
    teacher, batch = setting(torch.float64, nodes=30)
    teacher.requires_grad_(False)
    context = teacher.inject(batch.x)
    solver = random_solver()
    *_, z = solver.rollout(teacher, context, 4)
    (z - batch.endpoint).square().sum().backward()
    require_gradients(solver)
    assert all(weight.grad is None for weight in teacher.parameters())


def test_the_gradient_passes_through_the_teachers_map():
    teacher, batch = setting(torch.float64, nodes=10)
    teacher.requires_grad_(False)
    context = teacher.inject(batch.x)
    solver = random_solver(hidden=3, inner=2)

    def value(bias):
        changed = copy.deepcopy(solver)
        with torch.no_grad():
            changed.initial.expand.bias.copy_(bias)
            *_, z = changed.rollout(teacher, context, 3)
        return z.square().sum()

    *_, z = solver.rollout(teacher, context, 3)
    (gradient,) = torch.autograd.grad(z.square().sum(), solver.initial.expand.bias)
    bias, direction = solver.initial.expand.bias.detach(), torch.randn(WIDTH, dtype=torch.float64)
    h = 1e-6
    slope = (value(bias + h * direction) - value(bias - h * direction)) / (2 * h)
    assert (gradient @ direction).item() == pytest.approx(slope.item(), rel=1e-5)


def test_contexts_and_states_of_another_kind_are_refused():
    solver = IGNNSolver(width=WIDTH)
    with pytest.raises(TypeError, match="injection"):
        list(solver.rollout(from_functions(lambda z, c: z), torch.zeros(3, WIDTH), 1))
    teacher, batch = setting(nodes=10)
    pairs = from_functions(lambda z, c: (z, z), batched=False)
    with pytest.raises(TypeError, match="not tuples"):
        list(solver.rollout(pairs, teacher.inject(batch.x), 1))


@pytest.mark.parametrize("wrong", [{"width": 0}, {"inner": 0}, {"hidden": 0}, {"window": 0}])
def test_sizes_are_checked(wrong):
    with pytest.raises(ValueError, match="at least 1"):
        IGNNSolver(**{"width": WIDTH, **wrong})


def test_config_rebuilds_the_solver():
    teacher, batch = setting(torch.float64, nodes=30)
    solver = random_solver(inner=5, hidden=7, window=2)
    twin = IGNNSolver(**json.loads(json.dumps(solver.config))).double()
    twin.load_state_dict(solver.state_dict())
    assert twin.config == solver.config
    assert twin.window == 2
    assert same_tensors(rollout(solver, teacher, batch.x, 4), rollout(twin, teacher, batch.x, 4))


def test_a_deep_copy_is_independent():
    solver = random_solver()
    before = {name: tensor.clone() for name, tensor in solver.state_dict().items()}
    twin = copy.deepcopy(solver)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.zero_()
    twin.config["window"] = 99
    assert solver.config["window"] == 6
    assert same_tensors(dict(solver.state_dict()), before)


class Twice(torch.nn.Module):
    """Starts a pair at the context."""

    def forward(self, context):
        return context, context


class MeanMixing(MixingNetwork):
    """Describes a residual of a batched pair of tensors by the means of its two parts."""

    def describe(self, z, image, context):
        return torch.stack([(f - s).mean(dim=1) for s, f in zip(z, image, strict=True)], dim=1)


def test_tuple_states_with_a_batch_axis_can_be_solved_by_another_pair_of_networks():
    scale = torch.rand(4, 3, dtype=torch.float64)
    teacher = from_functions(lambda z, c: (c * z[1] + 1, 0.5 * z[0]))
    torch.manual_seed(0)
    solver = LearnedSolver(Twice(), MeanMixing(features=2, hidden=4, window=3).double())
    with torch.no_grad():
        solver.predictor.second.weight.normal_(std=0.3)
    for mixing in solver.mixings(teacher, scale, solver.initial(scale), 5):
        assert mixing.alpha.shape == (4, len(mixing.states))
        torch.testing.assert_close(mixing.alpha.sum(dim=1), torch.ones(4, dtype=torch.float64))
        alone = sum(
            mixing.alpha[2, i] * torch.lerp(z[0][2], f[0][2], mixing.beta[2])
            for i, (z, f) in enumerate(zip(mixing.states, mixing.images, strict=True))
        )
        torch.testing.assert_close(mixing.state[0][2], alone)


# The objective.


def by_hand(solver, teacher, batch, depth):
    """The three terms, without their weights."""
    context, star = teacher.inject(batch.x), batch.endpoint
    states = list(solver.rollout(teacher, context, depth))
    size = star.square().sum().sqrt()
    gaps = [(z - star).square().sum().sqrt() / size for z in states[1:]]
    distance = sum(k * gap for k, gap in enumerate(gaps, start=1)) / sum(range(1, depth + 1))
    start = (states[0] - star).square().mean() / star.square().mean()
    residual = 0.0
    for k in range(depth):
        window = states[max(0, k + 1 - solver.window) : k + 1]
        images = [teacher.step(z, context) for z in window]
        described = [
            solver.predictor.describe(z, f, context) for z, f in zip(window, images, strict=True)
        ]
        alpha = centred(solver.predictor(described)[0])
        columns = torch.stack([f - z for z, f in zip(window, images, strict=True)], dim=-1)
        residual = residual + (columns @ alpha).abs().mean()
    return distance, start, residual


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize(
    ("weights", "update", "factors"),
    [
        (SolverLossWeights(distance=1, start=0, residual=0), 0, (1, 0, 0)),
        (SolverLossWeights(distance=0, start=1, residual=0), 0, (0, 1, 0)),
        (SolverLossWeights(distance=0, start=0, residual=1, anneal=8), 0, (0, 0, 1)),
        (SolverLossWeights(distance=0, start=0, residual=1, anneal=8), 6, (0, 0, 0.25)),
        (SolverLossWeights(distance=0, start=0, residual=1, anneal=8), 9, (0, 0, 0)),
        (SolverLossWeights(distance=0, start=0, residual=1, anneal=0), 0, (0, 0, 0)),
        (None, 500, (0.1, 5, 0.5e-4)),
    ],
)
def test_each_term_is_what_the_docstring_says(depth, weights, update, factors):
    teacher, batch = setting(torch.float64, nodes=30)
    solver = random_solver(window=3)
    objective = SolverObjective(solver, teacher, depth, weights)
    loss, metrics = objective(batch, update)
    terms = by_hand(solver, teacher, batch, depth)
    wanted = sum(factor * term.item() for factor, term in zip(factors, terms, strict=True))
    assert loss.item() == pytest.approx(wanted, rel=1e-10)
    states = solver.rollout(teacher, teacher.inject(batch.x), depth)
    gaps = distances(states, batch.endpoint, batched=False)
    assert metrics["distance_0"].item() == pytest.approx(gaps[0])
    assert metrics["distance_1"].item() == pytest.approx(gaps[1])
    assert metrics["distance"].item() == pytest.approx(gaps[-1])
    assert not any(value.requires_grad for value in metrics.values())


def test_the_objectives_teacher_is_frozen_and_the_callers_is_left_alone():
    teacher, batch = setting(nodes=30)
    teacher.train()
    solver = IGNNSolver(width=WIDTH)
    objective = SolverObjective(solver, teacher, 3).train()
    assert not any(module.training for module in objective.teacher.modules())
    assert solver.training
    trained = {p for p in objective.parameters() if p.requires_grad}
    assert trained == set(solver.parameters())
    objective(batch, 0)[0].backward()
    assert all(p.grad is None for p in [*teacher.parameters(), *objective.teacher.parameters()])
    assert teacher.training
    assert all(p.requires_grad for p in teacher.parameters())


def test_impossible_objectives_are_refused():
    teacher, _ = setting(nodes=10)
    with pytest.raises(ValueError, match="depth"):
        SolverObjective(IGNNSolver(width=WIDTH), teacher, 0)
    with pytest.raises(TypeError, match="not an equilibrium model"):
        SolverObjective(IGNNSolver(width=WIDTH), torch.nn.Linear(2, 2), 3)
    with pytest.raises(ValueError, match="start"):
        SolverLossWeights(start=-1)


@pytest.mark.slow
def test_training_beats_picard_and_mixing_does_its_part():
    teacher, batch = setting()
    solver = IGNNSolver(width=WIDTH)
    fit(
        SolverObjective(solver, teacher, 5, SolverLossWeights(anneal=50)),
        lambda update: batch,
        FitConfig(updates=100, learning_rate=8e-3),
    )
    learned = rollout(solver, teacher, batch.x, 5)
    ours, picard, same_start = (
        distances(states, batch.endpoint, batched=False)
        for states in (
            learned,
            picard_states(teacher, batch.x, 5),
            picard_states(teacher, batch.x, 5, z=learned[0]),
        )
    )
    for k in (1, 2, 5):
        assert ours[k] < 0.3 * picard[k]
    # The start alone does not explain it: Picard from there is farther off after five steps.
    assert ours[5] < 0.5 * same_start[5]
    assert ours[5] < ours[1]
