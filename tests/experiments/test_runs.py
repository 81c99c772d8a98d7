"""Runs: one folder for each configuration, its work done once, whole or not at all, by one process at a time."""

import dataclasses
import json
import multiprocessing
import time

import pytest
from small import GRAPH, IMAGES, TEXT

from builders import Cut
from cdeq.evaluation import described
from cdeq.solvers import Anderson, Picard
from cdeq_experiments.options import ExperimentError
from cdeq_experiments.runs import CONFIG, LOCK, RESULT, Run


@pytest.fixture
def run(tmp_path):
    return Run.of(tmp_path / "runs", "a", {"seed": 0})


def leaves(value, path=()):
    """The places of all plain values in nested settings."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [leaf for key, item in items for leaf in leaves(item, (*path, key))]
    return [path]


def test_one_configuration_has_one_folder(tmp_path):
    first = Run.of(tmp_path, "ignn", {"config": GRAPH, "solver": Anderson()})
    again = Run.of(tmp_path, "ignn", {"solver": Anderson(), "config": dataclasses.replace(GRAPH)})
    assert first == again
    assert first.folder.name.startswith("ignn-")
    assert [path.name for path in first.folder.iterdir()] == [CONFIG]
    found = json.loads((first.folder / CONFIG).read_text())
    assert found["config"]["teacher"]["arguments"]["width"] == 8
    assert found["solver"]["type"] == "Anderson"


@pytest.mark.parametrize("config", [TEXT, IMAGES, GRAPH], ids=lambda config: config.kind)
def test_every_value_of_a_configuration_counts(config, tmp_path):
    """Each value at any depth is in what is hashed, and changing it changes the folder."""
    whole = described({"config": config})
    names = {Run.of(tmp_path, "a", whole)}
    places = leaves(whole)
    assert len(places) > 100
    for path in places[::7]:
        changed = json.loads(json.dumps(whole))
        item = changed
        for key in path[:-1]:
            item = item[key]
        item[path[-1]] = "something else"
        names.add(Run.of(tmp_path, "a", changed))
    assert len(names) == 1 + len(places[::7])


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("a", {"seed": 1, "solver": Anderson(), "counts": (1, 2)}),
        ("a", {"seed": 0, "solver": Picard(), "counts": (1, 2)}),
        ("a", {"seed": 0, "solver": Anderson(window=7), "counts": (1, 2)}),
        ("a", {"seed": 0, "solver": Anderson(), "counts": (2, 1)}),
        ("a", {"seed": 0, "solver": Anderson(), "counts": (1, 2), "more": None}),
        ("b", {"seed": 0, "solver": Anderson(), "counts": (1, 2)}),
    ],
)
def test_another_configuration_has_another_folder(name, other, tmp_path):
    config = {"seed": 0, "solver": Anderson(), "counts": (1, 2)}
    assert Run.of(tmp_path, name, other) != Run.of(tmp_path, "a", config)


def test_work_is_done_once(run):
    done = []

    def work():
        done.append(1)
        return {"rows": (1, 2), "metric": None}

    # Plain JSON at once, and not only when it is read again.
    assert run.result(work) == {"rows": [1, 2], "metric": None} == run.result(work)
    assert run.attempt(work)
    assert Run(run.folder).read() == run.read()
    assert len(done) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, Cut, TypeError])
def test_work_cut_short_leaves_no_result_and_is_done_again(run, error):
    def cut():
        if error is TypeError:
            return {"model": object()}  # which is no JSON
        raise error

    for do in (run.result, run.attempt):
        with pytest.raises(error):
            do(cut)
        assert {path.name for path in run.folder.iterdir()} == {CONFIG, LOCK}
    assert run.result(lambda: "done") == "done"


@pytest.mark.parametrize("text", ["", '{"rows": [1, 2', "rows"])
def test_a_damaged_result_is_named(run, text):
    (run.folder / RESULT).write_text(text)
    with pytest.raises(ExperimentError, match="damaged") as caught:
        run.result(lambda: pytest.fail("done over what is there"))
    assert str(run.folder / RESULT) in str(caught.value)
    assert "remove it" in str(caught.value)
    (run.folder / RESULT).unlink()
    assert run.result(lambda: 1) == 1


def test_a_run_that_another_process_has_is_not_waited_for(run):
    with run.lock:
        assert not run.attempt(lambda: pytest.fail("done twice"))
    assert run.attempt(lambda: 1)


# The seconds of a training.


def train(run, updates, cut=None):
    def work(progress):
        for update in range(1, updates + 1):
            (run.folder / "checkpoint.safetensors").touch()
            progress(update, updates, {})
            if update == cut:
                raise Cut

    return run.train(None, work)


def test_the_seconds_of_a_training_survive_a_cut(run, monkeypatch):
    commits = iter(["first", "second", "third"])
    name = "cdeq.evaluation.training_time.current_commit"
    monkeypatch.setattr(name, lambda: next(commits))
    with pytest.raises(Cut):
        train(run, 5, cut=3)
    before = json.loads((run.folder / "training.json").read_text())
    assert before["seconds"] > 0
    assert not before["finished"]
    done = train(run, 5)
    assert done.seconds > before["seconds"]
    assert (done.commits, done.finished) == (("first", "second"), True)
    assert train(run, 5) == done


# Two processes.


def work_slowly(folder, log):
    def work():
        with log.open("a") as file:
            file.write("begun\n")
        time.sleep(0.3)
        return {"found": 1}

    assert Run(folder).result(work) == {"found": 1}


@pytest.mark.slow
def test_two_processes_do_the_work_of_a_run_once(run, tmp_path):
    context = multiprocessing.get_context("spawn")
    both = [
        context.Process(target=work_slowly, args=(run.folder, tmp_path / "log")) for _ in range(2)
    ]
    for one in both:
        one.start()
    for one in both:
        one.join(60)
        assert one.exitcode == 0
    assert (tmp_path / "log").read_text() == "begun\n"
