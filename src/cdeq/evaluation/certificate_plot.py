"""The plot to look at first: what is known of the error against evaluations, and how much of it is true."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdeq.consistency.certify import CertifiedSolution
from cdeq.consistency.scores import Exact, score
from cdeq.consistency.student import Student
from cdeq.equilibrium.contract import Input
from cdeq.evaluation.plot import INK, SETTINGS, require_matplotlib, write_figure

LEVELS: dict[str, dict[str, Any]] = {
    "residual": {"color": "#8a8f98", "linewidth": 1.4},
    "bound": {"color": "#c2410c", "linewidth": 2.6},
    "error": {"color": "#1f6feb", "linewidth": 1.4, "linestyle": (0, (4, 2))},
    "distance": {"color": INK, "linewidth": 1.4},
}
"""How each is drawn, the last on top: the error may lie on the bound."""
HISTORY = ("residual", "error", "bound")
"""What the history of a solution has, in order."""


def plot_certificate(
    result: CertifiedSolution,
    path: str | os.PathLike[str],
    *,
    distances: Tensor | None = None,
) -> Path:
    """Draw residual, estimated error and bound of a solve against evaluations: medians over the samples.

    `distances` (K, B): the true ones of the first states on the way, as `true_distances` gives them. A sample that has
    stopped stays at its last values.
    """
    matplotlib, new_figure = require_matplotlib()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    history = result.history.double().cpu()
    ahead = result.evaluations - len(history)
    counts = list(range(ahead + 1, result.evaluations + 1))
    drawn = dict(zip(HISTORY, history.unbind(2), strict=True))
    if result.bound is None:
        del drawn["bound"]
    if distances is not None:
        rows = torch.arange(len(history))[:, None].minimum(result.steps.cpu()[None] - ahead - 1)
        known = distances.double().cpu().gather(0, rows.clamp_max(len(distances) - 1))
        drawn["distance"] = known.where(rows < len(distances), torch.nan)
    said = {"residual": "measured", "error": "estimated", "distance": "true"}
    said["bound"] = str(result.bound_kind)
    if result.confidence is not None:
        said["bound"] += f", {result.confidence:.0%}"
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": "cdeq"}):
        figure = new_figure(figsize=(5.2, 3.4), layout="constrained")
        panel = figure.subplots()
        for name in (one for one in LEVELS if one in drawn):
            label = f"{name} ({said[name]})"
            panel.plot(counts, _medians(drawn[name]), label=label, **LEVELS[name])
        _finish(panel, matplotlib)
        is_svg = path.suffix == ".svg"
        metadata = {"Date": None} if is_svg else None
        face = "none" if is_svg else "white"
        write_figure(figure, path, dpi=160, facecolor=face, metadata=metadata)
    return path


def true_distances(student: Student, x: Input) -> Tensor:
    """Those (K, B) of the states that `student.solve(x)` passes through, to equilibria solved for much more tightly."""
    return score(student, x, Exact(student)).distance


def _medians(values: Tensor) -> list[float]:
    """Of the samples after each evaluation; where nothing is known yet, NaN: a gap."""
    return torch.where(values.isfinite() & (values > 0), values, torch.nan).nanmedian(1)[0].tolist()


def _finish(panel: Any, matplotlib: Any) -> None:
    """Scales, labels and title."""
    title = {"loc": "left", "fontsize": 9.5, "weight": "bold", "color": INK}
    panel.set_title("What a solve knows of its error", **title)
    panel.set_yscale("log")
    panel.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    panel.set_xlabel("evaluations of f", color=INK)
    panel.set_ylabel("relative to the state", color=INK)
    panel.set_facecolor("none")
    panel.grid(color=INK, alpha=0.13, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(INK)
    panel.tick_params(which="both", colors=INK)
    panel.legend(frameon=False, labelcolor=INK)
