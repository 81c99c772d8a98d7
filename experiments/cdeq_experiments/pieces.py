"""A table of the paper as pieces of work, a model each: trained and scored on the whole test data, in processes of
their own if so asked. At the end all models are timed in one process, in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from cdeq.evaluation import (
    SOLVERS,
    Method,
    Quality,
    Seconds,
    Target,
    explicit_row,
    learned_solver_method,
    measure_seconds,
    method_rows,
    parameter_count,
    solver_method,
    student_method,
)
from cdeq.evaluation import (
    Results,
    Row,
    TeacherResult,
    provenance,
)
from cdeq.solvers import Picard
from cdeq_experiments.model_cells import (
    ModelCell,
    few_step_config,
    few_step_model,
    hyperdeq_config,
    trained_hyperdeq,
)
from cdeq_experiments.subjects import (
    Teacher,
    recorded,
    student_config,
    teacher_result,
    trained_student,
)
from cdeq_experiments.workers import worked

REPEATS = 5
"""Of every timing."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One model to train and score: `kind` with a seed, or a number of steps it is made for."""

    cell: ModelCell
    kind: str
    seed: int = 0
    steps: int | None = None

    @property
    def name(self) -> str:
        """Unique among the pieces of a table."""
        return self.kind + (f" {self.steps}" if self.steps else "") + f" seed {self.seed}"


def pieces_of(cell: ModelCell) -> tuple[list[Piece], list[Piece]]:
    """The pieces that need nothing, the teacher first; and those that need the teacher."""
    first = [
        Piece(cell=cell, kind=kind)
        for kind in ("teacher", *cell.other_teachers, *cell.explicit_names)
    ]
    second = [Piece(cell=cell, kind=name) for name in ("solved", *SOLVERS)]
    for seed in range(cell.options.seeds):
        kinds = [kind for kind, plan in cell.students.items() if seed == 0 or not plan.once]
        second += [Piece(cell=cell, kind=kind, seed=seed) for kind in ("hyperdeq", *kinds)]
    second += [Piece(cell=cell, kind="few_step", steps=k) for k in cell.shown]
    return first, second


def counts_of(piece: Piece) -> tuple[int, ...]:
    """Evaluations at which a piece's method is scored."""
    return piece.cell.solved if piece.kind in SOLVERS else piece.cell.shown


def config_of(piece: Piece) -> dict[str, Any]:
    """What the model of a piece depends on, beside the data and the teacher."""
    cell = piece.cell
    if piece.kind in cell.explicit_names:
        return cell.explicit_config(piece.kind)
    if piece.kind in cell.other_teachers:
        return cell.other_teacher_config(piece.kind)
    if piece.kind in cell.students:
        return student_config(cell, cell.students[piece.kind], piece.seed)
    if piece.kind == "hyperdeq":
        return hyperdeq_config(cell, piece.seed)
    if piece.kind == "few_step" and piece.steps is not None:
        return few_step_config(cell.plan, piece.steps)
    if piece.kind == "solved":
        return {"tolerance": cell.tolerances.usual}
    return {"solver": SOLVERS[piece.kind]} if piece.kind in SOLVERS else {}


def scored(piece: Piece) -> dict[str, Any]:
    """What a piece found, now or before, as plain JSON."""
    tolerances = piece.cell.tolerances
    reference = {"tolerance": tolerances.reference, "budget": tolerances.budget}
    config = {**config_of(piece), "counts": counts_of(piece), "reference": reference}
    return piece.cell.result(f"score-{piece.kind}", config, partial(_scored, piece))


def _scored(piece: Piece) -> dict[str, Any]:
    cell = piece.cell
    work: dict[str, Callable[[Piece], dict[str, Any]]] = {
        "teacher": _score_teacher,
        "solved": _score_solved,
        **dict.fromkeys(cell.explicit_names, _score_explicit),
        **dict.fromkeys(cell.other_teachers, _score_other_teacher),
    }
    found = work.get(piece.kind, _score_method)(piece)
    cell.say(f"{piece.name} done")
    return {**found, **provenance()}


def _score_teacher(piece: Piece) -> dict[str, Any]:
    teacher, training = piece.cell.trained_teacher()
    return {
        **piece.cell.score_teacher(teacher),
        "parameters": parameter_count(teacher),
        "seconds": training.seconds,
    }


def _score_solved(piece: Piece) -> dict[str, Any]:
    teacher, _ = piece.cell.trained_teacher()
    return piece.cell.score_solved(teacher)


def _score_explicit(piece: Piece) -> dict[str, Any]:
    model, training = piece.cell.trained_explicit(piece.kind)
    return {**piece.cell.score_explicit(model), "seconds": training.seconds}


def _score_other_teacher(piece: Piece) -> dict[str, Any]:
    """Another equilibrium model: converged, and under Anderson at each number of evaluations."""
    method, model, seconds = made(piece, None)
    with piece.cell.counting(f"score {piece.name}") as progress:
        converged, scores = piece.cell.score_other_teacher(
            model, method, counts_of(piece), progress
        )
    return {
        **converged,
        "parameters": parameter_count(model),
        "scores": {k: asdict(quality) for k, quality in scores.items()},
        "seconds": seconds,
    }


def _score_method(piece: Piece) -> dict[str, Any]:
    cell = piece.cell
    teacher = None if piece.kind == "few_step" else cell.trained_teacher()[0]
    method, model, seconds = made(piece, teacher)
    with cell.counting(f"score {piece.name}") as progress:
        found = cell.score_method(method, model, method.counts or counts_of(piece), progress)
    return {"scores": {k: asdict(quality) for k, quality in found.items()}, "seconds": seconds}


def made(piece: Piece, teacher: Teacher) -> tuple[Method, Teacher, float | None]:
    """The method of a piece, trained; the model whose equilibrium it seeks; and the seconds it took to train.

    That model is the teacher; a few-step model and another teacher, which ask for none, are their own.
    """
    cell = piece.cell
    if piece.kind == "few_step":
        assert piece.steps is not None
        model, training = few_step_model(cell, piece.steps)
        # Its own equilibrium, which it was not trained for, is not looked for: no distance is given.
        own = Target(model=model, stars=[])
        fields: dict[str, Any] = {"own": own, "counts": (piece.steps,), "label": "few_step"}
        return solver_method(model, Picard(), **fields), model, training.seconds
    if piece.kind in cell.other_teachers:
        model, training = cell.trained_other_teacher(piece.kind)
        own = Target(model=model, stars=[])
        return solver_method(model, SOLVERS["anderson"], own=own), model, training.seconds
    if piece.kind in SOLVERS:
        return solver_method(teacher, SOLVERS[piece.kind]), teacher, None
    if piece.kind == "hyperdeq":
        solver, training = trained_hyperdeq(cell, teacher, piece.seed)
        return learned_solver_method(teacher, solver), teacher, training.seconds
    student, training = trained_student(
        cell, teacher, cell.students[piece.kind], piece.seed, piece.kind
    )
    return student_method(student), teacher, training.seconds


def _solved_row(cell: ModelCell, found: dict[str, dict[str, Any]], seconds: Seconds) -> Row:
    score = found["solved seed 0"]
    return Row(
        dataset=cell.plan.title,
        seed=0,
        method="solved",
        steps=None,
        metric=score["metric"],
        top5=score.get("top5"),
        distance=None,
        residual=score["residual"],
        seconds=seconds["solved", None],
        f_equivalents=score["steps"],
        parameters=found["teacher seed 0"]["parameters"],
    )


def timed_rows(cell: ModelCell, found: dict[str, dict[str, Any]]) -> list[Row]:
    """All methods timed on one input, in turns, and joined with their scores."""
    first, second = pieces_of(cell)
    measured = [piece for piece in first if piece.kind in cell.other_teachers]
    measured += [piece for piece in second if piece.kind != "solved"]
    x = cell.timed_input()
    teacher, _ = cell.trained_teacher()
    methods: dict[str, Method] = {}
    for piece in measured:
        method, model, _ = made(piece, teacher)
        method = replace(method, counts=method.counts or counts_of(piece))
        methods[piece.name] = cell.timed_method(method, model, x)
    explicit = {
        piece.name: cell.timed_explicit(cell.trained_explicit(piece.kind)[0], x)
        for piece in first
        if piece.kind in cell.explicit_names
    }
    solved = {"solved": cell.timed_solved(teacher, x)}
    with torch.no_grad():
        seconds = measure_seconds(
            methods,
            teacher,
            x,
            tuple(sorted({*cell.shown, *cell.solved})),
            explicit=explicit,
            repeats=REPEATS,
            others=solved,
        )
    rows = [_solved_row(cell, found, seconds)]
    for piece in measured:
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
        if piece.kind in cell.explicit_names:
            row = explicit_row(
                piece.name,
                explicit[piece.name],
                found[piece.name]["metric"],
                seconds,
                dataset=cell.plan.title,
                seed=piece.seed,
                train_seconds=found[piece.name]["seconds"],
            )
            rows.append(replace(row, method=piece.kind, top5=found[piece.name].get("top5")))
    return rows


def table_of(cells: Sequence[ModelCell], experiment: str) -> Results:
    """All pieces of all cells, worked and timed; the cells have the same options."""
    options = cells[0].options
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for number in range(2):
        stage = [piece for cell in cells for piece in pieces_of(cell)[number]]
        stage.sort(key=lambda piece: piece.kind != "teacher")  # the longest first
        if number == 1:
            for cell in cells:
                teacher, _ = cell.trained_teacher()
                for mode in ("endpoint", "full"):
                    recorded(cell, teacher, mode)  # here, where nobody else writes to their folders
        work = stage
        if options.jobs > 1:
            work = [replace(piece, cell=piece.cell.quiet()) for piece in stage]
        for piece, score in zip(stage, worked(scored, work, options), strict=True):
            found[piece.cell.plan.name, piece.name] = score
            if options.jobs > 1:
                piece.cell.say(f"{piece.name} done")
    rows: list[Row] = []
    teachers: list[TeacherResult] = []
    for cell in cells:
        own = {name: score for (data, name), score in found.items() if data == cell.plan.name}
        rows += timed_rows(cell, own)
        names = {"teacher": cell.teacher_name, **cell.other_teachers}
        teachers += [
            teacher_result(cell, own[f"{kind} seed 0"], name) for kind, name in names.items()
        ]
    return Results(
        experiment=experiment,
        scale=options.scale,
        **provenance(found.values()),
        teachers=tuple(teachers),
        rows=tuple(rows),
    )
