"""The bound of a calibrated student: what held-out inputs say of the error of inputs like them.

Split conformal prediction: the score of a held-out input is the largest ratio of its true distance to the estimate of
it, over all states at which its solve might have stopped. The distance of another input, drawn like them, is within
its estimate times the ceil((n + 1) confidence)-th smallest of n scores with a probability of at least `confidence`,
wherever its solve stops. Shapes: B samples.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from cdeq.equilibrium.contract import Context
from cdeq.equilibrium.states import State, sample_norms, tensors_of
from cdeq.equilibrium.trees import tensors_in

FLOOR = 1e-5
"""Estimates below this are taken for this: there rounding has a share in all that is measured."""
MARGIN = 0.25
"""How far past the calibrated range, in its own widths, an input may lie."""
DRIFT = 4.0
"""Standard errors by which the mean rank of a batch among the calibrated inputs may be off."""

TOLERATED = 0.02
"""Share of the samples of a batch that may lie outside without a warning: a few of a hundred always do."""


def conformal_quantile(scores: Tensor, confidence: float) -> float:
    """The ceil((n + 1) confidence)-th smallest of n scores; infinite if there are too few."""
    rank = math.ceil((len(scores) + 1) * confidence - 1e-9)
    if rank > len(scores):
        return math.inf
    return float(scores.sort().values[rank - 1])


def fewest_samples(confidence: float) -> int:
    """How many held-out samples a finite quantile needs."""
    return math.ceil(confidence / (1 - confidence) - 1e-9)


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A calibrated bound, and what the inputs that it was calibrated on were like.

    `factor`: the bound over the estimated error.
    `quantiles`: of the calibrated inputs, of each thing that is looked at (see `features_of`).
    """

    confidence: float
    samples: int
    factor: float
    quantiles: dict[str, tuple[float, ...]]

    def bound(self, error: Tensor) -> Tensor:
        """The bound (B,) from the estimated error."""
        return self.factor * error.clamp_min(FLOOR)

    def unlike(self, residual: Tensor, context: Context, start: State, batched: bool) -> Tensor:
        """Which samples (B,) lie outside of what was calibrated; all of them if the batch as a whole does."""
        unlike = torch.zeros_like(residual, dtype=torch.bool)
        for name, values in features_of(residual, context, start, batched).items():
            known = self.quantiles.get(name)
            if known is None:
                continue
            table = torch.tensor(known, dtype=torch.float64, device=values.device)
            slack = MARGIN * (table[-1] - table[0]) + 1e-6
            values = values.contiguous()
            sides = [torch.searchsorted(table, values, right=right) for right in (False, True)]
            rank = float((sides[0] + sides[1]).double().mean()) / (2 * len(table))
            drift = (rank - 0.5) / math.sqrt((1 / len(values) + 1 / self.samples) / 12)
            unlike |= values > table[-1] + slack
            if name != "residual":  # a nearer start is no reason to doubt
                unlike |= values < table[0] - slack
                drift = abs(drift)
            unlike |= bool(drift > DRIFT) | ~values.isfinite()
        return unlike

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Certificate:
        """The certificate that `to_dict` described; refuses one that bounds nothing."""
        found = cls(
            confidence=float(values["confidence"]),
            samples=int(values["samples"]),
            factor=float(values["factor"]),
            quantiles={
                str(name): tuple(map(float, known)) for name, known in values["quantiles"].items()
            },
        )
        sound = 0 < found.confidence < 1 and found.samples >= fewest_samples(found.confidence)
        numbers = [found.factor, *(n for known in found.quantiles.values() for n in known)]
        if not (sound and found.factor > 0 and all(map(math.isfinite, numbers))):
            raise ValueError(f"the certificate is damaged: {values}")
        return found


def features_of(
    residual: Tensor, context: Context, start: State, batched: bool
) -> dict[str, Tensor]:
    """What is looked at in each input, (B,), as logarithms.

    The start's residual and norm, the norm of the context, and its roughness: how much it changes from one position to
    the next, which is where noise shows. Of the context, what belongs to samples.
    """
    found = {"residual": residual, "start": sample_norms(start, batched)}
    count = len(tensors_of(start)[0])
    dense = [
        tensor
        for tensor in tensors_in(context)
        if tensor.layout == torch.strided and tensor.is_floating_point() and tensor.ndim > 1
    ]
    own = {i: tensor for i, tensor in enumerate(dense) if len(tensor) == count}
    if batched and own:
        # A table that is by chance as long as the batch makes for another name, of which nothing was calibrated.
        which = "" if len(own) == len(dense) else f" of {' '.join(map(str, own))}"
        size = torch.stack([sample_norms(tensor) for tensor in own.values()]).norm(dim=0)
        steps = [t.diff(dim=-1 if t.ndim == 4 else 1) for t in own.values()]
        rough = torch.stack([sample_norms(step) for step in steps]).norm(dim=0)
        found[f"context{which}"] = size
        found[f"roughness{which}"] = rough / size.clamp_min(1e-30)
    return {name: values.double().clamp_min(1e-300).log() for name, values in found.items()}


def warn_of_unlike(unlike: Tensor) -> None:
    """Say that a bound may not hold."""
    count = int(unlike.sum())
    if count > TOLERATED * len(unlike):
        warnings.warn(
            f"{count} of {len(unlike)} inputs are unlike those that the student was calibrated on: their bound may not "
            "hold. Calibrate on inputs like these.",
            UserWarning,
            stacklevel=4,
        )
