"""Table 1 of the paper: word-level language modelling, implicit and explicit, at 1, 2, 4, 8 and 12 evaluations.

The work is cut into pieces, a model each: trained and scored on the whole test text, each with its own memory, in
processes of their own if so asked. At the end all models are timed in one process, in turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cdeq.equilibrium.memory import Segment
from cdeq.experiments.compare import (
    SOLVERS,
    Equilibria,
    Explicit,
    Method,
    Quality,
    Seconds,
    explicit_row,
    learned_solver_method,
    method_rows,
    method_seconds,
    parameter_count,
    solver_method,
    student_method,
)
from cdeq.experiments.generate import VOCABULARY
from cdeq.experiments.metrics import perplexity
from cdeq.experiments.options import ExperimentError, Options
from cdeq.experiments.results import (
    Results,
    Row,
    TeacherResult,
    current_command,
    current_commit,
    current_hardware,
    joined,
)
from cdeq.experiments.table1_claims import SHOWN, USUAL_TOLERANCE, write_table1
from cdeq.experiments.text_models import (
    RECIPES,
    Teacher,
    TextCell,
    explicit_config,
    few_step_config,
    few_step_model,
    hyperdeq_config,
    recorded,
    student_config,
    trained_explicit,
    trained_hyperdeq,
    trained_student,
    trained_teacher,
)
from cdeq.experiments.text_plans import EXPLICIT, SCALES
from cdeq.experiments.text_quality import (
    REFERENCE_BUDGET,
    REFERENCE_TOLERANCE,
    Segments,
    explicit_text_score,
    text_quality,
    text_reference,
)
from cdeq.experiments.workers import worked
from cdeq.solvers import Anderson, Picard, solve_model

SOLVED = (1, 2, 3, 4, 6, 8, 12)
"""Those of the plain solvers: closer, so that the moment they reach the converged perplexity is known better."""
STARS = "equilibria.safetensors"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One model to train and score: `kind` with a seed, or a number of steps it is made for."""

    cell: TextCell
    kind: str
    seed: int = 0
    steps: int | None = None

    @property
    def name(self) -> str:
        """Unique among the pieces of a table."""
        return self.kind + (f" {self.steps}" if self.steps else "") + f" seed {self.seed}"


def pieces_of(cell: TextCell) -> tuple[list[Piece], list[Piece]]:
    """The pieces that need nothing, the teacher first; and those that need the teacher."""
    first = [Piece(cell=cell, kind=kind) for kind in ("teacher", *EXPLICIT)]
    second = [Piece(cell=cell, kind=name) for name in ("solved", *SOLVERS)]
    for seed in range(cell.options.seeds):
        kinds = [kind for kind in RECIPES if seed == 0 or kind != "anchored_teacher_memory"]
        second += [Piece(cell=cell, kind=kind, seed=seed) for kind in ("hyperdeq", *kinds)]
    second += [Piece(cell=cell, kind="few_step", steps=k) for k in SHOWN]
    return first, second


def counts_of(kind: str) -> tuple[int, ...]:
    """Evaluations at which a kind of method is scored."""
    return SOLVED if kind in SOLVERS else SHOWN


def test_segments(cell: TextCell) -> Segments:
    """The whole test text."""
    return list(cell.plan.streams(cell.corpus.test))


def config_of(piece: Piece) -> dict[str, Any]:
    """What the model of a piece depends on, beside the text and the teacher."""
    plan = piece.cell.plan
    if piece.kind in EXPLICIT:
        return explicit_config(plan, piece.kind)
    if piece.kind in RECIPES:
        return student_config(plan, piece.kind, piece.seed)
    if piece.kind == "hyperdeq":
        return hyperdeq_config(plan, piece.seed)
    if piece.kind == "few_step" and piece.steps is not None:
        return few_step_config(plan, piece.steps)
    if piece.kind == "solved":
        return {"tolerance": USUAL_TOLERANCE}
    return {"solver": SOLVERS[piece.kind]} if piece.kind in SOLVERS else {}


def scored(piece: Piece) -> dict[str, Any]:
    """What a piece found, now or before, as plain JSON."""
    reference = {"tolerance": REFERENCE_TOLERANCE, "budget": REFERENCE_BUDGET}
    config = {**config_of(piece), "counts": counts_of(piece.kind), "reference": reference}
    return piece.cell.result(f"score-{piece.kind}", config, partial(_scored, piece))


def _scored(piece: Piece) -> dict[str, Any]:
    cell = piece.cell
    work = {"teacher": _score_teacher, "solved": _score_solved}
    work |= dict.fromkeys(EXPLICIT, _score_explicit)
    found = work.get(piece.kind, _score_method)(piece)
    cell.say(f"{piece.name} done")
    return {
        **found,
        "commit": current_commit(),
        "command": current_command(),
        "hardware": current_hardware(),
    }


def _score_teacher(piece: Piece) -> dict[str, Any]:
    """The converged teacher on the test text, its states kept."""
    cell = piece.cell
    teacher, training = trained_teacher(cell)
    known, timed = text_reference(teacher, test_segments(cell), perplexity())
    states = {f"{i:06d}": z for i, z in enumerate(known.states) if isinstance(z, Tensor)}
    memory = {f"memory.{i}": part.contiguous() for i, part in enumerate(timed.memory)}
    save_file(
        {**states, **memory, "tokens": timed.tokens.contiguous()}, cell.place("teacher") / STARS
    )
    return {
        "metric": known.metric,
        "steps": known.steps,
        "residual": known.residual,
        "parameters": parameter_count(teacher),
        "seconds": training.seconds,
    }


def _score_solved(piece: Piece) -> dict[str, Any]:
    """The teacher under its own solver, to the tolerance of everyday use."""
    teacher, _ = trained_teacher(piece.cell)
    segments = test_segments(piece.cell)
    known, _ = text_reference(teacher, segments, perplexity(), tol=USUAL_TOLERANCE)
    return {"metric": known.metric, "steps": known.steps, "residual": known.residual}


def _score_explicit(piece: Piece) -> dict[str, Any]:
    model, training = trained_explicit(piece.cell, piece.kind)
    score = explicit_text_score(model, test_segments(piece.cell), perplexity())
    return {"metric": score, "seconds": training.seconds}


def _score_method(piece: Piece) -> dict[str, Any]:
    cell = piece.cell
    segments, metric = test_segments(cell), perplexity()
    method, model, seconds = made(
        piece, None if piece.kind == "few_step" else trained_teacher(cell)[0]
    )
    own = method.own or Equilibria(model=model, stars=_test_states(cell))
    with cell.bar(f"score {piece.name}") as bar:
        progress = None if bar is None else lambda done, total: bar(done, total, {})
        counts = method.counts or counts_of(piece.kind)
        stars = own.stars or None
        found = text_quality(method, own.model, segments, stars, metric, counts, progress)
    return {"scores": {k: asdict(quality) for k, quality in found.items()}, "seconds": seconds}


def made(piece: Piece, teacher: Teacher) -> tuple[Method, Teacher, float | None]:
    """The method of a piece, trained; the model whose equilibrium it seeks; and the seconds it took to train.

    That model is the teacher; a few-step model, which asks for none, is its own.
    """
    cell = piece.cell
    if piece.kind == "few_step":
        assert piece.steps is not None
        model, training = few_step_model(cell, piece.steps)
        # Its own equilibrium, which it was not trained for, is not looked for: no distance is given.
        own = Equilibria(model=model, stars=[])
        fields: dict[str, Any] = {"own": own, "counts": (piece.steps,), "label": "few_step"}
        return solver_method(model, Picard(), **fields), model, training.seconds
    if piece.kind in SOLVERS:
        return solver_method(teacher, SOLVERS[piece.kind]), teacher, None
    if piece.kind == "hyperdeq":
        solver, training = trained_hyperdeq(cell, teacher, piece.seed)
        return learned_solver_method(teacher, solver), teacher, training.seconds
    student, training = trained_student(cell, teacher, piece.kind, piece.seed)
    return student_method(student), teacher, training.seconds


def _test_states(cell: TextCell) -> list[Any]:
    """The converged teacher's states on the test text."""
    return _kept(cell, str.isdigit)


def _timed_segment(cell: TextCell) -> Segment:
    """The segment to time on; of the file that has the states too, nothing else is read."""
    memory = _kept(cell, lambda name: name.startswith("memory."))
    [tokens] = _kept(cell, lambda name: name == "tokens")
    return Segment(tokens, tuple(memory))


def _kept(cell: TextCell, wanted: Callable[[str], bool]) -> list[Tensor]:
    with safe_open(cell.place("teacher") / STARS, framework="pt") as file:
        return [file.get_tensor(name) for name in sorted(filter(wanted, file.keys()))]


def with_scoring(method: Method, model: Teacher, targets: Tensor) -> Method:
    """The method with the words' likelihood in its output: what a perplexity takes, from tokens to a number."""

    def output(x: Any, steps: int) -> Tensor:
        return model.words.nll(method.output(x, steps), targets)

    return replace(method, output=output)


def explicit_method(model: nn.Module, targets: Tensor) -> Explicit:
    """An explicit model on a segment whose memory is its own; timed with a memory as it would have."""
    held: list[Any] = []

    def output(x: Segment) -> Tensor:
        if not held:
            held.append(model(x.tokens, None)[1])
        features, _ = model(x.tokens, held[0])
        return model.words.nll(features, targets)  # type: ignore[union-attr, operator]

    return Explicit(output=output, parameters=parameter_count(model))


def solved_method(teacher: Teacher, targets: Tensor) -> Explicit:
    """The teacher under its own solver, as long as its tolerance takes."""

    def output(x: Segment) -> Tensor:
        context = teacher.inject(x)
        z = solve_model(
            teacher, context, Anderson(), tol=USUAL_TOLERANCE, max_steps=REFERENCE_BUDGET
        ).state
        return teacher.words.nll(teacher.readout(z, context), targets)

    return Explicit(output=output, parameters=parameter_count(teacher))


def _solved_row(cell: TextCell, found: dict[str, dict[str, Any]], seconds: Seconds) -> Row:
    score = found["solved seed 0"]
    return Row(
        dataset=cell.plan.title,
        seed=0,
        method="solved",
        steps=None,
        metric=score["metric"],
        distance=None,
        residual=score["residual"],
        seconds=seconds["solved", None],
        f_equivalents=score["steps"],
        parameters=found["teacher seed 0"]["parameters"],
    )


def methods_of(pieces: list[Piece]) -> list[Piece]:
    """Those of the pieces that are measured at several numbers of steps."""
    return [piece for piece in pieces if piece.kind != "solved"]


def timed_rows(cell: TextCell, found: dict[str, dict[str, Any]]) -> list[Row]:
    """All methods timed on one segment of the test text, in turns, and joined with their scores."""
    first, second = pieces_of(cell)
    x = _timed_segment(cell)
    targets = x.tokens  # as good as the next words: their likelihood takes as long
    teacher, _ = trained_teacher(cell)
    methods: dict[str, Method] = {}
    for piece in methods_of(second):
        method, model, _ = made(piece, teacher)
        counts = method.counts or counts_of(piece.kind)
        methods[piece.name] = with_scoring(replace(method, counts=counts), model, targets)
    explicit = {
        piece.name: explicit_method(trained_explicit(cell, piece.kind)[0], targets)
        for piece in first
        if piece.kind != "teacher"
    }
    solved = {"solved": solved_method(teacher, targets)}
    with torch.no_grad():
        seconds = method_seconds(
            methods, teacher, x, SOLVED, explicit=explicit, repeats=5, others=solved
        )
    rows = [_solved_row(cell, found, seconds)]
    for piece in methods_of(second):
        score = {int(k): Quality(**q) for k, q in found[piece.name]["scores"].items()}
        method = replace(methods[piece.name], label=methods[piece.name].label or piece.kind)
        rows += method_rows(
            piece.name,
            method,
            score,
            seconds,
            dataset=cell.plan.title,
            seed=piece.seed,
            train_seconds=found[piece.name]["seconds"],
        )
    for piece in first:
        if piece.kind in EXPLICIT:
            row = explicit_row(
                piece.name,
                explicit[piece.name],
                found[piece.name]["metric"],
                seconds,
                dataset=cell.plan.title,
                seed=piece.seed,
                train_seconds=found[piece.name]["seconds"],
            )
            rows.append(replace(row, method=piece.kind))
    return rows


def table1(options: Options) -> Results:
    """Language modelling; table1.json, table1.md and table1.png, and the student as a folder to generate from."""
    plan = SCALES[options.scale]
    if options.only:
        raise ExperimentError("table1 has one text a scale: --only has no meaning")
    plan.require(options.data)
    cell = TextCell(plan=plan, options=options)
    found: dict[str, dict[str, Any]] = {}
    for number, stage in enumerate(pieces_of(cell)):
        if number == 1:
            teacher, _ = trained_teacher(cell)
            for mode in ("endpoint", "full"):
                recorded(cell, teacher, mode)  # here, where nobody else writes to their folders
        work = stage
        if options.jobs > 1:
            quiet = TextCell(plan=plan, options=options.quiet())
            work = [replace(piece, cell=quiet) for piece in stage]
        for piece, score in zip(stage, worked(scored, work, options), strict=True):
            found[piece.name] = score
            if options.jobs > 1:
                cell.say(f"{piece.name} done")
    rows = timed_rows(cell, found)
    about = found["teacher seed 0"]
    result = TeacherResult(
        dataset=plan.title,
        name="DEQ-Transformer",
        parameters=about["parameters"],
        metric_name=perplexity().name,
        metric=about["metric"],
        higher_is_better=False,
        steps=about["steps"],
        residual=about["residual"],
        train_seconds=about["seconds"],
    )
    results = Results(
        experiment="table1",
        scale=options.scale,
        commit=joined([*(score["commit"] for score in found.values()), current_commit()]),
        command=joined([*(score["command"] for score in found.values()), current_command()]),
        hardware=current_hardware(),
        teachers=(result,),
        rows=tuple(rows),
    )
    write_table1(results, options.out)
    cell.say(f"the student is in {keep_student(cell)}: see cdeq generate --help")
    return results


def keep_student(cell: TextCell) -> Path:
    """The anchored student of seed 0 with its words, as a folder."""
    folder = cell.options.runs.parent / "models" / cell.plan.name
    teacher, _ = trained_teacher(cell)
    student, _ = trained_student(cell, teacher, "anchored", 0)
    student.save(folder)
    cell.corpus.vocabulary.to_json(folder / VOCABULARY)
    return folder
