"""Students as plain modules: the same numbers as step by step, no branch on data, taken whole by the compiler."""

import pytest
import torch

from cdeq.consistency.branchless import eliminated_weights
from cdeq.consistency.unrolling import UnrolledStudent
from cdeq.equilibrium.states import StateLayout, relative_residual
from cdeq.solvers.anderson import anderson_weights
from checks import numbers
from deployed import BATCHES, MODELS, OTHERS, RECIPES, STEPS, plain, student_of
from teachers import inputs, randomized


def eliminated(gram, ridge):
    """The weights (..., n) of Gram matrices (..., n, n)."""
    rows = [[gram[..., i, j] for j in range(i + 1)] for i in range(gram.shape[-1])]
    return torch.stack(eliminated_weights(rows, ridge), dim=-1)


@pytest.mark.parametrize("n", range(1, 8))
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_elimination_gives_the_weights_of_cholesky(n, scale):
    r = numbers(5, n, 20) * scale
    gram = r @ r.mT
    expected = anderson_weights(gram, 1e-6)
    torch.testing.assert_close(eliminated(gram, 1e-6), expected, rtol=1e-9, atol=1e-9)
    places = eliminated(gram[:, None].expand(5, 3, n, n), 1e-6)
    torch.testing.assert_close(places, expected[:, None].expand(5, 3, n), rtol=1e-9, atol=1e-9)


def test_elimination_on_residuals_that_are_zero_equal_or_of_very_different_sizes():
    r = numbers(4, 3, 10)
    r[0] = 0.0
    r[1] = r[1, :1]
    r[2] *= torch.tensor([1.0, 1e-6, 1e-12])[:, None]
    r[3, 2] = r[3, 0] - 2 * r[3, 1]
    gram = r @ r.mT
    expected = anderson_weights(gram, 1e-6)
    torch.testing.assert_close(eliminated(gram, 1e-6), expected, rtol=1e-6, atol=1e-6)


def test_a_matrix_that_is_not_positive_gives_weights_by_size():
    gram = torch.tensor([[[1.0, 5.0], [5.0, 4.0]]])
    expected = anderson_weights(gram, 0.0)
    torch.testing.assert_close(eliminated(gram, 0.0), expected)
    torch.testing.assert_close(expected, torch.tensor([[0.8, 0.2]], dtype=torch.float64))


def same_as_step_by_step(student, x, steps, atol=1e-5):
    found = student.unrolled(steps).named(x)
    z = student.trajectory(x, steps)[-1]
    context = student.teacher.inject(x)
    torch.testing.assert_close(found["output"], student(x, steps=steps), rtol=0, atol=atol)
    layout = StateLayout.of(z, student.batched)
    rows = [layout.flatten(state) for state in (z, student.teacher.step(z, context))]
    expected = relative_residual(*rows)
    torch.testing.assert_close(found["residual"], expected, rtol=1e-3, atol=1e-5)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_the_student(name, recipe):
    student = student_of(name, recipe)
    for steps in STEPS:
        for batch in BATCHES:
            same_as_step_by_step(student, (MODELS | OTHERS)[name].x(batch), steps)


@pytest.mark.parametrize("changes", [{"history": "mlp"}, {"history": "gru"}, {"mixing": 0.7}])
def test_other_histories(changes):
    student = student_of("Pair", "paper", **changes)
    same_as_step_by_step(student, inputs(), 4)


def test_a_learned_and_a_calibrated_clock_and_a_leap():
    same_as_step_by_step(student_of("Tanh", "anchored", schedule="learned", depth=3), inputs(), 4)
    student = student_of("Tanh", "anchored")
    student.calibrated = (0.0, 0.3)
    same_as_step_by_step(student, inputs(), 4)
    same_as_step_by_step(student_of("Tanh", "corrected", leap=1), inputs(), 4)


@pytest.mark.parametrize("name", ["Tanh", "text"])
@pytest.mark.parametrize("scale", [0.5, 20.0, torch.nan])
def test_the_safeguard_takes_back_what_it_takes_back_there(name, scale):
    """Corrections that are much too large, and one that is not a number, for some samples alone."""
    student = student_of(name, "corrected", mixing=0.9)
    x = (MODELS | OTHERS)[name].x(7)
    with torch.no_grad():
        student.gains.copy_(torch.tensor([1.0, 1.0, scale, 1.0, 1.0, 1.0]))
    plain = student_of(name, "corrected", mixing=0.9)(x, steps=6)
    assert not torch.equal(student(x, steps=6), plain)
    assert same_as_step_by_step(student, x, 6, 1e-4)["output"].isfinite().all()


def test_the_residual_can_be_left_out():
    student, x = student_of("Tanh", "corrected"), inputs()
    (output,) = student.unrolled(2, check=False)(x)
    assert torch.equal(output, student.unrolled(2)(x)[0])


def test_a_model_with_memory_says_what_it_remembers():
    student = student_of("memory", "corrected")
    for batch in BATCHES:
        x = MODELS["memory"].x(batch)
        found = student.unrolled(2).named(x)
        context = student.teacher.inject(x)
        expected = student.teacher.remember(student.trajectory(x, 2)[-1], context)
        for i, part in enumerate(expected):
            torch.testing.assert_close(found[f"next_memory_{i}"], part, rtol=0, atol=1e-5)


def test_it_is_a_snapshot_and_carries_only_what_it_needs():
    student, x = student_of("Normed", "anchored"), inputs()
    before = student.unrolled(2)
    output = before(x)[0]
    names = [name for name, _ in before.named_parameters()]
    assert not [name for name in names if "deltas" in name or "original" in name]
    randomized(student.own_parts().requires_grad_(True), seed=6)
    assert torch.equal(before(x)[0], output)
    assert not torch.allclose(student.unrolled(2)(x)[0], output)


# The compiler


def compiled(module, backend):
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        *(
            ("images", "corrected"),
            ("mdeq", "paper"),
            ("text", "corrected"),
            ("memory", "anchored"),
        ),
        ("graph", "corrected"),
    ],
)
def test_the_compiler_takes_steps_and_rollout_whole(name, recipe):
    student, x = student_of(name, recipe), plain(MODELS[name].x(7))
    module = student.unrolled(2)
    with torch.no_grad():
        expected, found = module(x), compiled(module, "aot_eager")(x)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        context = student.teacher.inject(x)
        z = student.teacher.start(context)
        step = compiled(student.teacher.step, "eager")
        torch.testing.assert_close(step(z, context), student.teacher.step(z, context))


@pytest.mark.release
@pytest.mark.filterwarnings("ignore:.*_prims_common.check:FutureWarning")  # of torch's own calls
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_the_compiler_of_this_machine_gives_the_same_numbers(monkeypatch):
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # no pool of processes
    student, x = student_of("Tanh", "anchored"), inputs(1)
    module = UnrolledStudent(student, 2)
    with torch.no_grad():
        output, residual = compiled(module, "inductor")(x)
    torch.testing.assert_close(output, student(x, steps=2), rtol=0, atol=1e-5)
    assert residual.shape == (1,)
