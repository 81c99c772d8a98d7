"""Configurations as data: every one of every scale builds its models; ablations change what their names say."""

import json
from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch

from cdeq.training import few_step_teaching
from cdeq_experiments import cli
from cdeq_experiments.ablations import ABLATIONS
from cdeq_experiments.configs import SUITES, figure_configs, select, table_configs
from cdeq_experiments.configs.base import CORRECTED, KINDS, ContinuedConfig
from cdeq_experiments.inductive import inductive_configs
from cdeq_experiments.options import ExperimentError
from cdeq_experiments.registry import EXPERIMENTS
from cdeq_experiments.teachers import deeper_settings, graph_settings

ALL = [(scale, config) for scale in SUITES for kind in KINDS for config in SUITES[scale][kind]]
SIZES = {
    "text": {"manual": 4000, "wikitext-2": 33_278, "wikitext-103": 267_735},
    "images": {"digits": 10, "cifar-10": 10, "tiny-imagenet-40": 40, "imagenet": 1000},
}


def sizes_of(config):
    """What the data would give."""
    if config.kind == "graph":
        return {"features": 500, "classes": 40}
    argument = "vocabulary" if config.kind == "text" else "classes"
    return {argument: SIZES[config.kind][config.name]}


def weights(config, **sizes):
    return sum(p.numel() for p in config.build(**sizes).parameters())


@pytest.mark.parametrize(("scale", "config"), ALL, ids=lambda one: getattr(one, "name", one))
@pytest.mark.slow
def test_every_configuration_builds_its_models(scale, config):
    given = sizes_of(config)
    with torch.device("meta"):
        teacher = weights(config.teacher, **given)
        others = {name: weights(other, **given) for name, other in config.others.items()}
        explicit = {name: weights(other, **given) for name, other in config.explicit.items()}
    assert min(teacher, *others.values(), *explicit.values()) > 100
    if config.kind == "text" and scale != "tiny":
        assert all(size == pytest.approx(teacher, rel=0.05) for size in explicit.values())
    if config.kind == "images" and scale == "small":
        assert all(0.5 * teacher < size < 1.2 * teacher for size in explicit.values())
    for student in config.students.values():
        assert student.resolve().store_mode in config.recording
        assert student.fit.warmup_updates < student.fit.updates
    assert {"paper", "anchored"} <= set(config.students)
    assert set(config.counts.shown) <= set(config.counts.methods)
    assert set(config.counts.shown) <= set(config.counts.timed) <= {*config.counts.solvers}
    for steps in config.counts.shown:
        assert few_step_teaching(config.few_step, steps).tol == 0.0


def test_data_sets_of_a_scale_have_their_own_names():
    for scale in SUITES:
        titles = [config.title for kind in KINDS for config in SUITES[scale][kind]]
        assert len(set(titles)) == len(titles)
    assert [c.name for c in table_configs("images", "small")] == ["cifar-10", "tiny-imagenet-40"]
    assert table_configs("text", "paper")[0].teacher.arguments["inner"] == 48_000


def test_what_the_published_recipe_learns_from_may_be_less():
    [cifar, *_] = table_configs("images", "small")
    assert cifar.recording["full"].batches < cifar.recording["endpoint"].batches


def test_data_sets_are_chosen_by_name_or_by_kind():
    known = figure_configs("small")
    assert select(known, ()) == known
    assert [c.name for c in select(known, ("graph", "cifar-10"))] == ["cifar-10", "pubmed"]
    with pytest.raises(ExperimentError, match=r"no data set 'music'.*wikitext-2, cifar-10, pubmed"):
        select(known, ("text", "music"))


def test_figures_have_one_teacher_for_all_seeds_which_is_that_of_the_table():
    for config, table in zip(figure_configs("tiny"), SUITES["tiny"].values(), strict=True):
        assert not config.seeded_teacher
        assert config.teacher == table[0].teacher
        assert config.recording["full"].max_steps == 30


# Experiments.


def test_every_experiment_has_a_page_at_every_scale():
    for experiment in EXPERIMENTS.values():
        for scale in SUITES:
            page = experiment.page(scale)
            assert json.loads(json.dumps(page)) == page
            assert page["title"]
            assert set(page["counts"]) == {c.title for c in experiment.configs(scale)}
    assert set(SUITES) == {"tiny", "small", "paper"}


def test_the_command_knows_every_experiment():
    hint = {field.name: field.type for field in fields(cli.Reproduce)}["experiment"]
    assert "Literal" in hint
    for name in (*EXPERIMENTS, "all"):
        assert cli.Reproduce(experiment=name).experiment == name
    known = [*cli.Tables.__args__, *cli.Figures.__args__, *cli.Ablations.__args__]
    assert set(known) == set(EXPERIMENTS)
    assert len(known) == len(EXPERIMENTS)


def test_distances_are_compared_among_methods_of_one_equilibrium():
    page = EXPERIMENTS["table3"].page("small")
    assert page["same_equilibrium"] == [
        *("picard", "anderson", "broyden", "ignn_solver", "paper", "anchored", *CORRECTED)
    ]
    assert page["counts"]["PubMed"] == [1, 2, 5, 10]


# Ablations.

BY_NAME = {ablation.name: ablation for ablation in ABLATIONS}


@pytest.mark.parametrize("ablation", ABLATIONS, ids=BY_NAME)
def test_every_variant_is_a_student_of_its_own(ablation):
    for config in ablation.configs("small"):
        students = config.students
        assert ablation.default in students
        plain = [
            json.dumps([s.resolve().to_dict(), s.solver, s.clock, s.fit.updates])
            for s in students.values()
        ]
        assert len(set(plain)) == len(students)
        assert config.counts.timed[0] in config.counts.methods
        assert (config.solvers, config.explicit, config.others) == ((), {}, {})
        assert config.few_step is config.learned_solver is None
    page = EXPERIMENTS[ablation.name].page("small")
    assert page["reported"].keys() == page["counts"].keys()
    if ablation.axes:
        places = {(one["row"], one["column"]) for one in page["variants"]}
        assert len(places) == len(page["variants"])


def test_the_ablations_have_the_papers_sizes():
    sizes = {"lambdas": 12, "gamma-rho": 12, "beta": 4, "window": 4, "modules": 3, "time-map": 3}
    sizes |= {"solvers": 3, "history": 2}
    found = {name: len(BY_NAME[name].configs("paper")[0].students) for name in sizes}
    assert found == sizes
    lambdas = EXPERIMENTS["lambdas"].page("paper")
    assert lambdas["axes"] == ["lambda_2", "lambda_1"]
    assert lambdas["variants"][1] == {
        **{"name": "lambda_1 = 0.2, lambda_2 = 0"},
        **{"row": "0", "column": "0.2"},
    }


@pytest.mark.parametrize("ablation", ABLATIONS, ids=BY_NAME)
def test_the_default_is_the_recipe_of_the_tables(ablation):
    for config in ablation.configs("small"):
        [usual] = [c for c in figure_configs("small") if c.kind == config.kind]
        ours = ablation.name in ("recipe", "corrected")
        wanted = usual.students["corrected" if ours else "paper"]
        default = config.students[ablation.default]
        assert default.resolve() == wanted.resolve()
        assert default.fit == wanted.fit
        assert default.clock in (None, wanted.resolve().decay)


def test_each_part_of_the_recipe_changes_what_its_name_says():
    for config in BY_NAME["recipe"].configs("small"):
        recipes = [student.resolve().to_dict() for student in config.students.values()]
        changed = [{k for k in a if a[k] != b[k]} for a, b in pairwise(recipes)]
        assert "states" in changed[0]
        assert "boundary" in changed[1]
        assert changed[2:5] == [{"backprop"}, {"loss"}, {"start"}]
        [tables] = [c for c in figure_configs("small") if c.kind == config.kind]
        for name in ("anchored", "warm_start", "corrected"):
            assert config.students[name] == tables.students[name]


def test_each_variant_of_the_default_recipe_lacks_what_its_name_says():
    parts = [
        {"start", "start_updates"},
        {"correction", "correction_updates", "safeguard"},
        {"correction_updates"},
        {"history", "window", "safeguard"},
        {"safeguard"},
        {"leap"},
        {"leap"},
    ]
    for config in BY_NAME["corrected"].configs("small"):
        usual, *others = [student.resolve().to_dict() for student in config.students.values()]
        changed = [{k for k in usual if usual[k] != other[k]} for other in others]
        assert changed == parts
        control = config.students["no correction (warm_start)"].resolve()
        [tables] = [c for c in figure_configs("small") if c.kind == config.kind]
        assert replace(control, name="warm_start") == tables.students["warm_start"].resolve()


def test_a_longer_training_has_more_updates_and_nothing_else_changed():
    [config, *_] = BY_NAME["updates"].configs("small")
    usual, twice, fourfold, _ = config.students.values()
    for times, student in ((2, twice), (4, fourfold)):
        assert student.fit.updates == times * usual.fit.updates
        assert replace(student, fit=usual.fit) == usual


# Other graphs.


def test_inductive_students_differ_in_what_they_are_distilled_on():
    for config in inductive_configs("small"):
        assert config.data.unseen == 0.5
        inputs = {name: student.inputs for name, student in config.students.items()}
        assert inputs.pop("paper") == inputs.pop("anchored") == "training"
        assert inputs == {f"anchored_{name}": name for name in ("parts", "samples", "whole")}


def test_a_setting_of_a_graph_teacher_is_one_changed_value():
    for config in table_configs("graph", "small"):
        for other in graph_settings(config).values():
            fit = other.teaching.fit
            trained = {n for n, v in vars(fit).items() if v != vars(config.teacher.teaching.fit)[n]}
            built = dict(other.arguments.items() - config.teacher.arguments.items())
            assert len((trained - {"warmup_updates"}) | set(built)) == 1


@pytest.mark.parametrize("kind", ["text", "images"])
def test_deeper_teachers_are_trained_on_or_never_shallow(kind):
    for config in table_configs(kind, "small"):
        usual = config.teacher.teaching
        further, alone = deeper_settings(config).values()
        assert isinstance(further, ContinuedConfig)
        assert not isinstance(alone, ContinuedConfig)
        for one in (further, alone):
            assert one.pretraining is None
            assert one.teaching.penalty == 0
            assert one.teaching.depths[1] == 2 * usual.depths[1]
            assert one.teaching.fit.updates == usual.fit.updates // 3
        assert further.teaching.fit.learning_rate == usual.fit.learning_rate
        assert alone.teaching.fit.learning_rate > usual.fit.learning_rate
