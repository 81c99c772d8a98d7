"""What can be reproduced, by name: the paper's tables and figures, and ours."""

from __future__ import annotations

from collections.abc import Callable

from cdeq.evaluation import Results
from cdeq_experiments import figures, image_cells, table3, text_cells
from cdeq_experiments.graph_cells import plans_of
from cdeq_experiments.graph_teachers import teachers
from cdeq_experiments.grid_run import grid_experiment
from cdeq_experiments.grids import GRIDS
from cdeq_experiments.image_scales import SCALES as IMAGES
from cdeq_experiments.inductive import inductive
from cdeq_experiments.options import Options
from cdeq_experiments.table1 import table1
from cdeq_experiments.table2 import table2
from cdeq_experiments.text_plans import SCALES as TEXTS

EXPERIMENTS: dict[str, Callable[[Options], Results]] = {
    "table1": table1,
    "table2": table2,
    "table3": table3.table3,
    "inductive": inductive,
    "teachers": teachers,
    "residuals": figures.residuals,
    **{name: grid_experiment(name) for name in GRIDS},
    "cost": figures.cost,
    "overhead": figures.overhead,
    "certified": figures.certified,
}
"""Each runs at the scale of its options, and writes its JSON, Markdown and PNG as it goes."""

TABLE_COUNTS: dict[str, tuple[int, ...]] = {
    "table1": text_cells.SHOWN,
    "table2": image_cells.SHOWN,
    "table3": table3.SHOWN,
    "inductive": table3.SHOWN,
    "teachers": table3.SHOWN,
}
"""The numbers of evaluations that each shows in the terminal."""


def require_data(options: Options) -> None:
    """Refuse at once, not after hours, what `all` has no data for."""
    TEXTS[options.scale].require(options.data)
    for images in IMAGES[options.scale]:
        images.require(options.data)
    for graph in plans_of(options):
        graph.require(options.data)
