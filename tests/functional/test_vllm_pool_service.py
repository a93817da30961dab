"""Engines that store and an engine that publishes what the service announces, with the service between them:
a router that hears only the second one knows what the first one stored."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine_adapters.vllm.counts import Counts
from engine_adapters.vllm.pool_follower import PoolFollower
from engine_adapters.vllm.pool_places import StreamFinder, named
from engine_adapters.vllm.pool_secrets import opener
from engine_adapters.vllm.pool_wire import Told
from engine_adapters.vllm.settings import Settings
from metaservice.client import Client, ClientConfig
from metaservice.publish.curve import make_keys
from tests.engines.engine_request import Adapter
from tests.engines.fleet import UcmEngine
from tests.engines.ground import Ground, until
from tests.engines.oracle import Shape, block_keys
from tests.engines.row_house import BLOCKS, DOCUMENT
from tests.functional.events_reader import Block, Index
from tests.functional.events_service import EventsService
from tests.unit.pool_sender import as_told

_NUMBERS = itertools.count()
SHAPE = Shape()
SIZE = SHAPE.block_tokens
OTHER = tuple((11 * number + 1) % 251 for number in range(41))


class Site:
    """A service with events, and engines of a group of their own."""

    def __init__(self, service: EventsService, folder: Path) -> None:
        self.service = service
        self.name = f"pool{next(_NUMBERS)}"
        self.engines: list[UcmEngine] = []
        self.ground = cast(Ground, SimpleNamespace(port=service.process.port))
        self.client = Client(ClientConfig(url=service.process.url, timeout_ms=5_000, raise_errors=True))
        folder.mkdir()
        self.client.put_storage(self.name, "posix", {"root": str(folder), "fsync": "none"})
        self.client.put_tenant("t")
        self.client.put_group(f"g-{self.name}", "t", [self.name])

    def engine(self, name: str, **settings: Any) -> UcmEngine:
        told = {"publish": True, "publish_model": "fake", **settings}
        made = UcmEngine(self.ground, self.name, f"{self.name}-{name}", SHAPE, settings=told)
        self.engines.append(made)
        return made

    @property
    def instance(self) -> str:
        return self.engines[0].broker.instance_of(None) or ""

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.client.close()


class Publisher:
    """The second engine's part: it takes steps, and a router hears what they publish."""

    def __init__(self, engine: UcmEngine, settings: Settings | None = None) -> None:
        settings = settings or engine.made_settings
        self.router = Index()
        self.finder = StreamFinder(settings, engine.name, lambda: engine.broker.instance_of(None))
        endpoints = named(settings.pool_endpoints)
        self.follower: PoolFollower[Told] = PoolFollower(
            (lambda: endpoints) if endpoints else self.finder, lambda told: told, opener(settings), Counts()
        )
        self.follower.start()

    def knows(self, *prompts: tuple[int, ...]) -> bool:
        """Whether its router has just these prompts' blocks, plain ones."""
        self.step()
        return self.router.blocks == {key: block for one in prompts for key, block in blocks_of(one).items()}

    def step(self) -> None:
        for event in as_told(self.follower.take()):
            self.router.take(event)

    def close(self) -> None:
        self.follower.close()
        self.finder.close()


def blocks_of(
    prompt: tuple[int, ...], *, salt: str = "", adapter: Adapter | None = None
) -> dict[tuple[int, str], Block]:
    """What a router has to know of a prompt in the pool."""
    keys = block_keys(SHAPE, prompt, salt, adapter.label if adapter else "")
    hashes = [int.from_bytes(key[-8:], "big") for key in keys]
    name = adapter.lora_name if adapter else None
    return {
        (one, "EXTERNAL"): Block(parent, prompt[row * SIZE : (row + 1) * SIZE], name, salt)
        for row, (parent, one) in enumerate(zip([None, *hashes], hashes, strict=False))
    }


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventsService]:
    with EventsService(tmp_path_factory.mktemp("service")) as made:
        yield made


@pytest.fixture
def site(service: EventsService, tmp_path: Path) -> Iterator[Site]:
    made = Site(service, tmp_path / "disk")
    try:
        yield made
    finally:
        made.close()


def test_what_one_engine_stores_another_publishes(site: Site) -> None:
    one, two = site.engine("one"), site.engine("two", pool_events=True)
    two.broker.wait_ready(5_000)
    publisher = Publisher(two)
    one.serve("a", DOCUMENT, 1)
    until(lambda: publisher.knows(DOCUMENT), what="the document's blocks")
    assert len(publisher.router.blocks) == BLOCKS
    one.serve("b", OTHER, 1)
    until(lambda: publisher.knows(DOCUMENT, OTHER), what="the other's")
    site.client.remove(site.instance, block_keys(SHAPE, OTHER))
    until(lambda: publisher.knows(DOCUMENT), what="the other's end")

    publisher.router.blocks.clear()
    publisher.follower.cleared()
    until(lambda: publisher.knows(DOCUMENT), what="all of it once more, after the engine cleared its caches")

    site.service.restart()
    one.serve("c", OTHER, 1)
    until(lambda: publisher.knows(DOCUMENT, OTHER), 20, what="what came after the service had died")
    publisher.close()


def test_row_19_row_20_adapters_and_salts_are_published_as_such(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "poet"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"poetry")
    poet = Adapter("poet", str(folder), "poetry")
    one = site.engine("one")
    publisher = Publisher(one)
    one.serve("a", DOCUMENT, 1)
    one.serve("b", DOCUMENT, 1, salt="sea")
    until(lambda: one.broker.instance_of((poet.lora_name, poet.lora_path)), what="the adapter's instance")
    one.serve("c", DOCUMENT, 1, adapter=poet)
    right = {
        **blocks_of(DOCUMENT),
        **blocks_of(DOCUMENT, salt="sea"),
        **blocks_of(DOCUMENT, adapter=poet),
    }

    def told() -> bool:
        publisher.step()
        return publisher.router.blocks == right

    until(told, what="three times the same tokens")
    publisher.close()


def test_a_stream_that_an_operator_names_is_followed(site: Site) -> None:
    one = site.engine("one")
    one.serve("a", DOCUMENT, 1)
    stream = site.service.stream(site.instance)
    named_one = Settings(group="g", pool_events=stream["endpoint"])
    publisher = Publisher(one, named_one)
    until(lambda: publisher.knows(DOCUMENT), what="the document's blocks")
    publisher.close()


def test_an_encrypted_stream_is_followed_with_the_keys_of_the_settings(tmp_path: Path) -> None:
    server, server_public = make_keys(tmp_path, "server")
    mine, my_public = make_keys(tmp_path, "mine")
    other, _ = make_keys(tmp_path, "other")
    keys = {"events_curve_secret": server, "events_curve_clients": f"{my_public}=t"}
    with EventsService(tmp_path / "service", **keys) as service:
        site = Site(service, tmp_path / "disk")
        one = site.engine("one", pool_events=True, curve_secret=str(mine), curve_server=server_public)
        two = site.engine("two", pool_events=True, curve_secret=str(other), curve_server=server_public)
        friend, stranger = Publisher(one), Publisher(two)
        one.serve("a", DOCUMENT, 1)
        until(lambda: friend.knows(DOCUMENT), what="the document's blocks")
        stranger.step()
        assert not stranger.router.blocks
        for each in (friend, stranger):
            each.close()
        site.close()
