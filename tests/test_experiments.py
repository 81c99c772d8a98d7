"""Tasks, metrics and the comparison that every table is made of."""

import math

import pytest
import torch

from cdeq.consistency.recipes import recipe_named
from cdeq.consistency.student import Student
from cdeq.equilibrium.contract import from_functions
from cdeq.experiments.compare import (
    STEPS,
    compare,
    median_seconds,
    quality,
    reference,
    solver_method,
    student_method,
)
from cdeq.experiments.demo_tasks import DEMO_TASKS
from cdeq.experiments.metrics import accuracy, perplexity
from cdeq.solvers import Anderson, Picard
from cdeq.training.task_loss import IGNORED


class Affine(torch.nn.Module):
    """z -> L z + x, whose equilibrium x / (1 - L) is known."""

    def __init__(self, factor):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))
        self.calls = 0

    def forward(self, z, x):
        self.calls += 1
        return self.factor * z + x


def contraction(factor=0.5):
    step = Affine(factor)
    return from_functions(step), step


def batches():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10, 4, generator=generator)
    return [(part, part.argmax(1)) for part in x.split(5)]


def test_accuracy_counts_only_labels_that_count():
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 0.0]])
    assert accuracy().part(logits, torch.tensor([0, 0, IGNORED])) == (1.0, 2)
    assert accuracy().score([(1.0, 2), (3.0, 3)]) == 0.8


def test_perplexity_is_that_of_the_summed_loss():
    logits = torch.zeros(2, 3, 7)
    part = perplexity().part(logits, torch.zeros(2, 3, dtype=torch.long))
    assert part[1] == 6
    assert perplexity().score([part, part]) == pytest.approx(7.0)
    assert math.isfinite(perplexity().score([(1e9, 1)]))


def test_the_reference_is_the_closed_form():
    model, _ = contraction()
    known = reference(model, batches(), accuracy())
    for star, (x, _) in zip(known.states, batches(), strict=True):
        torch.testing.assert_close(star, 2 * x, rtol=1e-4, atol=1e-4)
    assert known.metric == 1.0
    assert known.residual <= 1e-4
    assert known.steps >= 1


def test_quality_of_picard_is_its_contraction_factor():
    model, _ = contraction(0.5)
    stars = [2 * x for x, _ in batches()]
    scores = quality(solver_method(model, Picard()), model, batches(), stars, accuracy(), (1, 2, 3))
    for k in (1, 2, 3):
        assert scores[k].distance == pytest.approx(0.5**k, rel=1e-4)
    # z_1 = x, f(z_1) = 1.5 x
    assert scores[1].residual == pytest.approx(0.5, rel=1e-4)


def test_every_method_spends_exactly_its_steps():
    model, step = contraction()
    student = Student.for_example(model, recipe_named("anchored", start="zero"), batches()[0][0])
    inner = student.teacher.step_function
    x = batches()[0][0]
    for method, counter in (
        (solver_method(model, Anderson()), step),
        (solver_method(model, Picard()), step),
        (student_method(student), inner),
    ):
        for k in (1, 2, 5):
            counter.calls = 0
            method.output(x, k)
            assert counter.calls == k


def test_a_solve_that_ends_early_stays_where_it_is():
    model, _ = contraction(0.0)
    states = list(solver_method(model, Picard()).states(batches()[0][0], 6))
    assert len(states) == 7
    torch.testing.assert_close(states[-1], batches()[0][0])


def test_compare_gives_a_row_for_each_method_and_count():
    model, _ = contraction()
    student = Student.for_example(model, recipe_named("anchored"), batches()[0][0])
    methods = {"picard": solver_method(model, Picard()), "anchored": student_method(student)}
    stars = [2 * x for x, _ in batches()]
    rows = compare(
        methods,
        model,
        batches(),
        stars,
        accuracy(),
        dataset="toy",
        seed=3,
        counts=(1, 2),
        repeats=2,
    )
    assert [(r.method, r.steps) for r in rows] == [
        ("picard", 1),
        ("picard", 2),
        ("anchored", 1),
        ("anchored", 2),
    ]
    by = {(r.method, r.steps): r for r in rows}
    assert by["picard", 2].f_equivalents == 2
    assert by["anchored", 2].f_equivalents >= 2
    assert all(r.seconds > 0 and r.seed == 3 for r in rows)
    # An untrained student with a zero start network is the teacher's Picard.
    assert by["anchored", 2].distance == pytest.approx(by["picard", 2].distance)
    assert by["anchored", 1].parameters > by["picard", 1].parameters


def test_work_is_timed_in_turns():
    order = []
    times = median_seconds({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert order == ["a", "b"] * 4
    assert set(times) == {"a", "b"}


@pytest.mark.parametrize("name", DEMO_TASKS)
def test_a_demo_task_is_whole(name):
    pytest.importorskip("sklearn")
    task = DEMO_TASKS[name](0)
    model = task.build().requires_grad_(False)
    x, y = task.teaching(0)
    again, _ = task.teaching(0)
    if name != "graph":
        assert torch.equal(x, again)
        assert not torch.equal(x, task.teaching(1)[0])
    context = model.inject(x)
    output = model.readout(model.step(model.start(context), context), context)
    total, count = task.metric.part(output, y)
    assert count > 0
    assert math.isfinite(total)
    assert set(task.plans) == {"paper", "anchored"}
    for recipe, plan in task.plans.items():
        recipe_named(recipe, **plan.changes)


def test_the_demo_never_distils_on_test_data():
    pytest.importorskip("sklearn")
    task = DEMO_TASKS["images"](0)
    seen = {bytes(image.numpy().tobytes()) for x, _ in task.distilling for image in x}
    assert not any(bytes(i.numpy().tobytes()) in seen for x, _ in task.test for i in x)
    graph = DEMO_TASKS["graph"](0)
    (_, train), (_, test) = graph.distilling[0], graph.test[0]
    assert not bool(((train != IGNORED) & (test != IGNORED)).any())


def test_the_listed_step_counts():
    assert STEPS == (1, 2, 3, 5, 8, 12)
