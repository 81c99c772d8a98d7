"""The benchmark of certificates, on maps that take no time."""

import copy
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import cdeq
import deq_texts
import mdeqs
from cdeq.data.embedded import pydoc_words
from cdeq.data.images import Images, split_images
from graphs import FEATURES, random_graph
from image_files import random_bytes
from teachers import untrained
from test_correction import Affine
from test_correction import batches as vectors
from test_correction import contraction as slow_linear
from test_demo import toy_task
from test_evaluation import batches


def certificate(bench, monkeypatch, path, *words):
    """What bench/certificate.py writes as JSON and as tables."""
    arguments = ["certificate.py", "--repeats", "1", *words, "--json", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    bench("certificate").main()
    return json.loads(path.read_text()), path.with_suffix(".md").read_text()


@pytest.mark.slow
def test_bench_certificate_judges_bounds_of_students_that_it_keeps(
    bench, tmp_path, monkeypatch, brief_stages
):
    cases, stranger = bench("certificate_cases"), bench("strangers").Stranger
    teacher = Affine(slow_linear(0.9).float())
    maps = {"tiny": lambda: stranger(teacher, vectors(8), vectors(2, size=128, seed=9))}
    monkeypatch.setattr(cases, "STRANGERS", maps)
    monkeypatch.setattr(bench("certificate"), "SLOW", ("tiny",))
    distil, distilled = cdeq.distill, []

    def short(*a, **k):
        distilled.append(a)
        return distil(*a, fit=cdeq.FitConfig(updates=10), **k)

    monkeypatch.setattr(cases.cdeq, "distill", short)
    words = ["--only", "tiny", "--parts", "coverage", "slow", "--students", str(tmp_path / "kept")]
    for _ in range(2):
        found, page = certificate(bench, monkeypatch, tmp_path / "found.json", *words)
    assert len(distilled) == 1
    (row,) = found["rows"]
    assert row["commit"] == found["commit"]
    maps["other"] = maps["tiny"]  # measured later: what is known of the first stays
    words = ["--only", "other", "--parts", "coverage", "--add"]
    again, _ = certificate(bench, monkeypatch, tmp_path / "found.json", *words)
    assert [one["map"] for one in again["rows"]] == ["tiny", "other"]
    assert again["rows"][0] == row
    judged = row["coverage"]
    assert judged["calibrated_on"] == 128
    for one in judged["levels"]:
        assert one["share"] >= one["confidence"] - 0.1
        assert one["samples"] == 256
    assert [(one["name"], one["tuned"]) for one in judged["shifts"]] == [
        *(("noise", True), ("averaged", False), ("shuffled", False)),
    ]
    assert judged["unlike"]["warned"] == 0
    averaged = judged["shifts"][1]  # vectors of normal numbers, which get shorter by it
    assert averaged["warned"] == averaged["batches"] == 1
    assert row["slow"]["within"] > 0.95
    for words in ("| tiny | 99% |", "| tiny | averaged | no |", "**Slow maps.**"):
        assert words in page


@pytest.mark.slow
def test_bench_certificate_takes_what_the_zoo_has_of_texts_images_and_graphs(
    bench, tmp_path, monkeypatch
):
    cases, parts = bench("certificate_cases"), bench("certificate")
    for name, value in {"IMAGES": 8, "SEGMENTS": 3, "SHIFTED": 8}.items():
        monkeypatch.setattr(cases, name, value)
    corpus = pydoc_words(minimum=40)
    monkeypatch.setattr(cases, "load_text", lambda *a, **k: corpus)
    monkeypatch.setattr(cases, "load_graph", lambda name: SimpleNamespace(graph=graph))
    drawn = [torch.from_numpy(random_bytes(40, 3, 32, 32, seed=i)) for i in range(2)]
    train, test = (Images(pixels=pixels, labels=torch.arange(40) % 2) for pixels in drawn)
    images = split_images("images", train, test, classes=("a", "b"), valid=16)
    monkeypatch.setattr(cases, "load_images", lambda *a, **k: images)
    monkeypatch.setenv("CDEQ_DATA", str(tmp_path))
    graph = random_graph(dtype=torch.float32)
    given = {
        "text": (deq_texts.build(vocabulary=len(corpus.vocabulary)).float(), "text"),
        "images": (mdeqs.contracted(in_channels=3), "images"),
        "graphs": (cdeq.models.IGNN(features=FEATURES, width=8), "graph"),
    }
    for kind, (teacher, name) in given.items():
        data = SimpleNamespace(name=name, size=32, batch=4, length=deq_texts.LENGTH)
        make = {"text": cases.text_case, "images": cases.image_case, "graphs": cases.graph_case}
        case = make[kind](SimpleNamespace(teacher=teacher), data, None)
        student = student_on(teacher, case.test[0])
        case = replace(case, student=student)
        asked = ["coverage", "proven", "solving"]
        row = parts.measured(f"zoo {kind}", case, asked, repeats=1)
        assert [one["tol"] for one in row["solving"]] == list(bench("certificate_times").TOLERANCES)
        assert all(one["converged"] == [1.0, 1.0] for one in row["solving"])
        if kind == "graphs":
            assert set(row) == {"map", "proven", "solving"}
            assert all(one["share"] == 1 and one["width"][0] >= 1 for one in row["proven"])
            continue
        names = {"text": ["words drawn anew", "words shuffled", "Python's manual"]}
        names["images"] = ["noise", "averaged"]
        assert [one["name"] for one in row["coverage"]["shifts"]] == names[kind]
        assert row["coverage"]["levels"][0]["share"] > 0.5
        assert f"| zoo {kind}, 0.1 |" in bench("certificate_page").page([row], {})


def student_on(teacher, x):
    student = untrained(teacher.requires_grad_(False).eval(), x, "corrected")
    return student.requires_grad_(False).eval()


def test_bench_certificate_leaves_out_what_has_no_data(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CDEQ_DATA", str(tmp_path))
    cases = bench("certificate_cases")
    assert {"zoo WikiText-2", "zoo CIFAR-10", "zoo PubMed"} < set(cases.cases())
    monkeypatch.setattr(sys, "argv", ["certificate.py", "--only", "zoo P", "--parts", "proven"])
    bench("certificate").main()
    assert "zoo PubMed is left out: pubmed needs the file" in capsys.readouterr().out
    for word, wrong in (("--only", "nothing"), ("--parts", "nothing")):
        monkeypatch.setattr(sys, "argv", ["certificate.py", word, wrong])
        with pytest.raises(SystemExit, match="'nothing'; there are "):
            bench("certificate").main()


def test_bench_certificate_says_what_was_asked_and_whether_it_was_found(bench):
    page = bench("certificate_page").page
    level = {"confidence": 0.9, "factor": 1.0, "width": [1.0, 2.0], "samples": 400}
    unlike = {"share_unlike": 0.0, "warned": 0, "batches": 2}
    shifts = [
        {"name": "seen", "tuned": True, "levels": [{**level, "share": 0.5}], **unlike, "warned": 1},
        {"name": "unseen", "tuned": False, "levels": [{**level, "share": 0.5}], **unlike},
        {"name": "harmless", "tuned": False, "levels": [{**level, "share": 0.9}], **unlike},
    ]

    def row(share):
        levels = [{**level, "share": share}]
        found = {"calibrated_on": 100, "levels": levels, "unlike": unlike, "shifts": shifts}
        return {"map": "m", "coverage": found}

    assert "| m | 90% | 87.0% | 87.0% | yes |" in page([row(0.87)], {})
    shown = page([row(0.8699)], {})
    assert "| m | 90% | 87.0% | 87.0% | **no** |" in shown
    assert "| m | seen | yes | 50.0% | – | – | 0% | 1 of 2 |" in shown
    assert "| m | unseen | no | 50.0% | – | – | 0% | 0 of 2: **missed** |" in shown
    assert "| m | harmless | no | 90.0% | – | – | 0% | 0 of 2 |" in shown

    def solved(ratio, by_student, name="zoo m"):
        times = {"time_ratio": ratio, "cpu_ratio": ratio, "evaluations": [2.0, 4.0]}
        return {"map": name, "solving": [{"tol": 1e-2, **times, "by_student": by_student}]}

    for one, end in (
        (solved(0.5, 0.8), "| 0.50 | 2.0 / 4.0 | 80% | yes |"),
        (solved(0.51, 0.8), "| 0.50 | 2.0 / 4.0 | 80% | **no** |"),
        (solved(0.5, 0.79), "| 0.50 | 2.0 / 4.0 | 79% | **no** |"),
        (solved(0.9, 0.0, "demo m"), "|  | 2.0 / 4.0 | 0% |  |"),
    ):
        assert end in page([one], {})


@pytest.mark.slow
def test_bench_certificate_compares_trainings_that_begin_and_see_the_same(
    bench, tmp_path, monkeypatch, capsys
):
    times, drawn = bench("certificate_times"), []
    task = toy_task(updates=24)

    def teaching(number):
        drawn.append(number)
        return task.teaching(number)

    monkeypatch.setattr(times.tasks, "images", lambda seed: replace(task, teaching=teaching))
    untrained_one = lambda task, teacher, *_: student_on(teacher, batches()[0][0])  # noqa: E731
    monkeypatch.setattr(times, "distil_student", untrained_one)
    monkeypatch.setenv("CDEQ_DATA", str(tmp_path))
    found = times.training(repeats=1)
    assert "zoo CIFAR-10 is left out: cifar-10 needs the file" in capsys.readouterr().out
    ours, theirs = found
    assert (ours["solver"], theirs["solver"]) == ("anderson", "student")
    assert ours["updates"] == 12
    # Without a learned start and without corrections a student is Anderson's method.
    assert ours["evaluations"] == pytest.approx(theirs["evaluations"], rel=0.05)
    assert ours["score"] == theirs["score"]
    assert min(*ours["forward"].values(), *theirs["forward"].values()) > 0
    once = [12, 13, *range(13, 23), 23, 23]  # after one update and after eleven the next is timed
    assert drawn == [*range(12), *once, *once]
    page = bench("certificate_page").page([], {"training": found})
    assert "| demo images, 12 updates | student |" in page


@pytest.mark.slow
def test_bench_certificate_trains_the_model_of_the_zoo_on(bench, monkeypatch):
    times = bench("certificate_times")
    pixels = torch.from_numpy(random_bytes(70, 3, 32, 32))
    train = Images(pixels=pixels, labels=torch.arange(70) % 2)
    images = split_images("images", train, train, classes=("a", "b"), valid=1)
    monkeypatch.setattr(times, "load_images", lambda name: images)
    lesson = times.zoo_lesson(updates=1, tested=6)
    before = copy.deepcopy(lesson.model.state_dict())
    found = times.taught(lesson, "student", {"student": lesson.student.as_solver()}, 1)
    assert 0 < found["evaluations"] <= max(lesson.teach.depths)
    assert 0 <= found["score"] <= 1
    assert all(torch.equal(now, before[name]) for name, now in lesson.model.state_dict().items())


@pytest.mark.slow
def test_bench_certificate_times_rows_that_are_left_out(bench):
    found = bench("certificate_times").compaction(1, width=8, batch=20)
    assert found["time_ratio"] > 0
    easy, hard = found["evaluations"]
    assert hard > 3 * easy
    assert "asked" in bench("certificate_page").page([], {"compaction": found})
