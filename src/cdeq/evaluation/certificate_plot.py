"""The plot to look at first: what is known of the error against evaluations, and how much of it is true."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdeq.consistency.certify import CertifiedSolution
from cdeq.evaluation.plot import INK, SETTINGS, require_matplotlib

LEVELS = (
    ("residual", "#8a8f98", "measured"),
    ("error", "#1f6feb", "estimated"),
    ("bound", "#c2410c", ""),
)


def plot_certificate(
    result: CertifiedSolution,
    path: str | os.PathLike[str],
    *,
    distances: Tensor | None = None,
) -> Path:
    """Draw residual, estimated error and bound of a solve against evaluations: medians, and the middle 90% of samples.

    `distances` (evaluations, B): the true ones, where they are known.
    """
    matplotlib, new_figure = require_matplotlib()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    history = result.history.double().cpu()
    counts = range(result.evaluations - len(history) + 1, result.evaluations + 1)
    with matplotlib.rc_context(SETTINGS):
        figure = new_figure(figsize=(5.2, 3.4), layout="constrained")
        panel = figure.subplots()
        for i, (name, colour, how) in enumerate(LEVELS):
            if name == "bound" and result.bound is None:
                continue
            how = how or str(result.bound_kind)
            _draw(panel, counts, history[:, :, i], colour, f"{name} ({how})")
        if distances is not None:
            _draw(panel, counts, distances.double().cpu()[: len(history)], INK, "distance (true)")
        panel.set_yscale("log")
        panel.set_xlabel("evaluations of f", color=INK)
        panel.set_ylabel("relative to the state", color=INK)
        panel.grid(color=INK, alpha=0.13, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False)
        figure.savefig(path, dpi=160)
    return path


def _draw(panel: Any, counts: range, values: Tensor, colour: str, label: str) -> None:
    """The median over samples, and a band; where nothing is known yet there is a gap."""
    finite = torch.where(values.isfinite() & (values > 0), values, torch.nan)
    low, middle, high = (finite.nanquantile(q, dim=1).tolist() for q in (0.05, 0.5, 0.95))
    panel.plot(list(counts), middle, color=colour, label=label, linewidth=1.6)
    panel.fill_between(list(counts), low, high, color=colour, alpha=0.15, linewidth=0)
