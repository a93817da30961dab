"""The SDK's router calls and the cache reporter against a whole service that publishes."""

from collections.abc import Callable, Iterator
from time import monotonic, sleep

import pytest

from metaservice.client import CacheReporter, Client, ClientConfig, RouteResult
from tests.functional.events_service import EventsService, Prompt

ADDRESS = "10.0.0.1:8000"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventsService]:
    with EventsService(tmp_path_factory.mktemp("service")) as service:
        service.furnish("m1")
        yield service


@pytest.fixture
def client(service: EventsService) -> Iterator[Client]:
    with Client(ClientConfig(url=str(service.http.base_url), timeout_ms=5_000)) as client:
        yield client


def announced(blocks: int) -> Callable[[RouteResult], bool]:
    """Whether routers are told of the first so many."""
    return lambda told: told.pool is not None and told.pool.announced == blocks


def eventually(ask: Callable[[], RouteResult], good: Callable[[RouteResult], bool]) -> RouteResult:
    """The first good answer. Fails after 10 s with the last one."""
    until = monotonic() + 10
    while not good(told := ask()):
        assert monotonic() < until, told
        sleep(0.02)
    return told


def test_a_prompt_is_found_in_the_pool_and_in_an_engine(service: EventsService, client: Client) -> None:
    prompt = Prompt(1, 4)
    client.register_engine("e1", instance="m1", endpoints={"address": ADDRESS, "worker_id": 77}, canary="")
    write = client.start_write("m1", prompt.keys[:3], tokens=[*prompt.tokens[:3]])
    assert write.failure is None, write.detail
    assert client.finish(write, write.locations, write.generations, checksums=[1] * 3).published == 3
    told = eventually(lambda: client.route("m1", prompt.keys), announced(3))
    assert told.pool is not None and (told.pool.blocks, told.pool.staleness_ms, told.asked) == (3, 0, 4)
    with CacheReporter(client, flush_ms=5) as reporter:
        reporter.stored("gpu", prompt.hashes[:1], prompt.tokens[0])
        reporter.stored("cpu", prompt.hashes[3:], prompt.tokens[3], parent=prompt.hashes[2])
        told = eventually(
            lambda: client.route("m1", prompt.keys),
            lambda told: any(row.engine == "e1" and row.blocks == 4 for row in told.engines),
        )
        best = told.engines[0]
        assert (best.engine, best.address, best.worker_id, best.visible) == ("e1", ADDRESS, 77, True)
        # The last block hangs on one of the pool: without the pool it is of no use.
        tiers = best.tiers
        assert (tiers.gpu, tiers.cpu, tiers.storage, tiers.external, best.tokens) == (1, 1, 1, 4, 64)
        assert told.engines[1].engine == "e-m1" and told.engines[1].tiers.external == 3
        assert [row.engine for row in client.route("m1", prompt.keys, top_k=1).engines] == ["e1"]
        by_tokens = client.route("m1", token_ids=prompt.ids)
        assert by_tokens.pool is not None and by_tokens.pool.blocks == -1, "nobody knows this hash scheme"
        assert [row.blocks for row in by_tokens.engines] == [1]
        assert not client.route("m1", token_ids=prompt.ids, salt="another tenant's").engines
        (engine,) = [row for row in client.events("m1").engines if row.engine == "e1"]
        assert (engine.state, engine.blocks["gpu"], engine.blocks["cpu"]) == ("reported", 1, 1)
        reporter.cleared()
        eventually(
            lambda: client.route("m1", prompt.keys),
            lambda told: all(not row.tiers.gpu for row in told.engines),
        )
    client.deregister()
    eventually(
        lambda: client.route("m1", prompt.keys), lambda told: all(row.engine != "e1" for row in told.engines)
    )


@pytest.mark.slow
def test_reports_are_told_again_to_a_service_that_was_killed(service: EventsService, client: Client) -> None:
    prompt = Prompt(2, 5)
    client.register_engine("e2", instance="m1")
    with CacheReporter(client, flush_ms=5) as reporter:
        reporter.stored("storage", prompt.hashes, [*prompt.ids])
        mine = lambda told: any(row.engine == "e2" and row.tiers.storage == 5 for row in told.engines)  # noqa: E731
        eventually(lambda: client.route("m1", token_ids=prompt.ids), mine)
        service.restart()
        eventually(lambda: client.route("m1", token_ids=prompt.ids), mine)
    client.deregister()


def test_all_that_is_announced_is_told_again_when_asked(service: EventsService, client: Client) -> None:
    prompt = Prompt(3, 2)
    service.write(prompt)
    eventually(lambda: client.route("m1", prompt.keys), announced(2))
    assert client.restate("m1").blocks >= 2
    refused = client.restate("none")
    assert (refused.failure, refused.blocks) == ("rejected:instance_unknown", 0)


def test_streams_are_told(service: EventsService, client: Client) -> None:
    (stream,) = [one for one in client.events("m1").streams if one.live]
    assert (stream.kind, stream.instance, stream.node, stream.topic) == (
        "shared",
        "m1",
        "",
        "kv@pool@tiny-llm",
    )
    assert stream.endpoint.startswith("tcp://127.0.0.1:") and stream.replay.startswith("tcp://127.0.0.1:")
    assert client.events("none").streams == []
