"""Distillation: a teacher and data in, a student out."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cdeq.consistency.certify import plan_handover
from cdeq.consistency.first_stages import CorrectionObjective, PartObjective, StartObjective
from cdeq.consistency.least_squares import fit_correction, fit_start
from cdeq.consistency.objective import DistillationObjective
from cdeq.consistency.parts import check_teacher, try_teacher
from cdeq.consistency.recipes import Recipe
from cdeq.consistency.report import describe_distillation
from cdeq.consistency.selection import (
    MOST_HELD_OUT,
    Selection,
    can_be_cut,
    held_out_count,
    held_out_samples,
)
from cdeq.consistency.student import Student
from cdeq.equilibrium.contract import check_contract
from cdeq.placement import Placement, Precision, beside, dtype_beside, representative_tensor
from cdeq.solvers.base import MAX_STEPS, TOL, Solver
from cdeq.training.draws import numbered_generator
from cdeq.training.log import Progress
from cdeq.training.loop import FitConfig
from cdeq.training.loop import fit as run_fit
from cdeq.training.parallel import from_main_process, process_rank
from cdeq.training.task_loss import TaskLoss, cross_entropy
from cdeq.trajectories import TrajectoryBatch, TrajectoryStore, record
from cdeq.trajectories.nesting import check_loader, split_batch

LOGGER = logging.getLogger("cdeq")

STEPS = {"full": MAX_STEPS, "endpoint": 20 * MAX_STEPS}
"""Budget of a recorded solve. One to an equilibrium stops when its estimated error is within the tolerance."""
POLISHED = {"student.correction.": 1 / 3, "student.gains": 1 / 3}
"""The learning rate of corrections that were trained before, relative to that of the rest."""
RATES = {".": 1.0, "slow": 0.3, "slower": 0.1}
"""Shares of the learning rate, by the folder of a training: where a stage does harm at one, the next is tried.

How large a step may be depends on the map, and now and then on the seed."""
EARLY, LONG = 8, 100
"""A training of so many updates or more is looked at after the first of as many parts of it."""
START_BATCHES, FITTED_BATCHES = 32, 8
"""Batches that the last layers of a start, and the linear part of a correction, are fitted on."""
PIECES = 4
"""Parts of a batch, for a fit in closed form to fewer batches than that."""
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
        return _fit_student(
            teacher,
            data,
            recipe,
            fit or FitConfig(),
            place,
            task_loss,
            (start_network, correction),
            seed,
            precision,
            progress,
        )


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
    config: FitConfig,
    folder: Path | None,
    task_loss: TaskLoss | None,
    networks: tuple[nn.Module | None, nn.Module | None],
    seed: int,
    precision: Precision,
    progress: bool | Progress | None,
) -> Student:
    rank, world = process_rank()
    weight = representative_tensor(teacher)
    with torch.no_grad():
        _, start = try_teacher(teacher, store[0].to(weight.device, weight.dtype).x)
    dtype = dtype_beside(teacher, start)

    def placed(batch: TrajectoryBatch) -> TrajectoryBatch:
        return batch.to(weight.device, dtype)

    with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
        torch.manual_seed(seed)
        student = Student.for_example(teacher, recipe, placed(store[0]).x, *networks).train()
    known_to = target_precision(store)
    student.report = describe_distillation(student, store, placed(store[0]), task_loss)
    if rank == 0:
        LOGGER.info("distilling %s: %s", type(teacher).__name__, student.report)
    _check_labels(student, task_loss, placed(store[0]))

    def objective_now() -> DistillationObjective:
        """Its running average begins with the student as it is."""
        return DistillationObjective(student, task_loss, seed, log_floor=known_to**2)

    trained_on = len(store) - (held_out_count(len(store)) if recipe.selection else 0)
    # Too few batches to keep a whole one: some samples of each.
    divides = can_be_cut(student, placed(store[0]))
    spares = recipe.selection and trained_on == len(store) and divides

    def divided(index: int) -> tuple[TrajectoryBatch, TrajectoryBatch]:
        """What of a batch is trained on, and what is judged on; all of it both where nothing is spared."""
        batch = placed(store[index])
        kept = held_out_samples(batch.size, world) if spares else 0
        first = batch.size - kept
        return (batch.rows(0, first), batch.rows(first, batch.size)) if kept else (batch, batch)

    def batch_at(update: int) -> TrajectoryBatch:
        """Every batch once in each epoch, in an order that depends on the seed and the epoch alone."""
        epoch, place = divmod(update, trained_on)
        generator = numbered_generator(seed, epoch)
        return read(int(torch.randperm(trained_on, generator=generator)[place]))

    @lru_cache(maxsize=1)  # a graph is one batch, which is read only once
    def read(index: int) -> TrajectoryBatch:
        return divided(index)[0].part(rank, world)

    def judged() -> Iterator[TrajectoryBatch]:
        """Whole batches, the same on every process."""
        first = trained_on if trained_on < len(store) else max(0, len(store) - MOST_HELD_OUT)
        return (divided(i)[1] for i in range(first, len(store)))

    def first_batches(count: int) -> Iterator[TrajectoryBatch]:
        """For a fit in closed form, which every process does on whole batches: all come to the same weights.

        Of every four, one chooses the ridge: of fewer, a quarter of each.
        """
        for i in range(min(trained_on, count)):
            batch = divided(i)[0]
            pieces = PIECES if divides and trained_on < PIECES <= batch.size else 1
            ends = [batch.size * k // pieces for k in range(pieces + 1)]
            for start, stop in pairwise(ends):
                yield batch if pieces == 1 else batch.rows(start, stop)

    selection = Selection(student, judged, known_to) if recipe.selection else None

    def attempt(name: str, *ways: Callable[[], object]) -> None:
        if selection is None:
            ways[0]()
        else:
            selection.attempt(name, *ways)

    identity = {
        "recipe": recipe.to_dict(),
        "training": {
            name: value
            for name, value in asdict(config).items()
            if name not in ("log_every", "checkpoint_every")
        },
        "data": store.manifest.fingerprint,
        "seed": seed,
        "start_network": None if student.start_network is None else str(student.start_network),
        "correction": None if student.correction is None else str(student.correction),
    }

    def train(
        title: str,
        objective: nn.Module,
        config: FitConfig,
        place: str,
        **more: Any,
    ) -> None:
        run_fit(
            objective,
            batch_at,
            config,
            folder=None if folder is None else folder / place,
            identity=identity,
            precision=precision,
            progress=progress,
            title=f"distil {title}",
            **more,
        )

    def part(name: str, objective: type[PartObjective], updates: int) -> None:
        """A first stage, of one part of the student."""

        def at(rate: float, place: str) -> None:
            how = replace(slowed(config, rate), updates=updates, warmup_updates=0)
            train(f"the {name}", objective(objective_now()), how, place)

        attempt(name, partial(at, 1.0, name), partial(at, RATES["slower"], f"{name}-slower"))

    has_labels = bool(recipe.lambda_2 or recipe.agreement)

    def whole(rate: float, place: str) -> None:
        objective = objective_now()

        def after_update(update: int) -> None:
            objective.update_average()
            is_early = config.updates >= LONG and update + 1 == config.updates // EARLY
            if selection is not None and has_labels and is_early and place != "slower":
                selection.require_its_hold()

        train(
            recipe.name,
            objective,
            slowed(config, rate),
            place,
            after_update=after_update,
            factors=POLISHED if recipe.correction_updates else None,
        )

    if recipe.start_updates:
        part("start", StartObjective, recipe.start_updates)
        if selection is not None:
            closed = partial(fit_start, student, first_batches(START_BATCHES))
            selection.attempt("start, in closed form", closed)
    if student.correction is not None:
        attempt(
            "correction, in closed form",
            lambda: fit_correction(
                student, first_batches(FITTED_BATCHES), steps=recipe.depth, floor=known_to
            ),
        )
    if recipe.correction_updates:
        part("correction", CorrectionObjective, recipe.correction_updates)
    if selection is not None and student.correction is not None:
        selection.drop_useless_correction()
    ways = {place: partial(whole, rate, place) for place, rate in RATES.items()}
    if selection is not None and has_labels:
        # Labels and answers are no distances: what it learns of them is not judged by one.
        selection.attempt("whole", *ways.values(), judged=False)
    else:
        attempt("whole", ways["."], ways["slower"])
    if selection is not None and selection.undone:
        student.report = replace(student.report, undone=tuple(selection.undone))
        if rank == 0:
            LOGGER.info("distilled %s: %s", type(teacher).__name__, student.report.taken_back)
    student.eval().requires_grad_(False)
    if rank == 0:
        inputs = [placed(store[i]).x for i in range(min(2, len(store)))]
        student.plan = plan_handover(student, inputs)
    student.plan = from_main_process(student.plan)
    return student


def slowed(config: FitConfig, rate: float) -> FitConfig:
    """The same training at a share of its learning rate."""
    return replace(config, learning_rate=rate * config.learning_rate)


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
