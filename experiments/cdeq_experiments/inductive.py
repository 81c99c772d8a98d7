"""Inductive use: teacher and students made on one part of a graph, used on the whole with its unseen nodes.

Also, what a student loses when it is distilled on parts of the graph, as graphs larger than memory must be.
"""

from __future__ import annotations

from dataclasses import replace

from cdeq_experiments.configs import table_configs
from cdeq_experiments.configs.base import Counts, SuiteConfig
from cdeq_experiments.tables import Experiment, measure_tables, same_equilibrium

UNSEEN = 0.5
"""Share of the test nodes that teacher and students never see, neither their features nor their edges."""


def inductive_configs(scale: str) -> list[SuiteConfig]:
    """The graphs with unseen nodes; students are distilled on what is seen, on parts of it, or on all."""
    found = []
    for config in table_configs("graph", scale):
        at = config.counts.shown
        anchored = replace(config.students["anchored"], calibrated_steps=None)
        students = {"paper": config.students["paper"], "anchored": anchored}
        for inputs in ("parts", "samples", "whole"):
            students[f"anchored_{inputs}"] = replace(anchored, inputs=inputs)
        counts = Counts(shown=at, methods=at, solvers=at, timed=at)
        hidden = replace(config, data=replace(config.data, unseen=UNSEEN))
        found.append(hidden.with_students(students, counts, solvers=("picard", "anderson")))
    return found


INDUCTIVE = Experiment(
    name="inductive",
    layout="table",
    configs=inductive_configs,
    measure=measure_tables,
    more=same_equilibrium,
)
