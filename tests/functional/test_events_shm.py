"""Memory of a node that goes: what was announced of it is told as gone, whoever notices."""

from collections.abc import Iterator
from itertools import count

import pytest

from tests.functional.events_service import EventsService, Prompt, known, running, wanted

_numbers = count(1)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventsService]:
    with running(tmp_path_factory.mktemp("shm"), expire_ms=2_000, suspect_ms=1_000, heartbeat_ms=400) as one:
        yield one


@pytest.fixture
def name() -> str:
    return f"m{next(_numbers)}"


def test_row_11_a_worker_that_restarts_takes_its_memory_s_blocks_with_it(
    service: EventsService, name: str
) -> None:
    node = f"n-{name}"
    service.furnish(name, storages=[f"mem@{node}"], publication={"model": name})
    service.engine(f"e-{name}", name, node=node)
    service.worker(f"k-{name}", [f"mem-{node}"], "j1")
    near = service.reader(name, node)
    prompt = Prompt(800, 6)
    service.write(prompt, name)
    near.pump(lambda: near.has(prompt.hashes, "CPU"))
    service.worker(f"k-{name}", [f"mem-{node}"], "j2")
    near.pump(lambda: not near.index.blocks, what="the pool of the life before is gone")
    service.engine(f"e-{name}", name, node=node)
    service.write(prompt, name)
    near.pump(lambda: near.has(prompt.hashes, "CPU"))
    assert known(near.index, "CPU") == wanted(prompt)


def test_row_11_a_worker_that_falls_silent_takes_its_memory_s_blocks_with_it(
    service: EventsService, name: str
) -> None:
    """Within its expiry and a beat, without anybody asking."""
    node = f"n-{name}"
    service.furnish(name, storages=[f"mem@{node}"], publication={"model": name})
    service.engine(f"e-{name}", name, node=node)
    service.worker(f"k-{name}", [f"mem-{node}"])
    near = service.reader(name, node)
    prompt = Prompt(801, 3)
    service.write(prompt, name)
    near.pump(lambda: near.has(prompt.hashes, "CPU"))
    near.pump(lambda: not near.index.blocks, 4.0, "it expired")
