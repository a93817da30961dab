"""What this engine tells the service for routers, and the service's events as vLLM publishes them, on vLLM's
own classes."""

from typing import Any

import msgspec
import pytest
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.block_pool import BlockPool

from engine_adapters.vllm.connector import UcmConnector
from engine_adapters.vllm.endpoints import event_endpoints, presence
from engine_adapters.vllm.events import Clears, pool_event
from engine_adapters.vllm.pool_wire import Removed, Told, events_of
from engine_adapters.vllm.settings import Settings, SettingsRefused
from tests.unit.pool_sender import BLOCK_TOKENS, hash_of, removed, stored
from tests.vllm.config_house import cache_configs, engine_config, llama_specs
from tests.vllm.test_interface import configured

pytestmark = pytest.mark.vllm


def told_of(*events: dict[str, Any]) -> list[Told]:
    return [told[0] for told in events_of(msgspec.msgpack.encode([1.0, list(events), 0])) if told]


def through_vllm(*told: Told) -> list[Any]:
    """As a router reads what vLLM's publisher makes of it."""
    events = [pool_event(one, BLOCK_TOKENS) for one in told]
    plain: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=events)))
    return list(plain[1])


def test_events_go_through_vllms_publisher_as_they_came() -> None:
    salted = stored(5, 2, parent=4, cache_salt="sea")
    root = stored(7, 1, lora_name="poet", cache_salt="sea", extra_keys=[["sea"]])
    sent = [removed([1, 2]), stored(0, 3), salted, root]
    assert through_vllm(*told_of(*sent)) == sent
    first = pool_event(told_of(sent[0])[0], BLOCK_TOKENS)
    second = pool_event(told_of(sent[1])[0], BLOCK_TOKENS)
    assert isinstance(first, BlockRemoved) and isinstance(second, BlockStored)
    assert hash(first) and hash(second)


def test_row_03_row_16_what_is_not_of_so_many_blocks_is_not_published() -> None:
    short = {**stored(0, 3), "token_ids": list(range(11))}
    (told,) = told_of(short)
    assert pool_event(told, BLOCK_TOKENS) is None
    (other,) = told_of(stored(0, 3))
    assert pool_event(other, 2 * BLOCK_TOKENS) is None, "blocks of another size are another engine's"


def test_row_12_vllm_says_nothing_of_a_reset_but_it_is_seen() -> None:
    """And it tells its followers itself that all is gone, before what the connector has for the same step."""
    pool = BlockPool(num_gpu_blocks=4, enable_caching=True, hash_block_size=16, enable_kv_cache_events=True)
    clears = Clears()
    assert not clears.seen(pool) and not clears.seen(pool)
    assert pool.reset_prefix_cache()
    assert clears.seen(pool) and not clears.seen(pool)
    assert [type(event) for event in pool.take_events()] == [AllBlocksCleared]
    held = pool.get_new_blocks(1)
    assert not pool.reset_prefix_cache()
    assert not clears.seen(pool) and pool.take_events() == [], "a reset that failed is none"
    pool.free_blocks(held)


@pytest.mark.parametrize(
    ("endpoint", "replay", "rank", "address", "seen"),
    [
        ("tcp://*:5557", "tcp://*:5558", 0, "10.1.2.3:8000", ("tcp://10.1.2.3:5557", "tcp://10.1.2.3:5558")),
        ("tcp://*:5557", None, 2, "10.1.2.3:8000", ("tcp://10.1.2.3:5559", "")),
        ("tcp://*:5557", "tcp://*:6000", 1, "", ("tcp://127.0.0.1:5558", "tcp://127.0.0.1:6001")),
        ("tcp://[::]:5557", None, 0, "[fd00::1]:8000", ("tcp://[fd00::1]:5557", "")),
        ("tcp://[fd00::2]:5557", "tcp://10.0.0.9:1", 0, "", ("tcp://[fd00::2]:5557", "tcp://10.0.0.9:1")),
        ("ipc:///tmp/kv", None, 0, "", ("ipc:///tmp/kv", "")),
        ("inproc://kv", None, 0, "", ("", "")),
        ("tcp://collector:5557", "tcp://*:5558", 0, "", ("", "")),
        ("tcp://*:0", "tcp://*:5558", 0, "", ("", "")),
    ],
)
def test_row_18_an_engines_own_streams_are_told_as_others_reach_them(
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str,
    replay: str | None,
    rank: int,
    address: str,
    seen: tuple[str, str],
) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, replay_endpoint=replay)
    assert event_endpoints(Settings(group="g", address=address), config, rank) == seen


def test_an_engine_that_publishes_nothing_has_no_streams() -> None:
    settings = Settings(group="g", node="n1", worker_id=7)
    for config in (None, KVEventsConfig(), KVEventsConfig(enable_kv_cache_events=True, publisher="null")):
        assert event_endpoints(settings, config, 0) == ("", "")
    config = engine_config()
    told = presence(settings, config)
    assert told.model == config.model_config.served_model_name and told.rank == 0
    assert dict(told.endpoints) == {
        "node": "n1", "address": "", "worker_id": 7, "events": "", "replay": "", "dialect": "vllm",
    }  # fmt: skip


def made(*, told: bool) -> UcmConnector:
    """A connector of an engine that publishes KV cache events, or not."""
    config = configured(pool_events=True)
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=told, publisher="null")
    scheduler, _ = cache_configs(config, llama_specs())
    return UcmConnector(config, KVConnectorRole.SCHEDULER, scheduler)


def test_pool_events_without_vllms_own_are_refused() -> None:
    with pytest.raises(SettingsRefused, match="enable_kv_cache_events"):
        made(told=False)


def test_pool_events_of_an_engine_that_names_blocks_otherwise_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    with pytest.raises(SettingsRefused, match="VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"):
        made(told=True)


def test_with_pool_events_the_engine_does_not_tell_of_its_own_writes() -> None:
    connector = made(told=True)
    try:
        assert connector._teller is None and connector._pool is not None
    finally:
        connector.shutdown()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pool_events": "5557"}, "pool_events"),
        ({"pool_events": "tcp://*:5557"}, "pool_events"),
        ({"address": "somewhere"}, "address"),
        ({"node": "no node"}, "node"),
        ({"worker_id": -1}, "worker_id"),
        ({"publish_blocks_max": 0}, "publish_blocks_max"),
    ],
)
def test_a_setting_for_routers_that_cannot_be_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsRefused, match=words):
        Settings(group="g", **settings)


def test_removed_events_name_only_blocks_and_medium() -> None:
    event = pool_event(Removed([hash_of(1)], "CPU"), BLOCK_TOKENS)
    assert event == BlockRemoved(block_hashes=[hash_of(1)], medium="CPU")
