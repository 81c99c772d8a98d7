"""The boundary coefficients: all student at eps, nothing of it left at T (paper, eq:cm_definition)."""

from __future__ import annotations


def skip_coefficient(t: float, *, gamma: float, eps: float, end: float) -> float:
    """c_skip(t) = ((t - eps) / (T - eps))^gamma."""
    return ((t - eps) / (end - eps)) ** gamma


def out_coefficient(t: float, *, gamma: float, eps: float, end: float) -> float:
    """c_out(t) = 1 - c_skip(t): the share of the student's output, or, anchored, of its change of weights."""
    return 1.0 - skip_coefficient(t, gamma=gamma, eps=eps, end=end)
