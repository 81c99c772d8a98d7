"""Pretrained models: written and read back, refused when damaged; each of the zoo answers as its sample says."""

import json
import runpy
from dataclasses import replace

import pytest
import torch

import cdeq
from cdeq import cli, zoo
from cdeq.consistency.student import Student
from cdeq.models import ConvDEQ

CARD = zoo.Card(
    name="toy",
    title="ConvDEQ",
    data="random pixels",
    licence="MIT",
    parameters=10,
    metric="accuracy",
    higher_is_better=True,
    score=0.9,
    steps=12.3,
    converged=1.0,
    depth=[{"steps": 1, "score": 0.5, "distance": 0.3, "residual": 0.2}],
    student=[
        {"steps": 1, "score": 0.8, "distance": 0.1, "residual": 0.05},
        {"steps": 2, "score": 0.89, "distance": 0.01, "residual": 0.005},
    ],
    training={"updates": 3},
    command="cdeq reproduce table2",
    commit="abc",
    hardware="a processor",
)


def images():
    return torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    teacher = ConvDEQ(channels=8, groups=4, keep=0.0, gain=0.2)
    student = Student.for_example(teacher, cdeq.Recipe.from_name("corrected"), images()).eval()
    zoo.write_pretrained(tmp_path / "toy", student, CARD, images())
    return tmp_path


def test_a_pretrained_model_answers_as_its_sample_says(folder):
    student = cdeq.load_pretrained("toy", folder)
    assert {p.dtype for p in student.parameters()} == {torch.float32}
    assert student(images(), steps=2).shape == (4, 10)
    assert zoo.check_pretrained("toy", folder) < 1e-4
    [card] = zoo.pretrained_models(folder)
    assert replace(card, structure={}) == CARD
    assert {p.suffix for p in (folder / "toy").iterdir()} == {".json", ".safetensors"}
    stored = sum(p.stat().st_size for p in (folder / "toy").glob("*.safetensors"))
    assert stored < 3 * sum(p.numel() for p in student.parameters()) + 20_000  # two bytes each


def test_other_weights_are_noticed(folder):
    student = Student.load(folder / "toy")
    with torch.no_grad():
        student.teacher.head.weight.mul_(1.5)
    student.save(folder / "toy")
    assert zoo.check_pretrained("toy", folder) > 1e-2


def test_the_folder_may_be_named_by_the_environment(folder, monkeypatch):
    monkeypatch.setenv("CDEQ_ZOO", str(folder))
    assert isinstance(cdeq.load_pretrained("toy"), Student)


def test_what_is_not_there_is_said(folder, tmp_path):
    with pytest.raises(cdeq.ZooError, match=r"no pretrained model .other. .* there are toy"):
        cdeq.load_pretrained("other", folder)
    with pytest.raises(cdeq.ZooError, match="set CDEQ_ZOO"):
        cdeq.load_pretrained("toy", tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"name": "toy"}'])
def test_a_damaged_card_is_refused_by_name(folder, content):
    (folder / "toy" / "card.json").write_text(content)
    with pytest.raises(cdeq.ZooError, match=r"card\.json is damaged"):
        zoo.pretrained_models(folder)


def test_damaged_weights_and_samples_are_refused(folder):
    for name in ("sample.safetensors", "teacher.safetensors"):
        path = folder / "toy" / name
        path.write_bytes(path.read_bytes()[:-3])
        with pytest.raises(cdeq.ZooError, match=name):
            zoo.check_pretrained("toy", folder)


def test_the_command_lists_and_shows(folder, capsys):
    assert cli.main(["zoo", "--folder", str(folder)]) == 0
    assert "toy" in (shown := capsys.readouterr().out)
    assert "90.0%" in shown
    assert cli.main(["zoo", "toy", "--folder", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "1: 50.0% (distance 0.3, residual 0.2)" in shown
    assert "2: 89.0% (distance 0.01, residual 0.005)" in shown
    assert cli.main(["zoo", "none", "--folder", str(folder)]) == 1
    assert "cdeq: there is no pretrained model 'none'" in capsys.readouterr().err
    assert cli.main(["zoo", "--folder", str(folder / "nowhere")]) == 1


# Those of the repository.

SHIPPED = [card.name for card in zoo.pretrained_models()]


@pytest.mark.parametrize("name", SHIPPED)
def test_each_model_of_the_zoo_is_what_its_card_says(name):
    card = zoo.Card.read(zoo.zoo_folder() / name)
    student = cdeq.load_pretrained(name)
    assert sum(p.numel() for p in student.teacher.parameters()) == card.parameters
    assert student.recipe.name == "corrected"
    assert zoo.check_pretrained(name) < 1e-3
    for entry in (card.depth, card.student):
        assert [one["steps"] for one in entry] == sorted(one["steps"] for one in entry)
        assert all(one["distance"] > 0 and one["residual"] > 0 for one in entry)
    assert card.converged >= 0.99
    assert card.command
    assert card.commit


def test_the_example_of_images_needs_no_training(capsys):
    runpy.run_path(
        str(zoo.zoo_folder().parent / "examples" / "pretrained_images.py"), {}, "__main__"
    )
    *_, fourth, converged, last = capsys.readouterr().out.splitlines()
    classes = converged.split()[1:]
    assert fourth.split() == [
        "4",
        *classes,
        *classes,
    ]  # plain iteration and the student agree with it by then
    assert "estimated error at most" in last


def test_the_zoo_is_small_enough_to_be_committed():
    sizes = [p.stat().st_size for p in zoo.zoo_folder().rglob("*") if p.is_file()]
    assert sum(sizes) <= 40 * 2**20
    kept = {p.suffix for p in zoo.zoo_folder().rglob("*") if p.is_file()}
    assert kept <= {".json", ".safetensors", ".md"}
    for path in zoo.zoo_folder().rglob("card.json"):
        assert json.loads(path.read_text())["name"] == path.parent.name
