"""Distillation: a teacher and data in, a student out."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cdeq.consistency.certify import plan_handover
from cdeq.consistency.parts import check_teacher, try_teacher
from cdeq.consistency.recipes import Recipe
from cdeq.consistency.report import describe_distillation
from cdeq.consistency.shares import Shares
from cdeq.consistency.stages import Stages, StudentTraining
from cdeq.consistency.student import Student
from cdeq.equilibrium.contract import check_contract
from cdeq.placement import Placement, Precision, beside, dtype_beside, representative_tensor
from cdeq.solvers.base import MAX_STEPS, TOL, Solver
from cdeq.training.log import Progress
from cdeq.training.loop import FitConfig
from cdeq.training.parallel import from_main_process, process_rank
from cdeq.training.task_loss import TaskLoss, cross_entropy
from cdeq.trajectories import TrajectoryBatch, TrajectoryStore, record
from cdeq.trajectories.nesting import check_loader, split_batch

LOGGER = logging.getLogger("cdeq")

STEPS = {"full": MAX_STEPS, "endpoint": 20 * MAX_STEPS}
"""Budget of a recorded solve. One to an equilibrium stops when its estimated error is within the tolerance."""
NOT_CONVERGED = 0.1
"""A recorded equilibrium with a larger residual has not converged."""


def distill(
    teacher: nn.Module,
    data: Iterable[Any] | TrajectoryStore,
    *,
    recipe: str | Recipe = "corrected",
    fit: FitConfig | None = None,
    folder: str | Path | None = None,
    solver: Solver | None = None,
    max_steps: int | None = None,
    tol: float = TOL,
    task_loss: TaskLoss | None = cross_entropy,
    start_network: nn.Module | None = None,
    correction: nn.Module | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    precision: Precision = "fp32",
    progress: bool | Progress | None = None,
) -> Student:
    """Distil a teacher into a student that needs one to a few evaluations.

    `teacher`: any equilibrium model (the four methods) that is an `nn.Module`.
    `data`: batches `x` or `(x, y)`, recorded first with `solver`, `max_steps` and `tol`; or a store recorded
        before, which has its own. A pair is always `(x, y)`: wrap an input that is itself a pair in one more
        tuple. Labels are used only by recipes with a task loss, and may be absent.
    `max_steps`: of a recorded solve; unless given, as many as its estimated error takes, within reason.
    `recipe`: a name or a `Recipe`. `fit`: updates, learning rate and the rest of the training.
    `folder`: where recordings, checkpoints and the log go; the same call on the same folder resumes where an
        earlier one was cut short, and ends with the same weights. A finished recording there is used as it is. Without
        a folder nothing is kept.
    `device`: where to compute, if not where the teacher is; the teacher is moved there. `precision`: "bf16" or "fp16"
        for products inside teacher and student in half precision while the student is trained. Recordings are made in
        single precision, since what a student is measured by should be exact.
    `progress`: True draws bars on standard error; or a function `(done, total, metrics)`.
    What the student rests on (how exact the targets are, whether plain iteration converges, which weights take part)
    is in `student.report`, and one line at level INFO of the log `cdeq`.
    Under torchrun every process makes this same call; each takes its share of every batch.
    """
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.from_name(recipe)
    check_teacher(teacher, needs_weights=recipe.changes_weights)
    if not isinstance(fit, FitConfig | None):
        raise TypeError(f"fit is a cdeq.FitConfig, as FitConfig(updates=300), not {fit!r}")
    if not isinstance(data, TrajectoryStore):
        check_loader(data)
    Placement.of(teacher, device, precision, training=True)
    rank, world = process_rank()
    place = Path(folder) if folder is not None else None
    with ExitStack() as stack:
        progress = progress if rank == 0 else None
        if not isinstance(data, TrajectoryStore):
            if place is None and world > 1:
                raise ValueError(
                    "under torchrun give a folder that all processes see, or a recorded store"
                )
            room = place or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cdeq-")))
            path = room / f"trajectories-{recipe.store_mode}"
            steps = max_steps or STEPS[recipe.store_mode]
            data = _record(teacher, data, path, recipe, solver, steps, tol, progress)
        data.check(teacher=teacher)
        _check_store(data, world)
        if recipe.store_mode == "full" and data.manifest.mode != "full":
            raise ValueError(
                f"recipe {recipe.name!r} trains on the teacher's states: record with mode='full'"
            )
        training = StudentTraining(
            config=fit or FitConfig(),
            folder=place,
            task_loss=task_loss,
            seed=seed,
            precision=precision,
            progress=progress,
        )
        return _fit_student(teacher, data, recipe, (start_network, correction), training)


def _check_store(store: TrajectoryStore, world: int) -> None:
    """Refuse batches that the processes cannot share; warn of a teacher that did not converge."""
    if world > 1:
        if not store.manifest.batched:
            raise ValueError("a state without a batch axis cannot be shared between processes")
        uneven = sorted({size for size in store.sizes() if size % world})
        if uneven:
            raise ValueError(
                f"batches of {', '.join(map(str, uneven))} samples cannot be shared evenly by "
                f"{world} processes; drop the last batch, or change the batch size"
            )
    share = store.unconverged(NOT_CONVERGED)
    if share > 0.5:
        warnings.warn(
            f"{share:.0%} of the recorded equilibria have a residual above {NOT_CONVERGED:g}: the teacher "
            "does not converge within the budget, and its student learns from states that are not equilibria",
            stacklevel=3,
        )


def _record(
    teacher: nn.Module,
    loader: Iterable[Any],
    path: Path,
    recipe: Recipe,
    solver: Solver | None,
    max_steps: int,
    tol: float,
    progress: bool | Progress | None,
) -> TrajectoryStore:
    """What the recipe needs of the teacher, recorded by all processes."""
    return record(
        check_contract(teacher),
        _Tried(loader, teacher),
        path,
        solver=solver,
        max_steps=max_steps,
        tol=tol if recipe.store_mode == "endpoint" else 0.0,
        mode=recipe.store_mode,
        dtype=torch.promote_types(representative_tensor(teacher).dtype, torch.float32),
        progress=progress,
    )


class _Tried:
    """A loader whose first batch is tried on the teacher, so that what does not fit is said in words, and at once."""

    def __init__(self, loader: Iterable[Any], teacher: nn.Module):
        self.loader, self.teacher = loader, teacher

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        tried = False
        for batch in self.loader:
            if not tried:
                x, _ = split_batch(batch)
                try_teacher(self.teacher, beside(self.teacher, x))
                tried = True
            yield batch


def _fit_student(
    teacher: nn.Module,
    store: TrajectoryStore,
    recipe: Recipe,
    networks: tuple[nn.Module | None, nn.Module | None],
    training: StudentTraining,
) -> Student:
    rank, _ = process_rank()
    weight = representative_tensor(teacher)
    dtype = _dtype_of_states(teacher, store)

    def placed(batch: TrajectoryBatch) -> TrajectoryBatch:
        return batch.to(weight.device, dtype)

    with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
        torch.manual_seed(training.seed)
        student = Student.for_example(teacher, recipe, placed(store[0]).x, *networks).train()
    student.report = describe_distillation(student, store, placed(store[0]), training.task_loss)
    if rank == 0:
        LOGGER.info("distilling %s: %s", type(teacher).__name__, student.report)
    _check_labels(student, training.task_loss, placed(store[0]))
    shares = Shares(store, placed, student, judges=recipe.selection, seed=training.seed)
    undone = Stages(student, shares, training, known_to=target_precision(store)).run()
    if undone:
        student.report = replace(student.report, undone=undone)
        if rank == 0:
            LOGGER.info("distilled %s: %s", type(teacher).__name__, student.report.taken_back)
    student.eval().requires_grad_(False)
    if rank == 0:
        inputs = [placed(store[i]).x for i in range(min(2, len(store)))]
        student.plan = plan_handover(student, inputs)
    student.plan = from_main_process(student.plan)
    return student


@torch.no_grad()
def _dtype_of_states(teacher: nn.Module, store: TrajectoryStore) -> torch.dtype:
    """That of the weights, or of a teacher without weights that of its inputs."""
    weight = representative_tensor(teacher)
    _, start = try_teacher(teacher, store[0].to(weight.device, weight.dtype).x)
    return dtype_beside(teacher, start)


def _check_labels(student: Student, task_loss: TaskLoss | None, batch: TrajectoryBatch) -> None:
    """Refuse a recipe that asks for classes of an output that has none."""
    recipe = student.recipe
    if not (recipe.agreement or (recipe.lambda_2 and task_loss is cross_entropy)):
        return
    with torch.no_grad():
        output = student.teacher.readout(batch.endpoint, student.prepare(batch.x).base)
    field = "agreement" if recipe.agreement else "lambda_2"
    if output.ndim == 4:
        raise ValueError(
            f"{field} is for a readout of logits (..., classes), and this one is an image "
            f"{tuple(output.shape)}: set it to 0, or give a task_loss of your own"
        )
    if recipe.lambda_2 and batch.y is not None and batch.y.is_floating_point():
        raise ValueError(
            f"lambda_2 uses cross entropy, which takes classes, and the labels are {batch.y.dtype}: "
            "give a task_loss of your own, or set lambda_2 to 0"
        )


def target_precision(store: TrajectoryStore) -> float:
    """The relative distance below which the recorded equilibria cannot tell one state from another."""
    return min(max(2 * float(store.precision().median()), 1e-5), 3e-2)
