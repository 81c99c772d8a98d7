"""Learned corrections of a residual: what they are, how they are fitted, and what they may not change."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import cdeq
from cdeq.consistency import blocks
from cdeq.consistency.correction import FOLLOWED, LearnedCorrection
from cdeq.consistency.groups import groups_of, joined, seen, state_like
from cdeq.consistency.least_squares import Regression
from cdeq.consistency.recipes import Recipe
from cdeq.consistency.safeguard import PATIENCE, GuardedAnderson
from cdeq.consistency.start import LearnedStart
from cdeq.consistency.student import Student
from cdeq.equilibrium.states import StateLayout, map_state, relative_distance, tensors_of
from cdeq.equilibrium.trees import tensors_in
from checks import as_it_is


class Affine(nn.Module):
    """z = A z + x, with a state of any shape whose last axis has the features of A."""

    def __init__(self, a, weights=True):
        super().__init__()
        self.a = nn.Parameter(a) if weights else None
        if not weights:
            self.register_buffer("matrix", a)

    def matrix_of(self):
        return self.a if self.a is not None else self.matrix

    def inject(self, x):
        return x

    def start(self, context):
        return torch.zeros_like(context)

    def step(self, z, context):
        return z @ self.matrix_of().T + context

    def readout(self, z, context):
        return z

    def solved(self, x):
        a = self.matrix_of()
        a = a.detach()
        return torch.linalg.solve(torch.eye(len(a), dtype=a.dtype) - a, x[..., None]).squeeze(-1)


def contraction(radius, dim=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(dim, dim, generator=g, dtype=torch.float64))
    values = torch.linspace(-0.5 * radius, radius, dim, dtype=torch.float64)
    return q @ torch.diag(values) @ q.T


def batches(count, size=32, dim=8, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(size, dim, generator=g) for _ in range(count)]


GENERATOR = torch.Generator().manual_seed(0)


def drawn(*shape):
    """Random numbers that are the same whatever was imported before."""
    return torch.randn(*shape, generator=GENERATOR)


STATES = {
    "vector": drawn(3, 6),
    "sequence": drawn(3, 5, 6),
    "image": drawn(3, 2, 9, 7),
    "wide image": drawn(3, 12, 8, 8),
    "tuple": (drawn(3, 6), drawn(3, 4)),
    "two resolutions": (drawn(3, 4, 8, 8), drawn(3, 6, 4, 4)),
}


def axes_of(state):
    return [1 if t.ndim == 4 else t.ndim - 1 for t in tensors_of(state)]


@pytest.mark.parametrize("kind", STATES)
def test_groups_join_and_part_again(kind):
    state = STATES[kind]
    groups = groups_of(state, state, axes_of(state))
    again = state_like(state, groups, [joined(group, state) for group in groups])
    for a, b in zip(tensors_of(again), tensors_of(state), strict=True):
        assert torch.equal(a, b)
    for group in groups:
        assert seen(group, state, state).shape[group.axis] == group.source_features + group.width
    assert len(groups) == (2 if kind == "two resolutions" else 1)


@pytest.mark.parametrize("kind", STATES)
def test_a_correction_is_linear_in_the_residual_and_zero_at_zero(kind):
    torch.manual_seed(0)
    r = STATES[kind]
    network = LearnedCorrection.matching(r, r, axes_of(r))
    for p in network.parameters():
        nn.init.normal_(p, std=0.3)
    gates = network.gate(r, r)
    other = map_state(lambda t: torch.randn_like(t), r)
    mixed = map_state(lambda a, b: 2 * a - 3 * b, r, other)
    expected = map_state(lambda a, b: 2 * a - 3 * b, network(r, gates), network(other, gates))
    for a, b in zip(tensors_of(network(mixed, gates)), tensors_of(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    zero = network(map_state(torch.zeros_like, r), gates)
    assert all(not t.any() for t in tensors_of(zero))


ODD = {
    "odd wide image": (drawn(3, 12, 9, 10), [1]),
    "features first": (drawn(3, 6, 5), [1]),
    "features before the samples": (drawn(6, 5), [0]),
    "very wide": (drawn(3, 1030), [1]),
}


@pytest.mark.parametrize("kind", [*STATES, *ODD])
@pytest.mark.parametrize("cache", [1, 1 << 20])
@pytest.mark.parametrize("strided", [False, True])
def test_what_is_written_is_the_residual_and_its_correction(kind, cache, strided, monkeypatch):
    """All at once and sample by sample, to memory in one piece and to a slice of a batch of flat states.

    In double precision: the sums of a very wide state have thousands of terms.
    """
    monkeypatch.setattr(blocks, "CACHE", cache)
    torch.manual_seed(0)
    z, axes = ODD[kind] if kind in ODD else (STATES[kind], axes_of(STATES[kind]))
    z = map_state(torch.Tensor.double, z)
    context, f = (map_state(torch.randn_like, z) for _ in range(2))
    network = LearnedCorrection.matching(context, z, axes).double()
    for p in network.parameters():
        nn.init.normal_(p, std=0.3)
    gates, gain = network.gate(context, z), torch.tensor(0.7, dtype=torch.float64)
    r = map_state(torch.sub, f, z)
    expected = map_state(lambda r, n: r + gain * n, r, network(r, gates))
    layout = StateLayout.of(z)
    out, image = (
        layout.restore(gain.new_full((layout.batch, 3, sum(layout.sizes)), torch.nan)[:, 1])
        if strided
        else map_state(torch.empty_like, z)
        for _ in range(2)
    )
    with torch.no_grad():
        network.corrected(z, f, gates, gain, out, image)
    for p, wanted, moved, start in zip(*map(tensors_of, (out, expected, image, z)), strict=True):
        torch.testing.assert_close(p, wanted, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(moved, start + wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", STATES)
def test_gates_follow_another_state_of_the_same_input(kind):
    torch.manual_seed(0)
    state = STATES[kind]
    context, first, second = (map_state(torch.randn_like, state) for _ in range(3))
    network = LearnedCorrection.matching(context, state, axes_of(state))
    other = LearnedCorrection.matching(context, state, axes_of(state))
    expected = tensors_in(network.gate(context, second).now)
    # Where another network made them, as a running average of this one, nothing of them is taken over.
    for before in (network.gate(context, first), other.gate(context, first)):
        found = tensors_in(network.follow(before, context, second).now)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", STATES)
def test_untrained_networks_change_nothing(kind):
    state = STATES[kind]
    start = LearnedStart.matching(state, state, axes_of(state))
    assert all(not t.any() for t in tensors_of(start(state, state)))
    correction = LearnedCorrection.matching(state, state, axes_of(state))
    changed = correction(state, correction.gate(state, state))
    assert all(not t.any() for t in tensors_of(changed))


@pytest.mark.parametrize("kind", STATES)
def test_a_fitted_linear_part_is_the_map_it_was_fitted_to(kind):
    """`inputs`, `outputs` and `set_linear` agree with `forward`."""
    torch.manual_seed(1)
    r = STATES[kind]
    network = LearnedCorrection.matching(r, r, axes_of(r))
    expected = []
    for block, members, arrays in zip(
        network.blocks, network.members, network.arrays(r), strict=True
    ):
        for member, group in enumerate(members):
            rows = block.inputs(arrays, member)
            weight = torch.randn(network.groups[group].width, rows.shape[1])
            block.set_linear(weight, member)
            expected.append(rows @ weight.T)
    found = network.arrays(network(r, network.gate(r, r)))
    outputs = [
        block.outputs(arrays, member)
        for block, arrays in zip(network.blocks, found, strict=True)
        for member in range(len(arrays))
    ]
    for output, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)


def test_images_of_many_channels_are_seen_on_one_grid_and_others_by_themselves():
    images = torch.randn(2, 6, 16, 16), torch.randn(2, 5, 8, 8), torch.randn(2, 7, 4, 4)
    pyramid = LearnedCorrection.matching(images, images, [1, 1, 1])
    assert pyramid.config["units"] == [([0, 1, 2], [4, 2, 1])]
    odd = torch.randn(2, 6, 9, 9), torch.randn(2, 5, 4, 7)  # no squares bring both to one grid
    assert LearnedCorrection.matching(odd, odd, [1, 1]).config["units"] == [([0], [4]), ([1], [4])]
    few = torch.randn(2, 3, 8, 8), torch.randn(2, 9, 8, 8)[:, :, :4]
    assert LearnedCorrection.matching(few, few, [1, 1]).config["units"] == [([0], []), ([1], [4])]


def test_a_resolution_is_corrected_by_what_another_one_lacks():
    images = torch.randn(2, 6, 8, 8), torch.randn(2, 5, 4, 4)
    network = LearnedCorrection.matching(images, images, [1, 1])
    network.blocks[0].set_linear(torch.ones(6, 6 + 11), 0)
    gates = network.gate(images, images)
    fine = torch.zeros(2, 6, 8, 8)
    coarse = torch.zeros(2, 5, 4, 4)
    coarse[:, 2, 1, 3] = 1
    change, none = network((fine, coarse), gates)
    assert not none.any()
    assert change[:, :, 2:4, 6:].eq(1).all()
    assert change.sum() == 2 * 6 * 4


def test_regression_is_least_squares():
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 5, generator=g).double(), torch.randn(200, 3, generator=g).double()
    regression = Regression()
    for part in range(4):
        regression.add(x[part::4], y[part::4])
    weight = regression.solve(0.0)
    torch.testing.assert_close(weight.T, torch.linalg.lstsq(x, y).solution)
    assert regression.loss(weight) == pytest.approx(float((x @ weight.T - y).square().sum()))


def quick(**changes):
    return Recipe.from_name("corrected", start_updates=20, correction_updates=20, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("radius", [0.9, 0.99])
@pytest.mark.parametrize("weights", [True, False])
def test_a_linear_map_is_solved_in_two_steps(radius, weights):
    """The best correction of a linear map is (I - A)^-1 - I, which the fit finds in closed form."""
    teacher = Affine(contraction(radius).float(), weights)
    student = cdeq.distill(
        teacher, batches(8), recipe=quick(), fit=cdeq.FitConfig(updates=20), task_loss=None
    )
    x = batches(1, seed=9)[0]
    star = teacher.solved(x)
    with torch.no_grad():
        near = [float(relative_distance(z, star).mean()) for z in student.trajectory(x, 3)]
        solver = cdeq.solve_model(teacher, x, tol=0.0, max_steps=3).state
    assert near[2] < 1e-3
    assert near[3] < 0.05 * float(relative_distance(solver, star).mean())


def test_the_local_rate_is_that_of_the_corrected_jacobian():
    """e_j+1 = (I - (I + N)(I - J)) e_j, without mixing, in double precision."""
    a = contraction(0.8)
    teacher = Affine(a)
    recipe = quick(history="none", window=1, safeguard=False)
    student = Student.for_example(teacher, recipe, batches(1)[0].double()).double()
    g = torch.Generator().manual_seed(3)
    n = 0.3 * torch.randn(8, 8, generator=g, dtype=torch.float64)
    student.correction.blocks[0].set_linear(n)
    eye = torch.eye(8, dtype=torch.float64)
    rate = eye - (eye + n) @ (eye - a)
    x = batches(1, seed=5)[0].double()
    star = teacher.solved(x)
    with torch.no_grad():
        states = student.trajectory(x, 5)
    for z, after in pairwise(states):
        torch.testing.assert_close(after - star, (z - star) @ rate.T, rtol=1e-9, atol=1e-10)


def test_the_equilibrium_is_a_fixed_point_of_every_step():
    teacher = Affine(contraction(0.9))
    student = Student.for_example(teacher, quick(), batches(1)[0].double()).double()
    for p in student.correction.parameters():
        nn.init.normal_(p)
    x = batches(1)[0].double()
    star = teacher.solved(x)
    prepared, memory = student.prepare(x), None
    z = star
    with torch.no_grad():
        for j in range(4):
            z, memory = student.advance(z, student.time_point(j), memory, prepared)
            torch.testing.assert_close(z, star, rtol=1e-9, atol=1e-9)


def harmful(teacher, x, size):
    """A student whose correction throws every state away."""
    student = Student.for_example(teacher, quick(), x).eval().requires_grad_(False)
    student.correction.blocks[0].set_linear(-size * torch.eye(8))
    return student


def test_the_safeguard_takes_a_harmful_correction_back():
    teacher, x = Affine(contraction(0.9).float()), batches(1)[0]
    star = teacher.solved(x)
    student = harmful(teacher, x, 60.0)
    with torch.no_grad():
        guarded = relative_distance(student.trajectory(x, 14)[-1], star)
        student.recipe = student.recipe.changed(safeguard=False)
        student.train()
        student.train(False)
        free = relative_distance(student.trajectory(x, 14)[-1], star)
        plain = relative_distance(cdeq.solve_model(teacher, x, tol=0.0, max_steps=12).state, star)
    assert float(guarded.max()) < 1.05 * float(plain.max()) + 1e-5
    assert not torch.equal(guarded, free)


def test_the_safeguard_judges_each_sample_by_itself():
    history = cdeq.consistency.history.AndersonHistory(3, 1.0, batched=True)
    z = torch.zeros(2, 4)
    guard, memory = GuardedAnderson(history, 3, z), None
    f = torch.ones(2, 4)
    first, memory = guard.guarded(z, f, as_it_is, memory)
    # The second sample's corrected residual grows a hundredfold.
    worse = torch.stack([0.5 * torch.ones(4), 100 * torch.ones(4)])
    after, memory = guard.guarded(first, first + worse, as_it_is, memory)
    assert memory[1].trusted.flatten().tolist() == [True, False]
    torch.testing.assert_close(after[1], f[1])  # the solver's step from its best state


def test_the_safeguard_loses_patience_with_a_residual_that_does_not_fall():
    history = cdeq.consistency.history.AndersonHistory(3, 1.0, batched=True)
    z, memory = torch.zeros(2, 4), None
    guard = GuardedAnderson(history, 3, z)
    for k in range(PATIENCE + 2):
        # Of the first sample it falls to 0.98 at each step, of the second it hardly falls at all.
        r = torch.stack([0.98**k * torch.ones(4), (1 - 1e-4 * k) * torch.ones(4)])
        _, memory = guard.guarded(z, z + r, as_it_is, memory)
        assert memory[1].trusted.flatten().tolist() == [True, k < PATIENCE]


@pytest.mark.parametrize("steps", [2, 3, 7])
def test_gates_follow_the_images_of_the_first_steps_and_then_stay(steps):
    teacher, x = Affine(contraction(0.9).float()), batches(1)[0]
    student = Student.for_example(teacher, quick(), x).eval()
    torch.manual_seed(0)
    for p in student.correction.parameters():
        nn.init.normal_(p, std=0.05)
    seen, used = [], []
    network = student.correction
    gate, follow, corrected = network.gate, network.follow, network.corrected
    network.gate = lambda context, z: seen.append(z) or gate(context, z)
    network.follow = lambda gates, context, z: seen.append(z) or follow(gates, context, z)
    network.corrected = lambda z, f, gates, *more: (
        used.append(gates) or corrected(z, f, gates, *more)
    )
    with torch.no_grad():
        states = student.trajectory(x, steps)
        images = [teacher.step(z, teacher.inject(x)) for z in states]
        assert all(torch.equal(a, b) for a, b in zip(seen, images, strict=False))
        assert len(seen) == min(steps, FOLLOWED)
        assert len(used) == steps
        assert all(gates is used[FOLLOWED - 1] for gates in used[FOLLOWED:])
        # As a solver it has the same gates, up to the rounding of what it adds up in another order.
        seen.clear()
        solution = cdeq.solve_model(teacher, x, student.as_solver(), tol=0.0, max_steps=steps)
        assert len(seen) == min(steps, FOLLOWED)
        for a, b in zip(seen, images, strict=False):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(solution.state, states[-1], rtol=1e-4, atol=1e-5)


def test_maps_without_weights_need_a_recipe_that_changes_none():
    teacher = Affine(contraction(0.9).float(), weights=False)
    with pytest.raises(TypeError, match="recipe='corrected'"):
        cdeq.distill(teacher, batches(2), recipe="anchored")


@pytest.mark.slow
def test_a_saved_student_of_a_map_without_weights_is_the_same(tmp_path):
    teacher = Affine(contraction(0.9).float(), weights=False)
    student = cdeq.distill(
        teacher, batches(4), recipe=quick(), fit=cdeq.FitConfig(updates=5), task_loss=None
    )
    student.save(tmp_path)
    again = Student.load(tmp_path, teacher=Affine(torch.zeros(8, 8), weights=False))
    x = batches(1, seed=4)[0]
    assert torch.equal(again(x, steps=3), student(x, steps=3))


def test_the_start_is_the_teachers_and_a_change():
    class Informed(Affine):
        def start(self, context):
            return context + 1

    teacher = Informed(contraction(0.9).float())
    x = batches(1)[0]
    student = Student.for_example(teacher, quick(), x)
    assert torch.equal(student.begin(student.prepare(x)), x + 1)
    nn.init.normal_(student.start_network.networks[0].outer.linear.weight)
    assert not torch.equal(student.begin(student.prepare(x)), x + 1)


def test_slow_targets_are_solved_until_their_estimated_error_is_small(tmp_path):
    """A residual of 1e-4 of a map that contracts by 0.99 may be a hundred times as far."""
    teacher = Affine(contraction(0.99).float())
    student_data = batches(2)
    store = cdeq.record(teacher, student_data, tmp_path, mode="endpoint", max_steps=500, tol=1e-3)
    for batch, x in zip(store, student_data, strict=True):
        far = relative_distance(batch.endpoint, teacher.solved(x))
        assert float(far.max()) < 2e-3
    assert float(store.precision().max()) <= 1e-3


class Plain(Affine):
    """Its scale is a plain tensor attribute, neither a parameter nor a buffer."""

    def __init__(self, a):
        super().__init__(a)
        self.scale = torch.tensor(2.0) * self.a.detach().abs().max()

    def step(self, z, context):
        return super().step(z, context * self.scale)


def test_plain_tensors_of_a_teacher_are_saved(tmp_path):
    teacher, x = Plain(contraction(0.9).float()), batches(1)[0]
    student = Student.for_example(teacher, quick(), x)
    student.save(tmp_path)
    again = Student.load(tmp_path, teacher=Plain(torch.eye(8)))
    assert torch.equal(again(x, steps=2), student(x, steps=2))


def test_an_attribute_that_a_graph_computed_is_copied_without_it():
    teacher = Affine(contraction(0.9).float())
    teacher.cached = teacher.a * 2
    student = Student.for_example(teacher, quick(), batches(1)[0])
    assert student.teacher.cached.grad_fn is None
    assert torch.equal(student.teacher.cached, teacher.cached)


def test_a_network_that_could_not_be_loaded_again_is_refused_when_saving(tmp_path):
    class Mine(nn.Module):
        def forward(self, context):
            return torch.zeros_like(context)

    student = Student.for_example(
        Affine(contraction(0.9).float()), quick(), batches(1)[0], start_network=Mine()
    )
    with pytest.raises(cdeq.StudentFolderError, match=r"start_network, a Mine.*give it a `config`"):
        student.save(tmp_path / "student")
    assert not (tmp_path / "student").exists()


@pytest.mark.parametrize(
    ("x", "match"),
    [
        (torch.ones(4, 8).long(), "cannot take this input.*int64"),
        (torch.ones(4, 7), r"cannot take this input.*float32 \(4, 7\)"),
    ],
)
def test_inputs_that_a_teacher_cannot_take_are_named(x, match):
    with pytest.raises(ValueError, match=match):
        Student.for_example(Affine(contraction(0.9).float()), quick(), x)


def test_half_precision_and_a_batch_axis_elsewhere_are_refused():
    with pytest.raises(ValueError, match=r"teacher.float\(\)"):
        Student.for_example(
            Affine(contraction(0.9).bfloat16()), quick(), torch.ones(4, 8).bfloat16()
        )

    class Last(Affine):
        def inject(self, x):
            return x.T.contiguous()[None].expand(3, -1, -1)

    teacher = Last(torch.eye(5) * 0.5)
    with pytest.raises(ValueError, match="the batch axis comes first"):
        Student.for_example(teacher, quick(), torch.randn(5, 8))


@pytest.mark.parametrize("steps", [2.5, -1, "2"])
def test_steps_are_whole_numbers(steps):
    x = batches(1)[0]
    student = Student.for_example(Affine(contraction(0.9).float()), quick(), x)
    with pytest.raises(ValueError, match="steps must be a whole number"):
        student(x, steps=steps)


def test_classes_are_not_asked_of_an_image():
    class Picture(Affine):
        def readout(self, z, context):
            return z[:, None, None]

    data = [(x, torch.zeros(len(x)).long()) for x in batches(2)]
    with pytest.raises(ValueError, match="agreement is for a readout of logits"):
        cdeq.distill(Picture(contraction(0.9).float()), data, recipe=quick(agreement=1.0))
