"""Table 2 of the paper: image classification, implicit and explicit, at 1, 2, 4 and 8 evaluations."""

from __future__ import annotations

from cdeq.evaluation import Results
from cdeq_experiments.image_cells import ImageCell
from cdeq_experiments.image_scales import SCALES
from cdeq_experiments.options import ExperimentError, Options
from cdeq_experiments.pieces import table_of
from cdeq_experiments.table2_claims import write_table2


def table2(options: Options) -> Results:
    """Image classification; table2.json, table2.md and table2.png."""
    plans = {plan.name: plan for plan in SCALES[options.scale]}
    if unknown := sorted(set(options.only) - set(plans)):
        raise ExperimentError(
            f"table2 has no {unknown[0]!r} at scale {options.scale}; there are {', '.join(plans)}"
        )
    chosen = [plan for name, plan in plans.items() if not options.only or name in options.only]
    for plan in chosen:
        plan.require(options.data)
    results = table_of([ImageCell(plan=plan, options=options) for plan in chosen], "table2")
    write_table2(results, options.out)
    return results
