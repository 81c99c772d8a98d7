"""A graph as a subject of the figures: the IGNN of Table 3, seed 0, and students of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from safetensors.torch import load_file, save_file

from cdeq.consistency.student import Student
from cdeq.demo.task import Task
from cdeq.equilibrium.contract import check_contract
from cdeq.equilibrium.states import tensors_of
from cdeq.evaluation import Method, Quality, find_equilibria, measure_quality
from cdeq.evaluation import Metric, accuracy
from cdeq.evaluation import Training
from cdeq.training.loop import FitConfig
from cdeq.training.task_loss import TaskLoss, cross_entropy
from cdeq_experiments.graph_cells import GraphCell
from cdeq_experiments.graph_tasks import GraphPlan, ignn_task
from cdeq_experiments.subjects import StudentPlan, Subject, Teacher
from cdeq_experiments.table3 import CALIBRATED
from cdeq_experiments.train import train_teacher

STARS = "equilibrium.safetensors"


@dataclass(frozen=True, kw_only=True)
class GraphSubject(Subject):
    """A graph with its plan; the teacher is the one that Table 3 trained, if it did."""

    plan: GraphPlan

    students: ClassVar = {
        "paper": StudentPlan(recipe="paper"),
        "anchored": StudentPlan(
            recipe="anchored", changes={"history": "anderson", "window": 5, "agreement": 100.0}
        ),
    }
    teacher_name: ClassVar = "IGNN"
    shown: ClassVar = (1, 2, 5, 10)

    @cached_property
    def task(self) -> Task:
        return ignn_task(self.plan, self.plan.load(self.options.data, 0), 0)

    @property
    def base(self) -> dict[str, Any]:
        return {"plan": self.plan, "teacher_seed": 0}

    def recorded_key(self, mode: str) -> dict[str, int]:
        return {}

    @property
    def metric(self) -> Metric:
        return accuracy()

    def trained_teacher(self) -> tuple[Teacher, Training]:
        cell = GraphCell(plan=self.plan, seed=0, options=self.options)
        with self.bar("IGNN") as bar:
            return train_teacher(self.task, cell.place("ignn"), 0, bar)

    def record_batches(self, mode: str) -> list[Any]:
        return self.task.distilling

    def task_loss(self, teacher: Teacher) -> TaskLoss:
        return cross_entropy

    def student_fit(self, recipe: str) -> FitConfig:
        return self.task.plans[recipe].fit

    def finished(self, student: Student, plan: StudentPlan) -> Student:
        """Late steps of an anchored student, past the depth it was trained at, have a clock to choose."""
        if plan.recipe == "anchored":
            student.calibrate(self.task.distilling, steps=CALIBRATED)
        return student

    def score_teacher(self, teacher: Teacher) -> dict[str, Any]:
        known = find_equilibria(check_contract(teacher), self.task.test, self.metric)
        [star] = tensors_of(known.states[0])
        save_file({"0": star}, self.place("reference") / STARS)
        return {"metric": known.metric, "steps": known.steps, "residual": known.residual}

    def score_method(
        self,
        method: Method,
        model: Teacher,
        counts: tuple[int, ...],
        progress: Callable[[int, int], None] | None,
    ) -> dict[int, Quality]:
        stars = [load_file(self.place("reference") / STARS)["0"]]
        return measure_quality(
            method, model, self.task.test, stars, self.metric, counts, progress=progress
        )

    def timed_input(self) -> Any:
        return self.task.test[0][0]

    def timed_method(self, method: Method, model: Teacher, x: Any) -> Method:
        return method
