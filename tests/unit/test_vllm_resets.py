"""Caches that are reset while requests have blocks: what was computed with the old weights is never stored as
the new weights'. On fake engines with the real connector and service."""

import logging
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from engine_adapters.vllm.requests import Phase
from tests.engines.fake_scheduler import Options
from tests.engines.fleet import UcmEngine
from tests.engines.ground import Ground
from tests.engines.row_house import BLOCKS, DOCUMENT, RowHouse, row_house, until


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    logging.getLogger("ucm.vllm").setLevel(logging.CRITICAL)
    logging.getLogger("metaservice.client").setLevel(logging.CRITICAL)
    made = Ground(tmp_path_factory.mktemp("resets"))
    yield made
    made.close()


def unregistered(house: RowHouse) -> UcmEngine:
    """An engine whose service is away when it starts."""
    made = UcmEngine(
        house.ground, house.group, f"{house.group}-late", house.shape, Options(), start=False
    )  # fmt: skip
    house.engines.append(made)
    return made


def test_row23_a_request_of_before_the_first_registration_stores_nothing_after_a_reset(
    ground: Ground,
) -> None:
    """It was never told an instance, so it may not take the one that the new weights get."""
    with row_house(ground) as house:
        engine = unregistered(house)
        engine.ask("old", DOCUMENT, 12)
        engine.step_until(lambda: engine.engine.scheduler.tables.pool.leaked, "its first blocks")
        engine.broker.renew_namespace(replace(engine.broker._joining._namespace, weight_version="2"))
        engine.side.reset()
        engine.broker.start()
        assert engine.broker.wait_ready(5_000)
        engine.run()
        engine.settle()
        assert house.stored() == 0, "KV of the old weights is stored under the new ones"
        assert engine.engine.scheduler.tables.pool.reset()
        engine.serve("new", DOCUMENT, 2)
        engine.settle()
        assert house.stored() == BLOCKS


def test_row23_while_old_blocks_are_left_nothing_is_asked_or_stored(ground: Ground) -> None:
    """vLLM could not empty its cache: what shares the old blocks is neither old nor new."""
    with row_house(ground) as house:
        first = house.filled()
        engine = house.engine("e")
        engine.ask("waiting", DOCUMENT, 2)
        until(lambda: engine.broker.answer("waiting#1") is not None, what="the answer")
        engine.side.suspend()
        until(lambda: not engine.broker.leases_open(), what="the lease's end")
        engine.run()
        other = tuple(reversed(DOCUMENT))
        engine.serve("meanwhile", other, 2)
        engine.settle()
        counted = engine.counted()
        assert "save_orders" not in counted and "loads" not in counted and counted["lookups"] == 1
        engine.side.reset()
        assert engine.engine.scheduler.tables.pool.reset()
        engine.serve("after", other, 2)
        engine.serve("again", DOCUMENT, 2)
        engine.settle()
        assert house.stored(other) == BLOCKS and engine.counted()["loaded_blocks"] == BLOCKS
        assert first.broker.instance_of(None) == engine.broker.instance_of(None)


def test_row23_who_waits_begins_anew_with_the_new_weights(ground: Ground) -> None:
    """An answer of before the reset is of the old weights; the request looks up, and stores, under the new
    ones."""
    with row_house(ground) as house:
        house.filled()
        engine = house.engine("e")
        engine.ask("r", DOCUMENT, 2)
        until(lambda: engine.broker.answer("r#1") is not None, what="the answer")
        old = engine.broker.instance_of(None)
        engine.broker.renew_namespace(replace(engine.broker._joining._namespace, weight_version="2"))
        engine.side.reset()
        assert engine.side._tracked["r"].phase is Phase.fresh
        until(lambda: engine.broker.identity is not None, what="the new instance")
        new = engine.broker.instance_of(None)
        assert new != old
        engine.run()
        engine.settle()
        assert "loaded_blocks" not in engine.counted()
        assert new is not None and house.stored(DOCUMENT, new) == BLOCKS
