"""How a model's outputs are scored."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from cdeq.labels import IGNORED


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A score summed over batches: `part(output, labels)` gives a sum and a count, `whole` their score."""

    name: str
    higher_is_better: bool
    part: Callable[[Tensor, Tensor], tuple[float, int]]
    whole: Callable[[float, int], float]

    def score(self, parts: list[tuple[float, int]]) -> float:
        return self.whole(sum(p for p, _ in parts), sum(n for _, n in parts))


def _correct(output: Tensor, labels: Tensor) -> tuple[float, int]:
    counts = labels != IGNORED
    return float(((output.argmax(-1) == labels) & counts).sum()), int(counts.sum())


def _log_loss(output: Tensor, labels: Tensor) -> tuple[float, int]:
    logits, flat = output.reshape(-1, output.shape[-1]).float(), labels.reshape(-1)
    loss = functional.cross_entropy(logits, flat, reduction="sum", ignore_index=IGNORED)
    return float(loss), int((flat != IGNORED).sum())


def accuracy() -> Metric:
    """Fraction of labels that the largest logit names."""
    return Metric(name="accuracy", higher_is_better=True, part=_correct, whole=lambda s, n: s / n)


def top_accuracy(count: int) -> Metric:
    """Fraction of labels that are among the `count` largest logits."""

    def part(output: Tensor, labels: Tensor) -> tuple[float, int]:
        named = output.topk(min(count, output.shape[-1]), dim=-1).indices
        counts = labels != IGNORED
        return float(((named == labels[..., None]).any(-1) & counts).sum()), int(counts.sum())

    return Metric(
        name=f"top-{count} accuracy", higher_is_better=True, part=part, whole=lambda s, n: s / n
    )


def mean_squared_error() -> Metric:
    """Mean over all numbers of the squared difference to the labels, which have the output's shape."""

    def part(output: Tensor, labels: Tensor) -> tuple[float, int]:
        return float((output.double() - labels.double()).square().sum()), labels.numel()

    return Metric(
        name="mean squared error", higher_is_better=False, part=part, whole=lambda s, n: s / n
    )


def perplexity() -> Metric:
    """exp of the mean negative log-likelihood."""
    return Metric(
        name="perplexity",
        higher_is_better=False,
        part=_log_loss,
        whole=lambda s, n: math.exp(min(s / n, 700.0)),
    )
