"""The processes that torchrun started, on one machine or several, as a crew that shares out pieces of work.

The first process runs the experiment and works along; the others wait for work. Everything goes through the store
that torchrun keeps anyway: no process group is made, so that a training inside a piece is one of a single process.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

from torch import distributed as dist

PATIENCE = timedelta(days=365)
"""How long a process waits for another; torchrun ends all of them when one dies."""


def crew_size() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def is_helper() -> bool:
    """Whether this process waits for the first one's work."""
    return crew_size() > 1 and int(os.environ["RANK"]) > 0


@cache
def crew() -> Crew:
    """The crew of this process."""
    store, rank, world = next(dist.rendezvous("env://"))
    # After a restart torchrun's store still has what was said before.
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"cdeq-crew-{again}", store)
    store.set_timeout(PATIENCE)
    return Crew(store, rank, world)


@dataclass
class Crew:
    """Rounds of work: the first process puts the pieces of a round into the store, everyone takes the next one.

    What is in the store was put there by processes of the same command: it is pickled.
    """

    store: Any
    rank: int
    world: int
    rounds: int = 0

    def shared(self, work: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        """`work` of each item, in order; called by the first process."""
        name = self._next_round()
        self.store.set(name, pickle.dumps((work, list(items))))
        self._take(name, work, items)
        for number in range(len(items)):
            found, error = pickle.loads(self.store.get(f"{name}/{number}"))
            if error is not None:
                raise error
            yield found

    def serve(self) -> None:
        """Work on every round until there are no more; called by the others."""
        while (given := pickle.loads(self.store.get(name := self._next_round()))) is not None:
            self._take(name, *given)
        self.store.set(f"{name}/left/{self.rank}", b"")

    def dismiss(self) -> None:
        """Tell the others that there is no more work, and wait until they know: the store may end with this process."""
        name = self._next_round()
        self.store.set(name, pickle.dumps(None))
        self.store.wait([f"{name}/left/{rank}" for rank in range(1, self.world)])

    def _next_round(self) -> str:
        self.rounds += 1
        return f"round-{self.rounds}"

    def _take(self, name: str, work: Callable[[Any], Any], items: Sequence[Any]) -> None:
        """Work on pieces of a round as long as there are any that nobody took."""
        while (number := self.store.add(f"{name}/taken", 1) - 1) < len(items):
            found: tuple[Any, Exception | None]
            try:
                found = (work(items[number]), None)
            except Exception as error:
                found = (None, error)
            self.store.set(f"{name}/{number}", _sendable(found))


def _sendable(found: tuple[Any, Exception | None]) -> bytes:
    """Pickled; an error that cannot be is told in words."""
    try:
        content = pickle.dumps(found)
        pickle.loads(content)
    except Exception:
        if found[1] is None:
            raise
        return pickle.dumps((None, RuntimeError(f"{type(found[1]).__name__}: {found[1]}")))
    return content
