"""Runs grids: every student of every grid once, whoever needs it, in processes of their own if so asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from cdeq.consistency.student import Student
from cdeq.evaluation import (
    Method,
    Quality,
    measure_seconds,
    method_rows,
    parameter_count,
    student_method,
)
from cdeq.evaluation import (
    Results,
    Row,
    provenance,
)
from cdeq_experiments.graph_subject import GraphSubject
from cdeq_experiments.graph_tasks import SCALES as GRAPHS
from cdeq_experiments.grid_page import write_grid
from cdeq_experiments.grids import GRIDS, Grid, Variant
from cdeq_experiments.image_cells import ImageCell
from cdeq_experiments.image_scales import SCALES as IMAGES
from cdeq_experiments.model_cells import ModelCell
from cdeq_experiments.options import ExperimentError, Options
from cdeq_experiments.pieces import REPEATS, Piece, scored
from cdeq_experiments.subjects import (
    Subject,
    Teacher,
    recorded,
    student_config,
    teacher_result,
    trained_student,
)
from cdeq_experiments.text_cells import TextCell
from cdeq_experiments.text_plans import SCALES as TEXTS
from cdeq_experiments.workers import worked


def subjects_of(options: Options, kinds: Sequence[str]) -> dict[str, Subject]:
    """The data set of each kind that figures are made on: the first of its table."""
    made: dict[str, Subject] = {
        "text": TextCell(plan=TEXTS[options.scale], options=options),
        "images": ImageCell(plan=IMAGES[options.scale][0], options=options),
        "graph": GraphSubject(plan=GRAPHS[options.scale][0], options=options),
    }
    if unknown := sorted(set(options.only) - set(made)):
        raise ExperimentError(f"no kind of data {unknown[0]!r}; there are {', '.join(made)}")
    chosen = [kind for kind in kinds if not options.only or kind in options.only]
    if not chosen:
        raise ExperimentError(f"this experiment is on {', '.join(kinds)} alone")
    for kind in chosen:
        made[kind].plan.require(options.data)
    return {kind: made[kind] for kind in chosen}


def teacher_score(subject: Subject) -> dict[str, Any]:
    """The converged teacher on the test data, and what its training took; its states there are kept."""
    if isinstance(subject, ModelCell):
        return scored(Piece(cell=subject, kind="teacher"))

    def work() -> dict[str, Any]:
        teacher, training = subject.trained_teacher()
        return {
            **subject.score_teacher(teacher),
            "parameters": parameter_count(teacher),
            "seconds": training.seconds,
            **provenance(),
        }

    return subject.result("score-teacher", {"reference": subject.tolerances}, work)


@dataclass(frozen=True, kw_only=True)
class VariantPiece:
    """One student of a grid with a seed, to be scored at some numbers of evaluations."""

    subject: Subject
    variant: Variant
    seed: int
    counts: tuple[int, ...]


def as_used(student: Student, variant: Variant) -> Student:
    """The student with the clock that the variant is used with."""
    if variant.decay is not None:
        student.recipe = replace(student.recipe, decay=variant.decay)
    return student


def made(piece: VariantPiece, teacher: Teacher) -> tuple[Method, float | None]:
    """The student of a piece as a method, and the seconds its training took."""
    student, training = trained_student(piece.subject, teacher, piece.variant.student, piece.seed)
    return student_method(as_used(student, piece.variant)), training.seconds


def scored_variant(piece: VariantPiece) -> dict[str, Any]:
    """What a student of a grid scores, now or before. Its name in the grid takes no part: grids share students."""
    subject, plan = piece.subject, piece.variant.student
    config = student_config(subject, plan, piece.seed)
    config |= {"counts": piece.counts, "reference": subject.tolerances}
    if piece.variant.decay is not None:
        config["decay"] = piece.variant.decay
    return subject.result(f"grid-{plan.recipe}", config, partial(_scored_variant, piece))


def _scored_variant(piece: VariantPiece) -> dict[str, Any]:
    subject = piece.subject
    teacher, _ = subject.trained_teacher()
    method, seconds = made(piece, teacher)
    with subject.counting(f"score {piece.variant.name}") as progress:
        found = subject.score_method(method, teacher, piece.counts, progress)
    subject.say(f"{piece.variant.name}, seed {piece.seed} done")
    return {
        "scores": {k: asdict(quality) for k, quality in found.items()},
        "seconds": seconds,
        **provenance(),
    }


def run_grid(grid: Grid, options: Options) -> Results:
    """One ablation; its JSON, Markdown and PNG."""
    subjects = subjects_of(options, grid.kinds)
    several = options.jobs > 1
    quiet = {kind: s.quiet() if several else s for kind, s in subjects.items()}
    teachers = dict(
        zip(subjects, worked(teacher_score, list(quiet.values()), options), strict=True)
    )
    variants = {kind: grid.variants(subject) for kind, subject in subjects.items()}
    for kind, subject in subjects.items():
        _record(subject, variants[kind])
    pieces = [
        VariantPiece(subject=quiet[kind], variant=variant, seed=seed, counts=grid.counts[kind])
        for kind in subjects
        for seed in range(options.seeds)
        for variant in variants[kind]
    ]
    found = list(worked(scored_variant, pieces, options))
    rows: list[Row] = []
    for kind, subject in subjects.items():
        mine = [(p, f) for p, f in zip(pieces, found, strict=True) if p.subject is quiet[kind]]
        rows += _rows(subject, grid.reported[kind], mine)
    results = Results(
        experiment=grid.experiment,
        scale=options.scale,
        **provenance(found),
        teachers=tuple(teacher_result(subjects[kind], teachers[kind]) for kind in subjects),
        rows=tuple(rows),
    )
    titles = {kind: subject.plan.title for kind, subject in subjects.items()}
    write_grid(results, grid, titles, variants, options.out)
    return results


def _record(subject: Subject, variants: Iterable[Variant]) -> None:
    """What the students learn from, made here, where nobody else writes to its folders."""
    wanted = {(v.student.whole.store_mode, v.student.solver) for v in variants}
    teacher, _ = subject.trained_teacher()
    for mode, solver in sorted(wanted):
        recorded(subject, teacher, mode, solver)


def _rows(
    subject: Subject, reported: int, found: list[tuple[VariantPiece, dict[str, Any]]]
) -> list[Row]:
    """Scores of all seeds; seconds of the first, at the number of evaluations that the paper reports."""
    teacher, _ = subject.trained_teacher()
    x = subject.timed_input()
    methods: dict[str, Method] = {}
    for piece, _score in found:
        if piece.seed == 0:
            method, _ = made(piece, teacher)
            method = replace(method, counts=(reported,))
            methods[piece.variant.name] = subject.timed_method(method, teacher, x)
    with torch.no_grad():
        seconds = measure_seconds(methods, teacher, x, (reported,), explicit={}, repeats=REPEATS)
    rows: list[Row] = []
    for piece, score in found:
        name = piece.variant.name
        qualities = {int(k): Quality(**q) for k, q in score["scores"].items()}
        rows += method_rows(
            name,
            methods[name],
            qualities,
            seconds,
            dataset=subject.plan.title,
            seed=piece.seed,
            train_seconds=score["seconds"],
        )
    return rows


def grid_experiment(name: str) -> Any:
    """The experiment of a grid by name, for the registry."""
    return partial(run_grid, GRIDS[name])
