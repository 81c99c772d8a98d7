"""What a kind of data fills in: what its data are, which models suit it, how an answer is scored.

Text, images and graphs do. Everything else about a suite is the same for all of them, and is in `base`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from cdeq import evaluation
from cdeq.equilibrium.states import State
from cdeq.evaluation import Method, Metric, Quality
from cdeq.models.learned_solvers import LearnedSolver
from cdeq.placement import moved
from cdeq.solvers import Anderson, solve_model
from cdeq.training import own_part
from cdeq.training.batches import FirstBatches, moved_batches
from cdeq.training.segments import CarriedMemory
from cdeq.training.task_loss import TaskLoss, cross_entropy
from cdeq_experiments.configs.base import SuiteConfig
from cdeq_experiments.options import Options

Model = Any
"""A module; of those with an equilibrium, one that keeps the contract."""
Batch = tuple[Any, Tensor]
Key = dict[str, Any]
"""What something depends on: its run is kept under the hash of it."""
Keep = Callable[[int, State], None]
"""Given the number of a test batch and its state."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """What a suite reads: training batches by number, the others once, in order; `valid` may be empty.

    `digest` changes with the data; `sizes` are arguments of all models that the data give. `own_at`: this process's
    part of a training batch, where the rest of it need not be read.
    """

    digest: str
    sizes: dict[str, int]
    batch_at: Callable[[int], Batch]
    valid: Callable[[], Iterable[Batch]]
    test: Callable[[], Iterable[Batch]]
    own_at: Callable[[int], Batch] | None = None

    def own_batch_at(self, update: int) -> Batch:
        """This process's part of a training batch."""
        return own_part(self.batch_at(update)) if self.own_at is None else self.own_at(update)


@dataclass(frozen=True, kw_only=True)
class DataContract(ABC):
    """A data set by its configuration, and what its kind has to say of it."""

    config: SuiteConfig
    options: Options

    def __getstate__(self) -> dict[str, Any]:
        """As it is sent to another process: without what was read or trained."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    # The data.

    @abstractmethod
    def require_data(self) -> None:
        """Refuse, by name, data whose files are not there; nothing is read."""

    @abstractmethod
    def open_data(self) -> Data: ...

    @cached_property
    def data(self) -> Data:
        """What `open_data` reads, where everything is computed."""
        found, here = self.open_data(), self.options.placement.device
        return replace(
            found,
            batch_at=moved_batches(found.batch_at, here),
            valid=lambda: (moved(batch, here) for batch in found.valid()),
            test=lambda: (moved(batch, here) for batch in found.test()),
        )

    @property
    @abstractmethod
    def metrics(self) -> dict[str, Metric]:
        """By their names in a row: `metric`, and `top5` where there is one."""

    def recorded_batches(self, mode: str, inputs: str) -> Sequence[Batch]:
        """What is distilled from: the first training batches, as many as the configuration of the mode says."""
        return FirstBatches(self.data.batch_at, self.config.recording[mode].batches or 0)

    # Its models.

    def task_loss(self, model: Model) -> TaskLoss:
        return cross_entropy

    def carried_memory(self, model: Model) -> CarriedMemory | None:
        """What an update leaves for the next one, where batches follow on each other."""
        return None

    @abstractmethod
    def explicit_objective(self, model: Model) -> nn.Module:
        """What the training of an explicit model minimises."""

    @abstractmethod
    def build_learned_solver(self, teacher: Model) -> LearnedSolver: ...

    # Scores and seconds.

    @torch.no_grad()
    def converge(
        self, model: Model, batches: Iterable[Batch], tol: float, keep: Keep | None = None
    ) -> dict[str, Any]:
        """Metrics, mean steps and mean residual where `tol` is met; `keep` is given every state.

        States that are kept are solved on, where the reference is not exact enough.
        """
        limits, steps, residuals = self.config.tolerances, [], []
        parts: dict[str, list[tuple[float, int]]] = {name: [] for name in self.metrics}
        for number, (x, y) in enumerate(batches):
            context = model.inject(x)
            solve = partial(solve_model, model, context, Anderson(), max_steps=limits.max_steps)
            found = solve(tol=tol)
            output = model.readout(found.state, context)
            for name, metric in self.metrics.items():
                parts[name].append(metric.part(output, y))
            steps.append(found.steps.double())
            residuals.append(found.residual.double())
            if keep is not None:
                exact = limits.exact
                keep(number, (solve(tol=exact, z0=found.state) if exact else found).state)
        scores = {name: metric.score(parts[name]) for name, metric in self.metrics.items()}
        within = (torch.cat(residuals) <= evaluation.CONVERGED).double()
        means = {"steps": torch.cat(steps), "residual": torch.cat(residuals), "converged": within}
        return {**scores, **{name: float(values.mean()) for name, values in means.items()}}

    def score_method(
        self, method: Method, model: Model, equilibria: Any, counts: tuple[int, ...], told: Any
    ) -> dict[int, Quality]:
        """Scores on the test data at each count; without equilibria no distances."""
        data, metrics = list(self.data.test()), self.metrics
        given = (method, model, data, equilibria, metrics["metric"], counts)
        return evaluation.measure_quality(*given, top5=metrics.get("top5"), progress=told)

    @torch.no_grad()
    def score_explicit(self, model: Callable[[Any], Tensor]) -> dict[str, Any]:
        """Metrics, on the test data, of a model that gives outputs."""
        outputs = [(model(x), y) for x, y in self.data.test()]
        return {
            name: metric.score([metric.part(*pair) for pair in outputs])
            for name, metric in self.metrics.items()
        }

    @abstractmethod
    def probes(self, teacher: Model) -> Iterator[Any]:
        """Some test inputs, on which residuals are measured."""

    def certified_input(self, teacher: Model) -> Any:
        """The test input that certified solving is shown on."""
        return list(self.probes(teacher))[-1]

    @abstractmethod
    def timed_input(self) -> Any:
        """What all methods are timed on."""

    def finish(self, model: Model, output: Tensor, x: Any) -> Tensor:
        """From an output to what a score takes; its seconds count."""
        return output

    def explicit_output(self, model: Model) -> Callable[[Any], Tensor]:
        """The way of an explicit model from an input to its output."""
        return model

    @abstractmethod
    def sample_input(self) -> Any:
        """A small input, on which a pretrained model keeps its answers."""
