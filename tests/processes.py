"""Several gloo processes without torchrun's start-up: forked from a helper process that has imported torch once."""

import os
import signal
import socket
import sys
import traceback

from cdeq import process_group


def run_processes(world, function, *arguments):
    """`function(*arguments)` in each of `world` processes of one group; if one ends badly, so do the others.

    That is what torchrun does. Returns whether all ended well.
    """
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    running = {_fork(rank, world, port, function, arguments) for rank in range(world)}
    well = True
    while running:
        child, status = os.wait()
        running.discard(child)
        if status and well:
            well = False
            for other in running:
                os.kill(other, signal.SIGKILL)
    return well


def _fork(rank, world, port, function, arguments):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        about = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in about.items()}
        os.environ["MASTER_ADDR"] = "localhost"
        with process_group():
            function(*arguments)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def die():
    os.kill(os.getpid(), signal.SIGKILL)
