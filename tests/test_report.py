"""What a distillation says it rests on: rates against eigenvalues, targets against the equilibrium, weights by name."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

import cdeq
from cdeq.consistency.report import local_rates
from cdeq.consistency.student import Student
from recorded import batches
from teachers import Plain

SHORT = cdeq.FitConfig(updates=1)
pytestmark = pytest.mark.usefixtures("brief_stages")


class Symmetric(Plain):
    """z = A z + x with a symmetric A of known eigenvalues; a weight that no step uses."""

    def __init__(self, *eigenvalues):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        size = len(eigenvalues)
        q, _ = torch.linalg.qr(torch.randn(size, size, generator=draw, dtype=torch.float64))
        self.a = nn.Parameter((q * torch.tensor(eigenvalues, dtype=torch.float64)) @ q.T)
        self.unused = nn.Parameter(torch.zeros(7, dtype=torch.float64))

    def step(self, z, context):
        return z @ self.a.T + context


def inputs(size=6):
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(4, size, generator=draw, dtype=torch.float64) for _ in range(2)]


def distilled(teacher, **options):
    return cdeq.distill(teacher, inputs(), fit=SHORT, task_loss=None, **options)


@pytest.mark.parametrize("largest", [0.9, -0.95, 1.2])
def test_rates_are_those_of_the_largest_eigenvalue(largest, tmp_path):
    teacher = Symmetric(largest, 0.3, 0.2, 0.1, -0.1, 0.05)
    store = cdeq.record(teacher, inputs(), tmp_path, mode="endpoint", dtype=torch.float64)
    student = Student.for_example(teacher, cdeq.Recipe.from_name("corrected"), store[0].x)
    rates = local_rates(student, store[0], rounds=40)
    assert rates.tolist() == pytest.approx([abs(largest)] * 4, rel=1e-4)


def test_a_report_says_how_exact_the_targets_are_and_that_no_weight_is_changed(caplog):
    with caplog.at_level(logging.INFO, logger="cdeq"):
        student = distilled(Symmetric(0.9, 0.5, 0.4, 0.3, 0.2, 0.1), tol=1e-6)
    before = replace(student.report, undone=())
    line, *more = [record.getMessage() for record in caplog.records]
    assert line == f"distilling Symmetric: {before}"
    assert student.report.undone
    assert more == [f"distilled Symmetric: {student.report.taken_back}"]
    assert str(student.report) == f"{before}; {student.report.taken_back}"
    assert student.report.worst_target_error <= 1e-6
    assert student.report.converging == 1
    assert "plain iteration converges" in line
    assert "no weight of the teacher is changed" in line


def test_a_report_warns_of_an_iteration_that_diverges():
    student = distilled(Symmetric(-1.5, 0.5, 0.4, 0.3, 0.2, 0.1))
    assert student.report.converging == 0
    assert "plain iteration diverges from the equilibrium for 100% of the samples" in str(
        student.report
    )


def test_a_report_counts_the_weights_that_take_part_and_names_the_others():
    student = distilled(Symmetric(0.6, 0.5, 0.4, 0.3, 0.2, 0.1), recipe="anchored")
    report = student.report
    assert (report.changed_weights, report.kept_weights) == (36, 7)
    assert report.outside_step == ("unused",)
    assert "36 of the teacher's weights are changed, 7 are not (no step depends on unused)" in str(
        report
    )


def test_a_tuple_state_and_one_without_a_batch_axis_have_rates(tmp_path):
    from recorded import Affine, Pair

    for teacher, count in ((Pair(), 4), (Affine(batched=False), 1)):
        store = cdeq.record(teacher, batches(2), tmp_path / str(count), mode="endpoint")
        student = Student.for_example(teacher, cdeq.Recipe.from_name("corrected"), store[0].x)
        rates = local_rates(student, store[0])
        assert rates.shape == (count,)
        assert ((rates > 0) & (rates < 1)).all()


def test_a_report_says_that_a_task_loss_has_no_labels():
    recipe = cdeq.Recipe.from_name("anchored", lambda_2=1.0)
    student = cdeq.distill(Symmetric(0.6, 0.5, 0.4), inputs(3), fit=SHORT, recipe=recipe)
    assert str(student.report).endswith("; no task loss, since batches have no labels")
