"""Tables that begin with the zoo's teachers: which teacher is the same, and what is then not trained."""

from dataclasses import replace

import pytest
import torch
from small import BY_KIND, suite

from builders import options
from cdeq import load_pretrained
from cdeq_experiments.entries import entries_of
from cdeq_experiments.options import ExperimentError
from cdeq_experiments.suites import make_suites

pytestmark = pytest.mark.slow


@pytest.fixture(params=BY_KIND)
def begun(request, reproduced, tmp_path, monkeypatch):
    """A suite in a folder where nothing was trained, beside a zoo with its teacher."""
    monkeypatch.setenv("CDEQ_ZOO", str(reproduced("zoo") / "runs" / "models"))
    return suite(options(tmp_path), request.param)


def test_the_teacher_comes_from_the_zoo_and_is_not_trained(begun):
    kept = load_pretrained(begun.config.pretrained).teacher.state_dict()
    found = begun.teacher.state_dict()
    assert all(torch.equal(found[name], kept[name]) for name in kept)
    assert not any(weight.requires_grad for weight in begun.teacher.parameters())
    assert begun.equilibria().run.result(begun.equilibria().work)["seconds"] > 0
    assert not [*begun.options.runs.glob("*-teacher-*"), *begun.options.runs.glob("*-pretrain*")]


def test_another_teacher_is_trained(begun):
    config = begun.config.teacher
    longer = replace(config.teaching, fit=replace(config.teaching.fit, updates=9))
    changed = replace(begun.config, teacher=replace(config, teaching=longer))
    asked = replace(begun.options, train_teachers=True)
    others = [
        replace(begun, teacher_seed=1),
        replace(begun, config=changed),
        replace(begun, options=asked),
    ]
    assert begun.pretrained is not None
    for other in others:
        assert other.pretrained is None
        assert other.teacher_key != begun.teacher_key


def test_students_depend_on_the_weights_in_the_zoo(begun):
    before = begun.student_run(begun.config.students["corrected"], 0)
    other = replace(begun)
    with torch.no_grad():
        next(other.pretrained.teacher.parameters()).add_(1.0)
    assert other.student_run(other.config.students["corrected"], 0) != before


def test_students_alone_are_compared_with_solvers_alone(begun):
    asked = replace(begun.options, students_only=True)
    [made] = make_suites([begun.config], asked)
    assert made.config.students == begun.config.students
    left = (made.config.others, made.config.few_step, made.config.explicit)
    assert not any(left)


def test_rows_are_chosen_by_name(begun):
    every = {entry.method for entry in entries_of(begun)}
    assert {"picard", "few_step", "corrected", *begun.config.explicit} <= every
    for name in sorted(every):
        [made] = make_suites([begun.config], replace(begun.options, methods=(name,)))
        assert {entry.method for entry in entries_of(made)} == {name}
    both = ("few_step", "corrected")
    [made] = make_suites([begun.config], replace(begun.options, methods=both))
    whole = {entry.name: entry.run for entry in entries_of(begun)}
    assert {e.method for e in entries_of(made)} == {*both}
    assert all(whole[entry.name] == entry.run for entry in entries_of(made))
    with pytest.raises(ExperimentError, match=r"has no alexnetwork, only \w+,"):
        make_suites([begun.config], replace(begun.options, methods=("alexnetwork",)))
