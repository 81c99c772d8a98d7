"""Image classification as an experiment: scores, the pieces of Table 2, its claims, one run as a user."""

import dataclasses
import warnings

import pytest
import torch

from cdeq import cli
from cdeq.data.images import Augmentation, Images, ImageSet
from cdeq.evaluation import solver_method
from cdeq.evaluation import Results, Row, TeacherResult
from cdeq.solvers import Anderson, Picard, solve_model
from cdeq_experiments import image_data, image_scales, pieces, table2
from cdeq_experiments.image_cells import SHOWN, ImageCell, KeptStates
from cdeq_experiments.image_data import ImagesInFolders, ImagesInMemory
from cdeq_experiments.image_plans import EXPLICIT, ImagePlan
from cdeq_experiments.image_scales import SCALES
from cdeq_experiments.options import ExperimentError, Options
from cdeq_experiments.subjects import student_config, trained_student
from cdeq_experiments.table2_claims import claims

BODIES = {
    "alexnet": {"width": 8, "hidden": 8, "batch_norm": True},
    "inception_v2": {"width": 0.0625, "blocks": (1, 1, 1)},
    "hrnet": {
        **{"width": 2, "stages": 2, "modules": (1, 1), "blocks": 1},
        **{"stem": 4, "head": 2, "features": 8},
    },
}
PLAN = ImagePlan(
    name="digits",
    title="digits",
    in_channels=1,
    image_size=8,
    channels=(4, 8),
    expand=1,
    groups=2,
    fuse_groups=2,
    stem=4,
    strides=(1, 1),
    head=(2, 4),
    final=8,
    padding=1,
    flip=False,
    batch=8,
    test_batch=10,
    pretrain=6,
    updates=4,
    depths=(3, 5),
    warmup=2,
    recorded=3,
    full_batches=2,
    students=3,
    papers=3,
    solvers=3,
    few=2,
    single={"channels": (4,), "head": (2,)},
    single_pretrain=3,
    single_updates=2,
    explicit=dict.fromkeys(EXPLICIT, 3),
    bodies=BODIES,
)


def few_digits():
    """Fifty random images whose class is their brightest column."""
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 100, (50, 1, 8, 8), generator=draw, dtype=torch.uint8)
    labels = torch.randint(8, (50,), generator=draw)
    for image, label in zip(pixels, labels.tolist(), strict=True):
        image[:, :, label] += 120
    parts = [
        Images(pixels=p, labels=y)
        for p, y in zip(pixels.split([25, 5, 20]), labels.split([25, 5, 20]), strict=True)
    ]
    names = tuple("abcdefgh")
    return ImageSet(
        name="few", train=parts[0], valid=parts[1], test=parts[2], classes=names, digest="few"
    )


@pytest.fixture(autouse=True)
def _few_images(monkeypatch):
    monkeypatch.setattr(image_data, "digits_set", few_digits)
    monkeypatch.setitem(SCALES, "tiny", (PLAN,))


def options(tmp_path, **fields):
    usual = {
        "scale": "tiny",
        "data": tmp_path / "no-data",
        "runs": tmp_path / "runs" / "cells",
        "out": tmp_path / "out",
        "seeds": 1,
    }
    return Options(**usual | fields)


# Plans and pieces.


def test_a_teacher_depends_on_nothing_that_comes_after_it(tmp_path):
    cell = ImageCell(plan=PLAN, options=options(tmp_path))
    assert {f.name for f in dataclasses.fields(ImagePlan)} >= PLAN.later
    other = dataclasses.replace(PLAN, students=9, full_batches=1, single_updates=9, explicit={})
    assert ImageCell(plan=other, options=cell.options).place("teacher") == cell.place("teacher")
    wider = dataclasses.replace(PLAN, channels=(8, 8))
    assert ImageCell(plan=wider, options=cell.options).place("teacher") != cell.place("teacher")
    decayed = dataclasses.replace(PLAN, weight_decay=0.5)
    assert decayed.teaching.fit.weight_decay == decayed.pretraining.fit.weight_decay == 0.5
    assert decayed.explicit_fit("hrnet").weight_decay == 0.5


def test_other_images_are_other_work(tmp_path, monkeypatch):
    before = ImageCell(plan=PLAN, options=options(tmp_path)).place("teacher")
    other = dataclasses.replace(few_digits(), digest="other")
    monkeypatch.setattr(image_data, "digits_set", lambda: other)
    assert ImageCell(plan=PLAN, options=options(tmp_path)).place("teacher") != before


@pytest.mark.parametrize("scale", ["tiny", "small", "paper"])
def test_every_piece_of_every_scale_is_well_formed(scale, tmp_path, monkeypatch):
    monkeypatch.undo()
    for plan in SCALES[scale]:
        cell = ImageCell(plan=plan, options=options(tmp_path, scale=scale, seeds=3))
        first, second = pieces.pieces_of(cell)
        both = first + second
        assert len({piece.name for piece in both}) == len(both)
        assert {piece.kind for piece in both} == {
            *("teacher", "deq", "solved", "picard", "anderson", "broyden", "hyperdeq"),
            *("few_step", "paper", "anchored", "alexnet", "inception_v2", "hrnet"),
        }
        for piece in both:
            pieces.config_of(piece)
        assert {p.seed for p in both if p.kind == "anchored"} == {0, 1, 2}
        with torch.device("meta"):
            plan.build(10)
            plan.build(10, **plan.single)
            for name in EXPLICIT:
                plan.build_explicit(name, 10)
        before, after = plan.single_stream()
        assert before.fit.updates == plan.single_pretrain
        assert after.fit.updates == plan.single_updates


def test_the_small_scale_is_cifar_and_tiny_imagenet_and_models_of_one_size():
    for plan in image_scales.SCALES["small"]:
        with torch.device("meta"):
            sizes = {
                name: sum(p.numel() for p in plan.build_explicit(name, 10).parameters())
                for name in EXPLICIT
            }
            teacher = sum(p.numel() for p in plan.build(10).parameters())
        assert all(0.5 * teacher < size < 1.2 * teacher for size in sizes.values()), sizes
    assert [p.name for p in image_scales.SCALES["small"]] == ["cifar-10", "tiny-imagenet-40"]


def test_students_are_recorded_from_as_many_batches_as_their_mode_says(tmp_path):
    cell = ImageCell(plan=PLAN, options=options(tmp_path))
    assert len(list(cell.record_batches("full"))) == 2
    assert len(list(cell.record_batches("endpoint"))) == 3
    assert student_config(cell, cell.students["paper"], 0)["batches"] == 2
    assert student_config(cell, cell.students["anchored"], 0)["batches"] == 3


def test_missing_files_and_unknown_sets_are_named_before_any_work(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="cifar-10-batches-bin"):
        table2.table2(options(tmp_path, scale="small"))
    with pytest.raises(ExperimentError, match="no 'mnist' at scale tiny; there are digits"):
        table2.table2(options(tmp_path, only=("mnist",)))
    assert not (tmp_path / "runs").exists()


# Data.


def test_all_test_images_come_once():
    images = few_digits()
    data = ImagesInMemory(images=images, batch=8, test_batch=6, augmentation=Augmentation())
    assert torch.cat([y for _, y in data.test()]).equal(images.test.labels)
    assert torch.cat([y for _, y in data.valid()]).equal(images.valid.labels)
    standard = images.standard()
    assert torch.cat([x for x, _ in data.test()]).allclose(standard(images.test.pixels))
    assert data.batch_at(5)[0].equal(data.batch_at(5)[0])


def test_class_folders_are_read_as_they_are_needed(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for split, count in (("train", 6), ("val", 3)):
        for label, name in enumerate(("cat", "dog")):
            folder = tmp_path / "imagenet" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                image.new("RGB", (40, 30), (80 * label + i, 20, 30)).save(folder / f"{i}.JPEG")
    data = ImagesInFolders(path=tmp_path / "imagenet", batch=4, test_batch=4, size=16)
    x, y = data.batch_at(0)
    assert x.shape == (4, 3, 16, 16)
    assert y.shape == (4,)
    assert data.classes == 2
    tested = list(data.test())
    assert [len(labels) for _, labels in tested] == [4, 2]
    assert torch.cat([labels for _, labels in tested]).tolist() == [0, 0, 0, 1, 1, 1]
    before = data.digest
    (tmp_path / "imagenet" / "train" / "cat" / "0.JPEG").unlink()
    assert (
        ImagesInFolders(path=tmp_path / "imagenet", batch=4, test_batch=4, size=16).digest != before
    )


# The whole, as a user runs it.


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One whole run on a few images; what it left."""
    place = tmp_path_factory.mktemp("table2")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # So few updates do not make a teacher that comes to rest.
        warnings.filterwarnings("ignore", message=".*recorded equilibria")
        patch.setattr(image_data, "digits_set", few_digits)
        patch.setitem(SCALES, "tiny", (PLAN,))
        patch.chdir(place)
        assert cli.main(["reproduce", "table2", "--scale", "tiny", "--seeds", "2"]) == 0
    return place


def test_all_rows_are_there(run):
    found = Results.from_json(run / "results" / "tiny" / "table2.json")
    at = {(row.method, row.seed, row.steps): row for row in found.rows}
    for k in SHOWN:
        for name in ("picard", "anderson", "broyden", "few_step", "deq"):
            assert (name, 0, k) in at
        for name in ("hyperdeq", "paper", "anchored"):
            assert {(name, 0, k), (name, 1, k)} <= set(at)
    assert {(name, 0, None) for name in (*EXPLICIT, "solved")} <= set(at)
    for row in found.rows:
        assert row.metric is not None
        assert row.top5 is not None
        assert 0 <= row.metric <= row.top5 <= 1
        assert row.seconds is not None
        assert (row.distance is None) == (row.method in ("solved", "few_step", *EXPLICIT))
    assert [t.name for t in found.teachers] == ["MDEQ", "DEQ (single-stream)"]
    assert found.teachers[0].train_seconds is not None
    text = (run / "results" / "tiny" / "table2.md").read_text()
    assert "| top 5 |" in text
    assert "| Inception-V2 |" in text
    assert (run / "results" / "tiny" / "table2.png").stat().st_size > 10_000


def test_work_that_was_done_is_not_done_again(run, monkeypatch):
    monkeypatch.chdir(run)
    before = Results.from_json(run / "results" / "tiny" / "table2.json")

    def refuse(*arguments, **fields):
        raise AssertionError("scored anew")

    monkeypatch.setattr(pieces, "_scored", refuse)
    assert cli.main(["reproduce", "table2", "--scale", "tiny", "--seeds", "2"]) == 0
    after = Results.from_json(run / "results" / "tiny" / "table2.json")
    assert [r.metric for r in after.rows] == [r.metric for r in before.rows]


@torch.no_grad()
def test_scores_are_those_of_the_trained_models(run):
    cell = ImageCell(plan=PLAN, options=options(run, runs=run / "runs" / "cells"))
    model, training = cell.trained_teacher()
    assert training.finished
    found = Results.from_json(run / "results" / "tiny" / "table2.json")
    student, _ = trained_student(cell, model, cell.students["anchored"], 1)
    right, near, total = {"teacher": 0, "picard": 0, "anchored": 0, "top5": 0}, [], 0
    for number, (x, y) in enumerate(cell.data.test()):
        context = model.inject(x)
        star = solve_model(model, context, Anderson(), tol=1e-4, max_steps=60).state
        kept = KeptStates(cell.place("teacher"), 2)[number]
        assert all(a.allclose(b, atol=1e-6) for a, b in zip(star, kept, strict=True))
        z = model.step(model.step(model.start(context), context), context)
        outputs = {
            "teacher": model.readout(star, context),
            "picard": model.readout(z, context),
            "anchored": student(x, steps=2),
        }
        for name, output in outputs.items():
            right[name] += int((output.argmax(1) == y).sum())
        right["top5"] += sum(
            int(label in row.topk(5).indices)
            for row, label in zip(outputs["picard"], y, strict=True)
        )
        total += len(y)
        gaps = torch.cat([(a - b).flatten(1) for a, b in zip(z, star, strict=True)], 1)
        sizes = torch.cat([b.flatten(1) for b in star], 1)
        near.append(gaps.norm(dim=1) / sizes.norm(dim=1))
    rows = {(r.method, r.seed, r.steps): r for r in found.rows}
    assert found.teachers[0].metric == pytest.approx(right["teacher"] / total)
    picard = rows["picard", 0, 2]
    assert picard.metric == pytest.approx(right["picard"] / total)
    assert picard.top5 == pytest.approx(right["top5"] / total)
    assert picard.distance == pytest.approx(float(torch.cat(near).mean()), rel=1e-4)
    assert rows["anchored", 1, 2].metric == pytest.approx(right["anchored"] / total)


def test_a_damaged_place_in_the_kept_states_is_an_index_error(tmp_path):
    states = KeptStates(tmp_path, 2)
    assert len(states) == 2
    with pytest.raises(IndexError):
        states[2]


def test_a_method_without_known_states_has_no_distance(run):
    cell = ImageCell(plan=PLAN, options=options(run, runs=run / "runs" / "cells"))
    model, _ = cell.trained_teacher()
    seen = []
    scores = cell.score_method(
        solver_method(model, Picard()), model, (1, 2), lambda *counts: seen.append(counts)
    )
    assert scores[1].distance > scores[2].distance > 0
    assert seen == [(1, 2), (2, 2)]


# What the table says.


def row(method, steps, metric, *, seconds=0.1, seed=0, train_seconds=None):
    return Row(
        dataset="Few",
        seed=seed,
        method=method,
        steps=steps,
        metric=metric,
        top5=min(1.0, metric + 0.1),
        distance=None,
        residual=None,
        seconds=seconds,
        f_equivalents=None,
        parameters=10,
        train_seconds=train_seconds,
    )


def results(*rows):
    def teacher(name, metric):
        return TeacherResult(
            dataset="Few",
            name=name,
            parameters=10,
            metric_name="accuracy",
            metric=metric,
            higher_is_better=True,
            steps=12,
            residual=1e-4,
            train_seconds=900.0,
        )

    return Results(
        experiment="table2",
        scale="tiny",
        commit="abc",
        command="cdeq reproduce table2",
        hardware={"cpu": "a processor"},
        teachers=(teacher("MDEQ", 0.80), teacher("DEQ (single-stream)", 0.70)),
        rows=rows,
    )


ROWS = (
    row("picard", 1, 0.30, seconds=0.2),
    row("anderson", 8, 0.797, seconds=1.2),
    row("anchored", 1, 0.796, seconds=0.2, train_seconds=45.0),
    row("anchored", 2, 0.80, seconds=0.3, train_seconds=45.0),
    row("deq", 1, 0.25),
    row("deq", 8, 0.69),
    dataclasses.replace(row("solved", None, 0.80, seconds=1.6), f_equivalents=11.2),
    row("hrnet", None, 0.82, train_seconds=700.0),
)


def test_the_claims_follow_the_rows():
    text = "\n".join(claims(results(*ROWS)))
    assert "closes 99.2% and 100.0% of the gap in top-1 accuracy" in text
    assert "no equilibrium rival is better at 1;" in text
    assert "never falls (79.60% → 80.00%)" in text
    assert "Anchored at 1 evaluations, 200 ms" in text
    assert "Anderson, at 8, 1200 ms: 6.0 times as long" in text
    assert "takes 11.2 evaluations on average and 1600 ms a batch" in text
    assert "single-stream DEQ 70.00% (12.0 evaluations, 69.00% at 8)" in text
    assert "Anchored 45 s (5.0%)" in text
    assert "HRNet 82.00% (700 s)" in text
    assert "is 2.00 points behind the best of them" in text

    worse = "\n".join(
        claims(results(*ROWS[:3], row("anchored", 2, 0.786), row("few_step", 1, 0.81)))
    )
    assert "worse than Few-step at 1 (by 1.40 points)" in worse
    assert "falls by at most 1.00 points" in worse
