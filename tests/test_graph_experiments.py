"""The graph experiments: tasks, rivals, cells, the comparison, inductive parts, and one run as a user."""

import dataclasses
import json
import pickle
import sys
from concurrent.futures import Future
from functools import partial
from typing import ClassVar

import pytest
import torch

from cdeq import cli
from cdeq.data.block_graphs import block_model
from cdeq.data.folders import MissingDataError
from cdeq.data.graph_sets import GRAPH_SETS
from cdeq.equilibrium.contract import from_functions
from cdeq.evaluation import comparison as comparing
from cdeq.evaluation import (
    Explicit,
    Target,
    compare,
    find_equilibria,
    median_times,
    solver_method,
)
from cdeq.evaluation import accuracy
from cdeq.evaluation import Results, Row, TeacherResult
from cdeq.models.graph.ignn import IGNN
from cdeq.solvers import Picard, solve_model
from cdeq.training.loop import FitConfig
from cdeq.training.supervised import SupervisedObjective
from cdeq.training.task_loss import IGNORED, cross_entropy
from cdeq.training.teaching import TeachingObjective, teach
from cdeq.trajectories import record
from cdeq_experiments import graph_rivals, inductive, table3, workers
from cdeq_experiments.graph_cells import GraphCell, plans_of, run_graphs
from cdeq_experiments.graph_rivals import (
    EXPLICIT,
    closed_form,
    eignn_task,
    explicit_fit,
    few_step_methods,
    few_step_task,
    rival_method,
    train_explicit,
    train_ignn_solver,
)
from cdeq_experiments.graph_tasks import (
    EMBEDDED,
    SCALES,
    GraphPlan,
    classes_of,
    features_of,
    ignn_task,
    labelled,
)
from cdeq_experiments.options import ExperimentError, Options
from cdeq_experiments.rivals.graph_convolutions import explicit_loss

PLAN = GraphPlan(
    name="small-blocks",
    title="Small blocks",
    width=8,
    updates=3,
    students=3,
    solvers=10,
    rivals=10,
    gpm_updates=10,
)


def nodes_of(seed=0, nodes=80):
    return block_model(nodes, classes=3, degree=5.0, features=6, noise=1.0, seed=seed)


def options(tmp_path, **fields):
    usual = {
        "scale": "tiny",
        "data": tmp_path / "no-data",
        "runs": tmp_path / "runs",
        "out": tmp_path / "out",
        "seeds": 1,
    }
    return Options(**(usual | fields))


class Cut(Exception):
    pass


def cut_at(update):
    def progress(done, total, metrics):
        if done == update:
            raise Cut

    return progress


# Tasks.


@pytest.mark.parametrize("scale", SCALES)
def test_the_plans_of_a_scale_are_consistent(scale):
    plans = SCALES[scale]
    assert len({plan.name for plan in plans}) == len(plans)
    assert len({plan.title for plan in plans}) == len(plans)
    for plan in plans:
        assert plan.name in EMBEDDED or plan.name in GRAPH_SETS
        assert plan.teaching.warmup < plan.updates
        assert set(plan.layers) <= set(EXPLICIT)
        for name in EXPLICIT:
            assert explicit_fit(name, plan).updates >= 1


def test_gpm_has_updates_of_its_own():
    plan = dataclasses.replace(PLAN, rivals=7, gpm_updates=4)
    assert {name: explicit_fit(name, plan).updates for name in EXPLICIT} == {
        "gcn": 7,
        "gat": 7,
        "gcnii": 7,
        "gpm": 4,
    }


@pytest.mark.parametrize("name", EMBEDDED)
def test_no_test_label_is_among_the_training_labels(name):
    if name == "digits":
        pytest.importorskip("sklearn")
    nodes = EMBEDDED[name](1)
    task = ignn_task(dataclasses.replace(PLAN, name=name), nodes, 1)
    (_, tested), (_, valid) = task.test[0], task.valid[0]
    test = nodes.test.nonzero().squeeze(1)
    assert torch.equal((tested != IGNORED).nonzero().squeeze(1), test)
    assert torch.equal(tested[test], nodes.labels[test])
    for graph, labels in (*task.distilling, task.teaching(0), task.teaching(7)):
        assert graph is nodes.graph
        assert torch.equal(labels != IGNORED, nodes.train)
        assert bool((labels[nodes.test | nodes.valid] == IGNORED).all())
    assert bool((valid[nodes.test | nodes.train] == IGNORED).all())


def test_an_embedded_graph_depends_on_the_seed_alone():
    plan = SCALES["tiny"][1]
    assert plan.name == "blocks"
    first, again, other = (plan.load(None, seed) for seed in (0, 0, 1))
    assert torch.equal(first.train, again.train)
    assert torch.equal(first.graph.features, again.graph.features)
    assert not torch.equal(first.train, other.train)


def test_a_task_can_be_tested_on_another_graph():
    nodes, other = nodes_of(), nodes_of(1, 50)
    task = ignn_task(PLAN, nodes, 0, testing=other)
    graph, labels = task.test[0]
    assert graph is other.graph
    assert torch.equal(labels, labelled(other, other.test)[1])
    assert task.teaching(0)[0] is nodes.graph


def assert_teaches(task, nodes):
    """One update changes the weights, and the readout has a column a class."""
    torch.manual_seed(0)
    model = task.build()
    before = [p.clone() for p in model.parameters()]
    config = dataclasses.replace(task.teach, fit=FitConfig(updates=1, learning_rate=1e-2))
    teach(model, task.teaching, config)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    with torch.no_grad():
        context = model.inject(nodes.graph)
        output = model.readout(model.step(model.start(context), context), context)
    assert output.shape == (len(nodes.labels), classes_of(nodes))


def test_one_update_of_every_teacher():
    nodes = nodes_of()
    task = ignn_task(PLAN, nodes, 0)
    assert_teaches(task, nodes)
    for build, _ in graph_rivals.RIVAL_TEACHERS.values():
        assert_teaches(build(task, PLAN, nodes), nodes)


@pytest.mark.parametrize("plan", SCALES["paper"], ids=lambda plan: plan.name)
def test_the_paper_plan_runs_on_a_small_graph_of_its_kind(plan):
    nodes = block_model(400, classes=40, degree=4.0, features=128, noise=1.0, seed=0)
    assert (features_of(nodes), classes_of(nodes)) == (128, 40)
    task = ignn_task(dataclasses.replace(plan, width=8), nodes, 0)
    assert_teaches(task, nodes)
    assert task.build().config["kappa"] == plan.kappa


# Rivals.


class Counting(IGNN):
    calls = 0

    def step(self, z, context):
        self.calls += 1
        return super().step(z, context)


def counting_model(nodes, dropout=0.0):
    torch.manual_seed(0)
    return Counting(
        features=features_of(nodes), width=8, classes=classes_of(nodes), dropout=dropout
    )


@pytest.mark.parametrize("steps", [1, 2, 5, 6, 10])
def test_a_few_step_model_is_trained_after_exactly_its_steps(steps):
    nodes = nodes_of()
    made = few_step_task(ignn_task(PLAN, nodes, 0), steps)
    model = counting_model(nodes)
    batch = made.teaching(0)
    loss, _ = TeachingObjective(model.train(), made.teach, cross_entropy)(batch, 0)
    assert model.calls == steps
    # The loss is that of the state after so many plain steps, where the method will be measured.
    model.calls = 0
    with torch.no_grad():
        output = solver_method(model.eval(), Picard()).output(batch[0], steps)
    assert model.calls == steps
    torch.testing.assert_close(loss.detach(), cross_entropy(output, batch[1]))


@pytest.mark.parametrize("steps", [2, 5, 10])
def test_the_gradient_of_a_few_step_model_reaches_back_five_steps(steps):
    nodes = nodes_of()
    made = few_step_task(ignn_task(PLAN, nodes, 0), steps)
    graph, labels = made.teaching(0)

    def weight_gradient(objective):
        model = counting_model(nodes).train()
        objective(model).backward()
        return model.weight.grad

    def by_hand(model):
        context = model.inject(graph)
        z = model.start(context)
        for k in range(steps):
            z = model.step(z.detach() if k == steps - 5 else z, context)
        return cross_entropy(model.readout(z, context), labels)

    found = weight_gradient(
        lambda model: TeachingObjective(model, made.teach, cross_entropy)((graph, labels), 0)[0]
    )
    torch.testing.assert_close(found, weight_gradient(by_hand))


def test_each_few_step_model_is_measured_at_its_own_count(tmp_path):
    nodes = nodes_of()
    task = ignn_task(PLAN, nodes, 0)
    cell = GraphCell(plan=PLAN, seed=0, options=options(tmp_path))
    methods = few_step_methods(task, (1, 2), cell.place, 0, cell.bar)
    assert [(m.counts, m.label) for m in methods.values()] == [
        ((1,), "few_step"),
        ((2,), "few_step"),
    ]
    one, two = (method.own.model for method in methods.values())
    assert not torch.equal(one.weight, two.weight)
    assert len(list((tmp_path / "runs").iterdir())) == 2
    rows = compare(
        methods,
        one,
        task.test,
        find_equilibria(one, task.test, task.metric).states,
        task.metric,
        dataset="blocks",
        seed=0,
        repeats=1,
    )
    assert [(row.method, row.steps) for row in rows] == [("few_step", 1), ("few_step", 2)]


def test_the_closed_form_is_the_converged_model():
    nodes = nodes_of()
    torch.manual_seed(3)
    model = eignn_task(ignn_task(PLAN, nodes, 0), PLAN, nodes).build().eval()
    with torch.no_grad():
        context = model.inject(nodes.graph)
        state = solve_model(model, context, Picard(), tol=1e-7, max_steps=300).state
        expected = model.readout(state, context)
        found = closed_form(model)
        torch.testing.assert_close(found.output(nodes.graph), expected, rtol=1e-4, atol=1e-4)
    assert found.parameters == sum(p.numel() for p in model.parameters())


@pytest.fixture
def often(monkeypatch):
    """Checkpoints after every fourth update."""
    monkeypatch.setattr(
        graph_rivals, "FitConfig", partial(FitConfig, checkpoint_every=4, log_every=1)
    )


def assert_resumes(train, tmp_path):
    """`train(folder, progress)` cut at update 6 of 10 goes on from 4, to the weights of one in one go."""
    whole, _ = train(tmp_path / "whole", None)
    with pytest.raises(Cut):
        train(tmp_path / "cut", cut_at(6))
    torch.rand(5)  # the state of the global generator must not matter
    seen = []
    resumed, training = train(tmp_path / "cut", lambda done, total, metrics: seen.append(done))
    assert seen == [5, 6, 7, 8, 9, 10]
    assert training.finished
    assert not resumed.training
    for (name, expected), found in zip(
        whole.state_dict().items(), resumed.state_dict().values(), strict=True
    ):
        assert torch.equal(found, expected), name
    train(tmp_path / "cut", lambda *_: pytest.fail("trained again"))


@pytest.mark.parametrize("name", EXPLICIT)
def test_an_explicit_model_cut_short_goes_on(name, tmp_path, often):
    pytest.importorskip("torch_geometric")
    nodes = nodes_of()
    assert_resumes(
        lambda folder, progress: train_explicit(name, PLAN, nodes, folder, 0, progress), tmp_path
    )


def test_a_learned_solver_cut_short_goes_on(tmp_path, often):
    nodes = nodes_of()
    task = ignn_task(PLAN, nodes, 0)
    torch.manual_seed(0)
    teacher = task.build().eval().requires_grad_(False)
    store = record(teacher, task.distilling, tmp_path / "store", max_steps=40, mode="endpoint")
    assert_resumes(
        lambda folder, progress: train_ignn_solver(teacher, store, PLAN, folder, 0, progress),
        tmp_path,
    )


def test_layers_of_an_explicit_model_can_be_chosen(tmp_path):
    pytest.importorskip("torch_geometric")
    plan = dataclasses.replace(PLAN, rivals=1, layers={"gcn": 4})
    model, _ = train_explicit("gcn", plan, nodes_of(), tmp_path, 0, None)
    assert model.config["layers"] == 4


def test_an_update_has_its_own_dropout():
    nodes = nodes_of()
    batch = labelled(nodes, nodes.train)
    model = counting_model(nodes, dropout=0.5)
    model.forward = lambda graph: model.readout(model.inject(graph).injection, None)
    objective = SupervisedObjective(model, explicit_loss, seed=0).train()
    before = torch.get_rng_state()
    first, again, other = (objective(batch, update)[0].item() for update in (3, 3, 4))
    assert first == again
    assert first != other
    assert SupervisedObjective(model, explicit_loss, seed=1).train()(batch, 3)[0].item() != first
    assert torch.equal(torch.get_rng_state(), before)


# Cells of graphs.


def row(plan, seed, metric=0.5):
    return Row(
        dataset=plan.title,
        seed=seed,
        method="picard",
        steps=1,
        metric=metric,
        distance=0.5,
        residual=0.5,
        seconds=0.1,
        f_equivalents=1.0,
        parameters=10,
    )


def teacher_of(plan):
    return TeacherResult(
        dataset=plan.title,
        name="IGNN",
        parameters=10,
        metric_name="accuracy",
        metric=0.9,
        higher_is_better=True,
        steps=9,
        residual=1e-4,
        train_seconds=None,
    )


class Measure:
    """Counts what it is asked to measure; a cell in `cut` is cut short."""

    def __init__(self, cut=None):
        self.cells, self.cut = [], cut

    def __call__(self, cell):
        if (cell.plan.name, cell.seed) == self.cut:
            raise Cut
        self.cells.append((cell.plan.name, cell.seed))
        return [row(cell.plan, cell.seed)], [teacher_of(cell.plan)]


@pytest.fixture
def two_plans(monkeypatch):
    for name in ("first", "second"):
        monkeypatch.setitem(EMBEDDED, name, partial(nodes_of, nodes=30))
    return [GraphPlan(name=name, title=name.title()) for name in ("first", "second")]


ALL = [("first", 0), ("second", 0), ("first", 1), ("second", 1)]


def test_all_graphs_come_with_one_seed_before_the_next(two_plans, tmp_path):
    measure, written = Measure(), []
    made = run_graphs("table3", two_plans, options(tmp_path, seeds=2), measure, {}, written.append)
    assert measure.cells == ALL
    assert [len(results.rows) for results in written] == [1, 2, 3, 4]
    assert [results.datasets for results in written] == [["First"]] + [["First", "Second"]] * 3
    assert isinstance(made, Results)
    assert made == written[-1]
    assert (made.experiment, made.scale) == ("table3", "tiny")
    assert [(r.dataset.lower(), r.seed) for r in made.rows] == ALL


def test_a_run_cut_short_measures_only_what_is_missing(two_plans, tmp_path):
    asked, written = options(tmp_path, seeds=2), []
    cut = Measure(cut=("first", 1))
    with pytest.raises(Cut):
        run_graphs("table3", two_plans, asked, cut, {}, written.append)
    assert cut.cells == ALL[:2]
    assert len(written) == 2  # and the table has what was done
    measure = Measure()
    made = run_graphs("table3", two_plans, asked, measure, {}, written.append)
    assert measure.cells == ALL[2:]
    assert len(made.rows) == 4
    measure = Measure()
    again = run_graphs("table3", two_plans, asked, measure, {}, written.append)
    assert measure.cells == []
    assert again == made


def test_more_seeds_measure_only_the_new_ones(two_plans, tmp_path):
    run_graphs("table3", two_plans, options(tmp_path), Measure(), {}, lambda results: None)
    measure = Measure()
    run_graphs("table3", two_plans, options(tmp_path, seeds=2), measure, {}, lambda results: None)
    assert measure.cells == ALL[2:]


@pytest.mark.parametrize(
    "change",
    [
        lambda plans, config: ("inductive", plans, config),
        lambda plans, config: ("table3", plans, {"counts": (1, 2)}),
        lambda plans, config: (
            "table3",
            [dataclasses.replace(plan, width=5) for plan in plans],
            config,
        ),
    ],
)
def test_what_a_measurement_depends_on_makes_it_another(change, two_plans, tmp_path):
    config = {"counts": (1,)}
    asked = options(tmp_path)
    run_graphs("table3", two_plans, asked, Measure(), config, lambda results: None)
    experiment, plans, config = change(two_plans, config)
    measure = Measure()
    run_graphs(experiment, plans, asked, measure, config, lambda results: None)
    assert measure.cells == ALL[:2]


def measured_elsewhere(cell):
    """What a process of its own measures; it has neither bars nor lines."""
    assert not cell.options.progress
    cell.say("nobody hears this")
    return [row(cell.plan, cell.seed)], [teacher_of(cell.plan)]


class Pool:
    """Does at once what is submitted, after sending it as to another process."""

    made: ClassVar[list[dict]] = []

    def __init__(self, jobs, **fields):
        self.made.append({"jobs": jobs, "threads": fields["initargs"]})

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def submit(self, work, cell):
        sent, cell = pickle.loads(pickle.dumps((work, cell)))
        future = Future()
        future.set_result(sent(cell))
        return future

    def shutdown(self, **how):
        pass


def test_several_at_a_time_give_the_same_in_the_same_order(two_plans, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(Pool, "made", [])
    lines, written = [], []
    asked = options(tmp_path, seeds=2, jobs=2, threads=3, progress=True, say=lines.append)
    made = run_graphs("table3", two_plans, asked, measured_elsewhere, {}, written.append)
    assert [(r.dataset.lower(), r.seed) for r in made.rows] == ALL
    assert [len(results.rows) for results in written] == [1, 2, 3, 4]
    assert len(lines) == 4
    assert None not in "".join(lines)
    [pool] = Pool.made
    [prepare] = pool["threads"]
    assert (pool["jobs"], prepare.args) == (2, (3,))
    alone = options(tmp_path, seeds=2)
    again = run_graphs("table3", two_plans, alone, Measure(cut=ALL[0]), {}, written.append)
    assert again == made


@pytest.mark.parametrize("measure", [table3.measure, inductive.measure])
def test_a_measurement_can_be_sent_to_another_process(measure, tmp_path):
    cell = GraphCell(plan=SCALES["tiny"][0], seed=1, options=options(tmp_path))
    assert pickle.loads(pickle.dumps((measure, cell))) == (measure, cell)


def test_a_diverged_metric_survives_being_kept(two_plans, tmp_path):
    def measure(cell):
        return [row(cell.plan, cell.seed, metric=float("nan"))], [teacher_of(cell.plan)]

    run_graphs("table3", two_plans, options(tmp_path), measure, {}, lambda results: None)
    again = run_graphs("table3", two_plans, options(tmp_path), Measure(), {}, lambda results: None)
    assert [r.metric for r in again.rows] == [None, None]
    for path in (tmp_path / "runs").glob("*/result.json"):
        assert "NaN" not in path.read_text()


def test_missing_data_is_found_before_anything_is_measured(two_plans, tmp_path):
    plans = [*two_plans, GraphPlan(name="pubmed", title="PubMed")]
    measure = Measure()
    with pytest.raises(MissingDataError, match=r"planetoid/ind\.pubmed"):
        run_graphs("table3", plans, options(tmp_path), measure, {}, lambda results: None)
    assert measure.cells == []


def test_trainings_of_a_cell_have_folders_of_their_own(tmp_path):
    asked = options(tmp_path)
    cell = GraphCell(plan=PLAN, seed=0, options=asked)
    places = [
        cell.place("ignn"),
        cell.place("gcn"),
        cell.place("ignn", {"steps": 1}),
        GraphCell(plan=PLAN, seed=1, options=asked).place("ignn"),
        GraphCell(plan=dataclasses.replace(PLAN, width=9), seed=0, options=asked).place("ignn"),
    ]
    assert len(set(places)) == len(places)
    assert GraphCell(plan=PLAN, seed=0, options=asked).place("ignn") == places[0]
    assert all(place.parent == asked.runs for place in places)


def test_the_graphs_of_a_scale(tmp_path):
    asked = options(tmp_path, scale="small")
    known = ["pubmed", "amazon-computers", "coauthor-physics"]
    assert [plan.name for plan in plans_of(asked)] == known
    for file in GRAPH_SETS["ogbn-arxiv"].files:
        (asked.data / file).parent.mkdir(parents=True, exist_ok=True)
        (asked.data / file).touch()
    assert [plan.name for plan in plans_of(asked)] == [*known, "ogbn-arxiv"]


def test_a_graph_that_is_named_is_never_left_out(tmp_path):
    asked = options(tmp_path, scale="small", only=("ogbn-arxiv", "pubmed"))
    assert [plan.name for plan in plans_of(asked)] == ["pubmed", "ogbn-arxiv"]


def test_an_unknown_graph_is_named_with_those_there_are(tmp_path):
    with pytest.raises(ExperimentError, match="no graph nonsense") as caught:
        plans_of(options(tmp_path, only=("blocks", "nonsense")))
    assert "digits, blocks" in str(caught.value)
    assert isinstance(caught.value, ValueError)


# The comparison.


def affine(factor, sign=1.0):
    """z -> factor z + x, whose equilibrium is x / (1 - factor)."""
    return from_functions(lambda z, x: factor * z + x, readout=lambda z: sign * z)


def points():
    x = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    return [(part, part.argmax(1)) for part in x.split(5)]


def compared(methods, explicit=None, counts=(1, 2), **fields):
    return compare(
        methods,
        affine(0.5),
        points(),
        [2 * x for x, _ in points()],
        accuracy(),
        dataset="toy",
        seed=0,
        counts=counts,
        repeats=1,
        explicit=explicit,
        **fields,
    )


def test_a_method_is_measured_at_its_own_equilibrium():
    own = affine(0.8, sign=-1.0)
    stars = [5 * x for x, _ in points()]
    rows = compared(
        {
            "picard": solver_method(affine(0.5), Picard()),
            "other": solver_method(own, Picard(), own=Target(model=own, stars=stars)),
        }
    )
    by = {(r.method, r.steps): r for r in rows}
    for k in (1, 2):
        assert by["picard", k].distance == pytest.approx(0.5**k, rel=1e-4)
        assert by["other", k].distance == pytest.approx(0.8**k, rel=1e-4)
        # Its own readout names the smallest entry.
        assert (by["picard", k].metric, by["other", k].metric) == (1.0, 0.0)
    # z_1 = x, f(z_1) = 1.8 x under its own map.
    assert by["other", 1].residual == pytest.approx(0.8, rel=1e-4)


def test_a_rival_is_compared_with_itself():
    nodes = nodes_of()
    task = ignn_task(PLAN, nodes, 0)
    torch.manual_seed(0)
    model = eignn_task(task, PLAN, nodes).build().eval().requires_grad_(False)
    known = find_equilibria(model, task.test, task.metric)
    method = rival_method(model, Picard(), known)
    assert method.own.model is model
    (found,) = compare(
        {"eignn": dataclasses.replace(method, counts=(60,))},
        ignn_task(PLAN, nodes, 0).build().eval(),
        task.test,
        [torch.full_like(star, 9.0) for star in known.states],
        task.metric,
        dataset="blocks",
        seed=0,
        repeats=1,
    )
    assert found.distance < 1e-3
    assert found.metric == known.metric


def test_counts_and_label_of_a_method_are_its_own():
    plain = solver_method(affine(0.5), Picard())
    rows = compared(
        {
            "picard": plain,
            "few 3": dataclasses.replace(plain, counts=(3,), label="few"),
            "few 7": dataclasses.replace(plain, counts=(7,), label="few"),
        }
    )
    assert [(r.method, r.steps) for r in rows] == [
        ("picard", 1),
        ("picard", 2),
        ("few", 3),
        ("few", 7),
    ]
    assert rows[-1].distance == pytest.approx(0.5**7, rel=1e-3)


def test_seconds_are_measured_where_they_are_asked_for():
    method, mlp = solver_method(affine(0.5), Picard()), Explicit(output=lambda x: x, parameters=7)
    few = dataclasses.replace(method, counts=(4,))
    rows = compared({"picard": method, "few": few}, {"mlp": mlp}, counts=(1, 2, 3), timed=(2,))
    assert {(r.method, r.steps): r.seconds is not None for r in rows} == {
        ("picard", 1): False,
        ("picard", 2): True,
        ("picard", 3): False,
        ("few", 4): False,
        ("mlp", None): True,
    }
    assert [r.f_equivalents for r in rows if r.method == "picard"] == pytest.approx([1, 2, 3])
    for k, found in enumerate(rows[:3], start=1):
        assert found.distance == pytest.approx(0.5**k, rel=1e-4)


def test_an_explicit_model_has_neither_steps_nor_distance():
    (found,) = compared({}, {"mlp": Explicit(output=lambda x: -x, parameters=7)})
    assert (found.method, found.steps, found.distance, found.residual) == ("mlp", None, None, None)
    assert found.metric == 0.0
    assert found.parameters == 7
    (right,) = compared({}, {"mlp": Explicit(output=lambda x: x, parameters=7)})
    assert right.metric == 1.0


def test_cost_is_in_steps_of_the_compared_teacher(monkeypatch):
    seconds = {
        ("own", 1): 0.3,
        ("own", 2): 0.5,
        ("own", "step"): 0.2,
        ("student", 1): 0.4,
        ("student", 2): 0.6,
        ("student", "extra"): 0.25,
        ("mlp", None): 0.35,
        "step": 0.1,
        "inject": 0.05,
    }

    rounds = []

    def measured(works, repeats):
        rounds.append(set(works))
        for work in works.values():
            work()
        return {name: seconds[name] for name in works}

    monkeypatch.setattr(comparing, "median_seconds", measured)
    model, stars = affine(0.8), [5 * x for x, _ in points()]
    began = []
    plain = solver_method(affine(0.5), Picard())
    rows = compared(
        {
            "own": solver_method(model, Picard(), own=Target(model=model, stars=stars)),
            "student": dataclasses.replace(plain, extra=began.append),
        },
        {"mlp": Explicit(output=lambda x: x, parameters=7)},
    )
    explicit = {("mlp", None)}
    assert rounds == [set(seconds) - explicit, explicit]  # apart, for the caches' sake
    by = {(r.method, r.steps): r for r in rows}
    assert by["own", 2].f_equivalents == pytest.approx(4.0)  # two of its own steps
    assert by["student", 2].f_equivalents == pytest.approx(2 + (0.25 - 0.05) / 0.1)
    assert by["mlp", None].f_equivalents == pytest.approx(3.5)
    assert {key: r.seconds for key, r in by.items()} == {key: seconds[key] for key in by}
    assert len(began) == 1


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    process_time = perf_counter


def test_slow_work_is_timed_once(monkeypatch):
    monkeypatch.setattr(comparing, "time", Clock())
    monkeypatch.setattr(comparing, "SLOW", 0.5)
    clock, runs = comparing.time, []

    def work(name, *spans):
        left = list(spans)

        def run():
            runs.append(name)
            clock.now += left.pop(0)

        return lambda: run

    found = median_times(
        {
            "slow": work("slow", 0.75),
            "at the limit": work("at the limit", 0.5, 0.125, 0.375, 0.25),
            "quick": work("quick", 0.25, 0.0, 0.125, 0.0625),
        },
        3,
    )
    assert runs == ["slow", *["at the limit", "quick"] * 4]
    # The first round of quick work warms up and does not count.
    assert found == {"slow": (0.75,) * 2, "at the limit": (0.25,) * 2, "quick": (0.0625,) * 2}


# Inductive use.


def test_training_knows_all_but_half_of_the_test_nodes():
    nodes = nodes_of(nodes=2000)
    seen = inductive.seen_nodes(nodes, 0)
    assert bool(seen[nodes.train | nodes.valid].all())
    assert float(seen[nodes.test].double().mean()) == pytest.approx(0.5, abs=0.08)
    assert torch.equal(seen, inductive.seen_nodes(nodes, 0))
    assert not torch.equal(seen, inductive.seen_nodes(nodes, 1))


def test_pieces_are_graphs_of_the_seen_part():
    nodes = nodes_of(nodes=160)
    found = inductive.pieces(nodes, 0)
    assert list(found) == ["anchored", "anchored_parts", "anchored_samples"]
    for batches in found.values():
        for graph, labels in batches:
            size = len(labels)
            assert graph.adjacency.shape == (size, size)
            assert graph.features.shape == (size, 6)
    (whole,) = found["anchored"]
    assert whole[0] is nodes.graph
    parts, samples = found["anchored_parts"], found["anchored_samples"]
    assert len(parts) == len(samples) == inductive.PIECES
    assert {len(labels) for _, labels in samples} == {160 // inductive.PIECES}
    # Each node is in one part, and each training label counts once.
    assert sum(len(labels) for _, labels in parts) == 160
    assert sum(int((y != IGNORED).sum()) for _, y in parts) == int(nodes.train.sum())
    again = inductive.pieces(nodes, 0)
    for (_, first), (_, second) in zip(
        samples + parts, again["anchored_samples"] + again["anchored_parts"], strict=True
    ):
        assert torch.equal(first, second)


def test_the_inductive_measurement_scores_unseen_nodes_alone(monkeypatch, tmp_path):
    monkeypatch.setitem(EMBEDDED, PLAN.name, partial(nodes_of, nodes=160))
    scored, usual = [], inductive.compare

    def spy(methods, model, batches, stars, metric, **fields):
        scored.extend(batches)
        return usual(methods, model, batches, stars, metric, **fields)

    monkeypatch.setattr(inductive, "compare", spy)
    asked = options(tmp_path)
    rows, (teacher,) = inductive.measure(GraphCell(plan=PLAN, seed=0, options=asked))
    methods = ["picard", "anderson", "paper", "anchored"]
    methods += ["anchored_parts", "anchored_samples", "anchored_whole"]
    assert [(r.method, r.steps) for r in rows] == [(m, k) for m in methods for k in (1, 2, 5, 10)]
    assert teacher.dataset == PLAN.title
    nodes = nodes_of(nodes=160)
    ((graph, labels),) = scored
    assert graph.adjacency.shape == (160, 160)
    unseen = ~inductive.seen_nodes(nodes, 0)
    assert torch.equal(labels != IGNORED, unseen)
    assert int(unseen.sum()) > 5


# As a user.

IMPLICIT = (
    "picard",
    "anderson",
    "broyden",
    "eignn",
    "mignn",
    "ignn_solver",
    "few_step",
    "paper",
    "anchored",
)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["cdeq", *arguments])
    return cli.main(list(arguments))


def times_below(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_table3_as_a_user(tmp_path, monkeypatch, capsys):
    for package in ("torch_geometric", "sklearn", "matplotlib"):
        pytest.importorskip(package)
    image = pytest.importorskip("matplotlib.image")
    monkeypatch.chdir(tmp_path)
    command = ("reproduce", "table3", "--scale", "tiny", "--seeds", "1", "--only", "blocks")
    assert run(monkeypatch, *command) == 0
    shown = capsys.readouterr().out
    for words in ("Block model, seed 0: IGNN", "measured", "results/tiny/table3.md"):
        assert words in shown
    out = tmp_path / "results" / "tiny"
    assert sorted(path.name for path in out.iterdir()) == ["table3.json", "table3.md", "table3.png"]
    results = Results.from_json(out / "table3.json")
    assert results.command == "cdeq " + " ".join(command)
    assert results.datasets == ["Block model"]
    assert [teacher.name for teacher in results.teachers] == ["IGNN", "EIGNN", "MIGNN"]
    found = {}
    for r in results.rows:
        found.setdefault(r.method, []).append(r.steps)
    shown_counts, all_counts = [1, 2, 5, 10], list(range(1, 11))
    assert found == {
        **{m: shown_counts if m == "few_step" else all_counts for m in IMPLICIT},
        **{m: [None] for m in ("eignn_closed", *EXPLICIT)},
    }
    for r in results.rows:
        assert (r.distance is None) == (r.steps is None)
        assert 0.25 < r.metric <= 1  # better than chance
        assert r.f_equivalents > 0
        assert r.seconds is None or r.seconds > 0
        assert (r.seconds is None) <= (r.steps not in (None, *shown_counts))  # all that is shown
    raw = json.loads((out / "table3.json").read_text())
    assert {r["method"] for r in raw["rows"] if r["steps"] is None} >= set(EXPLICIT)
    at = {(r.method, r.steps): r for r in results.rows}
    closed = at["eignn_closed", None].metric
    assert closed == pytest.approx(results.teacher("Block model", "EIGNN").metric, abs=0.01)
    page = (out / "table3.md").read_text()
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 5 + 4 * len(IMPLICIT)
    assert {line.count("|") for line in table} == {9}
    assert "- Block model, Anchored: closes" in page
    assert image.imread(out / "table3.png").ndim == 3

    kept = times_below(tmp_path / "runs")
    text = (out / "table3.json").read_text()
    assert run(monkeypatch, *command) == 0
    assert times_below(tmp_path / "runs") == kept
    assert (out / "table3.json").read_text() == text

    (damaged,) = (tmp_path / "runs" / "cells").glob("blocks-table3-*/result.json")
    damaged.write_text("{")
    capsys.readouterr()
    assert run(monkeypatch, *command) == 1
    assert_one_line(capsys.readouterr().err, "damaged", damaged.name)


def assert_one_line(text, *words):
    assert text.startswith("cdeq: ")
    assert text.count("\n") == 1
    for word in words:
        assert word in text


def test_an_unknown_data_set_is_one_line(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    pytest.importorskip("torch_geometric")
    monkeypatch.chdir(tmp_path)
    arguments = ("reproduce", "table3", "--scale", "tiny", "--only", "nonsense")
    assert run(monkeypatch, *arguments) == 1
    assert_one_line(capsys.readouterr().err, "nonsense", "digits, blocks")
    assert list(tmp_path.iterdir()) == []


def test_no_seed_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, "reproduce", "table3", "--scale", "tiny", "--seeds", "0")
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert "seeds must be at least 1" in " ".join((shown.out + shown.err).split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("experiment", ["table3", "inductive"])
def test_missing_data_is_one_line_that_names_a_file(experiment, tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch_geometric")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    arguments = ("reproduce", experiment, "--scale", "small", "--data-dir", "empty")
    assert run(monkeypatch, *arguments) == 1
    shown = capsys.readouterr()
    assert_one_line(shown.err, "pubmed needs the file planetoid/ind.pubmed.", "--data-dir")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]


@pytest.mark.parametrize("module", ["matplotlib", "torch_geometric", "sklearn"])
def test_a_missing_extra_is_found_before_any_work(module, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    assert run(monkeypatch, "reproduce", "table3", "--scale", "tiny") == 1
    assert_one_line(capsys.readouterr().err, "pip install 'cdeq[")
    assert list(tmp_path.iterdir()) == []
