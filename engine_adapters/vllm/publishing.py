"""What this engine tells the service for routers: where it is, and how its blocks are announced."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from engine_adapters.vllm.settings import Settings

HASH_OF = "tail64"
"""vLLM's events name a block by the last 8 bytes of its key."""


class Presence(Struct, frozen=True):
    """One engine as it registers. `model`: the first name that it serves its model under. `rank`: among those
    that share its data. `endpoints` as `Client.register_engine` takes them."""

    model: str = ""
    rank: int = 0
    endpoints: Mapping[str, Any] = {}


def presence_of(
    settings: Settings, *, model: str = "", rank: int = 0, events: str = "", replay: str = ""
) -> Presence:
    """`events` and `replay`: where the engine publishes its own KV cache events; empty: it does not."""
    endpoints = {
        "node": settings.node,
        "address": settings.address,
        "worker_id": settings.worker_id,
        "events": events,
        "replay": replay,
        "dialect": "vllm",
    }
    return Presence(model, rank, endpoints)


def publication_of(
    settings: Settings, model: str, *, lora: str = "", base: str = ""
) -> Mapping[str, Any] | None:
    """How an instance is announced; None: not at all. `lora`, `base`: of an adapter, its name and the
    instance of the model that it is for."""
    if not settings.publish:
        return None
    told = {
        "model": settings.publish_model or model,
        "routing_group": settings.routing_group,
        "hash_of": HASH_OF,
        "entries_max": settings.publish_blocks_max,
    }
    return {**told, "lora": lora, "base": base} if base else told
