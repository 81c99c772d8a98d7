"""What the tables 1 to 3 of the paper say, to stand in brackets beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cdeq.evaluation import Results


@dataclass(frozen=True)
class Figure:
    """One row of a table: its metric, seconds a batch, and top-5 accuracy if it has one."""

    metric: float | None = None
    seconds: float | None = None
    top5: float | None = None


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """A table of the paper: `data` it is on, and its rows by our method's name and number of evaluations.

    Ours is under the name whose place it takes: `anderson` solves the teacher, `paper` is the paper's own student.
    """

    data: str
    rows: Mapping[tuple[str, int | None], Figure]

    def figure(self, method: str, steps: int | None) -> Figure:
        """An empty one where the paper has no such row."""
        return self.rows.get((method, steps), Figure())


def _table(data: str, rows: dict[str, dict[int | None, tuple[float, ...]]]) -> PublishedTable:
    """Rows as (metric, seconds) or (top-1, top-5, seconds)."""
    return PublishedTable(
        data=data,
        rows={
            (method, k): Figure(found[0], found[-1], found[1] if len(found) == 3 else None)
            for method, by_steps in rows.items()
            for k, found in by_steps.items()
        },
    )


WIKITEXT_103 = _table(
    "WikiText-103",
    {
        "tcn": {None: (45.2, 0.74)},
        "gcnn": {None: (37.2, 0.30)},
        "awd_qrnn": {None: (33.0, 0.11)},
        "transformer_xl": {None: (24.3, 0.13)},
        "anderson": {1: (255.94, 0.09), 2: (223.40, 0.17), 8: (104.26, 0.65)},
        "hyperdeq": {1: (70.19, 0.73), 2: (51.31, 0.80), 8: (31.37, 1.21)},
        "paper": {1: (47.90, 0.05), 2: (38.98, 0.09), 8: (26.43, 0.37)},
    },
)
IMAGENET = _table(
    "ImageNet",
    {
        "alexnet": {None: (57.0, 80.3, 0.75)},
        "inception_v2": {None: (74.8, 92.2, 1.37)},
        "hrnet": {None: (76.8, 93.4, 1.64)},
        "deq": {1: (1.17, 4.64, 0.48), 2: (8.12, 19.43, 0.67), 8: (64.13, 82.49, 0.85)},
        "hyperdeq": {1: (5.46, 18.11, 1.09), 2: (27.82, 41.59, 1.34), 8: (69.90, 84.12, 2.90)},
        "anderson": {1: (1.44, 4.24, 0.57), 2: (9.70, 23.31, 0.70), 8: (71.29, 89.57, 0.98)},
        "paper": {1: (47.12, 68.71, 0.52), 2: (58.28, 77.10, 0.69), 8: (74.04, 91.45, 0.87)},
    },
)
OGBN_ARXIV = _table(
    "ogbn-arxiv",
    {
        "gcn": {None: (71.56, 0.05)},
        "gat": {None: (71.10, 0.06)},
        "gcnii": {None: (72.74, 0.08)},
        "gpm": {None: (72.89, 0.78)},
        "anderson": {1: (8.61, 0.03), 2: (13.80, 0.05), 5: (45.93, 0.18)},
        "eignn": {1: (11.30, 0.05), 2: (16.37, 0.07), 5: (47.25, 0.13)},
        "mignn": {1: (8.23, 0.06), 2: (15.04, 0.09), 5: (43.30, 0.15)},
        "ignn_solver": {1: (35.32, 0.13), 2: (52.32, 0.15), 5: (65.26, 0.19)},
        "paper": {1: (56.81, 0.05), 2: (67.48, 0.08), 5: (71.40, 0.16)},
    },
)
OGBN_PRODUCTS = _table(
    "ogbn-products",
    {
        "gcn": {None: (75.64, 1.30)},
        "gat": {None: (79.45, 1.46)},
        "gcnii": {None: (80.20, 1.43)},
        "gpm": {None: (82.62, 5.54)},
        "anderson": {1: (9.12, 0.73), 2: (11.25, 1.42), 10: (38.87, 6.56)},
        "eignn": {1: (11.96, 0.95), 2: (14.65, 1.02), 10: (40.29, 1.58)},
        "mignn": {1: (8.71, 0.98), 2: (11.53, 1.19), 10: (36.89, 2.87)},
        "ignn_solver": {1: (37.41, 2.19), 2: (54.04, 4.23), 10: (68.47, 9.30)},
        "paper": {1: (60.15, 1.39), 2: (69.68, 1.86), 10: (76.55, 3.85)},
    },
)

TABLES: dict[str, tuple[PublishedTable, ...]] = {
    "table1": (WIKITEXT_103,),
    "table2": (IMAGENET, IMAGENET),
    "table3": (OGBN_ARXIV, OGBN_PRODUCTS),
}
"""By experiment: what our first data set has in its brackets, and our second."""


def published_beside(results: Results, dataset: str) -> PublishedTable | None:
    """The paper's table that stands in brackets beside one of our data sets."""
    pairs = zip(results.datasets, TABLES.get(results.experiment, ()), strict=False)
    return dict(pairs).get(dataset)


def bracketed(figure: float | None) -> str:
    """To stand behind our own figure; nothing where the paper has none."""
    return "" if figure is None else f" ({figure:g})"
