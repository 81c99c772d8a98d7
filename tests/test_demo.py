"""The demo's tasks, its teacher's training, and what is kept of how things were made."""

import json
import math
from dataclasses import replace

import pytest
import torch

from builders import Cut, cut_at
from cdeq.consistency.recipes import RECIPES, Recipe
from cdeq.demo.run import train_teacher
from cdeq.demo.task import StudentConfig, Task, settings_of, training_notes
from cdeq.demo.tasks import DEMO_TASKS
from cdeq.evaluation import accuracy, described
from cdeq.evaluation.training_time import TRAINING
from cdeq.labels import IGNORED
from cdeq.training.loop import FitConfig
from cdeq.training.teaching import TeachConfig
from test_evaluation import batches, contraction


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
    assert set(task.students) == set(RECIPES)
    for recipe, config in task.students.items():
        Recipe.from_name(recipe, **config.changes)


def test_the_demo_never_distils_on_test_data():
    pytest.importorskip("sklearn")
    task = DEMO_TASKS["images"](0)
    seen = {bytes(image.numpy().tobytes()) for x, _ in task.distilling for image in x}
    assert not any(bytes(i.numpy().tobytes()) in seen for x, _ in task.test for i in x)
    graph = DEMO_TASKS["graph"](0)
    (_, train), (_, test) = graph.distilling[0], graph.test[0]
    assert not bool(((train != IGNORED) & (test != IGNORED)).any())


def toy_task(updates=30):
    return Task(
        name="toy",
        dataset="toy",
        build=lambda: contraction()[0],
        teach=TeachConfig(fit=FitConfig(updates=updates, checkpoint_every=10, log_every=5)),
        teaching=lambda update: batches()[update % 2],
        distilling=batches(),
        valid=batches(),
        test=batches(),
        metric=accuracy(),
        students={
            "paper": StudentConfig(fit=FitConfig(updates=7)),
            "anchored": StudentConfig(
                fit=FitConfig(updates=9, learning_rate=5e-3), changes={"decay": 0.7}
            ),
        },
    )


@pytest.mark.slow
def test_the_seconds_of_training_survive_a_resume(tmp_path, monkeypatch):
    def at_commit(name):
        monkeypatch.setattr("cdeq.evaluation.training_time.current_commit", lambda: name)

    at_commit("first")
    with pytest.raises(Cut):
        train_teacher(toy_task(), tmp_path, 0, cut_at(15))
    first = json.loads((tmp_path / TRAINING).read_text())
    assert first["seconds"] > 0
    assert not first["finished"]

    at_commit("second")
    teacher, done = train_teacher(toy_task(), tmp_path, 0)
    assert done.seconds > first["seconds"]
    assert done.commits == ("first", "second")
    assert done.finished

    at_commit("third")
    same, again = train_teacher(toy_task(), tmp_path, 0)
    assert again == done
    assert torch.equal(same.step_function.factor, teacher.step_function.factor)
    straight, _ = train_teacher(toy_task(), None, 0)
    assert torch.equal(straight.step_function.factor, teacher.step_function.factor)


def test_training_that_starts_anew_counts_anew(tmp_path):
    (tmp_path / TRAINING).write_text('{"seconds": 1e6, "commits": ["old"], "finished": true}')
    _, done = train_teacher(toy_task(), tmp_path, 0)
    assert done.seconds < 1e6
    assert "old" not in done.commits


def test_a_time_that_was_not_kept_is_not_made_up(tmp_path):
    task = toy_task()
    teacher, _ = train_teacher(task, tmp_path, 0)
    (tmp_path / TRAINING).unlink()
    _, done = train_teacher(task, tmp_path, 0)
    assert done.seconds is None
    assert done.commits[0] == "unknown"
    assert "in an unknown time" in training_notes(task, teacher, done)[0]


def test_the_settings_of_every_student_are_written_down():
    task = toy_task()
    teacher, training = train_teacher(task, None, 0)
    found = json.loads(json.dumps(settings_of(task, teacher, training)))
    assert found["students"]["anchored"]["changes"] == {"decay": 0.7}
    assert found["students"]["anchored"]["recipe"]["decay"] == 0.7
    assert found["students"]["paper"]["training"]["updates"] == 7
    assert found["teacher"]["training"]["solver"]["type"] == "Anderson"
    assert found["teacher"]["train_seconds"] > 0
    about_teacher, paper, anchored = training_notes(task, teacher, training)
    assert "30 updates at a learning rate of 0.003" in about_teacher
    assert paper == (
        "Paper student: recipe paper without changes; 7 updates at a learning rate of 0.003."
    )
    assert anchored == (
        "Anchored student: recipe anchored with decay=0.7, set for this task; "
        "9 updates at a learning rate of 0.005."
    )


def test_settings_are_plain_json():
    config = replace(toy_task().teach, pretrain_updates=3)
    assert json.loads(json.dumps(described(config)))["pretrain_updates"] == 3
    assert described({"a": (1, torch.float32)}) == {"a": [1, "torch.float32"]}
