"""Suites by kind of data."""

from __future__ import annotations

from dataclasses import replace

from cdeq.data import MissingDataError
from cdeq.training import process_rank
from cdeq_experiments.configs import select
from cdeq_experiments.configs.base import Kind, SuiteConfig
from cdeq_experiments.options import ExperimentError, Options
from cdeq_experiments.suites.base import Suite
from cdeq_experiments.suites.graphs import GraphSuite
from cdeq_experiments.suites.images import ImageSuite
from cdeq_experiments.suites.text import TextSuite

KINDS: dict[Kind, type[Suite]] = {"text": TextSuite, "images": ImageSuite, "graph": GraphSuite}


def make_suites(configs: list[SuiteConfig], options: Options) -> list[Suite]:
    """The suites of those data sets that are asked for, all of them with one seed before the next.

    Missing data are refused here, before hours of work; an optional data set without files is left out, unless it
    is named.
    """
    suites, seeds = [], options.seeds
    for config in select(configs, options.only):
        if config.kind == "graph" and process_rank()[1] > 1:
            raise ExperimentError(
                f"{config.title}: a graph is one state, which processes cannot share; without torchrun, --jobs "
                "does several trainings at a time (--only names other data)"
            )
        config = config.with_methods(options.methods) if options.methods else config
        if options.students_only:
            config = replace(config, others={}, few_step=None, explicit={})
        suite = KINDS[config.kind](config=config, options=options, seeds=seeds)
        try:
            suite.require_data()
        except MissingDataError:
            if config.optional and config.name not in options.only:
                continue
            raise
        suites.append(suite)
    seeded = [suite for suite in suites if suite.config.seeded_teacher]
    each = [replace(suite, teacher_seed=seed, seeds=(seed,)) for seed in seeds for suite in seeded]
    return [suite for suite in suites if not suite.config.seeded_teacher] + each
