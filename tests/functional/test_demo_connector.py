"""An engine's connector against a real service and real files: what it loads is right, or it is found out."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio

from dataplane.integrity import HEADER_BYTES
from engine_adapters.replay import hashing
from engine_adapters.replay.children import ChildFailed, Children
from engine_adapters.replay.connector import Connector, ModelShape
from engine_adapters.replay.deployment import INSTANCE, KEY_LENGTH, PART, Deployment, Sizing
from engine_adapters.replay.messages import Done, Job, Step
from metaservice.client import Client, ClientConfig

ROOT = Path(__file__).resolve().parent.parent.parent

BLOCKS = 40
BLOCK_SIZE_TOKENS = 16
PART_BYTES = 1_000
SIZING = Sizing(block_size_tokens=BLOCK_SIZE_TOKENS, part_bytes=PART_BYTES, blocks=1_000)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    """One service with everything registered, without a worker, for all tests here."""
    folder = tmp_path_factory.mktemp("deployment")
    async with Children(folder) as children:
        started = Deployment(children, folder, SIZING, seed=1)
        await started.start_service()
        await started.set_up()
        yield started


_first_tokens = count(0, 1_000_000)


@pytest.fixture
def prompt() -> bytes:
    """`BLOCKS` whole blocks and a tail, unlike the prompt of any other test."""
    first = next(_first_tokens)
    return hashing.pack_tokens(range(first, first + BLOCKS * BLOCK_SIZE_TOKENS + 5))


class Engine:
    """A connector with its client; every call runs in a thread, as the service has to be waited for."""

    def __init__(self, deployment: Deployment, name: str) -> None:
        self._client = Client(ClientConfig(url=deployment.url, timeout_ms=5_000, breaker_pause_ms_max=250))
        assert self._client.register_engine(name, instance=INSTANCE).active
        shape = ModelShape(
            instance=INSTANCE,
            part=PART,
            part_bytes=PART_BYTES,
            block_size_tokens=BLOCK_SIZE_TOKENS,
            hash_seed=deployment.hash_seed,
            key_length=KEY_LENGTH,
        )
        self._connector = Connector(self._client, shape, lease_ms=5_000, write_ttl_ms=5_000)
        self.steps: list[tuple[Step, int]] = []

    async def serve(self, tokens: bytes) -> Done:
        self.steps = []
        job = Job(index=3, tokens=tokens)
        return await asyncio.to_thread(
            self._connector.serve, job, lambda step, blocks: self.steps.append((step, blocks))
        )

    def close(self) -> None:
        self._connector.close()
        self._client.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engines(deployment: Deployment) -> AsyncIterator[tuple[Engine, Engine]]:
    pair = Engine(deployment, "e1"), Engine(deployment, "e2")
    yield pair
    for engine in pair:
        engine.close()


def files(deployment: Deployment) -> list[Path]:
    """The stored files in the order of their blocks: locations are given out in that order."""
    return sorted(
        (path for path in deployment.storage_root.rglob("*") if path.is_file()), key=lambda path: path.name
    )


async def test_what_one_engine_wrote_another_loads(
    deployment: Deployment, engines: tuple[Engine, Engine], prompt: bytes
) -> None:
    one, other = engines
    before = len(files(deployment))
    written = await one.serve(prompt)
    assert (written.asked, written.hits, written.written) == (BLOCKS, 0, BLOCKS)
    assert one.steps == [("writing", BLOCKS), ("finishing", BLOCKS)]
    loaded = await other.serve(prompt)
    assert (loaded.asked, loaded.hits, loaded.written, loaded.dirty) == (BLOCKS, BLOCKS, 0, 0)
    assert other.steps == [("loading", BLOCKS)]
    longer = await other.serve(prompt + hashing.pack_tokens(range(BLOCK_SIZE_TOKENS)))
    assert (longer.asked, longer.hits, longer.written) == (BLOCKS + 1, BLOCKS, 1)
    assert written.failures == loaded.failures == longer.failures == []
    assert len(files(deployment)) == before + BLOCKS + 1


async def test_a_prompt_shorter_than_a_block_asks_nobody(engines: tuple[Engine, Engine]) -> None:
    answer = await engines[1].serve(hashing.pack_tokens([1, 2, 3]))
    assert (answer.asked, answer.hits, answer.failures) == (0, 0, [])
    assert engines[1].steps == []


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + 10] ^= 1
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def remove(path: Path) -> None:
    path.unlink()


def exchange(path: Path) -> None:
    """Put another whole and valid block in its place."""
    other = next(one for one in sorted(path.parent.parent.rglob("*.kv")) if one != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("harm", [flip, cut_short, remove, exchange])
async def test_a_readable_block_that_is_not_right_is_a_dirty_read(
    deployment: Deployment, engines: tuple[Engine, Engine], prompt: bytes, harm: Callable[[Path], None]
) -> None:
    """This is what makes `dirty_reads` 0 in the demo mean something."""
    before = set(files(deployment))
    assert (await engines[0].serve(prompt)).written == BLOCKS
    stored = [path for path in files(deployment) if path not in before]
    assert len(stored) == BLOCKS
    harm(stored[17])
    answer = await engines[1].serve(prompt)
    assert answer.dirty == 1
    assert answer.hits == 17, "what comes before it is used, it and what comes after it is computed"
    assert (answer.asked, answer.present) == (BLOCKS, BLOCKS - 17)


async def test_h1_a_request_is_answered_without_the_service(
    deployment: Deployment, engines: tuple[Engine, Engine], prompt: bytes
) -> None:
    await engines[0].serve(prompt)
    deployment.kill_service()
    await deployment.service_gone()
    answer = await engines[1].serve(prompt)
    assert (answer.asked, answer.hits, answer.written, answer.dirty) == (BLOCKS, 0, 0, 0)
    assert [failure.partition(":")[0] for failure in answer.failures] == ["lookup", "start_write"]
    await deployment.start_service()
    await asyncio.sleep(0.3)  # the longest pause of this engine's breaker
    again = await engines[1].serve(prompt)
    assert (again.hits, again.failures) == (BLOCKS, [])


async def test_a_storage_that_takes_nothing_costs_a_computation(
    deployment: Deployment, engines: tuple[Engine, Engine], prompt: bytes
) -> None:
    """Every write fails: nothing is published, and the next engine meets no half of it."""
    root = deployment.storage_root
    aside = root.rename(root.with_name("moved-away"))
    try:
        answer = await engines[0].serve(prompt)
        assert (answer.asked, answer.hits, answer.written, answer.dirty) == (BLOCKS, 0, 0, 0)
        assert answer.failures
        again = await engines[1].serve(prompt)
        assert (again.hits, again.dirty) == (0, 0)
    finally:
        aside.rename(root)
    assert (await engines[1].serve(prompt)).written == BLOCKS


async def test_a_service_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "service").write_text("a file where its data folder should be")
    async with Children(tmp_path) as children:
        with pytest.raises(ChildFailed, match=r"service ended with status 1; its log (.|\n)*\| "):
            await Deployment(children, tmp_path, SIZING, seed=1).start_service()


async def test_status_shows_what_the_service_holds(
    deployment: Deployment, engines: tuple[Engine, Engine], prompt: bytes
) -> None:
    command = [sys.executable, "-c", "from metaservice.cli.app import main; main()", "status"]

    async def status(*options: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *command, "--url", deployment.url, *options, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        assert process.returncode == 0
        return output.decode()

    await engines[0].serve(prompt)
    told = json.loads(await status("--json"))
    assert told["service"]["ready"] is True
    assert [instance["usage"]["blocks"] >= BLOCKS for instance in told["instances"]] == [True]
    assert sorted(engine["id"] for engine in told["engines"]) == ["e1", "e2"]
    text = await status()
    for name in ("demo-model", "demo-group", "demo-tenant", "demo-disk", "e1", "e2", "leading"):
        assert name in text
