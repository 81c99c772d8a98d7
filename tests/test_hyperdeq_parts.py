"""HyperDEQ on states of several tensors."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from cdeq.equilibrium.contract import from_functions
from cdeq.models.learned_solvers import HyperDEQ, SolverLossWeights, SolverObjective
from cdeq.models.learned_solvers.hyperdeq import StateMixing
from cdeq.solvers import Anderson
from checks import distances, numbers, picard_states, require_gradients, same_tensors, solver_states
from problems import coupled_tuple
from slow_maps import WIDTH, Slow, ZeroStart, rollout, train_solver
from teachers import randomized

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
        return picard_states(self, x, 200)[-1]


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


@settings(max_examples=20)
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
    expected = [(z,) for z in rollout(single, teacher, x, 5)]
    assert same_tensors(rollout(tupled, tupled_teacher, x, 5), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_untrained_it_is_exactly_picard_on_parts(dtype):
    teacher, x = TwoScales().to(dtype), pictures(2, dtype)
    solver = scales_solver(trained=False, dtype=dtype)
    assert same_tensors(rollout(solver, teacher, x, 4), picard_states(teacher, x, 4))


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
    require_gradients(solver)


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
    assert same_tensors(rollout(solver, teacher, x, 4), rollout(twin, teacher, x, 4))


@pytest.mark.slow
def test_training_on_two_scales_beats_anderson_at_two_steps():
    teacher = TwoScales()
    x = 0.5 * numbers(48, 3, 6, 6, dtype=torch.float32)
    solver = scales_solver(trained=False, dtype=torch.float32)
    train_solver(solver, teacher, x[:32], teacher.equilibrium(x[:32]), updates=60, depth=3)
    star = teacher.equilibrium(x[32:])
    states = rollout(solver, teacher, x[32:], 3)
    ours = distances(states, star)
    theirs = distances(solver_states(teacher, x[32:], 3, Anderson()), star)
    same_start = distances(solver_states(teacher, x[32:], 3, Anderson(), states[0]), star)
    assert ours[2] < 0.5 * theirs[2]
    # The start alone does not explain it: Anderson from there is farther off.
    assert ours[2] < 0.95 * same_start[2]
    assert ours[3] < 0.8 * same_start[3]


# What is refused.


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
