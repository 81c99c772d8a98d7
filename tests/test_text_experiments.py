"""Language modelling as an experiment: scores with memory, the pieces of Table 1, its claims, one run as a user."""

import dataclasses
import json
import math

import pytest
import torch

from cdeq import cli
from cdeq.data.text import Corpus, Streams, Vocabulary
from cdeq.equilibrium.memory import Segment
from cdeq.evaluation import solver_method
from cdeq.evaluation import perplexity
from cdeq.evaluation import Results, Row, TeacherResult
from cdeq.evaluation import find_text_equilibria, measure_text_quality, score_explicit_text
from cdeq.models.text.deq_transformer import DEQTransformer
from cdeq.solvers import Anderson, Picard, solve_model
from cdeq_experiments import pieces, table1, text_plans
from cdeq_experiments.options import ExperimentError, Options
from cdeq_experiments.paper_table import gap_closed
from cdeq_experiments.plans import LATER
from cdeq_experiments.rivals.qrnn import QRNN
from cdeq_experiments.subjects import Tolerances, student_config
from cdeq_experiments.table1_claims import claims
from cdeq_experiments.text_cells import SHOWN, TextCell
from cdeq_experiments.text_plans import EXPLICIT, SCALES, TextPlan
from cdeq_experiments.workers import worked

WORDS = [f"w{i}" for i in range(30)]


def corpus(tokens=150):
    """A text in which a word mostly follows the one before it in the alphabet."""
    draw = torch.Generator().manual_seed(0)
    steps = 1 + (torch.rand(3 * tokens, generator=draw) < 0.2).long()
    places = (steps.cumsum(0) % len(WORDS)).split(tokens)
    lines = [[" ".join(WORDS[i] for i in part.tolist())] for part in places]
    vocabulary = Vocabulary.of(lines[0])
    return Corpus("steps", vocabulary, *(vocabulary.encode(part) for part in lines))


PLAN = TextPlan(
    name="steps",
    title="Steps",
    width=8,
    heads=2,
    inner=16,
    memory=6,
    cutoffs=(10,),
    batch=3,
    length=5,
    pretrain=8,
    updates=6,
    depths=(4, 6),
    warmup=2,
    recorded=4,
    students=4,
    papers=4,
    solvers=4,
    few=3,
    explicit=dict.fromkeys(EXPLICIT, 4),
    bodies={
        "tcn": {"channels": 8, "levels": 1},
        "gcnn": {"channels": 8, "levels": 1},
        "awd_qrnn": {"channels": 8, "layers": 2},
        "transformer_xl": {"heads": 2, "inner": 8, "layers": 1, "memory": 6},
    },
)


@pytest.fixture(autouse=True)
def _a_small_text(monkeypatch):
    monkeypatch.setitem(text_plans.EMBEDDED, "steps", corpus)
    monkeypatch.setitem(SCALES, "tiny", PLAN)


def options(tmp_path, **fields):
    usual = {
        "scale": "tiny",
        "data": tmp_path / "no-data",
        "runs": tmp_path / "runs" / "cells",
        "out": tmp_path / "out",
        "seeds": 1,
    }
    return Options(**usual | fields)


def teacher(**changes):
    torch.manual_seed(1)
    sizes = {"vocabulary": 32, "width": 8, "heads": 2, "inner": 16, "memory": 40, "keep": 0.5}
    return DEQTransformer(**sizes | changes).double().eval()


# Scores.


@torch.no_grad()
def test_a_text_in_segments_scores_as_the_whole_text():
    tokens = corpus().test[:36]
    segments = list(Streams(tokens, 1, 7))
    model = teacher()
    known, timed = find_text_equilibria(model, segments, perplexity(), Tolerances())
    context = model.inject(tokens[None, :-1])
    z = solve_model(model, context, Anderson(), tol=1e-12, max_steps=300).state
    nll = model.words.nll(z, tokens[None, 1:])
    assert known.metric == pytest.approx(math.exp(float(nll.mean())), rel=1e-3)
    assert timed.tokens.shape == (1, 7)
    assert timed.memory[0].shape == (1, 28, 8)
    assert torch.cat(known.states, 1).shape == z.shape


@torch.no_grad()
def test_each_count_meets_its_own_memory():
    model, segments = teacher(), list(Streams(corpus().test[:46], 2, 6))
    known, _ = find_text_equilibria(model, segments, perplexity(), Tolerances())
    method = solver_method(model, Picard())
    seen = []
    found = measure_text_quality(
        method,
        model,
        segments,
        known.states,
        perplexity(),
        (1, 3, 60),
        progress=lambda *a: seen.append(a),
    )
    memory, total, count, distances = (), 0.0, 0, []
    for (tokens, targets), star in zip(segments, known.states, strict=True):
        context = model.inject(Segment(tokens, memory))
        z = model.start(context)
        for _ in range(3):
            z = model.step(z, context)
        memory = model.remember(z, context)
        total += float(model.words.nll(z, targets).sum())
        count += int((targets >= 0).sum())
        distances += [(a - b).norm() / b.norm() for a, b in zip(z, star, strict=True)]
    assert count == 45
    assert found[3].metric == pytest.approx(math.exp(total / count), rel=1e-9)
    assert found[3].distance == pytest.approx(float(torch.stack(distances).mean()), rel=1e-6)
    assert found[60].metric == pytest.approx(known.metric, rel=1e-3)
    assert found[1].distance > found[3].distance > found[60].distance
    assert seen[-1] == (3 * len(segments), 3 * len(segments))
    assert (
        measure_text_quality(method, model, segments, None, perplexity(), (1,))[1].distance is None
    )


@torch.no_grad()
def test_an_explicit_model_keeps_its_memory():
    torch.manual_seed(0)
    model, tokens = (
        QRNN(vocabulary=32, width=8, channels=8, layers=2).double().eval(),
        corpus().test,
    )
    whole = model.words.nll(model(tokens[None, :-1], None)[0], tokens[None, 1:]).mean()
    for length in (7, 400):
        score = score_explicit_text(model, list(Streams(tokens, 1, length)), perplexity())
        assert score == pytest.approx(math.exp(float(whole)), rel=1e-9)


# Plans and pieces.


def test_a_teacher_depends_on_nothing_that_comes_after_it(tmp_path):
    cell = TextCell(plan=PLAN, options=options(tmp_path))
    names = {f.name for f in dataclasses.fields(TextPlan)}
    assert names >= LATER
    other = dataclasses.replace(PLAN, students=9, few=9, explicit={}, student_rate=1.0)
    assert TextCell(plan=other, options=cell.options).place("teacher") == cell.place("teacher")
    wider = dataclasses.replace(PLAN, width=12)
    assert TextCell(plan=wider, options=cell.options).place("teacher") != cell.place("teacher")
    changed = TextCell(plan=other, options=cell.options)
    assert student_config(changed, changed.students["anchored"], 0) != student_config(
        cell, cell.students["anchored"], 0
    )


def test_another_text_is_other_work(tmp_path, monkeypatch):
    cell = TextCell(plan=PLAN, options=options(tmp_path))
    before = cell.place("teacher")
    monkeypatch.setitem(text_plans.EMBEDDED, "steps", lambda: corpus(120))
    assert TextCell(plan=PLAN, options=options(tmp_path)).place("teacher") != before


@pytest.mark.parametrize("kind", ["picard", "solved", "teacher"])
def test_a_score_depends_on_how_it_was_solved(kind, tmp_path, monkeypatch):
    piece = pieces.Piece(cell=TextCell(plan=PLAN, options=options(tmp_path)), kind=kind)
    monkeypatch.setattr(pieces, "_scored", lambda piece: "first")
    assert pieces.scored(piece) == "first"
    monkeypatch.setattr(pieces, "_scored", lambda piece: "second")
    assert pieces.scored(piece) == "first"
    change = {
        "picard": lambda: monkeypatch.setitem(pieces.SOLVERS, "picard", Anderson()),
        "solved": lambda: monkeypatch.setattr(TextCell, "tolerances", Tolerances(usual=1e-2)),
        "teacher": lambda: monkeypatch.setattr(TextCell, "tolerances", Tolerances(reference=1e-2)),
    }
    change[kind]()
    assert pieces.scored(piece) == "second"


def test_pieces_in_processes_of_their_own(tmp_path):
    plan = dataclasses.replace(PLAN, name="manual", cutoffs=(200,), batch=64)
    chosen = options(tmp_path, jobs=2)
    cell = TextCell(plan=plan, options=chosen.quiet())
    work = [pieces.Piece(cell=cell, kind=kind) for kind in ("teacher", "awd_qrnn", "tcn")]
    scores = list(worked(pieces.scored, work, chosen))
    assert all(score["metric"] > 1 for score in scores)
    assert scores == [pieces.scored(piece) for piece in work]  # found, and the same


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_every_piece_of_every_scale_is_well_formed(scale, tmp_path):
    cell = TextCell(plan=SCALES[scale], options=options(tmp_path, scale=scale, seeds=3))
    first, second = pieces.pieces_of(cell)
    both = first + second
    assert len({piece.name for piece in both}) == len(both)
    assert first[0].kind == "teacher"
    kinds = {piece.kind for piece in both}
    assert kinds == {
        *("teacher", "solved", "picard", "anderson", "broyden", "hyperdeq", "few_step"),
        *TextCell.students,
        *EXPLICIT,
    }
    for piece in both:
        pieces.config_of(piece)
    assert {p.seed for p in both if p.kind == "anchored"} == {0, 1, 2}
    assert set(SCALES[scale].explicit) == set(EXPLICIT)


def test_the_published_model_is_the_paper_preset():
    plan = SCALES["paper"]
    assert (plan.width, plan.heads, plan.inner, plan.memory) == (700, 10, 48_000, 150)
    assert (plan.keep, plan.direct, plan.name) == (1.0, False, "wikitext-103")


@pytest.mark.parametrize(("scale", "words"), [("small", 33_278), ("paper", 267_735)])
def test_rivals_have_about_the_teachers_number_of_weights(scale, words):
    plan = SCALES[scale]
    text = Corpus("", Vocabulary(("<eos>", "<unk>")), *[torch.zeros(0, dtype=torch.int64)] * 3)
    object.__setattr__(text, "vocabulary", range(words))  # as many words, without naming them
    with torch.device("meta"):
        models = {"teacher": plan.build(text)}
        models |= {name: plan.build_explicit(name, text) for name in EXPLICIT}
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    for size in sizes.values():
        assert size == pytest.approx(sizes["teacher"], rel=0.05)


def test_missing_files_are_named_before_any_work(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"wikitext-2/wiki\.train\.tokens"):
        table1.table1(options(tmp_path, scale="small"))
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ExperimentError, match="one text a scale"):
        table1.table1(options(tmp_path, only=("ptb",)))


# The whole, as a user runs it.


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One whole run of the small text; what it left."""
    place = tmp_path_factory.mktemp("table1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(text_plans.EMBEDDED, "steps", corpus)
        patch.setitem(SCALES, "tiny", PLAN)
        patch.chdir(place)
        assert cli.main(["reproduce", "table1", "--scale", "tiny", "--seeds", "2"]) == 0
    return place


def test_all_rows_are_there(run):
    found = Results.from_json(run / "results" / "tiny" / "table1.json")
    at = {(row.method, row.seed, row.steps) for row in found.rows}
    for k in SHOWN:
        for name in ("picard", "anderson", "broyden", "few_step", "anchored_teacher_memory"):
            assert (name, 0, k) in at
        for name in ("hyperdeq", "paper", "anchored"):
            assert {(name, 0, k), (name, 1, k)} <= at
    assert {(name, 0, None) for name in (*EXPLICIT, "solved")} <= at
    for row in found.rows:
        assert row.metric is not None
        assert row.metric > 1
        assert row.seconds is not None
        assert (row.distance is None) == (row.method in ("solved", "few_step", *EXPLICIT))
        solvers = ("solved", "picard", "anderson", "broyden")
        assert (row.train_seconds is None) == (row.method in solvers)
    [solved] = [row for row in found.rows if row.method == "solved"]
    assert solved.metric == pytest.approx(found.teachers[0].metric, rel=0.01)
    assert found.teachers[0].train_seconds is not None
    text = (run / "results" / "tiny" / "table1.md").read_text()
    assert "| Transformer-XL |" in text
    assert "distilling on the teacher's memory" in text
    assert (run / "results" / "tiny" / "table1.png").stat().st_size > 10_000


def test_work_that_was_done_is_not_done_again(run, monkeypatch):
    monkeypatch.chdir(run)
    before = Results.from_json(run / "results" / "tiny" / "table1.json")

    def refuse(*arguments, **fields):
        raise AssertionError("scored anew")

    monkeypatch.setattr(pieces, "_scored", refuse)
    assert cli.main(["reproduce", "table1", "--scale", "tiny", "--seeds", "2"]) == 0
    after = Results.from_json(run / "results" / "tiny" / "table1.json")
    assert [r.metric for r in after.rows] == [r.metric for r in before.rows]
    monkeypatch.undo()


def test_scores_are_those_of_the_trained_models(run):
    cell = TextCell(plan=PLAN, options=options(run, runs=run / "runs" / "cells"))
    model, training = cell.trained_teacher()
    assert training.finished
    known, _ = find_text_equilibria(model, cell.test_segments, perplexity(), cell.tolerances)
    found = Results.from_json(run / "results" / "tiny" / "table1.json")
    assert found.teachers[0].metric == pytest.approx(known.metric, rel=1e-6)
    scored = measure_text_quality(
        solver_method(model, Picard()),
        model,
        cell.test_segments,
        known.states,
        perplexity(),
        (2,),
    )
    [row] = [r for r in found.rows if r.method == "picard" and r.steps == 2]
    assert row.metric == pytest.approx(scored[2].metric, rel=1e-6)
    assert row.distance == pytest.approx(scored[2].distance, rel=1e-4)


def test_text_is_generated_from_what_the_run_left(run, capsys):
    folder = run / "runs" / "models" / "steps"
    path = run / "speed.json"
    arguments = ["generate", str(folder), "--prompt", "w1 w2", "--tokens", "5", "--json", str(path)]
    assert cli.main(arguments) == 0
    assert "w1 w2" in capsys.readouterr().out
    assert len(json.loads(path.read_text())["rows"]) == 3  # the teacher, and one and two steps


# What the table says.


def row(method, steps, metric, *, seconds=0.1, seed=0, train_seconds=None):
    return Row(
        dataset="Steps",
        seed=seed,
        method=method,
        steps=steps,
        metric=metric,
        distance=None,
        residual=None,
        seconds=seconds,
        f_equivalents=None,
        parameters=10,
        train_seconds=train_seconds,
    )


def results(*rows):
    made = TeacherResult(
        dataset="Steps",
        name="DEQ-Transformer",
        parameters=10,
        metric_name="perplexity",
        metric=100.0,
        higher_is_better=False,
        steps=12,
        residual=1e-4,
        train_seconds=900.0,
    )
    return Results(
        experiment="table1",
        scale="tiny",
        commit="abc",
        command="cdeq reproduce table1",
        hardware={"cpu": "a processor"},
        teachers=(made,),
        rows=rows,
    )


ROWS = (
    row("picard", 1, 400.0, seconds=0.2),
    row("anderson", 1, 400.0, seconds=0.2),
    row("anderson", 8, 100.5, seconds=1.2),
    row("anderson", 12, 100.0, seconds=1.8),
    row("anchored", 1, 100.9, seconds=0.2, train_seconds=45.0),
    row("anchored", 2, 100.0, seconds=0.3, train_seconds=45.0),
    row("anchored_teacher_memory", 1, 102.9),
    dataclasses.replace(row("solved", None, 100.0, seconds=1.6), f_equivalents=11.2),
    row("tcn", None, 98.0, train_seconds=900.0),
)


def test_a_gap_in_perplexity_counts_by_its_logarithm():
    found = results(*ROWS, row("paper", 1, 200.0))
    assert gap_closed(found, "Steps", "paper", 1) == pytest.approx(0.5)
    assert gap_closed(found, "Steps", "anchored", 2) == pytest.approx(1.0)


def test_the_claims_follow_the_rows():
    text = "\n".join(claims(results(*ROWS)))
    assert "closes 99.4% and 100.0% of the gap" in text
    assert "no equilibrium rival is better at 1;" in text  # at 2 there is nobody to compare with
    assert "never rises (100.9 → 100.0)" in text
    assert "Anchored at 1 evaluations, 200 ms" in text
    assert "Anderson, at 8, 1200 ms: 6.0 times as long" in text
    assert "takes 11.2 evaluations on average and 1600 ms a batch" in text
    assert "8.0 times as long as that student" in text
    assert "Anchored 45 s (5.0%)" in text
    assert "TCN 98.0 (900 s)" in text
    assert "2.04% behind the best of them" in text
    assert "+2.00 at 1" in text

    worse = "\n".join(
        claims(results(*ROWS[:5], row("anchored", 2, 103.0), row("hyperdeq", 1, 50.0)))
    )
    assert "worse than HyperDEQ at 1 (by 101.80%)" in worse
    assert "rises by at most 2.08%" in worse
    assert "beats or matches" not in worse


def test_seconds_that_nobody_kept_are_said_to_be_unknown():
    rows = (row("anchored", 1, 101.0), row("paper", 1, 150.0, train_seconds=90.0), ROWS[0])
    assert "Anchored not known, Paper 90 s (10.0%)" in "\n".join(claims(results(*rows)))


def test_a_student_that_never_comes_near_is_said_to():
    text = "\n".join(claims(results(ROWS[0], row("anchored", 1, 150.0))))
    assert "does not come within 1%" in text
    alone = "\n".join(claims(results(ROWS[0], row("anchored", 1, 100.0))))
    assert "no solver does up to 1." in alone
