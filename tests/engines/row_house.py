"""A group of its own for one test of a reported bug, and the engines that meet in it."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dataplane import Place
from dataplane.backends.posix_layout import path_of
from tests.engines.fake_scheduler import Options
from tests.engines.fleet import UcmEngine, dirty_blocks
from tests.engines.ground import Ground, until
from tests.engines.oracle import Shape, block_keys

_NUMBERS = itertools.count()
DOCUMENT = tuple((7 * number + 3) % 251 for number in range(41))
"""Ten whole blocks, and one token more."""
BLOCKS = 10


class Gate:
    """Where a thread of the connector is held until it is opened; `reached` once one stands there."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self._open.wait(20), "the gate was never opened"

    def open(self) -> None:
        self._open.set()


class RowHouse:
    """Engines of one model in a group of its own."""

    def __init__(self, ground: Ground, shape: Shape, kind: str) -> None:
        self.ground = ground
        self.shape = shape
        self.group = f"row{next(_NUMBERS)}"
        self.root: Path = ground.group(self.group, kind=kind)
        self.engines: list[UcmEngine] = []
        self._gates: list[Gate] = []

    def engine(self, name: str = "e", *, namespace: dict[str, Any] | None = None, **more: Any) -> UcmEngine:
        """An engine; words that Options has go there, the others are settings."""
        options = {field: more.pop(field) for field in list(more) if hasattr(Options(), field)}
        made = UcmEngine(
            self.ground, self.group, f"{self.group}-{name}", self.shape, Options(**options), more,
            namespace=namespace or {},
        )  # fmt: skip
        self.engines.append(made)
        return made

    def filled(self, name: str = "first", prompt: tuple[int, ...] = DOCUMENT, **more: Any) -> UcmEngine:
        """An engine that has served and stored a prompt."""
        made = self.engine(name, **more)
        made.serve(f"fill-{name}", prompt, 1)
        made.settle()
        return made

    def gate(self) -> Gate:
        """A gate that is opened at the end at the latest."""
        made = Gate()
        self._gates.append(made)
        return made

    def hold_reads(self, engine: UcmEngine, rank: int = 0) -> Gate:
        """Reads of this rank wait at a gate."""
        gate, mover = self.gate(), engine.workers[rank]._mover
        read = mover.read

        def held(*args: Any) -> list[str]:
            gate()
            return read(*args)

        setattr(mover, "read", held)  # noqa: B010
        return gate

    def hold_writes(self, engine: UcmEngine, rank: int = 0) -> Gate:
        """Writes of this rank wait at a gate, after their session was opened."""
        gate, mover = self.gate(), engine.workers[rank]._mover
        write = mover.write

        def held(*args: Any) -> list[int | str]:
            gate()
            return write(*args)

        setattr(mover, "write", held)  # noqa: B010
        return gate

    def fail_writes(self, engine: UcmEngine, rank: int = 0) -> None:
        """Writes of this rank fail from now on."""
        setattr(engine.workers[rank]._mover, "write", lambda refs, data: ["io_error"] * len(refs))  # noqa: B010

    @property
    def instance(self) -> str:
        found = self.engines[0].broker.instance_of(None)
        assert found
        return found

    def stored(self, prompt: tuple[int, ...] = DOCUMENT, instance: str = "") -> int:
        """How many blocks of a prompt's prefix anybody may read."""
        keys = block_keys(self.shape, prompt)
        return self.ground.client.lookup(instance or self.instance, keys).hits

    def file_of(self, index: int, part: int = 0, prompt: tuple[int, ...] = DOCUMENT) -> Path:
        """The file of one part of one block."""
        key = block_keys(self.shape, prompt)[index]
        ref = self.ground.stored(self.instance, [key])[key][part]
        return Path(path_of(str(self.root), Place.of(ref)))

    def check(self) -> None:
        """Whatever was done: tokens right, blocks clean, nothing held."""
        for each in self.engines:
            if not each.dead:
                each.run()
                each.settle()
                each.engine.check_idle()
            assert not each.wrong(), each.name
        assert not dirty_blocks(self.ground, self.shape, self.engines)

    def leases(self) -> int:
        """Leases that this group's engines hold."""
        return sum(each.broker.leases_open() for each in self.engines)


@contextmanager
def row_house(ground: Ground, shape: Shape | None = None, kind: str = "posix") -> Iterator[RowHouse]:
    """A house that is checked and closed at the end."""
    house = RowHouse(ground, shape or Shape(), kind)
    try:
        yield house
        for gate in house._gates:
            gate.open()
        house.check()
    finally:
        for gate in house._gates:
            gate.open()
        for each in house.engines:
            ground.later(each.close)


__all__ = ["BLOCKS", "DOCUMENT", "Gate", "RowHouse", "row_house", "until"]
