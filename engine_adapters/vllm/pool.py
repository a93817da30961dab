"""The pool's events among vLLM's own: `pool_events` of the settings."""

from vllm import envs
from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.block_pool import BlockPool

from engine_adapters.vllm.broker import Broker
from engine_adapters.vllm.counts import Counts
from engine_adapters.vllm.events import Clears, pool_event
from engine_adapters.vllm.pool_follower import PoolFollower
from engine_adapters.vllm.pool_places import StreamFinder, named
from engine_adapters.vllm.pool_secrets import opener
from engine_adapters.vllm.settings import Settings, SettingsRefused


class PoolEvents:
    """What the connector has of it; the scheduler's thread's, and nothing waits but `close`."""

    def __init__(self, settings: Settings, block_size_tokens: int, broker: Broker) -> None:
        """Raises SettingsRefused when a key file cannot be used."""
        self._counts = Counts()
        self._clears = Clears()
        self._finder = StreamFinder(settings, settings.engine, lambda: broker.instance_of(None))
        endpoints = named(settings.pool_endpoints)
        self._follower: PoolFollower[KVCacheEvent] = PoolFollower(
            (lambda: endpoints) if endpoints else self._finder,
            lambda told: pool_event(told, block_size_tokens),
            opener(settings),
            self._counts,
        )

    def start(self) -> None:
        """Begin to follow the service's streams."""
        self._follower.start()

    def take(self, blocks: BlockPool) -> list[KVCacheEvent]:
        """What this step publishes behind vLLM's own; `blocks` are the engine's."""
        if self._clears.seen(blocks):
            self._follower.cleared()
        return self._follower.take()

    def renew(self) -> None:
        """The engine is of another instance now."""
        self._follower.renew()

    def counters(self) -> dict[str, int]:
        """What was counted since the last call."""
        return self._counts.drain()

    def close(self) -> None:
        """Stop; bounded."""
        self._finder.close()
        self._follower.close()


def open_pool(settings: Settings, block_size_tokens: int, broker: Broker, *, told: bool) -> PoolEvents | None:
    """None where the settings do not ask for it. `told`: whether vLLM publishes KV cache events. Raises
    SettingsRefused."""
    if not settings.pool_events:
        return None
    if not told:
        raise SettingsRefused(
            "kv_connector_extra_config.pool_events: they go out with vLLM's own, which are off: give "
            "--kv-events-config '{\"enable_kv_cache_events\": true, ...}'"
        )
    if not envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES:
        raise SettingsRefused(
            "kv_connector_extra_config.pool_events: the service names blocks by numbers, and this engine "
            "does not: VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0 does not go with it"
        )
    return PoolEvents(settings, block_size_tokens, broker)
