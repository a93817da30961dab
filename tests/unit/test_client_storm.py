"""C9: many clients of a service that is gone for a while must not come back in step."""

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from metaservice.client import AsyncClient
from tests.unit.client_cluster import KEYS, cluster

CLIENTS = 100
SLOT_S = 0.1
QUICK = {"breaker_failures": 2, "breaker_pause_ms_min": 200, "breaker_pause_ms_max": 1_000}


@pytest.mark.parametrize(
    ("refuses_s", "settles_s", "back_s_max", "changes"),
    [
        pytest.param(3.0, 1.0, 3.0, QUICK, id="quick"),
        pytest.param(20.0, 8.0, 7.0, {}, id="as-set", marks=pytest.mark.slow),
    ],
)
async def test_c9_clients_of_three_replicas_come_back_spread(
    refuses_s: float, settles_s: float, back_s_max: float, changes: dict[str, Any]
) -> None:
    """The replicas cut every call off for a while. Once the first moment is over, tries are even: no slot of
    a tenth of a second sees more than a few times its share, and all are back soon after."""

    async def engine(client: AsyncClient) -> None:
        while (await client.lookup("i1", KEYS)).failure is not None and time.monotonic() < stop_s:
            await asyncio.sleep(0.02)

    with cluster() as house:
        house.resets = {0, 1, 2}
        many = [AsyncClient(house.config(**changes)) for _ in range(CLIENTS)]
        began = time.monotonic()
        stop_s = began + refuses_s + 3 * back_s_max
        engines = [asyncio.create_task(engine(client)) for client in many]
        await asyncio.sleep(refuses_s)
        house.resets = set()
        healed = time.monotonic()
        await asyncio.gather(*engines)
        back_s = time.monotonic() - healed
        await asyncio.gather(*(client.close() for client in many))
        times = [request.at_s - began for _, request in house.got("lookup")]
    tries = [at for at in times if settles_s <= at < refuses_s]
    slots = Counter(int((at - settles_s) / SLOT_S) for at in tries)
    even = len(tries) * SLOT_S / (refuses_s - settles_s)
    assert len(tries) >= CLIENTS, "they go on trying"
    assert max(slots.values()) <= 4 * even + 5, f"in step: {sorted(slots.items())}"
    pause_s = changes.get("breaker_pause_ms_max", 5_000) / 1_000
    per_client_s = len(tries) / CLIENTS / (refuses_s - settles_s)
    assert per_client_s <= 3 / (0.5 * pause_s) + 0.5, "and each no more often than its pauses allow"
    assert back_s < back_s_max
