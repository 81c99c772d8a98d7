"""What can be reproduced, by name: the paper's tables and figures, and ours."""

from __future__ import annotations

from collections.abc import Callable

from cdeq.experiments.inductive import inductive
from cdeq.experiments.options import Options
from cdeq.experiments.results import Results
from cdeq.experiments.table1 import table1
from cdeq.experiments.table3 import SHOWN as TABLE_COUNTS
from cdeq.experiments.table3 import table3

EXPERIMENTS: dict[str, Callable[[Options], Results]] = {
    "table1": table1,
    "table3": table3,
    "inductive": inductive,
}
"""Each runs at the scale of its options, and writes its JSON, Markdown and PNG as it goes."""

__all__ = ["EXPERIMENTS", "TABLE_COUNTS"]
