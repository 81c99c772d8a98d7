"""Tasks, metrics and the comparison that every table is made of."""

import importlib.util
import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from cdeq.consistency.recipes import Recipe
from cdeq.consistency.student import Student
from cdeq.demo.task import DistillPlan, Task
from cdeq.demo.tasks import DEMO_TASKS
from cdeq.equilibrium.contract import from_functions
from cdeq.evaluation import compare_certified
from cdeq.evaluation import (
    STEPS,
    compare,
    find_equilibria,
    measure_quality,
    median_seconds,
    solver_method,
    student_method,
)
from cdeq.evaluation import accuracy, perplexity
from cdeq.evaluation import TRAINING, described, making_notes, recipes_of
from cdeq.solvers import Anderson, Picard
from cdeq.training.loop import FitConfig
from cdeq.training.task_loss import IGNORED
from cdeq.training.teaching import TeachConfig
from cdeq_experiments.train import train_teacher

ROOT = Path(__file__).parents[1]


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
    known = find_equilibria(model, batches(), accuracy())
    for star, (x, _) in zip(known.states, batches(), strict=True):
        torch.testing.assert_close(star, 2 * x, rtol=1e-4, atol=1e-4)
    assert known.metric == 1.0
    assert known.residual <= 1e-4
    assert known.steps >= 1


def test_quality_of_picard_is_its_contraction_factor():
    model, _ = contraction(0.5)
    stars = [2 * x for x, _ in batches()]
    scores = measure_quality(
        solver_method(model, Picard()), model, batches(), stars, accuracy(), (1, 2, 3)
    )
    for k in (1, 2, 3):
        assert scores[k].distance == pytest.approx(0.5**k, rel=1e-4)
    # z_1 = x, f(z_1) = 1.5 x
    assert scores[1].residual == pytest.approx(0.5, rel=1e-4)


def test_every_method_spends_exactly_its_steps():
    model, step = contraction()
    student = Student.for_example(model, Recipe.from_name("anchored", start="zero"), batches()[0][0])
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
    student = Student.for_example(model, Recipe.from_name("anchored"), batches()[0][0])
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
        Recipe.from_name(recipe, **plan.changes)


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


# Certified solving beside the solver.


def test_the_certified_comparison_counts_evaluations():
    model, _ = contraction(0.9)
    x = batches()[0][0]
    student = Student.for_example(model, Recipe.from_name("anchored"), x).eval()
    found = compare_certified(student, x, tol=1e-3, repeats=1)
    solved = student.solve(x, tol=1e-3)
    assert found.samples == 5
    assert found.student_evaluations == pytest.approx(float(solved.steps.double().mean()))
    assert found.finished_by_student == solved.finished_by.count("student") / 5
    assert found.solver_converged == found.student_converged == 1.0
    assert found.solver_seconds > 0
    assert found.student_seconds > 0
    assert "to a certified residual of 0.001 on 5 samples" in found.text()
    assert "above it" not in found.text()


def test_samples_that_miss_the_tolerance_are_said():
    model, _ = contraction(0.99)
    x = batches()[0][0]
    student = Student.for_example(model, Recipe.from_name("anchored"), x).eval()
    found = compare_certified(student, x, tol=1e-6, max_steps=2, repeats=1)
    assert found.student_converged == found.finished_by_student == 0.0
    assert "student.solve left 100% of the samples above it" in found.text()


# What is kept of how things were made.


def toy_task(updates=30):
    def draw(update):
        return batches()[update % 2]

    return Task(
        name="toy",
        dataset="toy",
        build=lambda: contraction()[0],
        teach=TeachConfig(fit=FitConfig(updates=updates, checkpoint_every=10, log_every=5)),
        teaching=draw,
        distilling=batches(),
        valid=batches(),
        test=batches(),
        metric=accuracy(),
        plans={
            "paper": DistillPlan(fit=FitConfig(updates=7)),
            "anchored": DistillPlan(
                fit=FitConfig(updates=9, learning_rate=5e-3), changes={"decay": 0.7}
            ),
        },
    )


class Cut(Exception):
    pass


def cut_at(update):
    def progress(done, total, metrics):
        if done == update:
            raise Cut

    return progress


def test_the_seconds_of_training_survive_a_resume(tmp_path, monkeypatch):
    monkeypatch.setattr("cdeq.evaluation.provenance.current_commit", lambda: "first")
    with pytest.raises(Cut):
        train_teacher(toy_task(), tmp_path, 0, cut_at(15))
    first = json.loads((tmp_path / TRAINING).read_text())
    assert first["seconds"] > 0
    assert not first["finished"]

    monkeypatch.setattr("cdeq.evaluation.provenance.current_commit", lambda: "second")
    _, done = train_teacher(toy_task(), tmp_path, 0, None)
    assert done.seconds > first["seconds"]
    assert done.commits == ("first", "second")
    assert done.finished

    monkeypatch.setattr("cdeq.evaluation.provenance.current_commit", lambda: "third")
    _, again = train_teacher(toy_task(), tmp_path, 0, None)
    assert again == done


def test_training_that_starts_anew_counts_anew(tmp_path):
    (tmp_path / TRAINING).write_text('{"seconds": 1e6, "commits": ["old"], "finished": true}')
    _, done = train_teacher(toy_task(), tmp_path, 0, None)
    assert done.seconds < 1e6
    assert "old" not in done.commits


def test_a_training_nobody_timed_is_not_made_up(tmp_path):
    task = toy_task()
    teacher, _ = train_teacher(task, tmp_path, 0, None)
    (tmp_path / TRAINING).unlink()
    _, done = train_teacher(task, tmp_path, 0, None)
    assert done.seconds is None
    assert done.commits[0] == "unknown"
    assert "in a time not recorded" in making_notes(task, teacher, done)[0]


def test_the_settings_of_every_student_are_written_down():
    task = toy_task()
    teacher, training = train_teacher(task, None, 0, None)
    found = json.loads(json.dumps(recipes_of(task, teacher, training)))
    assert found["students"]["anchored"]["changes"] == {"decay": 0.7}
    assert found["students"]["anchored"]["recipe"]["decay"] == 0.7
    assert found["students"]["paper"]["training"]["updates"] == 7
    assert found["teacher"]["training"]["solver"]["type"] == "Anderson"
    assert found["teacher"]["train_seconds"] > 0
    about_teacher, paper, anchored = making_notes(task, teacher, training)
    assert "30 updates at a learning rate of 0.001" in about_teacher
    assert (
        paper == "Paper student: recipe paper as it stands; 7 updates at a learning rate of 0.001."
    )
    assert anchored == (
        "Anchored student: recipe anchored with decay=0.7, set for this task; "
        "9 updates at a learning rate of 0.005."
    )


def test_settings_are_plain_json():
    config = replace(toy_task().teach, pretrain=3)
    assert json.loads(json.dumps(described(config)))["pretrain"] == 3
    assert described({"a": (1, torch.float32)}) == {"a": [1, "torch.float32"]}


# Benchmarks.


def bench(name):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "bench" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bench_steps_times_the_rollout_of_both_recipes(tmp_path, monkeypatch, capsys):
    steps = bench("steps")
    model, _ = contraction()
    named = {name: (model, batches()[0][0]) for name in steps.teachers()}
    monkeypatch.setattr(steps, "teachers", lambda: named)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    rolled = []
    usual = Student.rollout
    monkeypatch.setattr(
        Student,
        "rollout",
        lambda self, *a: (
            rolled.append((self.recipe.history, self.recipe.window)) or usual(self, *a)
        ),
    )
    path = tmp_path / "new" / "steps.json"
    arguments = ["steps.py", "--repeats", "1", "--steps", "1", "2", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    steps.main()
    assert set(rolled) == {("none", 1), ("anderson", 3)}
    data = json.loads(path.read_text())
    assert len(data["rows"]) == 8
    assert {row["target"] for row in data["rows"]} == {1.10}
    assert len({row["recipe"] for row in data["rows"]}) == 2
    assert data["command"].startswith("python steps.py")
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    for name in named:
        assert shown.count(name) == 4


def test_bench_steps_table_fits_a_hundred_columns():
    steps = bench("steps")
    row = {
        "steps": 8,
        "plain_seconds": 1.23456,
        "student_seconds": 1.34567,
        "ratio": 1.09,
        "cpu_ratio": 1.08,
        "call_ratio": 1.12,
        "target": 1.10,
    }
    rows = [{"teacher": name, **row} for name in steps.teachers()]
    for title in steps.RECIPES:
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(steps.table_of(title, rows))
        text = console.export_text()
        assert title in text
        assert all(name in text for name in steps.teachers())
        assert "…" not in text


def test_bench_solvers_makes_its_folder_and_says_how(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torchdeq")
    solvers = bench("solvers")
    monkeypatch.setattr(solvers, "MAPS", {})
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    path = tmp_path / "new" / "solvers.json"
    monkeypatch.setattr(sys, "argv", ["solvers.py", "--json", str(path)])
    with torch.enable_grad():  # the bench switches gradients off; put them back
        solvers.main()
    data = json.loads(path.read_text())
    assert {"command", "commit", "hardware", "load_before", "load_after", "rows"} <= set(data)
    assert data["hardware"]["cpu"]
