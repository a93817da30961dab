"""What to set where, so that a router reads these streams: the exact words, with the endpoints that are.

Nothing is changed. `docs/routers.md` says why each of the settings is what it is.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from metaservice.cli.events_read import key_of
from metaservice.wire.schemas_events import EngineView, EventsReply, StreamView

WEIGHTS = {"gpu": 1.0, "cpu": 0.75, "storage": 0.25, "external": 0.25}
"""What a block in each tier is worth, as Dynamo weighs them."""
POD_CACHE_SIZE_DEFAULT = 10
TIERS = 3
"""A pod may have one block in so many tiers, each an entry: in its GPU, on its node, in the pool."""
ZMQ_PORT = 5557
HICACHE_PORT = 5600
PEER_PORT = 9090


def llm_d(replies: Sequence[EventsReply]) -> Iterator[str]:
    """Settings of llm-d's endpoint picker, and ours."""
    pods = {engine.address for engine in _engines(replies) if engine.address}
    sizes = sorted({stream.block_size_tokens for stream in _streams(replies)})
    yield "# 1. llm-d: the plugin that reads KV events, in the endpoint picker's configuration"
    yield from (
        "- type: precise-prefix-cache-producer   # before August 2026: precise-prefix-cache-scorer",
        "  parameters:",
        "    tokenProcessorConfig:",
        f"      blockSize: {sizes[0] if sizes else 16}",
        "    kvEventsConfig:",
        f'      zmqEndpoint: "tcp://*:{ZMQ_PORT}"      # it binds, this service connects',
        '      topicFilter: "kv@"',
        "      discoverPods: true                # the engines' own streams stay as they are",
        "    indexerConfig:",
        "      kvBlockIndexConfig:",
        "        inMemoryConfig:",
        f"          podCacheSize: {max(POD_CACHE_SIZE_DEFAULT, TIERS * len(pods))}"
        f"              # at least {TIERS} x {len(pods)} pods, or the pool's entries push out the GPU's",
        "      kvCacheBackendConfigs:            # a tier without a weight counts 1.0, as much as the GPU",
    )
    for name, weight in WEIGHTS.items():
        yield f"      - name: {name}\n        weight: {weight}"
    yield ""
    yield "# 2. this service, every replica"
    yield f'events_attachments = ["llm-d endpoint=tcp://PICKER:{ZMQ_PORT}"]'
    yield "events_allow_plain = true               # llm-d knows no encryption: a network that you trust"
    yield ""
    yield "# 3. the engines: each registers the address that llm-d knows its pod by (ip:port); now:"
    for engine in _engines(replies):
        yield f"#    {engine.engine}: {engine.address or 'NONE, so llm-d hears nothing of it'}"
    if len(sizes) > 1:
        yield f"# WARNING: streams have blocks of {', '.join(map(str, sizes))} tokens: use a picker for each"


def dynamo_indexer(replies: Sequence[EventsReply]) -> Iterator[str]:
    """What an operator sets, and what that will register."""
    yield "# on every replica; its leader registers and unregisters by itself"
    yield 'events_attachments = ["dynamo-indexer url=http://INDEXER:8090"]'
    yield "# or once, by hand: ucm-meta events attach dynamo-indexer --indexer http://INDEXER:8090"
    for stream in _shared(replies):
        yield f"# channel {stream.channel}: {stream.topic} at {stream.endpoint}, replays at {stream.replay}"


def select_service(replies: Sequence[EventsReply]) -> Iterator[str]:
    """One body of POST /workers an engine, for those that have a merged stream."""
    merged = {stream.engine: stream for stream in _streams(replies) if stream.engine}
    if not merged:
        engines = ";".join(engine.engine for engine in _engines(replies)) or "ENGINE;ENGINE"
        yield "# select_service reads one stream a worker: have them merged, on every replica"
        yield f'events_attachments = ["merge port_base=7000 engines={engines}"]'
        return
    yield "# add these to what you POST to select_service's /workers for each worker"
    for engine in _engines(replies):
        stream = merged.get(engine.engine)
        if stream is not None:
            body = {
                "worker_id": engine.worker_id,
                "model_name": stream.model,
                "block_size": stream.block_size_tokens,
                "kv_events_endpoints": {str(engine.rank): stream.endpoint},
                "replay_endpoint": stream.replay,
            }
            yield msgspec.json.encode(body).decode()


def dynamo_frontend(replies: Sequence[EventsReply]) -> Iterator[str]:
    """Dynamo's own router takes one source a worker."""
    yield "# vLLM with our connector puts the pool's events in the engine's own stream: nothing to set there"
    extra = {"publish": True, "pool_events": True}
    yield f"kv_connector_extra_config = {msgspec.json.encode(extra).decode()}"
    yield "# any other engine: its worker's relay reads a merged stream instead of the engine's"
    for stream in _streams(replies):
        if stream.engine:
            yield f"#   {stream.engine}: zmq_endpoint={stream.endpoint}"


def mooncake(replies: Sequence[EventsReply]) -> Iterator[str]:
    """Bodies of the conductor's POST /register."""
    for engine in _engines(replies):
        for stream in _shared(replies):
            if stream.channel in (engine.pool_channel, engine.local_channel):
                body: dict[str, Any] = {
                    "endpoint": stream.endpoint,
                    "replay_endpoint": stream.replay,
                    "type": "vLLM",
                    "modelname": stream.model,
                    "instance_id": str(engine.worker_id),
                    "block_size": stream.block_size_tokens,
                    "dp_rank": engine.rank,
                }
                yield msgspec.json.encode(body).decode()


def generic(replies: Sequence[EventsReply]) -> Iterator[str]:
    """Where any subscriber connects."""
    for stream in _streams(replies):
        name = f"engine {stream.engine}, merged" if stream.engine else f"channel {stream.channel}"
        yield (
            f"{name}: SUB {stream.endpoint}, topic {stream.topic}, DEALER {stream.replay}, "
            f"blocks of {stream.block_size_tokens} tokens, rank {stream.rank}"
        )
    yield "three frames: topic, number (u64 big-endian), msgpack [seconds, [events], rank]"
    yield "replay: send ['', start (u64 big-endian)], read ['', topic, number, payload] up to number 2**64-1"


def dynamo_peer(replies: Sequence[EventsReply]) -> Iterator[str]:
    """Dynamo's indexer begins with all that is announced."""
    hosts = dict.fromkeys(urlsplit(stream.endpoint).hostname for stream in _shared(replies))
    host = next((_bracketed(host) for host in hosts if host), "REPLICA")
    yield "# on every replica: what a starting indexer fetches, once"
    yield f'events_attachments = ["dynamo-peer port={PEER_PORT}"]'
    yield "# and there; what comes after is told by the dynamo-indexer attachment"
    yield f"python -m dynamo.indexer --peers http://{host}:{PEER_PORT}"


def aibrix(replies: Sequence[EventsReply]) -> Iterator[str]:
    """A stream of arrays, at the port that AIBrix dials."""
    yield "# one of these, on all replicas; AIBrix dials pods at this port: put this address before the pod's"
    for instance in _instances(replies):
        yield f'events_attachments = ["generic port={ZMQ_PORT} instance={instance} emitter=array"]'


def hicache(replies: Sequence[EventsReply]) -> Iterator[str]:
    """Dynamo's router looks up a shared pool by SGLang's page hashes."""
    yield "# one of these, on all replicas; tp: tensor-parallel ranks (0: MLA), prefix: the backend's tag and"
    yield "# the model's name, joined by _"
    for instance in _instances(replies):
        emitter = "emitter=mooncake:tp=1;prefix=TAG_MODEL"
        yield f'events_attachments = ["generic port={HICACHE_PORT} instance={instance} {emitter}"]'
    yield "# Dynamo's router: --router-mode kv --shared-cache-type hicache, and in its environment"
    yield f"DYN_MOONCAKE_KV_EVENTS_ENDPOINT=tcp://REPLICA:{HICACHE_PORT}"


RECIPES: dict[str, Callable[[Sequence[EventsReply]], Iterator[str]]] = {
    "dynamo-indexer": dynamo_indexer,
    "dynamo-peer": dynamo_peer,
    "dynamo-frontend": dynamo_frontend,
    "select-service": select_service,
    "llm-d": llm_d,
    "aibrix": aibrix,
    "mooncake": mooncake,
    "hicache": hicache,
    "generic": generic,
}


def _streams(replies: Sequence[EventsReply]) -> list[StreamView]:
    """Each stream once, as the replica has it that publishes it now."""
    found: dict[tuple[str, int], StreamView] = {}
    for reply in replies:
        for stream in reply.streams:
            if stream.live or key_of(stream) not in found:
                found[key_of(stream)] = stream
    return [found[key] for key in sorted(found)]


def _shared(replies: Sequence[EventsReply]) -> list[StreamView]:
    """Those beside the engines' own."""
    return [stream for stream in _streams(replies) if not stream.engine]


def _instances(replies: Sequence[EventsReply]) -> list[str]:
    return sorted({stream.instance for stream in _shared(replies)}) or ["INSTANCE"]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _engines(replies: Sequence[EventsReply]) -> list[EngineView]:
    found = {engine.engine: engine for reply in replies for engine in reply.engines}
    return [found[key] for key in sorted(found)]
