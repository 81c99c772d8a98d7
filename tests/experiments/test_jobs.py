"""Jobs: one after another, in several processes, or shared by shells. Also the script that forks the shells."""

import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from multiprocessing import active_children
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the processes that are started here

import pytest
import torch
from small import TEXT, use_small_data

from builders import options
from cdeq import cli
from cdeq.evaluation import Results
from cdeq_experiments.jobs import Job, run_jobs
from cdeq_experiments.options import ExperimentError, silent
from cdeq_experiments.runs import Run
from killing import fork, outcome, run_helper


def noted(folder, number, seconds=0.0):
    """Takes note of who did it."""
    with (folder / "log").open("a") as file:
        file.write(f"{number}\n")
    time.sleep(seconds)
    return [number, os.getpid()]


def fail(folder, number):
    raise ExperimentError("this one fails")


def die(folder, number):
    os.kill(os.getpid(), signal.SIGKILL)


def hang(folder, number):
    (folder / "hanging").write_text(str(os.getpid()))
    time.sleep(600)


def jobs(folder, *works):
    return [
        Job(f"job {i}", Run.of(folder, "job", {"number": i}), partial(work, folder, i))
        for i, work in enumerate(works)
    ]


def test_jobs_are_done_in_order_and_once(tmp_path):
    lines = []
    asked = options(tmp_path, say=lines.append)
    found = run_jobs(jobs(tmp_path, *[noted] * 4), asked)
    assert [number for number, _ in found] == [0, 1, 2, 3]
    assert lines == [f"job {i}: done" for i in range(4)]
    assert run_jobs(jobs(tmp_path, *[noted] * 6), asked)[:4] == found
    assert (tmp_path / "log").read_text().split() == ["0", "1", "2", "3", "4", "5"]


def test_a_job_that_fails_leaves_those_before_it_done(tmp_path):
    with pytest.raises(ExperimentError, match="this one fails"):
        run_jobs(jobs(tmp_path, noted, fail, noted), options(tmp_path))
    run_jobs(jobs(tmp_path, noted, noted, noted), options(tmp_path))
    assert (tmp_path / "log").read_text().split() == ["0", "1", "2"]


def test_what_others_are_doing_is_left_to_them_and_then_waited_for(tmp_path, monkeypatch):
    made = jobs(tmp_path, noted, noted, noted)
    lock = made[0].run.lock
    lock.acquire()
    seen = []

    def work(job):
        seen.append(job.title)
        if len(seen) == 2:  # the other process fails, and lets go of what it had
            lock.release()
        return job.work()

    run_jobs([replace(job, work=partial(work, job)) for job in made], options(tmp_path))
    assert seen == ["job 1", "job 2", "job 0"]


def test_options_are_silent_in_another_process(tmp_path):
    import pickle

    asked = options(tmp_path, progress=True, say=print)
    sent = pickle.loads(pickle.dumps(asked))
    assert (sent.progress, sent.say) == (False, silent)
    assert replace(sent, progress=True, say=print) == asked


# Processes.


@pytest.mark.slow
def test_processes_share_the_jobs(tmp_path):
    lines = []
    asked = options(tmp_path, jobs=2, threads=1, say=lines.append)
    works = [partial(noted, seconds=0.3)] * 8
    found = run_jobs(jobs(tmp_path, *works), asked)
    assert [number for number, _ in found] == list(range(8))
    assert len({process for _, process in found} - {os.getpid()}) == 2
    assert sorted((tmp_path / "log").read_text().split()) == [str(i) for i in range(8)]
    assert sorted(lines) == [f"job {i}: done" for i in range(8)]


def ended(process):
    """Whether a process is gone, or dead and not yet taken note of."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(true, seconds=60):
    until = time.perf_counter() + seconds
    while not true():
        assert time.perf_counter() < until
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "message"),
    [(fail, "this one fails"), (die, "a process that worked on a job was killed")],
)
def test_an_error_ends_all_processes_at_once(work, message, tmp_path):
    began = time.perf_counter()
    with pytest.raises(ExperimentError, match=message):
        run_jobs(jobs(tmp_path, hang, work), options(tmp_path, jobs=2))
    assert time.perf_counter() - began < 100
    wait_until(lambda: not active_children())
    made = jobs(tmp_path, noted, noted)
    assert not any(job.run.done for job in made)
    run_jobs(made, options(tmp_path))  # nobody holds them


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at Linux's processes")
def test_processes_end_when_the_one_that_started_them_is_killed(tmp_path):
    parent = subprocess.Popen([sys.executable, __file__, "hang", str(tmp_path)])
    wait_until((tmp_path / "hanging").exists)
    worker = int((tmp_path / "hanging").read_text())
    assert not ended(worker)
    parent.kill()
    parent.wait()
    wait_until(lambda: ended(worker))


# Copies of one command.

ARGUMENTS = ("reproduce", "beta", "--scale", "tiny", "--seeds", "2", "--threads", "1")


def reproduce(root):
    """The command of a user, on data on which it takes a second."""
    places = ["--out", str(root / "out"), "--runs", str(root / "runs")]
    with pytest.MonkeyPatch.context() as patch:
        use_small_data(patch)
        return cli.main([*ARGUMENTS, *places])


def shell(root):
    assert reproduce(root) == 0


def rows(root):
    return Results.from_json(root / "out" / "beta.json").rows


def assert_same_numbers(two, one):
    assert [(r.method, r.seed, r.steps) for r in two] == [(r.method, r.seed, r.steps) for r in one]
    for theirs, ours in zip(two, one, strict=True):
        assert theirs.metric == pytest.approx(ours.metric, rel=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_shells_make_what_one_process_makes(tmp_path):
    assert run_helper(__file__, "shells", tmp_path / "shells") == [0, 0]
    assert reproduce(tmp_path / "one") == 0
    assert_same_numbers(rows(tmp_path / "shells"), rows(tmp_path / "one"))
    # All four clocks are of one student for each seed, which one of the processes trained.
    students = list((tmp_path / "shells" / "runs").glob(f"{TEXT.name}-paper-*"))
    assert len(students) == 2


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, root = sys.argv[1], Path(sys.argv[2])
    if what == "hang":
        run_jobs(jobs(root, hang, noted), options(root, jobs=2))
    else:
        import cdeq_experiments.registry  # noqa: F401, before the forks

        with redirect_stdout(sys.stderr):
            children = [fork(shell, root) for _ in range(2)]
        print([outcome(child) for child in children])
