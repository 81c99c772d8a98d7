"""What is known of the error: the conformal bound, its warnings, how it is kept and drawn."""

import json
import math
import warnings

import pytest
import torch

import cdeq
from cdeq.consistency import scores
from cdeq.consistency.certificate import (
    Certificate,
    conformal_quantile,
    features_of,
    fewest_samples,
)
from cdeq.consistency.scores import Exact, score
from cdeq.consistency.student import Student
from cdeq.equilibrium.states import relative_distance
from cdeq.evaluation import plot_certificate, true_distances
from cdeq.solvers import solve_model
from checks import numbers
from teachers import Linear, Tanh, held_out, inputs, students

# Quantiles


def test_the_quantile_is_that_of_split_conformal_prediction():
    scores = torch.arange(1.0, 100.0)  # 99 of them
    assert conformal_quantile(scores, 0.99) == 99.0
    assert conformal_quantile(scores, 0.9) == 90.0
    assert conformal_quantile(scores[:98], 0.99) == math.inf
    assert conformal_quantile(torch.tensor([3.0, 1.0, 2.0]), 0.5) == 2.0
    assert [fewest_samples(c) for c in (0.5, 0.9, 0.95, 0.99)] == [1, 9, 19, 99]


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_the_quantile_covers_as_often_as_it_says(confidence):
    g = torch.Generator().manual_seed(0)
    trials, n = 4000, 120
    scores = torch.randn(trials, n + 1, generator=g).exp()
    covered = [float(row[-1]) <= conformal_quantile(row[:-1], confidence) for row in scores]
    share, error = sum(covered) / trials, math.sqrt(confidence * (1 - confidence) / trials)
    assert confidence - 3 * error < share < confidence + 1 / (n + 1) + 3 * error


# Calibration


@pytest.mark.slow
def test_scores_are_true_distances_over_estimates():
    student, x = students(), inputs(24, seed=9)
    found = score(student, x, Exact(student))
    star = student.teacher.double().equilibrium(x.double())
    student.teacher.float()
    context = student.teacher.inject(x)
    states = []
    solution = solve_model(
        student.teacher,
        context,
        student.as_solver(),
        tol=1e-5,
        max_steps=300,
        measure="error",
        callback=lambda k, z: states.append(z),
    )
    true = torch.stack([relative_distance(z.double(), star) for z in states[:-1]])
    torch.testing.assert_close(found.distance, true, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(found.error.float(), solution.value_history[:, :, 0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["corrected", "warm_start", "anchored"])
def test_the_bound_holds_for_inputs_like_those_of_calibration(name):
    student = students(name=name)
    student.plan = {1e-2: 2}
    student.calibrate(held_out(), confidence=0.95, steps=2)
    assert student.certificate.samples == 256
    x = inputs(256, seed=7)
    star = student.teacher.equilibrium(x)
    for tol in (1e-1, 1e-2, 1e-3):
        for measure in ("residual", "error", "bound"):
            result = student.solve(x, tol=tol, measure=measure, max_steps=200)
            assert result.converged.all()
            assert (result.bound_kind, result.confidence) == ("calibrated", 0.95)
            within = relative_distance(result.state, star) <= result.bound
            assert within.float().mean() > 0.95 - 2 * math.sqrt(0.95 * 0.05 / 256)
            assert not result.unlike_calibration.any()
            levels = {"residual": result.residual, "error": result.error, "bound": result.bound}
            assert (levels[measure] <= tol).all()
    assert "calibrated bound" in repr(result)


def test_without_calibration_no_bound_is_claimed():
    student, x = students(), inputs()
    result = student.solve(x)
    assert result.bound is None
    assert result.bound_kind is None
    assert result.unlike_calibration is None
    assert result.seconds > 0
    with pytest.raises(ValueError, match=r"call student.calibrate\(held_out\)"):
        student.solve(x, measure="bound")
    with pytest.raises(ValueError, match="measure must be one of error, residual, bound"):
        student.solve(x, measure="distance")


def test_too_few_samples_are_said():
    student = students()
    with pytest.warns(UserWarning, match=r"on 6 samples: a bound at a confidence of 0.99 needs 99"):
        student.calibrate([inputs()])
    assert student.certificate is None
    student.calibrate([inputs()], confidence=0.8)
    assert student.certificate.samples == 6
    student.calibrate([inputs()], confidence=None)
    assert student.certificate is None
    with pytest.raises(ValueError, match="confidence must lie between 0 and 1"):
        student.calibrate([inputs()], confidence=1.0)


@pytest.mark.slow
def test_samples_without_an_equilibrium_count_against_the_bound(monkeypatch):
    monkeypatch.setattr(scores, "EXACT_STEPS", 60)
    monkeypatch.setattr(scores, "LONGEST", 20)

    class Drifting(Tanh):
        def step(self, z, context):
            return z + 1

    student = students(Drifting)
    with pytest.warns(UserWarning, match="of 128 no equilibrium was found"):
        student.calibrate(held_out(1), confidence=0.9)
    assert student.certificate is None


def test_inputs_unlike_those_of_calibration_are_told():
    student = students()
    student.calibrate(held_out(), confidence=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        student.solve(inputs(64, seed=8))
    with pytest.warns(UserWarning, match="unlike those that the student was calibrated on"):
        result = student.solve(5 * inputs(64, seed=8), max_steps=200)
    assert result.unlike_calibration.all()
    x = inputs(64, seed=8)
    x[3] *= 100
    with pytest.warns(UserWarning, match="1 of 40"):
        result = student.solve(x[:40], max_steps=200)
    assert result.unlike_calibration.nonzero().flatten().tolist() == [3]


def test_features_that_do_not_belong_to_samples_are_not_looked_at():
    start, residual = torch.ones(3, 2), torch.ones(3)
    own, table = numbers(3, 4), numbers(5, 2)
    alone = features_of(residual, {"a": own}, start, batched=True)
    beside = features_of(residual, {"b": table, "a": own}, start, batched=True)
    assert torch.equal(beside["context of 1"], alone["context"])
    assert torch.equal(beside["roughness of 1"], alone["roughness"])
    # A table that is by chance as long as the batch is nothing that was calibrated.
    chance = features_of(residual, {"b": table[:3], "a": own}, start, batched=True)
    assert not {"context of 1", "roughness of 1"} & set(chance)
    assert set(features_of(residual[:1], own, start, batched=False)) == {"residual", "start"}


def test_noise_shows_in_the_roughness_and_ties_are_no_drift():
    smooth = torch.linspace(0, 1, 16).expand(40, 3, 4, 16) + numbers(40, 1, 1, 1).float()
    start, residual = torch.ones(40, 2), torch.ones(40)
    features = features_of(residual, smooth, start, batched=True)
    certificate = scores.Scores(torch.ones(40), features).certificate(0.9)
    assert not certificate.unlike(residual, smooth, start, batched=True).any()
    noisy = smooth + 0.1 * numbers(*smooth.shape, seed=2).float()
    assert certificate.unlike(residual, noisy, start, batched=True).all()


# Saving


def test_the_certificate_is_saved_with_the_student(tmp_path):
    student, x = students(), inputs()
    student.calibrate(held_out(1), confidence=0.9)
    student.save(tmp_path)
    again = Student.load(tmp_path, teacher=Linear)
    assert again.certificate == student.certificate
    ours, theirs = (one.solve(x, tol=1e-2, measure="bound") for one in (student, again))
    assert torch.equal(ours.bound, theirs.bound)


@pytest.mark.parametrize(
    "change",
    [
        {"factor": -1.0},
        {"factor": "inf"},
        {"factor": None},
        {"confidence": 2},
        {"samples": 3},
        {"quantiles": {"residual": ["nan"]}},
        {"quantiles": 5},
    ],
)
def test_a_damaged_certificate_is_refused(tmp_path, change):
    student = students()
    student.calibrate(held_out(1), confidence=0.9)
    student.save(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["certificate"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(cdeq.StudentFolderError, match="does not describe a student"):
        Student.load(tmp_path, teacher=Linear)


def test_of_many_samples_quantiles_are_kept():
    values = numbers(5000)
    found = scores.Scores(values.abs(), {"start": values}).certificate(0.9)
    assert found.samples == 5000
    kept = found.quantiles["start"]
    assert len(kept) == scores.KEPT
    assert (kept[0], kept[-1]) == (float(values.min()), float(values.max()))
    few = scores.Scores(values.abs()[:40], {"start": values[:40]}).certificate(0.9)
    assert list(few.quantiles["start"]) == sorted(values[:40].tolist())


def test_a_certificate_survives_json():
    made = Certificate(confidence=0.9, samples=20, factor=1.5, quantiles={"start": (0.0, 1.0)})
    assert Certificate.from_dict(json.loads(json.dumps(made.to_dict()))) == made


# Drawing


@pytest.mark.slow
def test_the_certificate_can_be_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    student, x, drawn = students(), inputs(), {}
    usual = Axes.plot

    def plot(self, counts, values, **look):
        drawn[look["label"]] = (counts, values)
        return usual(self, counts, values, **look)

    monkeypatch.setattr(Axes, "plot", plot)
    student.calibrate(held_out(1), confidence=0.9)
    result, true = student.solve(x, tol=1e-3), true_distances(student, x)
    path = plot_certificate(result, tmp_path / "new" / "certificate.png", distances=true)
    assert path.stat().st_size > 1000
    assert list(drawn) == [
        *("residual (measured)", "bound (calibrated, 90%)", "error (estimated)", "distance (true)"),
    ]
    counts, distance = drawn["distance (true)"]
    assert counts == list(range(1, result.evaluations + 1))
    # Each sample stays where it stopped.
    star = student.teacher.equilibrium(x)
    ended = float(relative_distance(result.state, star).median())
    assert distance[-1] == pytest.approx(ended, rel=1e-2)
    assert drawn["bound (calibrated, 90%)"][1][-1] == pytest.approx(float(result.bound.median()))


def test_distances_that_are_not_known_are_not_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    result = students().solve(inputs(), tol=1e-3)
    for known in (None, torch.ones(1, 6)):
        plot_certificate(result, tmp_path / "certificate.svg", distances=known)
        text = (tmp_path / "certificate.svg").read_text()
        assert ("distance (true)" in text) == (known is not None)
        assert "bound" not in text
