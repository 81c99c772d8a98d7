"""A task that needs depth by nature: chains whose label stands at one end, and what a start that sees far can do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from cdeq.gradients import Implicit
from cdeq.models.graph.start import FarStart
from cdeq.solvers import Anderson
from cdeq.training import TeachConfig
from cdeq_experiments.configs import base
from cdeq_experiments.configs.graphs import GraphBudget, graph_config
from cdeq_experiments.suites.contract import Model
from cdeq_experiments.suites.graphs import CHAINS
from cdeq_experiments.tables import Experiment, measure_tables, same_equilibrium

TINY = GraphBudget(teacher_updates=20, student_updates=20, explicit_updates=20)
USUAL = GraphBudget(teacher_updates=60, student_updates=150, explicit_updates=150)
FEW, MANY = (1, 2, 5, 10, 20, 50, 100), (200, 500, 1000)
"""Evaluations at which all are scored and timed, and at which solvers are scored."""
SOLVER = Anderson(window=10)
EXPLICIT = {"gcn": (3e-3, {"layers": 12, "width": 16}), "gat": (1e-2, {"layers": 16, "heads": 2})}
"""Learning rate and arguments of each."""


@dataclass(frozen=True, kw_only=True)
class FarStudent(base.StudentConfig):
    """A student whose start sees so many `hops` far."""

    hops: int

    def start_network(self, teacher: Model) -> nn.Module:
        width, reach = teacher.config["width"], teacher.config["kappa"]
        return FarStart(width, hops=self.hops, reach=reach, nonnegative=True)


def chain_config(
    length: int, budget: GraphBudget, *, distilled: bool, kappa: float, solved: tuple[int, ...]
) -> base.SuiteConfig:
    """Chains of a length; settings were chosen on the validation nodes of seed 0 at lengths 20 and 100.

    `distilled`: the IGNN has students. `kappa` bounds IGNN, and EIGNN as its gamma; solvers are scored at `solved`.
    """
    config = graph_config(f"Chains of {length}", f"chains-{length}", budget, width=16)
    fit = replace(
        config.teacher.teaching.fit, learning_rate=3e-2, weight_decay=0.0, checkpoint_every=20
    )
    gradient = Implicit(solver=SOLVER, tol=1e-3, max_steps=150)
    teaching = TeachConfig(fit=fit, solver=SOLVER, gradient=gradient, tol=1e-5, depths=(150, 150))
    kept: dict[str, Any] = {"width": 16, "memory": 1.0, "bias": False}
    ignn = replace(config.teacher, teaching=teaching, arguments={**kept, "kappa": kappa})
    eignn = replace(config.others["eignn"], teaching=teaching)
    students = {name: config.students[name] for name in base.CORRECTED if distilled}
    far = {
        f"{name}_far": FarStudent(**vars(one), hops=3 * length // 2)
        for name, one in students.items()
    }
    return replace(
        config,
        teacher=ignn,
        others={
            "ignn_published": replace(
                ignn, title="IGNN, kappa 0.9", arguments={**kept, "kappa": 0.9}
            ),
            "eignn": replace(eignn, arguments={"width": 16, "gamma": kappa}),
            "eignn_published": replace(
                eignn, title="EIGNN, gamma 0.8", arguments={"width": 16}, closed_form=None
            ),
        },
        students=students | far,
        recording={"endpoint": base.RecordConfig(batches=None, max_steps=2000)},
        tolerances=base.Tolerances(reference=1e-6, max_steps=3000, exact=1e-7, everyday=1e-5),
        counts=base.Counts(shown=solved, methods=FEW, solvers=solved, timed=FEW),
        solvers=("picard", "anderson"),
        learned_solver=None,
        few_step=None,
        explicit={
            name: replace(
                config.explicit[name],
                arguments={"dropout": 0.0, **own},
                fit=replace(config.explicit[name].fit, learning_rate=rate, weight_decay=0.0),
            )
            for name, (rate, own) in EXPLICIT.items()
        },
    )


def chain_configs(scale: str) -> list[base.SuiteConfig]:
    lengths: tuple[int, ...] = CHAINS[1:]
    given: dict[str, Any] = {"budget": USUAL, "kappa": 0.999, "solved": FEW + MANY}
    if scale == "tiny":
        lengths, given = CHAINS[:2], {"budget": TINY, "kappa": 0.95, "solved": FEW}
    return [chain_config(n, distilled=n == lengths[-1], **given) for n in lengths]


CHAIN_TABLE = Experiment(
    name="chains",
    layout="chains",
    configs=chain_configs,
    measure=measure_tables,
    more=lambda configs: same_equilibrium(configs[-1:]),
)
