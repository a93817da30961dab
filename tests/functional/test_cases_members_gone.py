"""C11 over HTTP and on the command line: engines and workers that crash for ever leave nothing behind, and an
operator sees what is gone and clears it up without ending what lives."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest_asyncio

from metaservice.api.settings import ApiSettings
from metaservice.core.model import Limits
from tests.functional.api_house import House, open_house
from tests.functional.cli_house import ucm_meta

SHORT = Limits(
    heartbeat_ms=50, suspect_ms=150, expire_ms=300, forget_ms=400,
    write_ttl_ms_min=50, write_ttl_ms_default=300, reclaim_delay_ms=0, late_write_ms=50,
)  # fmt: skip
FOR_GOOD = Limits(heartbeat_ms=100, suspect_ms=500, expire_ms=1_000, forget_ms=600_000)
CYCLES = 1_000


@pytest_asyncio.fixture
async def house() -> AsyncIterator[House]:
    async with open_house(limits=FOR_GOOD) as house:
        await house.furnish()
        yield house


async def listed(house: House, kind: str, query: str = "") -> list[dict[str, Any]]:
    """All pages of a list."""
    found: list[dict[str, Any]] = []
    token = ""
    while True:
        page = await house.ask("GET", f"/v1/{kind}?page_token={token}{query}")
        found += page["items"]
        token = page["next_page_token"]
        if not token:
            return found


@asynccontextmanager
async def alive(house: House, engine: str, incarnation: str) -> AsyncIterator[None]:
    """An engine that registers and is heard of all the time."""
    await house.ask("PUT", f"/v1/engines/{engine}", {"incarnation": incarnation})

    async def beat() -> None:
        while True:
            await house.send("POST", f"/v1/engines/{engine}/heartbeat", {"incarnation": incarnation})
            await asyncio.sleep(0.05)

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.wait([beating])


async def gone(house: House, kind: str, count: int) -> None:
    """Wait until so many have expired."""
    for _ in range(400):
        if len(await listed(house, kind, "&status=expired")) == count:
            return
        await asyncio.sleep(0.05)
    raise TimeoutError(f"not {count} {kind} have expired: {await listed(house, kind)}")


class Wire:
    """One connection that asks one thing after the other, quicker than a whole client would."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, method: str, path: str, body: Any) -> int:
        """The status of the answer."""
        content = json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        self._writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        _, _, length = answer.partition(b"content-length: ")
        await self._reader.readexactly(int(length.partition(b"\r\n")[0]))
        return int(answer.split()[1])

    async def live_and_die(self, life: int) -> None:
        """An engine begins a write, a worker registers, and nobody hears of them again."""
        engine = {"incarnation": "a", "instance": "m1"}
        assert await self.ask("PUT", f"/v1/engines/x{life}", engine) == 200
        assert await self.ask("PUT", f"/v1/workers/x{life}", {"incarnation": "a", "storages": ["s1"]}) == 200
        body = {"engine": f"x{life}", "incarnation": "a", "keys": [life.to_bytes(16, "big").hex()]}
        # on a slow machine it may have expired before it begins
        assert await self.ask("POST", "/v1/instances/m1/writes", body) in (200, 409)


async def test_c11_a_thousand_engines_and_workers_come_and_die_and_nothing_stays() -> None:
    async with open_house(limits=SHORT) as house:
        await house.furnish()
        state = house.shard.state.state
        reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
        wire, peak, written = Wire(reader, writer), 0, 0
        for life in range(CYCLES):
            await wire.live_and_die(life)
            peak = max(peak, len(state.engines), len(state.workers))
            written = max(written, len(state.sessions))
        writer.close()
        assert written > 0
        assert peak < CYCLES, "the first are forgotten while others come"
        for _ in range(400):
            left = (state.engines, state.workers, state.sessions, state.sessions_of)
            if not any(left):
                break
            await asyncio.sleep(0.05)
        assert not any(left), left
        assert await listed(house, "engines") == [] and await listed(house, "workers") == []
        usage = (await house.ask("GET", "/v1/tenants/acme"))["usage"]
        assert usage["blocks"] == 0, "what they began to write is no longer counted"


async def test_c11_an_operator_lists_what_is_gone_and_takes_it_away(house: House) -> None:
    for number in range(5):
        await house.ask("PUT", f"/v1/engines/e{number}", {"incarnation": "old"})
    await gone(house, "engines", 5)
    await gone(house, "workers", 1)
    async with alive(house, "e3", "new"):
        expired = await listed(house, "engines", "&status=expired&page_size=1")
        assert [one["id"] for one in expired] == ["e0", "e1", "e2", "e4"]
        assert {one["status"] for one in expired} == {"expired"}
        for one in expired:
            assert await house.ask("DELETE", f"/v1/engines/{one['id']}") == {"id": one["id"]}
        assert (await house.problem("DELETE", "/v1/engines/e0"))[:2] == (404, "engine_unknown")
        assert await house.problem("DELETE", "/v1/engines/e3") == (409, "not_expired", "incarnation")
        assert (await house.problem("DELETE", "/v1/engines/e3?incarnation=old"))[1] == "reregister"
        assert [one["id"] for one in await listed(house, "engines")] == ["e3"]
        await house.ask("DELETE", "/v1/engines/e3?incarnation=new")
    assert await listed(house, "engines") == []
    assert (await house.problem("GET", "/v1/engines?status=dead"))[:2] == (422, "invalid_field")


async def test_c11_a_page_of_few_among_many_is_short_and_goes_on() -> None:
    """One request looks at no more of them than a page may have, whatever is asked for."""
    async with open_house(limits=FOR_GOOD, settings=ApiSettings(page_size_max=4)) as house:
        names = [f"f{number:02}" for number in range(10)]
        for name in names:
            await house.ask("PUT", f"/v1/engines/{name}", {"incarnation": "a"})
        await gone(house, "engines", len(names))
        async with alive(house, "f05", "b"):
            first = await house.ask("GET", "/v1/engines?status=active&page_size=100")
            assert first["items"] == [] and first["next_page_token"], "none of the first four is alive"
            assert [one["id"] for one in await listed(house, "engines", "&status=active")] == ["f05"]
        assert [one["id"] for one in await listed(house, "engines", "&page_size=3")] == names


async def test_c11_the_same_on_the_command_line(house: House) -> None:
    url = f"http://127.0.0.1:{house.port}"
    await gone(house, "engines", 1)
    await gone(house, "workers", 1)

    async def run(*words: str) -> tuple[int, str, str]:
        return await asyncio.to_thread(ucm_meta, "members", *words, "--url", url)

    async with alive(house, "e2", "new"):
        code, out, _ = await run("list", "--json", "--status", "expired")
        assert code == 0
        assert {(one["kind"], one["id"]) for one in json.loads(out)} == {("engine", "e1"), ("worker", "w1")}
        code, out, _ = await run("list", "--kind", "engine")
        assert code == 0 and "e1" in out and "e2" in out and "w1" not in out
        code, _, err = await run("forget", "engine", "e2")
        assert code == 1 and "not_expired" in err
        assert (await run("forget", "worker", "w1"))[:2] == (0, "worker w1 is forgotten\n")
        assert (await run("forget", "worker", "w1"))[0] == 1
        ended = await run("forget", "engine", "e2", "--incarnation", "new")
        assert ended == (0, "engine e2 is forgotten\n", "")
    assert (await run("forget-expired"))[:2] == (0, "1 forgotten\n")
    assert await listed(house, "engines") == []
    assert ucm_meta("members", "list", "--url", "http://127.0.0.1:9").returncode == 2
