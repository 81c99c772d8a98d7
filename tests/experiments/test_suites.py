"""Suites: what each kind of data fills in, what trainings depend on, and trainings that are cut short."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from small import BY_KIND, GRAPH, corpus, few_digits, few_nodes, suite

from builders import Cut, cut_at, options
from cdeq.data import MissingDataError
from cdeq.equilibrium.trees import tensors_in
from cdeq.evaluation.kept_states import KeptStates, keep_state
from cdeq.models import IGNN
from cdeq.placement import Placement
from cdeq.solvers import Picard, solve_model
from cdeq.training import few_step_teaching
from cdeq.training.task_loss import IGNORED, cross_entropy
from cdeq.training.teaching import TeachingObjective
from cdeq_experiments.configs import table_configs
from cdeq_experiments.entries import entries_of, make_closed_form
from cdeq_experiments.suites import graphs, images, make_suites, text

KINDS = pytest.mark.parametrize("kind", BY_KIND)


@pytest.fixture
def asked(tmp_path):
    return options(tmp_path)


# What a training depends on.


def test_the_digest_of_a_graph_is_that_of_its_data_and_not_of_how_they_were_rounded():
    nodes = few_nodes(0)
    known, features = graphs.digest_of(nodes), nodes.graph.features
    rounded = nodes.graph._replace(features=features * (1 + 1e-6))
    assert graphs.digest_of(nodes._replace(graph=rounded)) == known
    others = nodes.labels.clone()
    others[0] = 1 - others[0]
    assert graphs.digest_of(nodes._replace(labels=others)) != known
    assert graphs.digest_of(nodes._replace(train=nodes.valid)) != known
    doubled = nodes.graph._replace(features=2 * features)
    assert graphs.digest_of(nodes._replace(graph=doubled)) != known


@KINDS
def test_a_teacher_depends_on_nothing_that_comes_after_it(kind, asked):
    config, usual = BY_KIND[kind], suite(asked, kind)
    fit = replace(config.students["paper"].fit, updates=9)
    students = {n: replace(s, fit=fit) for n, s in config.students.items()}
    later = suite(asked, kind, students=students, explicit={}, few_step=None, others={})
    assert later.teacher_key == usual.teacher_key
    first, second = (one.student_run(one.config.students["anchored"], 0) for one in (usual, later))
    assert first != second
    wider = replace(config.teacher, arguments={**config.teacher.arguments, "width": 99})
    assert suite(asked, kind, teacher=wider).teacher_key != usual.teacher_key
    assert replace(usual, teacher_seed=1).teacher_key != usual.teacher_key


@KINDS
def test_other_data_are_other_work(kind, asked, monkeypatch):
    before = suite(asked, kind).teacher_key
    assert suite(asked, kind).teacher_key == before
    monkeypatch.setitem(text.EMBEDDED, "steps", lambda: corpus(120))
    monkeypatch.setattr(images, "digits_set", lambda: replace(few_digits(), digest="other"))
    monkeypatch.setitem(graphs.EMBEDDED, "few-nodes", lambda seed: few_nodes(seed, 70))
    assert suite(asked, kind).teacher_key != before


@KINDS
def test_another_device_or_precision_is_other_work_there(kind, tmp_path):
    usual = suite(options(tmp_path), kind)
    assert not {"device", "precision"} & set(usual.data_key)
    half = Placement(device=torch.device("cpu"), precision="bf16")
    assert suite(options(tmp_path, placement=half), kind).teacher_key != usual.teacher_key
    away = Placement(device=torch.device("meta"))
    moved = suite(options(tmp_path, placement=away), kind)
    assert moved.teacher_key != usual.teacher_key
    for made in (usual, moved):
        timed = None if kind == "text" else made.timed_input()  # of a text, by its trained teacher
        inputs = (made.data.batch_at(0), list(made.data.test()), timed)
        placed = {tensor.device for tensor in tensors_in(inputs)}
        assert placed == {made.options.placement.device}
        model = made.build(partial(made.config.teacher.build, **made.data.sizes), 0)
        assert {p.device for p in model.parameters()} == placed


@KINDS
def test_the_clock_of_use_takes_no_part_in_training(kind, asked):
    made, student = suite(asked, kind), BY_KIND[kind].students["paper"]
    used = replace(student, clock=0.5)
    assert made.student_run(used, 0) == made.student_run(student, 0)
    for other in (
        replace(student, solver="picard"),
        replace(student, changes={"window": 3}),
        replace(student, calibrated_steps=3),
        replace(student, inputs="parts"),
    ):
        assert made.student_run(other, 0) != made.student_run(student, 0)
    assert made.student_run(student, 1) != made.student_run(student, 0)


@KINDS
def test_a_score_depends_on_how_it_was_solved(kind, asked):
    config = BY_KIND[kind]
    changed = replace(config, tolerances=replace(config.tolerances, reference=1e-2))
    counts = replace(config, counts=replace(config.counts, solvers=(1, 2), methods=(1, 2)))
    usual = {entry.name: entry.run for entry in entries_of(suite(asked, kind))}
    for other in (changed, counts):
        made = type(suite(asked, kind))(config=other, options=asked)
        runs = {entry.name: entry.run for entry in entries_of(made)}
        assert runs["picard seed 0"] != usual["picard seed 0"]
        assert runs["anchored seed 0"] != usual["anchored seed 0"]


# Which suites there are.


def test_each_seed_of_a_graph_has_a_teacher_of_its_own(tmp_path):
    configs = [GRAPH, replace(GRAPH, name="few", title="Few")]
    made = make_suites(configs, options(tmp_path, seeds=(0, 1)))
    assert [(one.title, one.seeds) for one in made] == [
        ("Few nodes, seed 0", (0,)),
        ("Few, seed 0", (0,)),
        ("Few nodes, seed 1", (1,)),
        ("Few, seed 1", (1,)),
    ]
    [text_suite] = make_suites([BY_KIND["text"]], options(tmp_path, seeds=(0, 1)))
    assert (text_suite.teacher_seed, text_suite.seeds) == (0, (0, 1))


def test_missing_data_are_named_before_any_work(tmp_path):
    for kind, words in {
        "text": r"wikitext-2/wiki\.train\.tokens",
        "images": "cifar-10-batches-bin",
        "graph": r"planetoid/ind\.pubmed",
    }.items():
        with pytest.raises(MissingDataError, match=words):
            make_suites(table_configs(kind, "small"), options(tmp_path))
    assert not (tmp_path / "runs").exists()


def test_an_optional_graph_is_left_out_unless_it_is_named(tmp_path):
    optional = replace(GRAPH, name="ogbn-arxiv", data=replace(GRAPH.data, name="ogbn-arxiv"))
    optional = replace(optional, title="ogbn-arxiv", optional=True)
    [found] = make_suites([GRAPH, optional], options(tmp_path))
    assert found.config is GRAPH
    with pytest.raises(MissingDataError, match="ogbn-arxiv"):
        make_suites([GRAPH, optional], options(tmp_path, only=("ogbn-arxiv",)))


# Data.


@KINDS
def test_as_many_batches_are_recorded_as_the_mode_says(kind, asked):
    made = suite(asked, kind)
    wanted = {"text": (4, 4), "images": (3, 2), "graph": (1, 1)}[kind]
    found = [len(list(made.recorded_batches(mode, "training"))) for mode in ("endpoint", "full")]
    assert tuple(found) == wanted


def test_a_short_text_is_recorded_once(asked):
    made = suite(
        asked, "text", recording={"full": replace(BY_KIND["text"].recording["full"], batches=99)}
    )
    assert len(list(made.recorded_batches("full", "training"))) == len(made.training)


def test_no_test_label_is_among_the_training_labels(asked):
    made = suite(asked, "graph")
    nodes = made.nodes.whole
    for graph, labels in (made.data.batch_at(0), *made.recorded_batches("full", "training")):
        assert graph is nodes.graph
        assert torch.equal(labels != IGNORED, nodes.train)
    [(_, tested)] = made.data.test()
    assert torch.equal(tested != IGNORED, nodes.test)
    assert torch.equal(tested[nodes.test], nodes.labels[nodes.test])
    [(_, valid)] = made.data.valid()
    assert torch.equal(valid != IGNORED, nodes.valid)


def test_training_knows_all_but_half_of_the_test_nodes(asked):
    nodes = few_nodes(nodes=2000)
    seen = graphs.seen_nodes(nodes, 0.5, 0)
    assert bool(seen[nodes.train | nodes.valid].all())
    assert float(seen[nodes.test].double().mean()) == pytest.approx(0.5, abs=0.08)
    assert not torch.equal(seen, graphs.seen_nodes(nodes, 0.5, 1))
    made = suite(asked, "graph", data=replace(GRAPH.data, unseen=0.5))
    part, whole = made.nodes
    [(graph, tested)] = made.data.test()
    assert graph.adjacency.shape == (80, 80)
    unseen = ~graphs.seen_nodes(few_nodes(), 0.5, 0)
    assert torch.equal(tested != IGNORED, unseen)
    assert len(part.labels) == 80 - int(unseen.sum()) < len(whole.labels)


def test_pieces_are_graphs_of_the_seen_part(asked):
    made = suite(asked, "graph")
    nodes = made.nodes.seen
    parts, samples = (made.recorded_batches("full", name) for name in ("parts", "samples"))
    assert len(parts) == len(samples) == graphs.PARTS
    for graph, labels in (*parts, *samples):
        assert graph.adjacency.shape == (len(labels), len(labels))
    assert {len(labels) for _, labels in samples} == {80 // graphs.PARTS}
    # Each node is in one part, and each training label counts once.
    assert sum(len(labels) for _, labels in parts) == 80
    assert sum(int((y != IGNORED).sum()) for _, y in parts) == int(nodes.train.sum())
    again = made.recorded_batches("full", "samples")
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(samples, again, strict=True))


def test_images_in_class_folders_are_read_as_they_are_needed(tmp_path, asked):
    pil = pytest.importorskip("PIL.Image")
    for split, count in (("train", 6), ("val", 3)):
        for label, name in enumerate(("cat", "dog")):
            folder = tmp_path / "no-data" / "digits" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pil.new("RGB", (40, 30), (80 * label + i, 20, 30)).save(folder / f"{i}.JPEG")
    data = replace(BY_KIND["images"].data, streamed=True, size=16, batch=4, test_batch=4)
    made = suite(asked, "images", data=data)
    x, y = made.data.batch_at(0)
    assert (x.shape, y.shape) == ((4, 3, 16, 16), (4,))
    assert made.data.sizes == {"classes": 2}
    tested = torch.cat([labels for _, labels in made.data.test()])
    assert tested.tolist() == [0, 0, 0, 1, 1, 1]
    assert list(made.data.valid()) == []
    (folder / "0.JPEG").unlink()
    assert suite(asked, "images", data=data).data.digest != made.data.digest


def test_all_test_images_come_once_and_training_batches_by_number(asked):
    made, known = suite(asked, "images"), few_digits()
    assert torch.cat([y for _, y in made.data.test()]).equal(known.test.labels)
    assert torch.cat([y for _, y in made.data.valid()]).equal(known.valid.labels)
    assert made.data.batch_at(5)[0].equal(made.data.batch_at(5)[0])
    assert not made.data.batch_at(5)[0].equal(made.data.batch_at(6)[0])


@pytest.mark.parametrize(
    "state", [torch.ones(2, 3), (torch.ones(2), torch.zeros(2, 4)), (torch.ones(1),)]
)
def test_kept_states_are_read_as_they_were(state, tmp_path):
    keep_state(tmp_path, 3, state)
    found = KeptStates(tmp_path, torch.device("cpu"))[3]
    assert type(found) is type(state)
    for a, b in zip(
        *([s] if isinstance(s, torch.Tensor) else s for s in (found, state)), strict=True
    ):
        assert torch.equal(a, b)


# Few-step models.


class Counting(IGNN):
    calls = 0

    def step(self, z, context):
        self.calls += 1
        return super().step(z, context)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2, 5, 6, 10])
def test_a_few_step_model_is_trained_after_exactly_its_steps_with_a_gradient_of_five(steps, asked):
    made = suite(asked, "graph")
    graph, labels = made.data.batch_at(0)
    config = few_step_teaching(GRAPH.few_step, steps)

    def model():
        torch.manual_seed(0)
        return Counting(**made.data.sizes, width=8).train()

    trained, expected = model(), model()
    loss, _ = TeachingObjective(trained, config, cross_entropy)((graph, labels), 0)
    assert trained.calls == steps
    loss.backward()
    context = expected.inject(graph)
    z = expected.start(context)
    for k in range(steps):
        z = expected.step(z.detach() if k == steps - 5 else z, context)
    by_hand = cross_entropy(expected.readout(z, context), labels)
    by_hand.backward()
    torch.testing.assert_close(loss, by_hand)
    torch.testing.assert_close(trained.weight.grad, expected.weight.grad)


@pytest.mark.slow
def test_the_closed_form_is_the_converged_model(asked):
    made, config = suite(asked, "graph"), GRAPH.others["eignn"]
    model, _ = made.train_equilibrium_model("eignn", config)
    way, _, _, seconds = make_closed_form("eignn", config, made)
    assert seconds > 0
    with torch.no_grad():
        context = model.inject(made.timed_input())
        state = solve_model(model, context, Picard(), tol=1e-7, max_steps=300).state
        found, expected = way.output(made.timed_input()), model.readout(state, context)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# Trainings that are cut short.


def trainings(made):
    """One of each sort, by name: what trains it, and gives the model."""
    name, *_ = made.config.explicit
    student = made.config.students["anchored"]
    return {
        "teacher": lambda: made.train_equilibrium_model("teacher", made.config.teacher)[0],
        "explicit": lambda: made.train_explicit(name)[0],
        "student": lambda: made.train_student(student, 0)[0],
        "learned solver": lambda: made.train_learned_solver(0)[0],
    }


def often(config):
    """The same with a checkpoint after each update."""
    if isinstance(config, dict):
        return {name: often(one) for name, one in config.items()}
    if hasattr(config, "checkpoint_every"):
        return replace(config, checkpoint_every=1, log_every=1)
    found = {n: often(getattr(config, n)) for n in ("fit", "teaching") if hasattr(config, n)}
    return replace(config, **found)


@pytest.mark.slow
@KINDS
@pytest.mark.filterwarnings("ignore:.*recorded equilibria")
@pytest.mark.parametrize("what", ["teacher", "explicit", "student", "learned solver"])
def test_a_training_cut_short_goes_on_to_the_same_weights(kind, what, tmp_path, monkeypatch):
    names = ("teacher", "students", "explicit", "learned_solver")
    changes = {name: often(getattr(BY_KIND[kind], name)) for name in names}
    whole, cut = (suite(options(tmp_path / name), kind, **changes) for name in ("whole", "cut"))
    expected = trainings(whole)[what]()
    if what in ("student", "learned solver"):
        cut.record("endpoint")
    with monkeypatch.context() as patch:
        patch.setattr(type(cut), "train", lambda self, run, title, work: run.train(cut_at(2), work))
        with pytest.raises(Cut):
            trainings(cut)[what]()
    torch.rand(5)  # the state of the global generator must not matter
    resumed = trainings(suite(options(tmp_path / "cut"), kind, **changes))[what]()
    assert not resumed.training
    found = resumed.state_dict()
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)
