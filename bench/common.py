"""What the benchmarks share: their options, and how measurements are shown and written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cdeq.evaluation import write_measurements
from cdeq.files import atomic_write_text


@dataclass(frozen=True, kw_only=True)
class Options:
    threads: int = 1
    """Threads of torch."""
    repeats: int = 15
    """Of which the median counts."""
    json: Path | None = None
    """Write the measurements here."""


class Measurement:
    """From the first random draw to the file: how loaded the machine was, and what was found."""

    def __init__(self, options: Options):
        torch.set_num_threads(options.threads)
        torch.manual_seed(0)
        self.options, self.load = options, os.getloadavg()

    def finish(self, rows: list[dict[str, Any]], markdown: str | None = None, **about: Any) -> None:
        """Say how loaded the machine was, and write what `options.json` asks for, the table beside it."""
        after = os.getloadavg()
        print(f"threads {self.options.threads}, load {self.load[0]:.1f} to {after[0]:.1f}")
        if self.options.json is None:
            return
        about |= {"load_before": self.load, "load_after": after, "repeats": self.options.repeats}
        write_measurements(self.options.json, rows, **about)
        if markdown is not None:
            atomic_write_text(self.options.json.with_suffix(".md"), markdown)


def markdown_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in lines)]) + "\n"
