"""A fleet whose blocks routers are told of, and a router that believes what it is told."""

from msgspec.structs import replace

from metaservice.core.commands import Announce, PutInstance, PutStorage, Restate
from metaservice.core.machine import Machine
from metaservice.core.model import Fingerprint, Limits, Publication
from metaservice.core.windows import Gone, Run, Window
from metaservice.wire.tokens import pack_tokens
from tests.sim.fleet import FINGERPRINT
from tests.unit.core_host import LIMITS, Host

TOLD = replace(LIMITS, window_blocks_max=8, window_removed_max=16, restate_ms=1_000_000_000)
PUBLICATION = Publication("model", entries_max=1_000)
TOKENS = pack_tokens(range(16))
Place = tuple[str, str, str, bytes]
"""(instance, medium, node, key)."""


def rows(part: Run | Gone) -> list[bytes]:
    """Its keys."""
    return [part.keys[at : at + part.key_length] for at in range(0, len(part.keys), part.key_length)]


class Router:
    """Knows what the windows said, and refuses what no router would take."""

    def __init__(self) -> None:
        self.number = 0
        self.known: set[Place] = set()

    def take(self, window: Window) -> None:
        """The next window."""
        assert not self.number or window.number == self.number + 1, "a window is missing"
        self.number = window.number
        for gone in window.removed:
            self.known -= self._places(gone)
        for gone in window.again:
            assert not self._places(gone) & self.known, "what is announced is told as removed again"
        for run in window.restated:
            assert self._places(run) <= self.known, "told again without being announced"
        for run in window.stored:
            assert not self._places(run) & self.known, "stored twice"
            known = {place[3] for place in self.known}
            assert run.parent is None or run.parent in known, "a child before its parent"
            assert len(run.tokens) * run.key_length == len(run.keys)
            self.known |= self._places(run)

    @staticmethod
    def _places(part: Run | Gone) -> set[Place]:
        return {(part.instance, part.medium, part.node, one) for one in rows(part)}

    def keys(self, medium: str = "EXTERNAL") -> set[bytes]:
        """What it knows there."""
        return {place[3] for place in self.known if place[1] == medium}


class Told(Host):
    """Its instance `i` is announced; new blocks go to storage `s`, and `mem` is the memory of node `n1`."""

    def __init__(self, limits: Limits = TOLD, publication: Publication | None = PUBLICATION) -> None:
        self.router = Router()
        super().__init__(limits)
        self.done(PutStorage(storage="mem", kind="shm", options={"dir": "/dev/shm"}, fault_domain="n1"))
        self.prefer("s")
        self.publish(publication)

    def made(self, machine: Machine) -> Machine:
        machine.collect_windows()
        return machine

    def publish(
        self, publication: Publication | None, instance: str = "i", fingerprint: Fingerprint = FINGERPRINT
    ) -> None:
        """How the instance is announced from now on."""
        self.done(PutInstance(instance=instance, group="g", fingerprint=fingerprint, publication=publication))

    def write(self, keys: list[bytes], parent: bytes | None = None, engine: str = "e1") -> None:
        """Blocks with tokens."""
        self.put(keys, engine, parent=parent, tokens=[TOKENS] * len(keys))

    def tell(self, steps_max: int = 100) -> list[Window]:
        """All there is to tell now, and that the router takes it."""
        windows: list[Window] = []
        for _ in range(steps_max):
            if not self.machine.announces(self.now_ms):
                break
            self.now_ms += 5
            self.done(Announce())
            windows += self.machine.take_windows()
        else:
            raise AssertionError("there is always something to tell")
        for window in windows:
            self.router.take(window)
        return windows

    def restate(self, instance: str = "i") -> list[bytes]:
        """Ask for all of it; the keys in the order in which they are told again."""
        self.done(Restate(instance=instance))
        return [one for window in self.tell() for run in window.restated for one in rows(run)]
