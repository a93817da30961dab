"""D8: every replica is killed, all that they had of their own is deleted, and they start again; PostgreSQL is
what is left. Keys, sessions and members are as they were, and no client reports anything again. Who asks
meanwhile is refused, or answered with the age of the answer, never with less than there is."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from metaservice.cli.local.cluster import LocalCluster
from tests.functional.cluster_house import FAST, TTL_S, instance_of, led, set_up

SHARDS = 2
LEASE_MS = 6_000
LIMITS = {
    **FAST,
    "lease_ms_max": LEASE_MS,
    "reclaim_delay_ms": 3_000,
    "suspect_ms": 40_000,
    "expire_ms": 80_000,
}
OWNER = {"engine": "e1", "incarnation": "first"}
WORKER = {"incarnation": "only"}
STALE_MS_MAX = 1_000
CHAINS = 3
BLOCKS = 4
WITHIN_S = 40.0


def chain(shard: int, number: int) -> list[str]:
    """The keys of a chain of an instance, as JSON has them."""
    return [bytes([shard, number, block]).ljust(16, b"k").hex() for block in range(BLOCKS)]


class Asker:
    """Asks one replica after the other until one answers."""

    def __init__(self, http: httpx.AsyncClient, cluster: LocalCluster) -> None:
        self._http = http
        self._cluster = cluster

    async def send(self, url: str, method: str, path: str, body: Any = None) -> httpx.Response | None:
        """The answer of one replica; None when there is none."""
        try:
            return await self._http.request(method, url + path, json=body)
        except httpx.HTTPError:
            return None

    async def ask(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        """The answer that somebody gives in the end, of this status."""
        until_s = time.monotonic() + WITHIN_S
        said = ""
        while time.monotonic() < until_s:
            for url in self._cluster.urls:
                answer = await self.send(url, method, path, body)
                if answer is not None and answer.status_code != 503:
                    assert answer.status_code == status, f"{method} {path}: {answer.text}"
                    return answer.json()
                said = "" if answer is None else answer.text
            await asyncio.sleep(0.1)
        raise AssertionError(f"{method} {path}: nobody answers: {said}")

    async def start(self, shard: int, keys: list[str], **more: Any) -> Any:
        """Begin to write blocks."""
        return await self.ask(
            "POST", f"/v1/instances/{instance_of(shard)}/writes", OWNER | {"keys": keys} | more
        )

    async def finish(self, started: Any) -> Any:
        """End what was begun."""
        body = {name: started[name] for name in ("locations", "generations")}
        body["checksums"] = [7] * len(started["locations"])
        return await self.ask("POST", f"/v1/writes/{started['session']}/finish", OWNER | body)

    async def lookup(self, shard: int, keys: list[str], **more: Any) -> Any:
        """What is there."""
        return await self.ask("POST", f"/v1/instances/{instance_of(shard)}/lookup", {"keys": keys, **more})

    async def members(self) -> dict[str, tuple[str, int]]:
        """Of all engines and workers, which incarnation is registered since when."""
        pages = [await self.ask("GET", f"/v1/{kind}") for kind in ("engines", "workers")]
        assert all(one["status"] == "active" for page in pages for one in page["items"]), pages
        return {
            one["id"]: (one["incarnation"], one["registered_ms"]) for page in pages for one in page["items"]
        }

    async def counts(self) -> None:
        """Wait until operators are told of all blocks that are there or being written, of each shard."""
        for shard, blocks in enumerate((CHAINS * BLOCKS + 2 * BLOCKS, CHAINS * BLOCKS + BLOCKS)):
            until_s = time.monotonic() + WITHIN_S
            used = -1
            while used != blocks:
                assert time.monotonic() < until_s, (shard, used)
                view = await self.ask("GET", f"/v1/instances/{instance_of(shard)}")
                used = view["usage"]["blocks"]
                await asyncio.sleep(0.05)


class Watch:
    """Lookups of what was acknowledged, at every replica, with and without leave to be old, all the time."""

    def __init__(self, asker: Asker, urls: tuple[str, ...]) -> None:
        self.wrong: list[str] = []
        self.refused = 0
        self.old = 0
        self.fresh = 0
        self._asker = asker
        self._urls = urls

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Watch"]:
        """They are asked until the end of the context."""
        asking = [asyncio.create_task(self._ask(url, old)) for url in self._urls for old in (False, True)]
        try:
            yield self
        finally:
            for one in asking:
                one.cancel()
            await asyncio.wait(asking)

    async def _ask(self, url: str, old: bool) -> None:
        turn = 0
        while True:
            turn += 1
            shard, number = turn % SHARDS, turn % CHAINS
            body: dict[str, Any] = {"keys": chain(shard, number)}
            if old:
                body["staleness_ms_max"] = STALE_MS_MAX
            answer = await self._asker.send(url, "POST", f"/v1/instances/{instance_of(shard)}/lookup", body)
            if answer is not None:
                self._judge(answer, old)
            await asyncio.sleep(0.02)

    def _judge(self, answer: httpx.Response, old: bool) -> None:
        said = answer.json()
        if answer.status_code == 503 and said["code"] == "not_ready":
            self.refused += 1
        elif answer.status_code != 200 or said["hits"] != BLOCKS:
            self.wrong.append(answer.text)
        elif "staleness_ms" not in said:
            self.fresh += 1
        elif old and said["staleness_ms"] <= STALE_MS_MAX and said["applied_seq"] > 0:
            self.old += 1
        else:
            self.wrong.append(answer.text)


def lose_everything(cluster: LocalCluster) -> None:
    """All replicas die at once, and whatever they kept in files goes."""
    for replica in cluster.replicas:
        replica.crash()
    for replica in cluster.replicas:
        shutil.rmtree(cluster.folder / replica.name, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(leadership="sql_lease", shards=SHARDS, settings=LIMITS) as cluster:
        asyncio.run(set_up(cluster))
        yield cluster


@pytest.mark.timeout(180)
async def test_d8_replicas_lose_all_they_have_and_nobody_reports_anything_again(
    cluster: LocalCluster,
) -> None:
    async with httpx.AsyncClient(timeout=5, trust_env=False) as http:
        asker = Asker(http, cluster)
        await asker.ask("PUT", "/v1/engines/e1", {"incarnation": "first"})
        await asker.ask("PUT", "/v1/workers/w1", WORKER | {"storages": ["s"]})
        for shard in range(SHARDS):
            for number in range(CHAINS):
                done = await asker.finish(await asker.start(shard, chain(shard, number)))
                assert done["published"] == BLOCKS
        late = [await asker.start(shard, chain(shard, 100), ttl_ms=30_000) for shard in range(SHARDS)]
        left = await asker.start(0, chain(0, 101), ttl_ms=int(2_000 * TTL_S))
        members = await asker.members()
        await asker.counts()
        leased_s = time.monotonic()
        leased = await asker.lookup(0, chain(0, 0), lease_ms=LEASE_MS)
        assert leased["lease_ms"] == LEASE_MS

        async with Watch(asker, cluster.urls).running() as watch:
            await asyncio.to_thread(lose_everything, cluster)
            refused, fresh = watch.refused, watch.fresh
            for replica in cluster.replicas:
                replica.launch()
            await asyncio.to_thread(cluster.await_ready)

            # the members are who they were: the same incarnations, and no registration in between
            for kind, body in (("engines/e1", {"incarnation": "first"}), ("workers/w1", WORKER)):
                assert (await asker.ask("POST", f"/v1/{kind}/heartbeat", body))["status"] == "active"
            assert await asker.members() == members
            await asker.counts()  # what is being written is still counted
            for shard in range(SHARDS):
                for number in range(CHAINS):
                    assert (await asker.lookup(shard, chain(shard, number)))["hits"] == BLOCKS
                assert (await asker.finish(late[shard]))["published"] == BLOCKS
                assert (await asker.lookup(shard, chain(shard, 100)))["hits"] == BLOCKS
        assert watch.wrong == []
        assert watch.refused > refused, "they answered before they knew"
        assert watch.old > 0, "they told the age of what they knew before anybody led"
        assert watch.fresh > fresh

        # A lease that the new leader knows nothing of still holds the bytes: it was promised.
        renewed = await asker.ask("POST", f"/v1/leases/{leased['lease']}/renew", {"ttl_ms": 1_000})
        assert renewed["outcomes"] in (["unknown"], ["expired"])
        gone = await asker.ask("POST", f"/v1/instances/{instance_of(0)}/remove", {"keys": chain(0, 0)})
        assert gone["removed"] == BLOCKS
        taken: list[Any] = []
        while not taken:
            assert time.monotonic() < leased_s + WITHIN_S + 30, "the bytes were never given to a worker"
            asked = {**WORKER, "shard": 0, "wait_ms": 200}
            taken = (await asker.ask("POST", "/v1/workers/w1/tasks", asked))["tasks"]
            assert (await asker.ask("POST", "/v1/engines/e1/heartbeat", {"incarnation": "first"}))["status"]
        assert time.monotonic() >= leased_s + LEASE_MS / 1_000
        # What nobody finishes ends by itself, though its deadline was set in an earlier life.
        again = await asker.start(0, chain(0, 101))
        while again["outcomes"] != ["write"] * BLOCKS:
            assert time.monotonic() < leased_s + WITHIN_S + 60, again
            await asyncio.sleep(0.2)
            await asker.ask("POST", "/v1/engines/e1/heartbeat", {"incarnation": "first"})
            again = await asker.start(0, chain(0, 101))
        assert again["session"] != left["session"]
        assert len(led(cluster)) == SHARDS
