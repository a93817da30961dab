"""A service with cache events and a router on one of its streams, for those who wish them ill."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.functional.events_reader import Reader
from tests.functional.events_service import EventsService, Prompt, running
from tests.security.service_child import rss_bytes

MIB = 2**20
_next = iter(range(1_000_000, 2_000_000))


def publisher_pid(service: EventsService) -> int:
    """The process that speaks with routers."""
    assert service.process.process is not None
    parent = service.process.process.pid
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(stat.parent.name))
    assert len(found) == 1, found
    return found[0]


def unharmed(service: EventsService, reader: Reader, name: str) -> None:
    """Blocks are written, found and told, and nothing was logged that should not be."""
    prompt = Prompt(next(_next), 2)
    service.write(prompt, name)
    assert service.lookup(prompt, name) == 2
    reader.pump(lambda: reader.has(prompt.hashes), what="a new block is told")
    log = service.process.log()
    assert "Traceback" not in log, log[-3_000:]


@contextmanager
def same_publisher(service: EventsService, growth_bytes: int = 64 * MIB) -> Iterator[None]:
    """What happens inside neither kills the publisher nor makes it grow by more than that."""
    pid = publisher_pid(service)
    before = rss_bytes(pid)
    yield
    assert publisher_pid(service) == pid, "it died and was started again"
    grown = rss_bytes(pid) - before
    assert grown < growth_bytes, f"it grew by {grown / MIB:.0f} MiB"


@contextmanager
def furnished(folder: Path, **settings: object) -> Iterator[tuple[EventsService, Reader]]:
    """A service with an instance `m1`, and a router on its stream."""
    with running(folder, **settings) as service:
        service.furnish("m1", publication={"model": "m1"})
        yield service, service.reader("m1")
