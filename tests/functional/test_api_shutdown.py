"""Case I10: readiness falls first, then requests drain, polls are answered, and the end comes in bounded
time.
"""

import asyncio
import contextlib
from time import perf_counter
from typing import Any

import httpx

from metaservice.api.settings import ApiSettings
from tests.functional.api_house import OWNER, WORKER, House, key, keys, open_house, until


async def test_i10_nothing_fails_while_the_service_drains() -> None:
    """Clients that go on asking meet `connection: close` and a refused connection at most, and a retry
    elsewhere helps.
    """
    async with open_house(settings=ApiSettings(drain_delay_ms=400, graceful_timeout_ms=3000)) as house:
        await house.furnish()
        await house.fill(8)
        polls = [
            asyncio.create_task(house.ask("POST", "/v1/workers/w1/tasks", {**WORKER, "wait_ms": 50_000}))
            for _ in range(5)
        ]
        load = [asyncio.create_task(_ask_until_refused(house, number)) for number in range(4)]
        await until(lambda: house.server.gate.in_flight >= 5)
        await asyncio.sleep(0.2)
        begun = perf_counter()
        house.server.request_stop()
        assert (await house.send("GET", "/readyz")).status_code == 503
        assert (await house.send("GET", "/livez")).status_code == 200
        assert (await house.lookup(keys(8)))["hits"] == 8, (
            "requests are still answered while balancers notice"
        )
        for taken in await asyncio.gather(*polls):
            assert taken["tasks"] == []
        answered = await asyncio.gather(*load)
        await until(lambda: not house.server.gate.connections)
        took = perf_counter() - begun
        assert 0.35 < took < 3
        for statuses in answered:
            assert len(statuses) > 5, "it went on answering"
            assert set(statuses) == {200}, "no request that was taken failed"


async def _ask_until_refused(house: House, number: int) -> list[int]:
    """Look up and write until nobody listens any more; the statuses of all answers."""
    statuses = []
    base = f"http://127.0.0.1:{house.port}"
    async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=10, verify=False) as client:
        with contextlib.suppress(httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):
            for turn in range(100_000):
                body: dict[str, Any] = {"keys": [each.hex() for each in keys(8)]}
                path = "/v1/instances/m1/lookup"
                if turn % 3 == 0:
                    path = "/v1/instances/m1/writes"
                    body = {**OWNER, "keys": [key(1000 * (number + 1) + turn).hex()]}
                statuses.append((await client.post(path, json=body)).status_code)
    return statuses


async def test_i10_an_end_does_not_wait_for_those_who_hold_on() -> None:
    """Idle connections, half-sent requests and unread answers do not keep the process."""
    async with open_house(settings=ApiSettings(graceful_timeout_ms=400)) as house:
        await house.furnish()
        pieces = [
            b"",
            b"GET /livez HTTP/1.1\r\nHo",
            b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nab",
        ]
        peers = [await asyncio.open_connection("127.0.0.1", house.port) for _ in pieces]
        for (_, writer), piece in zip(peers, pieces, strict=True):
            writer.write(piece)
        await until(lambda: len(house.server.gate.connections) >= 3)
        begun = perf_counter()
        house.server.request_stop()
        house.server.request_stop()
        await until(lambda: not house.server.gate.connections)
        assert perf_counter() - begun < 2
        for _, writer in peers:
            writer.close()
