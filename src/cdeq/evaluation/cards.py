"""Cards of pretrained models as tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from cdeq.evaluation.results import Results
from cdeq.evaluation.styles import MetricStyle
from cdeq.evaluation.table import curves
from cdeq.zoo import Card

LICENCE = "MIT, as this repository; the data have their own"


def card_of(results: Results, dataset: str, name: str, training: dict[str, Any]) -> Card:
    """The card of a teacher and its student from what was measured on a data set: Picard's rows and `corrected`'s."""
    teacher, found = results.teacher(dataset), curves(results, dataset)

    def scores(method: str) -> list[dict[str, float]]:
        points = [p for p in found.get(method, []) if p.steps is not None and p.metric is not None]
        told = [
            {"steps": p.steps, "score": p.metric, "distance": p.distance, "residual": p.residual}
            for p in points
        ]
        return [{k: v for k, v in one.items() if v is not None} for one in told]

    return Card(
        name=name,
        title=teacher.name,
        data=dataset,
        licence=LICENCE,
        parameters=teacher.parameters,
        metric=teacher.metric_name,
        higher_is_better=teacher.higher_is_better,
        score=teacher.metric or 0.0,
        steps=teacher.steps or 0.0,
        converged=teacher.converged or 0.0,
        depth=scores("picard"),
        student=scores("corrected"),
        training={**training, "seconds": teacher.train_seconds},
        command=results.command,
        commit=results.commit,
        hardware=results.hardware,
    )


def zoo_table(cards: list[Card]) -> Table:
    """A line for each model."""
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("name", "teacher, data"):
        table.add_column(head)
    for head in ("weights", "score", "evaluations", "student at 1", "at 2"):
        table.add_column(head, justify="right")
    for card in cards:
        metric = metric_style(card)
        student = {one["steps"]: metric.text(one["score"]) for one in card.student}
        numbers = f"{card.parameters:,}", metric.text(card.score), f"{card.steps:.1f}"
        table.add_row(
            *(card.name, f"{card.title}, {card.data}", *numbers),
            *(student.get(1, ""), student.get(2, "")),
        )
    return table


def card_table(card: Card) -> Table:
    """All that a card says."""
    metric = metric_style(card)
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("name", card.name)
    table.add_row(
        "teacher",
        f"{card.title}, {card.parameters:,} weights; licence of the weights: {card.licence}",
    )
    table.add_row("data", card.data)
    table.add_row(
        "converged",
        f"{metric.phrase(card.score)} after {card.steps:.1f} evaluations; {card.converged:.1%} of the samples have a "
        "residual of 1e-3 or less",
    )
    for title, rows in (("plain evaluations", card.depth), ("steps of the student", card.student)):
        told = [
            f"{one['steps']:g}: {metric.text(one['score'])} (distance {one['distance']:.2g}, "
            f"residual {one['residual']:.2g})"
            for one in rows
        ]
        table.add_row(title, "; ".join(told))
    for name, value in card.training.items():
        table.add_row(name, str(value))
    table.add_row("stage", card.stage)
    table.add_row("made by", f"{card.command}, commit {card.commit}")
    table.add_row("on", str(card.hardware))
    return table


def metric_style(card: Card) -> MetricStyle:
    """How its scores are written: a share in percent."""
    share = card.higher_is_better and card.score <= 1
    return MetricStyle(
        name=card.metric,
        higher_is_better=card.higher_is_better,
        percent=share,
        factor=100.0 if share else 1.0,
    )
