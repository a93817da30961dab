"""What a forked child must not share with its parent: sockets, pipes, request ids, threads that only the
parent has."""

import os
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    def after_fork(self) -> None:
        """Called in the child of a fork, before anything else runs there."""


_all: "WeakSet[Forkable]" = WeakSet()


def register(thing: Forkable) -> None:
    """Tell `thing` about forks for as long as it lives."""
    _all.add(thing)


def _in_child() -> None:
    for thing in list(_all):
        thing.after_fork()


os.register_at_fork(after_in_child=_in_child)
