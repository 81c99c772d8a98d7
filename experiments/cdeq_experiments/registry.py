"""What can be reproduced, by name: the paper's tables and figures, and ours."""

from __future__ import annotations

from cdeq_experiments.ablations import ABLATIONS
from cdeq_experiments.chains import CHAIN_TABLE
from cdeq_experiments.configs import table_configs
from cdeq_experiments.configs.base import KINDS
from cdeq_experiments.figures import FIGURES
from cdeq_experiments.inductive import INDUCTIVE
from cdeq_experiments.options import Options
from cdeq_experiments.suites import make_suites
from cdeq_experiments.tables import TABLES, ZOO, Experiment
from cdeq_experiments.teachers import TEACHERS

RESIDUALS, *REST = FIGURES
EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        *(*TABLES, INDUCTIVE, CHAIN_TABLE, TEACHERS, RESIDUALS),
        *(ablation.experiment() for ablation in ABLATIONS),
        *(*REST, ZOO),
    )
}
"""In the order in which `all` does them."""


def require_data(options: Options) -> None:
    """Refuse at once, not after hours, what `all` has no data for."""
    for kind in KINDS:
        make_suites(table_configs(kind, options.scale), options)
