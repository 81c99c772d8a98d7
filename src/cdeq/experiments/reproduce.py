"""The paper's tables and figures by name; each is run at a scale and writes its files as it goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cdeq.experiments.results import Results
from cdeq.experiments.table3 import run_table3, write_table3


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every experiment is given: the scale, where data are and figures go, how many seeds, what to leave out."""

    scale: str
    data: Path | None
    runs: Path
    out: Path
    seeds: int
    only: tuple[str, ...] = ()
    progress: bool = False
    say: Callable[[str], None] = lambda line: None


def table3(options: Options) -> Results:
    """Node classification."""
    return run_table3(
        options.scale,
        runs=options.runs,
        data=options.data,
        seeds=options.seeds,
        only=options.only,
        progress=options.progress,
        say=options.say,
        kept=lambda results: write_table3(results, options.out),  # type: ignore[arg-type]
    )


EXPERIMENTS: dict[str, Callable[[Options], Results]] = {"table3": table3}
"""What can be reproduced."""
