"""Picard iteration, also known as fixed-point or forward iteration."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cdeq.solvers.base import check_mixing


@dataclass(frozen=True, kw_only=True)
class Picard:
    """z_{k+1} = (1 - beta) z_k + beta f(z_k). `mixing` is beta; below 1 it damps oscillation."""

    mixing: float = 1.0

    def __post_init__(self) -> None:
        check_mixing(self.mixing)

    def init(self, z: Tensor) -> None:
        return None

    def update(
        self, k: int, z: Tensor, fz: Tensor, residual: Tensor, memory: None
    ) -> tuple[Tensor, None]:
        return (fz if self.mixing == 1.0 else z.lerp(fz, self.mixing)), None
