"""Two real engines with the service between them: a router that hears nothing but the second one's own KV
cache events knows what the first one stored."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from metaservice.cli.local.places import free_port
from metaservice.client import ClientError
from metaservice.wire.schemas_events import EventsReply
from tests.functional.events_service import free_ports
from tests.vllm.engine_house import ANSWER_TOKENS, Engines, ServiceProcess, prompts
from tests.vllm.test_engine_kv_events import TINY, Event, Follower, Told, expected, names

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

BLOCKS = 6
CHANNELS = 8
EXTERNAL = "EXTERNAL"
WAIT_S = 15.0


class Router:
    """What a router knows of an engine's events beyond its own memory: block -> parent and tokens."""

    def __init__(self) -> None:
        self.blocks: dict[Told, tuple[Told | None, list[int]]] = {}
        self.clears = 0

    def follow(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.clears += 1
                self.blocks.clear()
            elif event.medium == EXTERNAL and isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    self.blocks.pop(block, None)
            elif event.medium == EXTERNAL and isinstance(event, BlockStored):
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        for row, block in enumerate(event.block_hashes):
            assert block not in self.blocks, "told twice"
            assert parent is None or parent in self.blocks, "its parent was not told"
            tokens = event.token_ids[row * event.block_size : (row + 1) * event.block_size]
            self.blocks[block] = parent, tokens
            parent = block


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service that tells routers."""
    flags = ("--events-port-base", str(free_ports(2 * CHANNELS)), "--events-channels-max", str(CHANNELS))
    process = ServiceProcess(tmp_path_factory.mktemp("service"), free_port(), *flags)
    try:
        process.await_ready()
        process.set_up()
        yield process
    finally:
        process.process.kill()


@pytest.fixture
def follower() -> Iterator[Follower]:
    found = Follower()
    try:
        yield found
    finally:
        found.close()


def streams_of(service: ServiceProcess) -> EventsReply:
    """What the service says of its streams. On a busy machine its publisher may need a moment."""
    until_s = time.monotonic() + WAIT_S
    with service.operator() as client:
        while True:
            try:
                return msgspec.convert(client.get_json("/v1/events"), EventsReply)
            except ClientError:
                assert time.monotonic() < until_s


def test_what_one_engine_stores_another_publishes_also_after_its_own_cache_was_reset(
    engines: Engines, service: ServiceProcess, models: Callable[[str], Path], follower: Follower
) -> None:
    model = models("llama")
    first, other = prompts(model, 2, BLOCKS, first=490)
    one = engines.start("one", model, salt="pool", publish=True, publish_model="mine")
    two = engines.start(
        "two", model, salt="pool", publish=True, publish_model="mine", pool_events=True, engine="two",
        arguments=follower.arguments,
    )  # fmt: skip
    router = Router()

    def step() -> None:
        """The second engine is made to take one: an idle one publishes nothing."""
        two.ask([TINY], 1)
        router.follow(follower.received())

    def knows(blocks: dict[Told, tuple[Told | None, list[int]]]) -> None:
        """Returns when the router knows these, and nothing of what is gone."""
        until_s = time.monotonic() + WAIT_S
        while not blocks.items() <= router.blocks.items() or gone & router.blocks.keys():
            assert time.monotonic() < until_s, (len(router.blocks), len(blocks), router.clears)
            step()

    gone: set[Told] = set()
    follower.join(two, service)
    (answer,) = one.ask([first], ANSWER_TOKENS)
    right = expected(answer, first)
    knows(right)

    clears = router.clears
    two.reset()
    until_s = time.monotonic() + WAIT_S
    while router.clears == clears:
        assert time.monotonic() < until_s
        step()
    knows(right)

    (second,) = one.ask([other], ANSWER_TOKENS)
    knows({**right, **expected(second, other)})
    with service.operator() as client:
        (instance,) = [row["id"] for row in client.get_json("/v1/instances")["items"]]
        client.remove(instance, [bytes.fromhex(key) for key in second.keys])
        told = client.get_json(f"/v1/instances/{instance}")["publication"]
        assert told["model"] == "mine" and told["hash_of"] == "tail64"
    gone |= set(names(second))
    knows(right)
    assert two.counts.connector["pool_events"] > 0
    assert not two.counts.connector.get("pool_events_invalid")


def test_an_engines_own_streams_and_place_are_registered(
    engines: Engines, service: ServiceProcess, models: Callable[[str], Path]
) -> None:
    port = free_ports(2)
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{port + 1}",
    }
    engine = engines.start(
        "three", models("llama"), salt="place", publish=True, engine="three", node="n1",
        address="127.0.0.1:8000", worker_id=5, arguments={"kv_events_config": events},
    )  # fmt: skip
    engine.ask(prompts(models("llama"), 1, 2, first=530), 1)
    (told,) = [one for one in streams_of(service).engines if one.engine == "three"]
    assert (told.node, told.address, told.worker_id) == ("n1", "127.0.0.1:8000", 5)
    assert (told.events, told.replay) == (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}")
    assert told.pool_channel >= 0 and told.local_channel >= 0
