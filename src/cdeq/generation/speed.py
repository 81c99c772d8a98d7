"""What a text took, and how its writers compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from rich.table import Table

from cdeq.data.text import Vocabulary
from cdeq.generation.drawing import DrawnToken


@dataclass(frozen=True, kw_only=True)
class GeneratedText:
    """The tokens that a method drew, and what each took; `steps` is None for the teacher."""

    steps: int | None
    tokens: tuple[int, ...]
    seconds_per_token: float
    """The median."""
    evaluations_per_token: float
    unconverged: int
    """Tokens at which the solver ran out of its budget."""

    @classmethod
    def of(cls, steps: int | None, drawn: Sequence[DrawnToken]) -> GeneratedText:
        return cls(
            steps=steps,
            tokens=tuple(one.token for one in drawn),
            seconds_per_token=median(one.seconds for one in drawn),
            evaluations_per_token=fmean(one.evaluations for one in drawn),
            unconverged=sum(not one.converged for one in drawn),
        )

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.seconds_per_token

    def same_words(self, other: GeneratedText) -> int:
        """How many words both texts begin with."""
        pairs = list(zip(self.tokens, other.tokens, strict=False))
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))

    def row(self, teacher: GeneratedText, vocabulary: Vocabulary) -> dict[str, Any]:
        """The measurements, beside those of the teacher, by name."""
        return {
            "method": "teacher" if self.steps is None else "student",
            "steps": self.steps,
            "evaluations_per_token": self.evaluations_per_token,
            "seconds_per_token": self.seconds_per_token,
            "tokens_per_second": self.tokens_per_second,
            "times_faster": teacher.seconds_per_token / self.seconds_per_token,
            "same_words": self.same_words(teacher),
            "unconverged": self.unconverged,
            "text": vocabulary.decode(self.tokens),
        }


def method_name(steps: int | None) -> str:
    """The teacher, or the student and its steps."""
    return "teacher" if steps is None else f"student, {steps} step{'s' * (steps > 1)}"


def speed_table(texts: Sequence[GeneratedText]) -> Table:
    """How fast each method wrote, the teacher first."""
    table = Table(title="Median over the tokens; evaluations are a mean", title_justify="left")
    table.add_column("method", no_wrap=True)
    for name in (
        "evaluations per token",
        "tokens per second",
        "times faster",
        "same words at first",
    ):
        table.add_column(name, justify="right")
    teacher = texts[0]
    for one in texts:
        table.add_row(
            method_name(one.steps),
            f"{one.evaluations_per_token:.1f}",
            f"{one.tokens_per_second:.0f}",
            "" if one is teacher else f"{teacher.seconds_per_token / one.seconds_per_token:.1f}",
            "" if one is teacher else f"{one.same_words(teacher)} of {len(teacher.tokens)}",
        )
    return table
