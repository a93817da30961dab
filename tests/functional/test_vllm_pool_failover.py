"""The replica that leads is killed while an engine publishes what it announces: another one goes on from an
address of its own, and the engine's router ends with what is announced, told once."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from metaservice.cli.local.cluster import LocalCluster
from metaservice.client import Client, ClientConfig
from tests.engines.fleet import UcmEngine
from tests.engines.ground import until
from tests.engines.oracle import block_keys
from tests.engines.row_house import DOCUMENT
from tests.functional.cluster_house import FAST
from tests.functional.events_service import free_ports
from tests.functional.test_vllm_pool_service import OTHER, SHAPE, Publisher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CHANNELS = 8
REPLICAS = 2
BACK_WITHIN_S = 20.0


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    first = free_ports(REPLICAS * 2 * CHANNELS)
    with LocalCluster(
        leadership="sql_lease",
        shards=1,
        replicas=REPLICAS,
        settings={**FAST, "events_channels_max": CHANNELS},
        own=lambda number: {"events_port_base": first + 2 * CHANNELS * (number - 1)},
    ) as made:
        yield made


def test_d2_row_09_another_replica_goes_on_where_the_leader_was_killed(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    urls = ",".join(cluster.urls)
    with Client(ClientConfig(url=urls, timeout_ms=5_000, raise_errors=True)) as operator:
        operator.put_storage("nfs", "posix", {"root": str(tmp_path), "fsync": "none"})
        operator.put_tenant("t")
        operator.put_group("g-pool", "t", ["nfs"])
        port: Any = SimpleNamespace(port=cluster.replicas[0].port)
        engine = UcmEngine(
            port, "pool", "one", SHAPE,
            settings={"publish": True, "publish_model": "fake", "url": urls, "write_ttl_ms": 30_000},
        )  # fmt: skip
        publisher = Publisher(engine)
        engine.serve("a", DOCUMENT, 1)
        until(lambda: publisher.knows(DOCUMENT), what="the document's blocks")
        told = publisher.router.stored
        leader = cluster.leader(0)
        assert leader is not None
        leader.crash()
        served = iter(range(1_000))

        def stored() -> bool:
            """Saves that met nobody who leads are dropped: the next request brings them again."""
            engine.engine.scheduler.tables.pool.forget_free()
            engine.serve(f"b{next(served)}", OTHER, 1)
            return publisher.knows(DOCUMENT, OTHER)

        until(stored, BACK_WITHIN_S, "what came under the next leader")
        assert cluster.leader(0) is not leader
        instance = engine.broker.instance_of(None) or ""
        operator.remove(instance, block_keys(SHAPE, OTHER))
        until(lambda: publisher.knows(DOCUMENT), BACK_WITHIN_S, "the other's end")
        assert publisher.router.stored - told <= 3 * 10, "all of it was told again and again"
        publisher.close()
        engine.close()
