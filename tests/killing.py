"""Children that are killed: forked from a helper process that has imported torch once."""

import json
import os
import random
import signal
import stat
import subprocess
import sys
import time


def fork(function, *arguments):
    """The process id of a child that runs `function` and ends."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function(*arguments)
            code = 0
        finally:
            os._exit(code)
    return pid


def outcome(pid):
    """The signal that ended a child, or 0 if it ended well."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status <= 0, f"the child failed with {status}"
    return -status


def killed_at(number, function, *arguments):
    """Run `function`, to be killed before its flush (with half the file written) or rename of this number."""
    calls = iter(range(10**6))
    fsync, replace = os.fsync, os.replace

    def fatal_fsync(descriptor):
        if next(calls) == number:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):  # as if half of it had been written
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    def fatal_replace(source, target):
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.fsync, os.replace = fatal_fsync, fatal_replace
    function(*arguments)


def kill_at_random(root, run, require_same, look, kills):
    """What `look(folder)` says after each SIGKILL at a random instant of `run(folder)`, which is then called again.

    Over as many folders as it takes; `require_same` compares each with the folder of a run that was not killed.
    """
    chance, found, began = random.Random(0), [], time.monotonic()
    assert outcome(fork(run, root / "whole")) == 0
    duration = time.monotonic() - began
    while len(found) < kills:
        folder = root / f"killed{len(found)}"
        while True:
            child = fork(run, folder)
            time.sleep(chance.uniform(0.0, duration / 3))
            os.kill(child, signal.SIGKILL)
            if outcome(child) == 0:
                break
            found.append(look(folder))
        require_same(folder, root / "whole")
    return found


def kill_at_every_call(root, run, require_same, look):
    """The same, killed once in each folder: before each flush, with half the file written, and each rename of a run."""
    assert outcome(fork(run, root / "whole")) == 0
    found = []
    while outcome(fork(killed_at, len(found), run, folder := root / f"call{len(found)}")) != 0:
        found.append(look(folder))
        assert outcome(fork(run, folder)) == 0
        require_same(folder, root / "whole")
    return found


def run_helper(file, *arguments):
    """What the helper process, a test file run as a script, reports."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, file, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
