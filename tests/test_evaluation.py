"""Methods compared at equal evaluations: scores, distances and counts against known fixed points."""

import math
from itertools import pairwise

import pytest
import torch

import cdeq
from cdeq import Recipe, Student
from cdeq.equilibrium.contract import from_functions
from cdeq.equilibrium.states import relative_distance
from cdeq.evaluation import (
    SOLVERS,
    STEPS,
    Explicit,
    Results,
    accuracy,
    compare,
    compare_certified,
    evaluate,
    find_equilibria,
    learned_solver_method,
    mean_squared_error,
    measure_quality,
    measure_seconds,
    median_seconds,
    parameter_count,
    perplexity,
    solver_method,
    student_method,
    top_accuracy,
)
from cdeq.labels import IGNORED
from cdeq.models.learned_solvers import HyperDEQ
from cdeq.solvers import Anderson, Broyden, Picard
from checks import numbers, picard_states
from problems import PROBLEMS, Counting
from slow_maps import ZeroStart
from teachers import CLASSES, INPUTS, WIDTH, Linear, Tanh


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
    x = numbers(10, 4, dtype=torch.float32)
    return [(part, part.argmax(1)) for part in x.split(5)]


def untrained(model, x, recipe="anchored", **changes) -> Student:
    return Student.for_example(model, Recipe.from_name(recipe, **changes), x).eval()


# Metrics.


def test_accuracy_counts_only_labels_that_count():
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 0.0]])
    assert accuracy().part(logits, torch.tensor([0, 0, IGNORED])) == (1.0, 2)
    assert accuracy().score([(1.0, 2), (3.0, 3)]) == 0.8


def test_top_accuracy_looks_at_the_largest():
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    assert top_accuracy(2).part(logits, torch.tensor([1, 2])) == (1.0, 2)
    assert top_accuracy(9).part(logits, torch.tensor([1, IGNORED])) == (1.0, 1)


def test_perplexity_is_that_of_the_summed_loss():
    logits = torch.zeros(2, 3, 7)
    part = perplexity().part(logits, torch.zeros(2, 3, dtype=torch.long))
    assert part[1] == 6
    assert perplexity().score([part, part]) == pytest.approx(7.0)
    assert math.isfinite(perplexity().score([(1e9, 1)]))


def test_squared_errors_are_averaged_over_all_numbers():
    metric = mean_squared_error()
    parts = [metric.part(torch.full((2, 3), 2.0), torch.zeros(2, 3))]
    parts.append(metric.part(torch.zeros(1, 3), torch.zeros(1, 3)))
    assert metric.score(parts) == pytest.approx(24 / 9)
    assert not metric.higher_is_better


# Equilibria, distances and residuals.


def test_the_equilibria_are_the_closed_form():
    model, _ = contraction()
    found = find_equilibria(model, batches(), accuracy())
    for z, (x, _) in zip(found.states, batches(), strict=True):
        torch.testing.assert_close(z, 2 * x, rtol=1e-4, atol=1e-4)
    assert found.metric == 1.0
    assert found.residual <= 1e-4
    assert found.steps >= 1


def test_quality_of_picard_is_its_contraction_factor():
    model, _ = contraction(0.5)
    known = [2 * x for x, _ in batches()]
    scores = measure_quality(
        solver_method(model, Picard()), model, batches(), known, accuracy(), (1, 2, 3)
    )
    for k in (1, 2, 3):
        assert scores[k].distance == pytest.approx(0.5**k, rel=1e-4)
    # z_1 = x, f(z_1) = 1.5 x
    assert scores[1].residual == pytest.approx(0.5, rel=1e-4)


def test_what_is_not_asked_for_is_not_measured():
    model, step = contraction()
    step.calls = 0
    scores = measure_quality(solver_method(model, Picard()), model, batches(), None, None, (3,))
    assert (scores[3].metric, scores[3].distance, scores[3].residual) == (None, None, None)
    assert step.calls == 3 * len(batches())  # no evaluation for a residual


def test_two_metrics_at_once():
    model = Tanh()
    data = [(numbers(6, INPUTS, dtype=torch.float32), torch.zeros(6, dtype=torch.long))]
    method = solver_method(model, Picard())
    found = measure_quality(method, model, data, None, accuracy(), (1,), top5=top_accuracy(CLASSES))
    assert found[1].top5 == 1.0
    assert found[1].metric < 1.0


def test_every_method_spends_exactly_its_steps():
    model, step = contraction()
    x = batches()[0][0]
    student = untrained(model, x, start="teacher")
    inner = student.teacher.step_function
    for method, counter in (
        (solver_method(model, Anderson()), step),
        (solver_method(model, Picard()), step),
        (solver_method(model, Broyden()), step),
        (student_method(student), inner),
    ):
        for k in (1, 2, 5):
            counter.calls = 0
            method.output(x, k)
            assert counter.calls == k
            counter.calls = 0
            assert len(list(method.states(x, k))) == k + 1
            assert counter.calls == k


def test_a_solve_that_ends_early_stays_where_it_is():
    model, _ = contraction(0.0)
    states = list(solver_method(model, Picard()).states(batches()[0][0], 6))
    assert len(states) == 7
    torch.testing.assert_close(states[-1], batches()[0][0])


def test_a_learned_solver_counts_its_own_weights():
    model = Tanh()
    x = numbers(2, INPUTS, dtype=torch.float32)
    solver = HyperDEQ(width=WIDTH, initial=ZeroStart())
    method = learned_solver_method(model, solver)
    assert method.parameters == parameter_count(model) + parameter_count(solver)
    *_, z = method.states(x, 3)
    torch.testing.assert_close(method.output(x, 3), model.readout(z, model.inject(x)))


# Seconds.


def test_work_is_timed_in_turns():
    order = []
    times = median_seconds({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert order == ["a", "b"] * 4
    assert set(times) == {"a", "b"}


def test_slow_work_is_timed_once(monkeypatch):
    monkeypatch.setattr("cdeq.evaluation.timing.SLOW", -1.0)
    order = []
    assert median_seconds({"a": lambda: order.append("a")}, 5)["a"] >= 0
    assert order == ["a"]


def test_what_is_timed():
    model, _ = contraction()
    x = batches()[0][0]
    methods = {
        "picard": solver_method(model, Picard()),
        "anchored": student_method(untrained(model, x)),
    }
    other = Explicit(output=lambda x: x, parameters=3)
    seconds = measure_seconds(
        methods, model, x, (1, 2), explicit={"mlp": other}, repeats=1, others={"solved": other}
    )
    assert set(seconds) == {
        ("picard", 1), ("picard", 2), ("anchored", 1), ("anchored", 2), ("anchored", "extra"), ("anchored", "rolled"),
        ("mlp", None), ("solved", None), "step", "inject",
    }  # fmt: skip


# Rows.


def test_compare_gives_a_row_for_each_method_and_count():
    model, _ = contraction()
    x = batches()[0][0]
    methods = {
        "picard": solver_method(model, Picard()),
        "anchored": student_method(untrained(model, x)),
        "few_step_2": solver_method(model, Picard(), counts=(2,), label="few_step"),
    }
    explicit = {"mlp": Explicit(output=lambda x: x, parameters=3)}
    known = [2 * x for x, _ in batches()]
    rows = compare(
        methods, model, batches(), known, accuracy(), dataset="toy", seed=3, counts=(1, 2),
        repeats=2, explicit=explicit,
    )  # fmt: skip
    by = {(row.method, row.steps): row for row in rows}
    assert list(by) == [
        ("picard", 1), ("picard", 2), ("anchored", 1), ("anchored", 2), ("few_step", 2), ("mlp", None),
    ]  # fmt: skip
    assert by["picard", 2].f_equivalents == 2
    assert by["anchored", 2].f_equivalents >= 2
    assert all(row.seconds > 0 and row.seed == 3 for row in rows)
    # An untrained student with a zero start network is the teacher's Picard.
    assert by["anchored", 2].distance == pytest.approx(by["picard", 2].distance)
    assert by["anchored", 1].parameters > by["picard", 1].parameters
    assert (by["mlp", None].metric, by["mlp", None].distance) == (1.0, None)


# One call for a model of one's own.


def model_of(problem):
    """A problem as a model whose every input has the same map."""
    return from_functions(
        lambda z, context: problem.f(z),
        start=lambda context: problem.z0,
        batched=problem.batched,
        readout=lambda z: z if isinstance(z, torch.Tensor) else z[0],
    )


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_distances_of_solvers_are_those_to_the_known_fixed_point(name):
    problem = PROBLEMS[name](torch.float64)
    model = model_of(problem)
    results = evaluate(model, [torch.zeros(1)], steps=(1, 2, 4, 60), repeats=1, name=name)
    by = {(row.method, row.steps): row for row in results.rows}
    assert set(by) == {(m, k) for m in SOLVERS for k in (1, 2, 4, 60)}
    iterates = picard_states(model, torch.zeros(1), 4)
    for k in (1, 2, 4):
        expected = relative_distance(iterates[k], problem.solution, problem.batched).mean()
        assert by["picard", k].distance == pytest.approx(float(expected), rel=1e-4, abs=1e-4)
        # The last step is measured by an evaluation of its own.
        assert by["picard", k].residual >= 0
    assert by["anderson", 60].distance < 1e-4
    assert by["picard", 60].distance < 1e-3 or not problem.picard
    assert all(row.metric is None for row in results.rows)


def test_solving_for_the_equilibria_spends_no_more_than_allowed():
    problem = PROBLEMS["symmetric_linear"](torch.float64)
    counted = Counting(problem.f)
    model = from_functions(lambda z, context: counted(z), start=lambda context: problem.z0)
    found = find_equilibria(model, [(torch.zeros(1), None)], None, max_steps=7)
    assert counted.calls <= 2 * 7
    assert found.steps <= 7


def test_students_are_compared_with_the_solvers_of_their_teacher():
    teacher = Linear()
    data = [(numbers(6, INPUTS, seed=s, dtype=torch.float32), torch.arange(6) % 3) for s in (1, 2)]
    students = {
        "ours": untrained(teacher, data[0][0]),
        "theirs": untrained(teacher, data[0][0], "paper"),
    }
    results = cdeq.evaluate(students, data, metric=accuracy(), steps=(4, 1), repeats=1)
    assert isinstance(results, Results)
    assert [row.method for row in results.rows[::2]] == [*SOLVERS, "ours", "theirs"]
    assert [row.steps for row in results.rows] == [1, 4] * (len(SOLVERS) + 2)
    by = {(row.method, row.steps): row for row in results.rows}
    z = [teacher.equilibrium(x) for x, _ in data]
    iterates = [picard_states(teacher, x, 4) for x, _ in data]
    expected = torch.cat([relative_distance(s[4], e) for s, e in zip(iterates, z, strict=True)])
    assert by["picard", 4].distance == pytest.approx(float(expected.mean()), rel=1e-3)
    # An untrained student is its teacher's Picard.
    assert by["ours", 4].distance == pytest.approx(by["picard", 4].distance, rel=1e-4)
    outputs = torch.cat([teacher.readout(e, None) for e in z])
    labels = torch.cat([y for _, y in data])
    assert results.teachers[0].metric == pytest.approx(
        float((outputs.argmax(1) == labels).double().mean())
    )
    assert results.teachers[0].name == "Linear"


def test_one_student_has_the_name_of_its_recipe():
    x = numbers(4, INPUTS, dtype=torch.float32)
    results = evaluate(untrained(Linear(), x), [x], steps=(1,), repeats=1)
    assert [row.method for row in results.rows] == [*SOLVERS, "anchored"]


def test_more_methods_can_join():
    teacher, x = Tanh(), numbers(4, INPUTS, dtype=torch.float32)
    more = {"another": solver_method(teacher, Anderson(window=1))}
    results = evaluate(teacher, [x], steps=(1, 2), methods=more, repeats=1)
    assert [row.method for row in results.rows[::2]] == [*SOLVERS, "another"]


def test_a_teacher_is_evaluated_without_dropout_and_left_as_it_was():
    class Dropped(Tanh):
        def step(self, z, context):
            return torch.nn.functional.dropout(super().step(z, context), 0.5, self.training)

    teacher, x = Dropped().train(), numbers(4, INPUTS, dtype=torch.float32)
    results = evaluate(teacher, [x], steps=(1, 30), repeats=1)
    assert results.teachers[0].residual <= 1e-4
    assert teacher.training
    assert all(p.requires_grad for p in teacher.parameters())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"batches": []}, ValueError, "nothing to evaluate on"),
        ({"metric": accuracy()}, ValueError, "accuracy needs labels"),
        ({"steps": ()}, ValueError, "steps must be one or more counts"),
        ({"steps": (0, 1)}, ValueError, "at least 1"),
        ({"model": {}}, TypeError, "students by name"),
        ({"model": {"a": Tanh()}}, TypeError, "students by name"),
        ({"model": torch.nn.Linear(2, 2)}, TypeError, "not an equilibrium model"),
    ],
)
def test_what_cannot_be_evaluated_is_said(change, error, message):
    given = {"model": Tanh(), "batches": [numbers(2, INPUTS, dtype=torch.float32)]} | change
    with pytest.raises(error, match=message):
        evaluate(given.pop("model"), given.pop("batches"), **given)


def test_students_of_different_teachers_are_refused():
    x = numbers(2, INPUTS, dtype=torch.float32)
    students = {"a": untrained(Tanh(), x), "b": untrained(Tanh(seed=1), x)}
    with pytest.raises(ValueError, match="different teachers"):
        evaluate(students, [x])


def test_the_usual_step_counts():
    assert STEPS == (1, 2, 3, 5, 8, 12)


# Certified solving beside the solver.


def test_the_certified_comparison_counts_evaluations():
    model, _ = contraction(0.9)
    x = batches()[0][0]
    student = untrained(model, x)
    found = compare_certified(student, x, tol=1e-3, repeats=1)
    solved = student.solve(x, tol=1e-3, measure="residual")
    assert found.samples == 5
    assert found.student_evaluations == pytest.approx(float(solved.steps.double().mean()))
    assert found.finished_by_student == list(solved.finished_by).count("student") / 5
    assert found.solver_converged == found.student_converged == 1.0
    assert found.solver_seconds > 0
    assert found.student_seconds > 0
    assert "to a certified residual of 0.001 on 5 samples" in found.text()
    assert "above it" not in found.text()


def test_samples_that_miss_the_tolerance_are_said():
    model, _ = contraction(0.99)
    x = batches()[0][0]
    found = compare_certified(untrained(model, x), x, tol=1e-6, max_steps=2, repeats=1)
    assert found.student_converged == found.finished_by_student == 0.0
    assert "student.solve left 100% of the samples above it" in found.text()


# Again.


def test_a_second_call_gives_the_same_numbers():
    x = numbers(4, INPUTS, dtype=torch.float32)
    first, second = (evaluate(Linear(), [x], steps=(1, 3), repeats=1).rows for _ in range(2))
    assert [row.distance for row in first] == [row.distance for row in second]
    for before, after in pairwise(row.distance for row in first if row.method == "picard"):
        assert after < before
