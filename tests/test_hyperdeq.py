"""HyperDEQ: Picard before training, samples apart, both layouts, the formulas densely, what training buys.

States of one tensor first, then tuples of them.
"""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.equilibrium.contract import from_functions
from cdeq.equilibrium.states import relative_distance
from cdeq.models.learned_solvers import (
    ConvolutionalStart,
    HyperDEQ,
    SolverLossWeights,
    SolverObjective,
)
from cdeq.models.learned_solvers.hyperdeq import StateMixing
from cdeq.models.text.transformer import TransformerDEQ
from cdeq.solvers import Anderson, solve_model
from cdeq.training.loop import FitConfig, fit
from problems import coupled_tuple
from teachers import Pair, Ring, inputs, randomized

WIDTH, TOKENS = 6, 5


class TextContext(NamedTuple):
    """A context with more than its injection, as a text teacher with a memory has."""

    injection: Tensor
    memory: Tensor


class ZeroStart(nn.Module):
    """z_0 = 0, and nothing to train."""

    def forward(self, context):
        return torch.zeros_like(context)


class Slow(nn.Module):
    """f(z, x) = W z + x with W symmetric, its eigenvalues from .3 to .9: every Picard step falls short."""

    def __init__(self, feature_axis: int = -1):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        q = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=g)).Q
        self.feature_axis = feature_axis
        self.weight = nn.Parameter(q @ torch.linspace(0.3, 0.9, WIDTH).diag() @ q.T)

    def inject(self, x):
        return x

    def start(self, context):
        return torch.zeros_like(context)

    def step(self, z, context):
        moved = z.movedim(self.feature_axis, -1) @ self.weight
        return moved.movedim(-1, self.feature_axis) + context

    def readout(self, z, context):
        return z

    def equilibrium(self, x):
        inverse = torch.linalg.inv(torch.eye(WIDTH, dtype=x.dtype) - self.weight.detach())
        moved = x.movedim(self.feature_axis, -1) @ inverse
        return moved.movedim(-1, self.feature_axis)


def text_solver(seed=1, trained=True, width_in=WIDTH, width=WIDTH, dtype=torch.float64, **config):
    """A solver for texts; `trained` leaves none of its weights at zero."""
    torch.manual_seed(seed)
    start = ConvolutionalStart(width_in=width_in, width=width, inner=9)
    solver = HyperDEQ(width=width, initial=start, **config).to(dtype)
    return randomized(solver) if trained else solver


def rollout(solver, teacher, x, steps):
    with torch.no_grad():
        return list(solver.rollout(teacher, teacher.inject(x), steps))


def picard(teacher, x, steps, z=None):
    context = teacher.inject(x)
    states = [teacher.start(context) if z is None else z]
    with torch.no_grad():
        for _ in range(steps):
            states.append(teacher.step(states[-1], context))
    return states


def numbers(*shape, seed=3, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# The start.


@pytest.mark.parametrize("kernel", [1, 2, 3])
def test_the_start_is_the_causal_convolution(kernel):
    torch.manual_seed(0)
    start = ConvolutionalStart(width_in=4, width=WIDTH, inner=7, kernel=kernel)
    start = randomized(start.double())
    u = numbers(3, TOKENS, 4)
    # Conv1d's weight is (out, in, kernel); ours lists the channels of one token after the other.
    weight = start.mix.weight.reshape(7, kernel, 4).transpose(1, 2)
    inner = F.conv1d(F.pad(u.mT, (kernel - 1, 0)), weight, start.mix.bias).relu()
    wanted = torch.einsum("bil,di->bld", inner, start.out.weight) + start.out.bias
    torch.testing.assert_close(start(u), wanted)
    torch.testing.assert_close(start(TextContext(u, numbers(3, 2, 4))), wanted)


@pytest.mark.parametrize("token", range(TOKENS))
def test_no_token_starts_from_a_later_one(token):
    solver = text_solver()
    u = numbers(2, TOKENS, WIDTH).requires_grad_()
    (gradient,) = torch.autograd.grad(solver.initial(u)[:, token].sum(), u)
    heard = gradient.abs().amax(dim=(0, 2)) > 0
    assert heard.tolist() == [token - 3 < i <= token for i in range(TOKENS)]


def test_the_start_has_the_published_sizes_and_rebuilds_from_its_config():
    start = ConvolutionalStart(width_in=8, width=4)
    assert start.mix.weight.shape == (200, 3 * 8)
    assert start.out.weight.shape == (4, 200)
    twin = ConvolutionalStart(**json.loads(json.dumps(start.config)))
    twin.load_state_dict(start.state_dict())
    assert not twin(torch.ones(2, 3, 8)).any()


# The description.


@settings(max_examples=25, deadline=None)
@given(
    places=st.lists(st.integers(1, 4), max_size=2),
    front=st.booleans(),
    scale=st.floats(1e-6, 1e6),
    seed=st.integers(0, 99),
)
def test_a_description_is_the_formula_sample_by_sample(places, front, scale, seed):
    shape = (3, WIDTH, *places) if front else (3, *places, WIDTH)
    torch.manual_seed(seed)
    mixing = StateMixing(width=WIDTH, hidden=4, feature_axis=1 if front else -1).double()
    z, r = numbers(*shape, seed=seed), scale * numbers(*shape, seed=seed + 100)
    described = mixing.describe(z, z + r, None)
    assert described.shape == (3, 5)
    letters = "cp,hc->ph" if front else "pc,hc->ph"
    for i in range(3):
        r_i = (z[i] + r[i]) - z[i]
        columns = r_i.reshape(WIDTH, -1) if front else r_i.reshape(-1, WIDTH)
        direction = columns / columns.square().mean().sqrt()
        inner = torch.einsum(letters, direction, mixing.project.weight) + mixing.project.bias
        torch.testing.assert_close(described[i, :-1], inner.clamp_min(0).mean(dim=0))
        torch.testing.assert_close(described[i, -1], (r_i.norm() / z[i].norm()).log10())


def test_residuals_of_zero_have_a_finite_description_and_gradient():
    torch.manual_seed(0)
    mixing = StateMixing(width=WIDTH)
    z = numbers(3, TOKENS, WIDTH, dtype=torch.float32)
    z[0] = 0
    image = z.clone()
    image[2] += 1  # only the last sample has a residual
    image.requires_grad_()
    description = mixing.describe(z, image, None)
    assert description[:, -1].tolist()[:2] == [-12.0, -12.0]
    (gradient,) = torch.autograd.grad(description.sum(), image)
    assert bool(gradient.isfinite().all())
    assert gradient.abs().max() < 100
    at_zero = mixing.describe(torch.zeros_like(z), image.detach(), None)
    assert at_zero[:, -1].tolist() == [-12.0, 0.0, 0.0]


# The rollout.


def test_untrained_it_is_exactly_picard_from_zero():
    teacher, x = Slow(), numbers(3, TOKENS, WIDTH, dtype=torch.float32)
    solver = text_solver(trained=False, dtype=torch.float32)
    states = rollout(solver, teacher, x, 9)
    assert not states[0].any()
    for z, wanted in zip(states, picard(teacher, x, 9), strict=True):
        torch.testing.assert_close(z, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("feature_axis", [-1, 1])
def test_samples_are_independent(feature_axis):
    """A batch of three is three batches of one, for texts and for images."""
    teacher = Slow(feature_axis).double()
    if feature_axis == -1:
        solver, x = text_solver(window=3), numbers(3, TOKENS, WIDTH)
    else:
        torch.manual_seed(1)
        conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        solver = HyperDEQ(width=WIDTH, initial=conv, window=3, feature_axis=1).double()
        solver, x = randomized(solver), numbers(3, WIDTH, 4, 3)
    x = x * torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64).reshape(3, *[1] * (x.ndim - 1))
    together = rollout(solver, teacher, x, 6)
    for i in range(3):
        for z, alone in zip(together, rollout(solver, teacher, x[i : i + 1], 6), strict=True):
            torch.testing.assert_close(z[i : i + 1], alone, rtol=1e-10, atol=1e-10)
    # And not because all samples are mixed alike.
    *_, last = solver.mixings(teacher, x, together[0], 4)
    assert last.alpha.shape == (3, 3)
    assert last.beta.shape == (3,)
    assert len({round(beta, 6) for beta in last.beta.tolist()}) == 3
    torch.testing.assert_close(last.alpha.sum(dim=1), torch.ones(3, dtype=torch.float64))


def test_images_are_texts_with_their_axes_moved():
    """The same weights on (B, D, H, W) and on (B, H, W, D) make the same states."""
    solvers = [HyperDEQ(width=WIDTH, initial=ZeroStart(), feature_axis=axis) for axis in (-1, 1)]
    randomized(solvers[0])
    solvers[1].load_state_dict(solvers[0].state_dict())
    x = numbers(2, 4, 3, WIDTH, dtype=torch.float32)
    last = rollout(solvers[0], Slow(), x, 5)
    first = rollout(solvers[1], Slow(1), x.movedim(-1, 1), 5)
    for z, image in zip(last, first, strict=True):
        torch.testing.assert_close(image.movedim(1, -1), z)


def test_gradients_reach_every_weight_of_both_networks():
    teacher, x = Slow().double().requires_grad_(False), numbers(2, TOKENS, WIDTH)
    solver = text_solver()
    *_, z = solver.rollout(teacher, x, 4)
    (z - teacher.equilibrium(x)).square().sum().backward()
    for name, weight in solver.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.any()), name
        assert bool(weight.grad.isfinite().all()), name


def test_the_gradient_is_the_finite_difference():
    teacher, x = Slow().double().requires_grad_(False), numbers(2, TOKENS, WIDTH)
    solver = text_solver(hidden=3)
    names = ["initial.mix.weight", "predictor.project.weight", "predictor.second.weight"]
    weights = dict(solver.named_parameters())

    def value(*changed):
        twin = copy.deepcopy(solver)
        *_, z = torch.func.functional_call(
            _Rollout(twin, teacher, 3),
            {f"solver.{n}": w for n, w in zip(names, changed, strict=True)},
            (x,),
        )
        return z.square().sum()

    leaves = [weights[name].detach().clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(value, leaves, fast_mode=True)


class _Rollout(nn.Module):
    def __init__(self, solver, teacher, steps):
        super().__init__()
        self.solver, self.teacher, self.steps = solver, teacher, steps

    def forward(self, x):
        return list(self.solver.rollout(self.teacher, x, self.steps))


def test_config_and_a_start_rebuild_the_solver():
    solver = text_solver(hidden=7, window=2)
    config = json.loads(json.dumps(solver.config))
    assert set(config) == {"width", "hidden", "window", "feature_axis"}
    start = ConvolutionalStart(**solver.initial.config)
    twin = HyperDEQ(**config, initial=start).double()
    twin.load_state_dict(solver.state_dict())
    x, teacher = numbers(2, TOKENS, WIDTH), Slow().double()
    for ours, theirs in zip(
        rollout(solver, teacher, x, 4), rollout(twin, teacher, x, 4), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_states_in_half_precision_stay_so():
    teacher, x = Slow().bfloat16(), numbers(2, TOKENS, WIDTH, dtype=torch.bfloat16)
    solver = HyperDEQ(width=WIDTH, initial=ZeroStart())
    for weights in (solver, copy.deepcopy(solver).bfloat16()):
        for z, wanted in zip(rollout(weights, teacher, x, 4), picard(teacher, x, 4), strict=True):
            assert z.dtype == torch.bfloat16
            torch.testing.assert_close(z, wanted, rtol=0, atol=0)


# Training.


def gaps(states, star):
    return [relative_distance(z, star).mean().item() for z in states]


def trained_on(teacher, solver, x, updates, depth=4):
    """Trains on 8 samples an update and returns the solver."""
    batch = [SimpleNamespace(x=part, endpoint=teacher.equilibrium(part)) for part in x.split(8)]
    fit(
        SolverObjective(solver, teacher, depth),
        lambda update: batch[update % len(batch)],
        FitConfig(updates=updates, learning_rate=1e-2),
    )
    return solver


def test_training_beats_picard_at_every_step_on_samples_it_never_saw():
    teacher = Slow()
    x = numbers(48, TOKENS, WIDTH, dtype=torch.float32)
    held_out = x[32:]
    solver = text_solver(trained=False, dtype=torch.float32)
    trained_on(teacher, solver, x[:32], updates=80)
    star = teacher.equilibrium(held_out)
    states = rollout(solver, teacher, held_out, 4)
    ours, theirs = gaps(states, star), gaps(picard(teacher, held_out, 4), star)
    same_start = gaps(picard(teacher, held_out, 4, z=states[0]), star)
    for k in range(1, 5):
        assert ours[k] < 0.8 * theirs[k]
    # The start alone does not explain it: Picard from there is farther off.
    assert ours[4] < 0.5 * same_start[4]


@pytest.mark.parametrize("feature_axis", [-1, 1])
def test_mixing_alone_beats_picard_at_every_step(feature_axis):
    teacher = Slow(feature_axis)
    x = numbers(48, 3, 3, WIDTH, dtype=torch.float32).movedim(-1, feature_axis).contiguous()
    torch.manual_seed(0)
    solver = HyperDEQ(width=WIDTH, initial=ZeroStart(), feature_axis=feature_axis)
    trained_on(teacher, solver, x[:32], updates=60)
    star = teacher.equilibrium(x[32:])
    ours = gaps(rollout(solver, teacher, x[32:], 4), star)
    theirs = gaps(picard(teacher, x[32:], 4), star)
    # After one step from zero only beta can help: the best length of one given direction.
    for k in range(1, 5):
        assert ours[k] < 0.95 * theirs[k]
    assert ours[4] < 0.3 * theirs[4]


def test_a_transformer_is_solved_faster_on_texts_it_never_saw():
    torch.manual_seed(0)
    teacher = TransformerDEQ(vocabulary=11, width=8, heads=2, inner=16, length=6)
    tokens = torch.randint(11, (48, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        solution = solve_model(teacher, teacher.inject(tokens), Anderson(), tol=1e-5, max_steps=200)
    assert bool(solution.converged.all())
    star = solution.state
    solver = text_solver(trained=False, width_in=4 * 8, width=8, dtype=torch.float32)
    untrained = rollout(solver, teacher, tokens, 4)
    for z, wanted in zip(untrained, picard(teacher, tokens, 4), strict=True):
        torch.testing.assert_close(z, wanted)
    batch = [
        SimpleNamespace(x=tokens[i : i + 8], endpoint=star[i : i + 8]) for i in range(0, 32, 8)
    ]
    fit(
        SolverObjective(solver, teacher, 4),
        lambda update: batch[update % 4],
        FitConfig(updates=80, learning_rate=1e-2),
    )
    ours = gaps(rollout(solver, teacher, tokens[32:], 4), star[32:])
    theirs = gaps([z[32:] for z in untrained], star[32:])
    for k in range(1, 5):
        assert ours[k] < 0.7 * theirs[k]


# States of several tensors.

SCALES = ((4, 6, 6), (5, 3, 3))
"""Channels, height and width of the two scales of an image's state."""


class TwoScales(nn.Module):
    """a = tanh(A a + up(B b) + u), b = tanh(C b + D a + v), the linear part of spectral norm .9: a contraction.

    A, C and D are convolutions of kernel 3, D of stride 2; B is 1 x 1. The context is (u, v).
    """

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        (fine, *_), (coarse, *_) = SCALES
        self.fine = nn.Conv2d(fine, fine, 3, padding=1, bias=False)
        self.up = nn.Conv2d(coarse, fine, 1, bias=False)
        self.coarse = nn.Conv2d(coarse, coarse, 3, padding=1, bias=False)
        self.down = nn.Conv2d(fine, coarse, 3, padding=1, stride=2, bias=False)
        self.fine_injection = nn.Conv2d(3, fine, 3, padding=1)
        self.coarse_injection = nn.Conv2d(3, coarse, 3, padding=1, stride=2)
        with torch.no_grad():
            for layer in (self.fine, self.up, self.coarse, self.down):
                layer.weight.abs_()  # a slow direction: what all numbers have in common
            identity = torch.eye(sum(c * h * w for c, h, w in SCALES)).split([144, 45], dim=1)
            parts = (e.reshape(-1, *shape) for e, shape in zip(identity, SCALES, strict=True))
            dense = torch.cat([part.flatten(1) for part in self.linear(*parts)], dim=1)
            for layer in (self.fine, self.up, self.coarse, self.down):
                layer.weight.mul_(0.9 / torch.linalg.matrix_norm(dense, 2))

    def linear(self, a, b):
        fine = self.fine(a) + F.interpolate(self.up(b), scale_factor=2.0)
        return fine, self.coarse(b) + self.down(a)

    def inject(self, x):
        return self.fine_injection(x), self.coarse_injection(x)

    def start(self, context):
        return tuple(torch.zeros_like(part) for part in context)

    def step(self, z, context):
        linear = self.linear(*z)
        return tuple((part + u).tanh() for part, u in zip(linear, context, strict=True))

    def readout(self, z, context):
        return z[1].mean(dim=(2, 3))

    def equilibrium(self, x):
        """The state by Picard iteration until rounding."""
        return picard(self, x, 200)[-1]


class TwoScaleStart(nn.Module):
    """z_0 = (conv(u), conv(v)), zero before training."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1) for c, _, _ in SCALES)
        for weight in self.parameters():
            nn.init.zeros_(weight)

    def forward(self, context):
        return tuple(conv(part) for conv, part in zip(self.convs, context, strict=True))


def scales_solver(trained=True, dtype=torch.float64, **config):
    torch.manual_seed(1)
    widths = tuple(c for c, _, _ in SCALES)
    solver = HyperDEQ(width=widths, initial=TwoScaleStart(), feature_axis=1, **config).to(dtype)
    return randomized(solver) if trained else solver


def pictures(samples, dtype=torch.float64):
    """Samples of different sizes, so that they are mixed differently."""
    scale = torch.linspace(0.3, 2, samples, dtype=dtype).reshape(-1, 1, 1, 1)
    return scale * numbers(samples, 3, 6, 6, dtype=dtype)


def plain_description(mixing, z, image):
    """The formula for one sample (a tuple of (D_i, H_i, W_i)), number by number."""
    means = torch.zeros(mixing.project[0].out_features, dtype=torch.float64)
    for project, z_i, f_i in zip(mixing.project, z, image, strict=True):
        r_i = (f_i - z_i).flatten(1)
        directions = r_i / (r_i.square().sum() / r_i.numel()).sqrt()
        for direction in directions.T:
            inner = (project.weight * direction).sum(dim=1) + project.bias
            means += inner.clamp_min(0) / directions.shape[1] / len(z)
    r_2 = sum(((f_i - z_i) ** 2).sum() for z_i, f_i in zip(z, image, strict=True))
    z_2 = sum((z_i**2).sum() for z_i in z)
    size = torch.log10((r_2 / z_2).sqrt()) if z_2 > 0 else z_2
    return torch.cat([means, size.reshape(1)])


def plain_weights(mixing, descriptions):
    """alpha and beta of one sample from its descriptions, the two convolutions tap by tap."""

    def convolved(layer, history, t):
        """The causal convolution at place t; the last tap of the kernel is for the newest."""
        taps = layer.weight.shape[2]
        reached = [(tap, t - taps + 1 + tap) for tap in range(taps) if t - taps + 1 + tap >= 0]
        return layer.bias + sum(layer.weight[:, :, tap] @ history[i] for tap, i in reached)

    n = len(descriptions)
    inner = [convolved(mixing.first, descriptions, t).clamp_min(0) for t in range(n)]
    newest = convolved(mixing.second, inner, n - 1)
    alpha_hat = newest[:n].flip(0)
    alpha = alpha_hat + (1 - alpha_hat.sum()) / n
    return alpha, 2 / (1 + torch.exp(-newest[-1]))


@torch.no_grad()
def plain_mixings(solver, teacher, x, steps):
    """(z_{k+1}, G alpha) for one sample (3, 6, 6) at a time, from the equations alone."""
    context = teacher.inject(x[None])
    z = solver.initial(context)
    states, images, descriptions = [], [], []
    for _ in range(steps):
        image = teacher.step(z, context)
        states.append(z)
        images.append(image)
        one = [tuple(part[0] for part in state) for state in (z, image)]
        descriptions.append(plain_description(solver.predictor, *one))
        states, images, descriptions = (
            past[-solver.window :] for past in (states, images, descriptions)
        )
        alpha, beta = plain_weights(solver.predictor, descriptions)
        zs, fs = (
            [torch.stack(parts) for parts in zip(*past, strict=True)] for past in (states, images)
        )
        z = tuple(
            torch.tensordot(alpha, beta * f + (1 - beta) * s, 1)
            for s, f in zip(zs, fs, strict=True)
        )
        yield z, [torch.tensordot(alpha, f - s, 1) for s, f in zip(zs, fs, strict=True)]


@settings(max_examples=20, deadline=None)
@given(
    sides=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    scales=st.tuples(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6)),
    seed=st.integers(0, 99),
)
def test_a_description_of_parts_is_the_formula(sides, scales, seed):
    """For parts of any size, and the later ones with residuals of another magnitude."""
    torch.manual_seed(seed)
    shapes = [(2, i + 2, side, side) for i, side in enumerate(sides)]
    widths = [shape[1] for shape in shapes]
    mixing = StateMixing(width=widths, hidden=4, feature_axis=1).double()
    z = tuple(numbers(*shape, seed=seed + i) for i, shape in enumerate(shapes))
    image = tuple(
        part + scales[min(i, 1)] * numbers(*part.shape, seed=seed + 200 + i)
        for i, part in enumerate(z)
    )
    described = mixing.describe(z, image, None)
    assert described.shape == (2, 5)
    for b in range(2):
        one = [tuple(part[b] for part in state) for state in (z, image)]
        torch.testing.assert_close(described[b], plain_description(mixing, *one))


def test_a_rollout_of_parts_is_the_equations_sample_by_sample():
    """Also says that samples do not influence each other."""
    teacher, x, solver = TwoScales().double(), pictures(3), scales_solver(window=3)
    together = rollout(solver, teacher, x, 6)
    for b in range(3):
        alone = plain_mixings(solver, teacher, x[b], 6)
        for state, (wanted, _) in zip(together[1:], alone, strict=True):
            assert isinstance(state, tuple)
            for part, part_wanted in zip(state, wanted, strict=True):
                torch.testing.assert_close(part[b : b + 1], part_wanted, rtol=1e-9, atol=1e-9)
    *_, last = solver.mixings(teacher, teacher.inject(x), together[0], 4)
    assert last.alpha.shape == (3, 3)
    assert len({round(beta, 6) for beta in last.beta.tolist()}) == 3


def test_no_sample_hears_another_through_its_parts():
    teacher, x, solver = TwoScales().double(), pictures(3).requires_grad_(), scales_solver()
    *_, z = solver.rollout(teacher, teacher.inject(x), 3)
    (gradient,) = torch.autograd.grad(sum(part[1].sum() for part in z), x)
    assert [bool(sample.any()) for sample in gradient] == [False, True, False]


class TupledStart(ZeroStart):
    """z_0 = (0,)."""

    def forward(self, context):
        return (super().forward(context),)


def test_a_tuple_of_one_part_is_the_single_tensor():
    single = randomized(HyperDEQ(width=WIDTH, initial=ZeroStart(), feature_axis=1))
    tupled = HyperDEQ(width=(WIDTH,), initial=TupledStart(), feature_axis=1)
    tupled.load_state_dict(
        {name.replace("project.", "project.0."): w for name, w in single.state_dict().items()}
    )
    teacher, x = Slow(1), numbers(2, WIDTH, 4, 3, dtype=torch.float32)
    tupled_teacher = from_functions(
        lambda z, c: (teacher.step(z[0], c),), start=lambda c: (torch.zeros_like(c),)
    )
    ones = rollout(tupled, tupled_teacher, x, 5)
    for z, one in zip(rollout(single, teacher, x, 5), ones, strict=True):
        torch.testing.assert_close(one, (z,), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_untrained_it_is_exactly_picard_on_parts(dtype):
    teacher, x = TwoScales().to(dtype), pictures(2, dtype)
    solver = scales_solver(trained=False, dtype=dtype)
    for z, wanted in zip(rollout(solver, teacher, x, 4), picard(teacher, x, 4), strict=True):
        torch.testing.assert_close(z, wanted, rtol=0, atol=0)


def test_a_part_that_has_arrived_has_a_finite_description_and_gradient():
    mixing = scales_solver(dtype=torch.float32).predictor
    z = tuple(numbers(2, *shape, dtype=torch.float32) for shape in SCALES)
    image = (z[0].clone().requires_grad_(), (z[1] + 1).requires_grad_())
    description = mixing.describe(z, image, None)
    # The part without a residual has no direction: its projection is the bias alone.
    arrived = mixing.project[0].bias.clamp_min(0)
    moving = 2 * description[:, :-1] - arrived
    torch.testing.assert_close(
        moving, mixing.project[1](torch.ones(5)).clamp_min(0).expand(2, -1), rtol=1e-4, atol=1e-5
    )
    for gradient in torch.autograd.grad(description.sum(), image):
        assert bool(gradient.isfinite().all())
        assert gradient.abs().max() < 100


def test_gradients_reach_every_weight_for_parts():
    teacher, x, solver = TwoScales().double().requires_grad_(False), pictures(2), scales_solver()
    *_, z = solver.rollout(teacher, teacher.inject(x), 4)
    sum(part.square().sum() for part in z).backward()
    for name, weight in solver.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.any()), name
        assert bool(weight.grad.isfinite().all()), name


@pytest.mark.parametrize("factors", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.1, 5, 1e-4)])
def test_the_objective_on_parts_is_what_its_docstring_says(factors):
    teacher, x, solver = TwoScales().double(), pictures(3), scales_solver(window=2)
    star, depth = teacher.equilibrium(x), 3
    weights = SolverLossWeights(distance=factors[0], start=factors[1], residual=factors[2])
    objective = SolverObjective(solver, teacher, depth, weights)
    loss, metrics = objective(SimpleNamespace(x=x, endpoint=star), 0)

    def gap(z, b):
        """|z - z*| / |z*| of sample b, from a state of that sample alone."""
        top = sum((part[0] - s[b]).square().sum() for part, s in zip(z, star, strict=True))
        return (top / sum(s[b].square().sum() for s in star)).sqrt().item()

    numbers_a_sample = sum(c * h * w for c, h, w in SCALES)
    wanted, last = 0.0, 0.0
    for b in range(3):
        start = solver.initial(teacher.inject(x[b : b + 1]))
        wanted += factors[1] * gap(start, b) ** 2 / 3
        steps = plain_mixings(solver, teacher, x[b], depth)
        for k, (z, residual) in enumerate(steps, start=1):
            wanted += factors[0] * k / 6 * gap(z, b) / 3
            size = sum(part.abs().sum().item() for part in residual)
            wanted += factors[2] * size / numbers_a_sample / 3
        last += gap(z, b) / 3
    assert loss.item() == pytest.approx(wanted, rel=1e-9)
    assert metrics["distance"].item() == pytest.approx(last, rel=1e-9)


def test_config_and_a_start_rebuild_the_solver_of_parts():
    solver = scales_solver(hidden=7, window=2)
    config = json.loads(json.dumps(solver.config))
    assert config == solver.config
    assert config["width"] == [4, 5]
    twin = HyperDEQ(**config, initial=TwoScaleStart()).double()
    twin.load_state_dict(solver.state_dict())
    x, teacher = pictures(2), TwoScales().double()
    ours, theirs = (rollout(each, teacher, x, 4) for each in (solver, twin))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_the_weights_of_one_tensor_keep_their_names():
    """Saved solvers are read by these names and rebuilt from this config."""
    solver = HyperDEQ(width=WIDTH, initial=ZeroStart())
    assert solver.config == {"width": WIDTH, "hidden": 20, "window": 6, "feature_axis": -1}
    layers = ("first", "second", "project")
    wanted = {f"predictor.{name}.{kind}" for name in layers for kind in ("weight", "bias")}
    assert set(solver.state_dict()) == wanted


def anderson(teacher, x, steps, z=None):
    seen = []
    with torch.no_grad():
        solve_model(
            teacher,
            teacher.inject(x),
            Anderson(),
            z0=z,
            tol=0.0,
            max_steps=steps,
            callback=lambda k, z: seen.append(z),
        )
    return seen


def test_training_on_two_scales_beats_anderson_at_two_steps():
    teacher = TwoScales()
    x = 0.5 * numbers(48, 3, 6, 6, dtype=torch.float32)
    solver = scales_solver(trained=False, dtype=torch.float32)
    trained_on(teacher, solver, x[:32], updates=60, depth=3)
    held_out = x[32:]
    star = teacher.equilibrium(held_out)
    states = rollout(solver, teacher, held_out, 3)
    ours, theirs = gaps(states, star), gaps(anderson(teacher, held_out, 3), star)
    same_start = gaps(anderson(teacher, held_out, 3, z=states[0]), star)
    assert ours[2] < 0.5 * theirs[2]
    # The start alone does not explain it: Anderson from there is farther off.
    assert ours[2] < 0.95 * same_start[2]
    assert ours[3] < 0.8 * same_start[3]


# What is refused.


@pytest.mark.parametrize("wrong", [{"width": 0}, {"width": (4, 0)}, {"hidden": 0}, {"window": 0}])
def test_sizes_are_checked(wrong):
    with pytest.raises(ValueError, match="at least 1"):
        HyperDEQ(**{"width": WIDTH, "initial": ZeroStart(), **wrong})


def test_no_widths_at_all_are_refused():
    with pytest.raises(ValueError, match="a number for each tensor"):
        HyperDEQ(width=(), initial=ZeroStart())


@pytest.mark.parametrize("name", ["width_in", "width", "inner", "kernel"])
def test_sizes_of_the_start_are_checked(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        ConvolutionalStart(**{"width_in": 2, "width": 2, name: 0})


def test_the_batch_axis_has_no_features():
    with pytest.raises(ValueError, match="feature_axis must not be 0"):
        HyperDEQ(width=WIDTH, initial=ZeroStart(), feature_axis=0)
    mixing = StateMixing(width=3, feature_axis=-2)
    with pytest.raises(ValueError, match="axis -2"):
        mixing.describe(torch.zeros(3, 4), torch.zeros(3, 4), None)
    with pytest.raises(ValueError, match="axis -2"):
        mixing.describe(torch.zeros(3), torch.zeros(3), None)


def test_states_of_another_shape_are_refused():
    x = numbers(2, TOKENS, WIDTH, dtype=torch.float32)
    with pytest.raises(ValueError, match="change width or feature_axis"):
        rollout(HyperDEQ(width=WIDTH + 1, initial=ZeroStart()), Slow(), x, 1)
    narrow = HyperDEQ(width=WIDTH, initial=ConvolutionalStart(width_in=WIDTH, width=1))
    message = r"gives a state \(2, 5, 1\), the teacher wants \(2, 5, 6\)"
    with pytest.raises(ValueError, match=message):
        rollout(narrow, Slow(), x, 1)
    growing = from_functions(lambda z, c: torch.cat([z, z], dim=1))
    with pytest.raises(ValueError, match="another shape"):
        rollout(HyperDEQ(width=WIDTH, initial=ZeroStart()), growing, x, 1)


def test_tuple_states_need_a_tuple_of_widths_whatever_the_start_gives():
    problem = coupled_tuple(torch.float32)
    pairs = from_functions(lambda z, c: problem.f(z), start=lambda c: problem.z0)
    with pytest.raises(TypeError, match=r"one tensor .* the teacher's state is a tuple of 2"):
        rollout(HyperDEQ(width=2, initial=ZeroStart()), pairs, torch.zeros(3, 4, 2), 1)
    with pytest.raises(TypeError, match=r"one tensor .* a state is a tuple of 2"):
        StateMixing(width=2).describe(problem.z0, problem.z0, None)
    with pytest.raises(TypeError, match=r"start network is a tuple of 1.* Give width as a tuple"):
        rollout(HyperDEQ(width=WIDTH, initial=TupledStart()), Slow(), numbers(3, WIDTH).float(), 1)


class Changed(TwoScaleStart):
    """A start with its parts changed."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, context):
        return self.change(*super().forward(context))


def test_a_tuple_of_widths_needs_tuple_states_of_as_many_parts():
    teacher, x = TwoScales(), pictures(2, torch.float32)
    two = {"width": (4, 5), "feature_axis": 1}
    with pytest.raises(TypeError, match=r"the teacher's state is one tensor"):
        rollout(HyperDEQ(initial=ZeroStart(), **two), Slow(), numbers(3, WIDTH).float(), 1)
    first_only = from_functions(lambda z, c: z, start=lambda c: c[:1])
    with pytest.raises(ValueError, match="the teacher's state has 1 tensors, width has 2 numbers"):
        rollout(HyperDEQ(initial=TwoScaleStart(), **two), first_only, teacher.inject(x), 1)
    short = Changed(lambda a, b: (a,))
    with pytest.raises(ValueError, match="start network has 1 tensors, width has 2"):
        rollout(HyperDEQ(initial=short, **two), teacher, x, 1)


def test_parts_of_another_shape_are_refused_by_their_number():
    teacher, x = TwoScales(), pictures(2, torch.float32)
    swapped = HyperDEQ(width=(5, 4), initial=TwoScaleStart(), feature_axis=1)
    with pytest.raises(ValueError, match=r"with 5 features on axis 1 was expected at part 0"):
        rollout(swapped, teacher, x, 1)
    small = Changed(lambda a, b: (a, b[..., :2]))
    message = r"a state \(2, 5, 3, 2\) at part 1, the teacher wants \(2, 5, 3, 3\)"
    with pytest.raises(ValueError, match=message):
        rollout(HyperDEQ(width=(4, 5), initial=small, feature_axis=1), teacher, x, 1)
    z = teacher.start(teacher.inject(x))
    mixing = StateMixing(width=(4, 5), feature_axis=1)
    with pytest.raises(ValueError, match=r"another shape, \(2, 5, 3, 2\) at part 1"):
        mixing.describe(z, (z[0], z[1][..., :2]), None)
    with pytest.raises(ValueError, match=r"disagree on the batch size: \[1, 2\]"):
        mixing.describe((z[0], z[1][:1]), z, None)


def test_graphs_are_sent_to_their_own_solver():
    with pytest.raises(ValueError, match="no batch axis"):
        rollout(HyperDEQ(width=8, initial=ZeroStart()), Ring(), inputs(), 1)


def test_contexts_without_a_fitting_injection_are_refused():
    start = ConvolutionalStart(width_in=WIDTH, width=WIDTH)
    with pytest.raises(TypeError, match="dict has none"):
        start(Pair().inject(inputs()))
    with pytest.raises(TypeError, match="SimpleNamespace has none"):
        start(SimpleNamespace(injection=[1.0]))
    for shape in [(2, WIDTH), (2, TOKENS, WIDTH + 1)]:
        with pytest.raises(ValueError, match=r"an injection \(B, L, 6\) was expected"):
            start(torch.zeros(shape))
