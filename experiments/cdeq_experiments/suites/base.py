"""A suite: one data set with its teacher, its students and its rivals, trained once and kept.

Text, images and graphs fill in its `DataContract`. How everything is trained, recorded and kept is the same for all of
them, and is here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from cdeq import evaluation
from cdeq.consistency import Student, distill
from cdeq.evaluation import SOLVERS, Explicit, Method, Results, Training
from cdeq.evaluation.kept_states import KeptStates, keep_state
from cdeq.models.learned_solvers import LearnedSolver, SolverLossWeights, SolverObjective
from cdeq.placement import ON_CPU, moved
from cdeq.solvers import Anderson, solve_model
from cdeq.training import FitConfig, TeachConfig, fit, process_rank, teach
from cdeq.training.log import Progress
from cdeq.training.parallel import from_main_process, is_main_process, on_main_process
from cdeq.trajectories import TrajectoryStore, record
from cdeq.trajectories.fingerprint import teacher_fingerprint
from cdeq.zoo import load_pretrained, pretrained_models, write_pretrained
from cdeq_experiments.configs.base import ContinuedConfig, StudentConfig, TeacherConfig
from cdeq_experiments.jobs import Job
from cdeq_experiments.runs import Run
from cdeq_experiments.suites.contract import DataContract, Key, Model

SAVED, RECORDED = "student", "trajectories"
"""Folders inside that of a run: the finished student; what was recorded."""
PUBLISHED = "corrected"
"""The student that is kept for users, where it is among those that are asked for."""


@dataclass(frozen=True, kw_only=True)
class Suite(DataContract):
    """A data set at work. The teacher, and the split of a graph, have the seed `teacher_seed`; students `seeds`."""

    teacher_seed: int = 0
    seeds: tuple[int, ...] = (0,)

    @property
    def title(self) -> str:
        seed = f", seed {self.teacher_seed}" if self.config.seeded_teacher else ""
        return self.config.title + seed

    @property
    def data_key(self) -> Key:
        """What everything depends on."""
        place, found = self.options.placement, {"digest": self.data.digest}
        if place != ON_CPU:
            found |= {"device": place.device.type, "precision": place.precision}
        return {"data": self.config.data, **found, "seed": self.teacher_seed}

    def run(self, name: str, key: Key) -> Run:
        return Run.of(self.options.runs, f"{self.config.name}-{name}", key)

    def train(self, run: Run, title: str, work: Callable[[Progress], object]) -> Training:
        """A training with its bar."""
        with self.options.bar(f"{self.title}: {title}") as bar:
            return run.train(bar, work)

    def build(self, make: Callable[[], Any], seed: int) -> Any:
        """A module with the random numbers of a seed, on the device."""
        return build_seeded(make, seed).to(self.options.placement.device)

    # Equilibrium models.

    @cached_property
    def teacher(self) -> Model:
        """The teacher, trained now or before."""
        return self.train_equilibrium_model("teacher", self.config.teacher)[0]

    @property
    def teaching(self) -> Key:
        """All that makes the teacher what it is, as the zoo's cards say it."""
        how = evaluation.described(self.config.teacher)
        return {"teaching": how, "digest": self.data.digest}

    @cached_property
    def pretrained(self) -> Student | None:
        """The zoo's student of this very teacher, unless the teacher is to be trained."""
        if self.options.train_teachers or self.teacher_seed != 0:
            return None
        same = (c for c in pretrained_models() if self.teaching.items() <= c.training.items())
        device = self.options.placement.device
        return next((load_pretrained(card.name).to(device) for card in same), None)

    def model_key(self, config: TeacherConfig) -> Key:
        """What an equilibrium model depends on."""
        if config == self.config.teacher and self.pretrained is not None:
            return {**self.data_key, "pretrained": teacher_fingerprint(self.pretrained.teacher)}
        return self._stages(config)[-1][1]

    @property
    def teacher_key(self) -> Key:
        return self.model_key(self.config.teacher)

    def _stages(self, config: TeacherConfig) -> list[tuple[str, Key]]:
        """The stages of a training, each with what it depends on; the last has the model's name."""
        key = {**self.data_key, "model": config.model, "arguments": config.arguments}
        if isinstance(config, ContinuedConfig):
            key["after"] = self.teacher_key
        both = [("pretraining", config.pretraining), ("", config.teaching)]
        named = [(name, replace(how, seed=self.teacher_seed)) for name, how in both if how]
        return [
            (name, {**key, "stages": [how for _, how in named[: i + 1]]})
            for i, (name, _) in enumerate(named)
        ]

    def train_equilibrium_model(self, name: str, config: TeacherConfig) -> tuple[Model, Training]:
        """From the zoo, or built with the teacher's seed; shallow first, if so asked, whose seconds are included.

        One that is trained on begins as the teacher, whose seconds are not included.
        """
        if config == self.config.teacher and (found := self.pretrained) is not None:
            seconds = (found.card or {})["training"]["seconds"]
            return found.teacher, Training(seconds=seconds, finished=True)
        model: Model = self.build(lambda: config.build(**self.data.sizes), self.teacher_seed)
        if isinstance(config, ContinuedConfig):
            model.load_state_dict(self.teacher.state_dict())
        training = Training()
        for stage, key in self._stages(config):
            run, before = self.run(stage or name, key), training.seconds
            teaching = partial(self._teach, model, key["stages"][-1], run)
            training = self.train(run, f"{name} {stage}", teaching).after(before)
        return model.requires_grad_(False), training

    def _teach(self, model: Model, config: TeachConfig, run: Run, told: Progress) -> None:
        teach(
            model,
            self.data.own_batch_at,
            config,
            task_loss=self.task_loss(model),
            carried=self.carried_memory(model),
            folder=run.folder,
            identity={"teach": repr(config), "model": model.config},
            precision=self.options.placement.precision,
            progress=told,
        )

    def equilibria(self, name: str = "teacher", config: TeacherConfig | None = None) -> Job:
        """A model converged on the test data, the teacher unless said: its states are kept, and what they score."""
        config = config or self.config.teacher
        limits = replace(self.config.tolerances, everyday=None)
        run = self.run("equilibria", {**self.model_key(config), "tolerances": limits})
        return Job(f"{self.title}: {config.title}", run, partial(self._solve, run, name, config))

    def _solve(self, run: Run, name: str, config: TeacherConfig) -> dict[str, Any]:
        model, training = self.train_equilibrium_model(name, config)
        tol, keep = self.config.tolerances.reference, partial(keep_state, run.folder)
        found = on_main_process(partial(self.converge, model, self.data.test(), tol, keep))
        about = {"parameters": evaluation.parameter_count(model), "seconds": training.seconds}
        return {**found, **about, **evaluation.provenance()}

    def find_equilibria(self, *which: Any) -> KeptStates:
        """The states of a model on the test data, solved now or before."""
        job = self.equilibria(*which)
        job.run.result(job.work)
        return KeptStates(job.run.folder, self.options.placement.device)

    # Students and learned solvers.

    def recording(self, mode: str, solver: str = "anderson", inputs: str = "training") -> Job:
        """The teacher's equilibria, or all its states, on some of the training data."""
        how = {"mode": mode, "how": self.config.recording[mode], "solver": SOLVERS[solver]}
        run = self.run("record", {**self.teacher_key, **how, "inputs": inputs})
        title = f"{self.title}: record ({mode}, {solver}, {inputs})"
        return Job(title, run, partial(self._record, run, mode, solver, inputs))

    def _record(self, run: Run, mode: str, solver: str, inputs: str) -> dict[str, float]:
        teacher, began = self.teacher, time.perf_counter()
        with self.options.bar(f"{self.title}: record ({mode}, {solver})") as bar:
            record(
                teacher,
                self.recorded_batches(mode, inputs),
                run.folder / RECORDED,
                solver=SOLVERS[solver],
                max_steps=self.config.recording[mode].max_steps,
                mode=mode,
                carried=self.carried_memory(teacher) is not None,
                progress=bar,
            )
        return {"seconds": time.perf_counter() - began}

    def record(self, *how: str) -> tuple[TrajectoryStore, float]:
        """What students learn from, recorded now or before, and the seconds it took."""
        job = self.recording(*how)
        seconds = job.run.result(job.work)["seconds"]
        return TrajectoryStore.open(job.run.folder / RECORDED), seconds

    def student_run(self, config: StudentConfig, seed: int) -> Run:
        """The training of a student; the clock it is used with takes no part in it."""
        recipe, trained = config.resolve(), replace(config, changes={}, clock=None, once=False)
        key = {"recipe": recipe, "config": trained, "student_seed": seed}
        key |= {"recording": self.config.recording[recipe.store_mode]}
        return self.run(config.recipe, {**self.teacher_key, **key})

    def train_student(self, config: StudentConfig, seed: int) -> tuple[Student, Training]:
        """A student, trained now or before; its seconds include the recording it learns from."""
        mode, run = config.resolve().store_mode, self.student_run(config, seed)
        store, before = self.record(mode, config.solver, config.inputs)

        def work(told: Progress) -> None:
            if from_main_process((run.folder / SAVED).exists()):
                return
            student = distill(
                self.teacher,
                store,
                recipe=config.resolve(),
                fit=config.fit,
                folder=run.folder,
                task_loss=self.task_loss(self.teacher),
                start_network=build_seeded(lambda: config.start_network(self.teacher), seed),
                seed=seed,
                precision=self.options.placement.precision,
                progress=told,
            )
            if config.calibrated_steps is not None:
                batches = self.recorded_batches(mode, config.inputs)
                student.calibrate(batches, steps=config.calibrated_steps, confidence=None)
            on_main_process(lambda: student.save(run.folder / SAVED))

        training = self.train(run, f"distil {config.recipe}, seed {seed}", work)
        student = Student.load(run.folder / SAVED).to(self.options.placement.device)
        if config.clock is not None:
            student.recipe = replace(student.recipe, decay=config.clock)
        return student, training.after(before)

    def learned_solver_key(self, seed: int) -> Key:
        how = {"how": self.config.learned_solver, "recording": self.config.recording["endpoint"]}
        return {**self.teacher_key, **how, "solver_seed": seed}

    def train_learned_solver(self, seed: int) -> tuple[LearnedSolver, Training]:
        """HyperDEQ or IGNN-Solver for the teacher, on the equilibria that its students learn from."""
        config, teacher = self.config.learned_solver, self.teacher
        assert config is not None
        store, before = self.record("endpoint")
        place = (self.options.placement.device, torch.float32)
        read = lru_cache(maxsize=1)(lambda i: store[i].to(*place))  # a graph is read only once
        solver = self.build(lambda: self.build_learned_solver(teacher), seed)
        weights = SolverLossWeights(anneal=config.fit.updates)
        objective = SolverObjective(solver, teacher, config.depth, weights)
        run = self.run(config.name, self.learned_solver_key(seed))
        identity = {"solver": solver.config, "depth": config.depth, "seed": seed}
        draw = lambda update: read(update % len(store)).part(*process_rank())  # noqa: E731
        training = self._fit(run, config.name, objective, draw, config.fit, identity)
        return solver.eval().requires_grad_(False), training.after(before)

    # Explicit models.

    def explicit_key(self, name: str) -> Key:
        return {**self.data_key, "model": self.config.explicit[name]}

    def train_explicit(self, name: str) -> tuple[Model, Training]:
        """An explicit model on the same training data."""
        config, run = self.config.explicit[name], self.run(name, self.explicit_key(name))
        model: Model = self.build(lambda: config.build(**self.data.sizes), self.teacher_seed)
        objective = self.explicit_objective(model)
        identity = {"model": name, "config": model.config}
        training = self._fit(run, name, objective, self.data.own_batch_at, config.fit, identity)
        return model.eval().requires_grad_(False), training

    def _fit(
        self,
        run: Run,
        title: str,
        objective: nn.Module,
        data: Any,
        config: FitConfig,
        identity: Key,
    ) -> Training:
        given: dict[str, Any] = {"folder": run.folder, "identity": identity}
        given["precision"] = self.options.placement.precision
        work = partial(fit, objective.train(), data, config, **given)
        return self.train(run, title, lambda told: work(progress=told))

    # What is kept for users, and what is timed.

    def publish(self, results: Results) -> str:
        """The default student of the first seed as a folder of the zoo; a line about it."""
        config, folder = self.config, self.options.runs.parent / "models" / self.config.pretrained
        student, _ = self.train_student(config.students[PUBLISHED], self.seeds[0])
        card = evaluation.card_of(results, config.title, config.pretrained, self.teaching)
        if is_main_process():
            sample = moved(self.sample_input(), ON_CPU.device)
            write_pretrained(folder, student.cpu(), card, sample)
        return f"the student is in {folder}"

    def timed_method(self, method: Method, model: Model) -> Method:
        """The method from an input to what a score takes."""
        output = method.output
        return replace(method, output=lambda x, k: self.finish(model, output(x, k), x))

    def timed_output(self, model: Model, output: Callable[[Any], Tensor]) -> Explicit:
        """The same of a model without steps."""
        count = evaluation.parameter_count(model)
        return Explicit(output=lambda x: self.finish(model, output(x), x), parameters=count)

    def everyday_output(self, x: Any) -> Tensor:
        """The teacher's output under its own solver, at the tolerance of everyday use."""
        limits, teacher, context = self.config.tolerances, self.teacher, self.teacher.inject(x)
        given: dict[str, Any] = {"tol": limits.everyday, "max_steps": limits.max_steps}
        return teacher.readout(solve_model(teacher, context, Anderson(), **given).state, context)


def build_seeded(build: Callable[[], Any], seed: int) -> Any:
    """What `build()` makes with the random numbers of a seed; the caller's stay as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()
