"""H2: an awaited call ends exactly once, whatever happens meanwhile."""

import asyncio
import inspect
import logging
import time
from typing import Any

import pytest

from metaservice.client import AsyncClient, Client, ClientConfig, LookupResult
from tests.unit.client_peers import Peer, Request, good, peer, resetting, silent

KEYS = [bytes([n]) * 16 for n in range(1, 9)]


def config_for(one: Peer, **changes: Any) -> ClientConfig:
    return ClientConfig(**{"url": one.url, "timeout_ms": 300, "breaker_failures": 1_000, **changes})


class Ends:
    """Counts how often a task ends, and how."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def watch(self, task: "asyncio.Task[LookupResult]") -> "asyncio.Task[LookupResult]":
        def done(ended: "asyncio.Task[LookupResult]") -> None:
            self.seen.append("cancelled" if ended.cancelled() else ended.result().failure or "ok")

        task.add_done_callback(done)
        return task


@pytest.fixture(autouse=True)
def nothing_left_unheard(caplog: pytest.LogCaptureFixture) -> Any:
    """asyncio logs what was resolved and never awaited, and callbacks that failed: neither may happen."""
    caplog.set_level(logging.ERROR, "asyncio")
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.name == "asyncio"] == []


@pytest.mark.parametrize(
    ("behave", "end"),
    [(good, "ok"), (resetting, "connection_lost"), (silent, "timeout")],
    ids=["ok", "error", "timeout"],
)
async def test_h2_future_resolves_exactly_once(behave: Any, end: str) -> None:
    ends = Ends()
    with peer(behave) as one:
        async with AsyncClient(config_for(one)) as client:
            await ends.watch(asyncio.create_task(client.lookup("i", KEYS)))
            await asyncio.sleep(0.05)
    assert ends.seen == [end]


async def test_h2_late_answer_after_the_deadline_changes_nothing() -> None:
    def late(request: Request) -> None:
        time.sleep(0.15)
        good(request)

    ends = Ends()
    with peer(late) as one:
        async with AsyncClient(config_for(one, timeout_ms=50)) as client:
            await ends.watch(asyncio.create_task(client.lookup("i", KEYS)))
            await asyncio.sleep(0.25)
            assert ends.seen == ["timeout"]
            result = await client.lookup("i", KEYS, timeout_ms=1_000)
            assert result.hits == 8, "and the late answer is not taken for the next one"
    assert one.connections == 2


async def test_h2_cancelled_call_ends_as_cancelled_and_only_that() -> None:
    answers = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_request(request: Request) -> None:
        loop.call_soon_threadsafe(answers.set)
        time.sleep(0.05)
        good(request)

    ends = Ends()
    with peer(on_request) as one:
        async with AsyncClient(config_for(one)) as client:
            call = ends.watch(asyncio.create_task(client.lookup("i", KEYS)))
            await answers.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.sleep(0.15)
            assert (await client.lookup("i", KEYS)).hits == 8
    assert ends.seen == ["cancelled"]
    assert one.connections == 2, "the connection of a cancelled call is not used again"


async def test_h2_cancelled_while_connecting_or_before_it_began() -> None:
    ends = Ends()
    with peer(silent) as one:
        async with AsyncClient(config_for(one)) as client:
            for turns in range(4):
                call = ends.watch(asyncio.create_task(client.lookup("i", KEYS)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
    assert ends.seen == ["cancelled"] * 4


async def test_h2_service_restarts_under_many_calls() -> None:
    """Every call ends once: with an answer, or as a miss; and after the restart they are answered again."""
    ends = Ends()

    def slowly(request: Request) -> None:
        time.sleep(0.01)
        good(request)

    first = Peer(slowly)
    config = ClientConfig(url=first.url, timeout_ms=500, breaker_failures=1_000)
    async with AsyncClient(config) as client:
        calls = [ends.watch(asyncio.create_task(client.lookup("i", KEYS))) for _ in range(120)]
        await asyncio.sleep(0.03)
        first.close()
        second = Peer(slowly, first.port)
        later = [ends.watch(asyncio.create_task(client.lookup("i", KEYS))) for _ in range(40)]
        await asyncio.gather(*calls, *later)
        after = await client.lookup("i", KEYS)
    second.close()
    assert len(ends.seen) == 160
    assert set(ends.seen) <= {"ok", "connection_lost", "refused_connection", "timeout"}
    assert "ok" in ends.seen
    assert after.failure is None


async def test_h2_restart_between_two_calls_is_not_noticed() -> None:
    first = Peer(good)
    async with AsyncClient(ClientConfig(url=first.url, timeout_ms=500)) as client:
        assert (await client.lookup("i", KEYS)).hits == 8
        first.close()
        second = Peer(good, first.port)
        assert (await client.lookup("i", KEYS)).hits == 8
    second.close()


async def test_deadlines_do_not_depend_on_each_other() -> None:
    with peer(silent) as one:
        async with AsyncClient(config_for(one, timeout_ms=5_000)) as client:
            began = time.monotonic()
            long = asyncio.create_task(client.lookup("i", KEYS, timeout_ms=400))
            short = await client.lookup("i", KEYS, timeout_ms=100)
            assert short.failure == "timeout"
            assert 0.09 < time.monotonic() - began < 0.35
            assert (await long).failure == "timeout"


async def test_cancelled_probe_of_the_breaker_makes_room_for_another() -> None:
    sick = True

    def behave(request: Request) -> None:
        if sick:
            silent(request)
        else:
            good(request)

    with peer(behave) as one:
        config = config_for(
            one, timeout_ms=5_000, breaker_failures=1, breaker_pause_ms_min=50, breaker_slow_ms=4_000
        )
        async with AsyncClient(config) as client:
            assert (await client.lookup("i", KEYS, timeout_ms=50)).failure == "timeout"
            assert (await client.lookup("i", KEYS)).failure == "breaker_open"
            await asyncio.sleep(0.06)
            probe = asyncio.create_task(client.lookup("i", KEYS))
            await asyncio.sleep(0.05)
            assert (await client.lookup("i", KEYS)).failure == "breaker_open"
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)
            sick = False
            assert (await client.lookup("i", KEYS)).hits == 8


def test_both_clients_have_the_same_calls() -> None:
    """Signature by signature, so that what is learnt for one holds for the other."""
    names = {name for name in vars(Client) if not name.startswith("_")}
    assert names == {name for name in vars(AsyncClient) if not name.startswith("_")}
    for name in names:
        one, other = getattr(Client, name), getattr(AsyncClient, name)
        if callable(one):
            assert inspect.signature(one) == inspect.signature(other), name
            assert (one.__doc__ == other.__doc__) or name == "close", name
