"""Students from a hub and to it: revision, cache, token and offline mode are huggingface_hub's; no code is run."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cdeq
from builders import contents
from cdeq import HubError, Student, StudentFolderError
from cdeq import hub as cdeq_hub
from cdeq.consistency import sharing
from cdeq.models import ConvDEQ
from checks import same_tensors
from hub_server import TOKEN, commit, running_hub
from saved import FILES, make
from teachers import Tanh, inputs
from test_zoo import CARD, folder, images  # noqa: F401

huggingface_hub = pytest.importorskip("huggingface_hub")
REPO = "somebody/digits"


def require_same(student, again, x):
    assert torch.equal(student(x), again(x))
    assert same_tensors(again.state_dict(), student.state_dict())


def student_of(seed=0):
    torch.manual_seed(seed)
    return make(ConvDEQ(channels=8, groups=4, keep=0.0, gain=0.2), images(), "corrected")


@pytest.fixture(scope="module")
def students(tmp_path_factory):
    """Two students with their folders, one for each revision of the repository."""
    made = {}
    for seed, revision in enumerate(("main", "v1")):
        place = tmp_path_factory.mktemp(revision)
        torch.manual_seed(seed)
        student = student_of(seed)
        with torch.no_grad():
            student.teacher.head.weight.mul_(1 + seed)
        student.save_pretrained(place)
        made[revision] = (student, place)
    return made


def point_to(url, monkeypatch):
    """What HF_ENDPOINT does, if set before huggingface_hub is imported."""
    constants = import_module("huggingface_hub.constants")
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)


@pytest.fixture
def server(students, tmp_path, monkeypatch):
    with running_hub() as hub:
        hub.repos[REPO] = {revision: place for revision, (_, place) in students.items()}
        point_to(hub.url, monkeypatch)
        monkeypatch.setenv("HF_TOKEN", "")
        yield hub


@pytest.fixture
def cache(server, tmp_path):
    """A cache that huggingface_hub has filled, whose hub is gone."""
    for revision in server.repos[REPO]:
        Student.from_pretrained(REPO, revision=revision, cache_dir=tmp_path / "cache")
    server.repos.clear()
    server.served.clear()
    return tmp_path / "cache"


# From a folder.


def test_a_folder_needs_no_hub(students, monkeypatch):
    monkeypatch.setattr(sharing, "fetch_folder", None)
    student, place = students["main"]
    assert set(contents(place)) == {*FILES, "README.md"}
    require_same(student, Student.from_pretrained(place), images())
    require_same(student, Student.from_pretrained(str(place)), images())
    with pytest.raises(ValueError, match=r"is a folder: only a repository has a revision"):
        Student.from_pretrained(place, revision="v1")


# From a repository.


@pytest.mark.slow
def test_a_repository_is_fetched_into_the_cache_once(students, server, tmp_path):
    (students["main"][1] / "evil.py").write_text("raise SystemExit")
    student = Student.from_pretrained(REPO, cache_dir=tmp_path)
    (students["main"][1] / "evil.py").unlink()
    require_same(student, students["main"][0], images())
    place = tmp_path / "models--somebody--digits"
    assert (place / "refs" / "main").read_text() == commit(REPO, "main")
    fetched = {p.name for p in (place / "snapshots" / commit(REPO, "main")).iterdir()}
    assert fetched == {*FILES, "README.md"}  # and no code
    blobs = contents(place / "blobs")
    server.served.clear()
    Student.from_pretrained(REPO, cache_dir=tmp_path)
    assert contents(place / "blobs") == blobs
    assert "teacher.safetensors" not in server.served


@pytest.mark.slow
def test_a_revision_is_a_branch_a_tag_or_a_commit(students, server, tmp_path):
    for revision in ("v1", commit(REPO, "v1")):
        student = Student.from_pretrained(REPO, revision=revision, cache_dir=tmp_path)
        require_same(student, students["v1"][0], images())
    assert not torch.equal(students["v1"][0](images()), students["main"][0](images()))
    with pytest.raises(HubError, match=r"^somebody/digits has no revision v9$"):
        Student.from_pretrained(REPO, revision="v9", cache_dir=tmp_path)


@pytest.mark.slow
def test_a_private_repository_needs_a_token(students, server, tmp_path):
    server.private.add(REPO)
    with pytest.raises(HubError, match=r"^there is no repository .*digits, or it needs a `token`$"):
        Student.from_pretrained(REPO, cache_dir=tmp_path, token=False)
    student = Student.from_pretrained(REPO, cache_dir=tmp_path, token=TOKEN)
    require_same(student, students["main"][0], images())


@pytest.mark.slow
def test_what_is_no_repository_is_said_in_one_line(server, tmp_path):
    with pytest.raises(HubError, match=r"^there is no repository nobody/nothing"):
        Student.from_pretrained("nobody/nothing", cache_dir=tmp_path)
    for name in ("./nowhere/at/all", "a b"):
        with pytest.raises(HubError, match=r"is neither a folder nor the name of a repository"):
            Student.from_pretrained(name, cache_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("content", [None, "{", "[1]", "{}"])
def test_a_repository_without_a_student_is_refused(server, tmp_path, content):
    place = tmp_path / "other"
    place.mkdir()
    (place / "README.md").write_text("nothing here")
    if content is not None:
        (place / "config.json").write_text(content)
    server.repos["somebody/other"] = {"main": place}
    with pytest.raises((HubError, StudentFolderError), match=r"config\.json") as caught:
        Student.from_pretrained("somebody/other", cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)


# Offline.


@pytest.mark.slow
def test_offline_the_cache_is_enough(students, cache, server):
    for revision, (student, _) in students.items():
        for name in (revision, commit(REPO, revision)):
            again = Student.from_pretrained(
                REPO, revision=name, cache_dir=cache, local_files_only=True
            )
            require_same(student, again, images())
    assert not server.served
    options = {"cache_dir": cache, "local_files_only": True}
    for name, revision in ((REPO, "v9"), ("somebody/else", None)):
        with pytest.raises(HubError, match=rf"^{name}.* is not in the cache") as caught:
            Student.from_pretrained(name, revision=revision, **options)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_offline_by_the_environment_in_a_process_of_its_own(students, cache):
    code = (
        "import sys, torch; from cdeq import HubError, Student; from hub_server import commit\n"
        f"student = Student.from_pretrained({REPO!r}, revision='v1')\n"
        "print(float(student(torch.ones(1, 1, 8, 8)).double().sum()))\n"
        "try:\n    Student.from_pretrained('somebody/else')\n"
        "except HubError as error:\n    print(error)\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    total, problem = done.stdout.splitlines()
    expected = float(students["v1"][0](torch.ones(1, 1, 8, 8)).double().sum())
    assert float(total) == pytest.approx(expected, abs=1e-6)
    assert problem.startswith("somebody/else is not in the cache")


@pytest.mark.slow
def test_an_incomplete_cache_is_noticed(cache):
    snapshot = cache / "models--somebody--digits" / "snapshots" / commit(REPO, "main")
    (snapshot / "student.safetensors").unlink()
    with pytest.raises((HubError, StudentFolderError), match=r"not in the cache|is missing"):
        Student.from_pretrained(REPO, cache_dir=cache, local_files_only=True)


# No code of a repository is run.

FOREIGN = (
    "os:system",
    "torch.nn:Linear",
    "cdeq.models:nn.Linear",
    "cdeq.__main__:main",
    "evil:Net",
)


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["teacher", "start_network", "correction_network"])
def test_a_repository_with_a_class_that_is_not_ours_is_refused(
    server, students, tmp_path, monkeypatch, entry
):
    place = tmp_path / "evil"
    shutil.copytree(students["main"][1], place)
    config = json.loads((place / "config.json").read_text())
    (place / "evil.py").write_text("raise SystemExit('run')")
    monkeypatch.syspath_prepend(place)
    for i, path in enumerate(FOREIGN):
        config[entry] = {"from_teacher": False, "class": path, "config": {}}
        (place / "config.json").write_text(json.dumps(config))
        server.repos[f"somebody/evil-{i}"] = {"main": place}
        for source in (f"somebody/evil-{i}", place):
            with pytest.raises(StudentFolderError, match="which is not a class of cdeq") as caught:
                Student.from_pretrained(source, cache_dir=tmp_path / "cache")
            assert path in str(caught.value)
            assert "\n" not in str(caught.value)
    assert "evil" not in sys.modules


@pytest.mark.slow
def test_a_teacher_of_ones_own_is_passed(server, tmp_path):
    student = make(Tanh(), inputs())
    student.save_pretrained(tmp_path / "own")
    assert 'digits", teacher=Tanh)' in sharing.model_card(student, REPO)
    server.repos["somebody/own"] = {"main": tmp_path / "own"}
    with pytest.raises(StudentFolderError, match=r"teachers:Tanh, which .* pass .* `teacher=`"):
        Student.from_pretrained("somebody/own", cache_dir=tmp_path)
    for teacher in (Tanh, Tanh(seed=3)):
        again = Student.from_pretrained("somebody/own", cache_dir=tmp_path, teacher=teacher)
        require_same(student, again, inputs())


# To a repository.


@pytest.fixture
def pushed(monkeypatch):
    """What huggingface_hub would upload, instead of doing so."""
    calls = []

    def create_repo(self, repo_id, **options):
        calls.append(("create", repo_id, options, {}))
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, *, repo_id, folder_path, **options):
        calls.append(("upload", repo_id, options | {"token": self.token}, contents(folder_path)))
        return f"https://hub/{repo_id}/commit/1"

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    return calls


@pytest.mark.slow
def test_what_is_pushed_is_the_saved_folder(pushed, students, server, tmp_path):
    student, _ = students["main"]
    options = {"private": True, "token": TOKEN, "branch": "v2", "commit_message": "better"}
    assert student.push_to_hub("me/mine", **options) == "https://hub/me/mine/commit/1"
    [(_, repo, created, _), (_, _, uploaded, files)] = pushed
    assert (repo, created["private"], created["exist_ok"]) == ("me/mine", True, True)
    assert uploaded["revision"] == "v2"
    assert uploaded["commit_message"] == "better"
    assert uploaded["token"] == TOKEN
    assert set(files) == {*FILES, "README.md"}
    assert b'Student.from_pretrained("me/mine")' in files["README.md"]
    (tmp_path / "mine").mkdir()
    for name, content in files.items():
        (tmp_path / "mine" / name).write_bytes(content)
    server.repos["me/mine"] = {"main": tmp_path / "mine"}
    again = Student.from_pretrained("me/mine", cache_dir=tmp_path / "cache")
    require_same(student, again, images())


def test_what_cannot_be_pushed_leaves_nothing(pushed):
    student = make(Tanh(), inputs(), start_network=torch.nn.Linear(8, 8))
    with pytest.raises(StudentFolderError, match="start_network"):
        student.push_to_hub("me/mine")
    with pytest.raises(ValueError, match=r"named 'owner/name', not 'mine'"):
        make(Tanh(), inputs()).push_to_hub("mine")
    assert not pushed


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_one_line(students, monkeypatch, tmp_path):
    point_to("http://127.0.0.1:9", monkeypatch)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    for call in (
        lambda: students["main"][0].push_to_hub("me/mine", token=TOKEN),
        lambda: Student.from_pretrained("me/mine", cache_dir=tmp_path),
    ):
        with pytest.raises(HubError, match=r"^me/mine") as caught:
            call()
        assert "\n" not in str(caught.value)


# The model card.


def test_the_card_is_one_that_the_hub_reads(students):
    card = huggingface_hub.ModelCard.load(students["main"][1] / "README.md")
    assert card.data.library_name == "cdeq"
    assert "distillation" in card.data.tags
    assert "ConvDEQ" in card.text
    assert "`corrected`" in card.text
    assert "How good it is" not in card.text


def test_what_the_zoo_knows_is_told_and_kept(folder, tmp_path):  # noqa: F811
    student = cdeq.load_pretrained("toy", folder)
    student.save_pretrained(tmp_path / "shared")
    text = (tmp_path / "shared" / "README.md").read_text()
    assert "| data | random pixels |" in text
    assert "| student, 2 steps | 0.89 | 0.01 |" in text
    assert "| teacher, converged (12.3 steps) | 0.9 | 0 |" in text
    again = Student.from_pretrained(tmp_path / "shared")
    assert again.card["data"] == CARD.data
    assert sharing.model_card(again, "a/b") == sharing.model_card(student, "a/b")


@pytest.mark.slow
def test_a_readme_of_ones_own_is_kept(students, tmp_path):
    student, readme = students["main"][0], tmp_path / "README.md"
    student.save_pretrained(tmp_path)
    readme.write_text(readme.read_text() + "added")
    student.save_pretrained(tmp_path)
    assert not readme.read_text().endswith("added")
    readme.write_text("# Mine")
    student.save_pretrained(tmp_path)
    assert readme.read_text() == "# Mine"


@pytest.mark.slow
def test_the_page_runs_as_written(
    students, server, pushed, tmp_path, monkeypatch, no_plan, brief_stages
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "default"))
    server.repos["me/digits"] = server.repos[REPO]
    table = [{"pixels": inputs(), "label": torch.arange(6) % 3}]
    names = {"cdeq": cdeq, "student": students["main"][0], "table": table, "teacher": Tanh()}
    page = (Path(__file__).parents[1] / "docs" / "sharing.md").read_text()
    monkeypatch.setattr(cdeq, "distill", partial(cdeq.distill, fit=cdeq.FitConfig(updates=1)))
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    require_same(names["again"], students["main"][0], images())
    require_same(names["same"], students["v1"][0], images())
    assert [call[0] for call in pushed] == ["create", "upload"]


# Without the package.


@pytest.mark.slow
def test_without_the_package_the_error_says_what_to_install(students, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    cdeq_hub._folder_class.cache_clear()
    student, place = students["main"]
    for call in (
        lambda: Student.from_pretrained(REPO),
        lambda: student.push_to_hub("me/mine"),
    ):
        with pytest.raises(ImportError, match=r"pip install 'cdeq\[hub\]'$"):
            call()
    Student.from_pretrained(place)
