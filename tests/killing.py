"""Children that are killed: forked from a helper process that has imported torch once."""

import json
import os
import signal
import stat
import subprocess
import sys


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


def run_helper(file, folder):
    """What the helper process, a test file run as a script, reports."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, file, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
