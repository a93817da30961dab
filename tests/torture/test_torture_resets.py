"""Whoever a replica asks resets the connection at the very moment at which it is made: the libraries between
both stumble over that in ways of their own, and it must stay an answer that did not come."""

import asyncio
import random
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from socket import SO_LINGER, SOL_SOCKET, create_server

import pytest
import uvloop

from metaservice.leadership.errors import LeadershipUnavailable
from metaservice.leadership.etcd import EtcdLeadership
from metaservice.leadership.etcd_gateway import EtcdSettings
from metaservice.leadership.port import Report

REPLICAS = 32
TRIES = 30


@pytest.fixture
def resetting() -> Iterator[int]:
    """The port of somebody who resets each connection at once."""
    with create_server(("127.0.0.1", 0), backlog=128) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


@pytest.mark.torture
def test_connections_to_etcd_that_are_reset_while_they_are_made_end_nothing(resetting: int) -> None:
    async def renewals(number: int) -> Counter[type]:
        leadership = EtcdLeadership(
            EtcdSettings(endpoints=(f"http://127.0.0.1:{resetting}",)),
            replica=f"r{number}",
            url=f"http://r{number}",
            life=f"life-{number}",
            shards=1,
            ttl_ms=2_000,
            timeout_ms=200,
            now_s=time.monotonic,
            chance=random.random,
        )
        seen: Counter[type] = Counter()
        for _ in range(TRIES):
            try:
                await leadership.renew(Report({}, True, True))
            except Exception as error:
                seen[type(error)] += 1
        await leadership.close()
        return seen

    async def together() -> Counter[type]:
        """A busy loop: the reset is known before whoever waits for the connection runs."""
        return sum(await asyncio.gather(*map(renewals, range(REPLICAS))), Counter[type]())

    assert uvloop.run(together()) == {LeadershipUnavailable: REPLICAS * TRIES}
