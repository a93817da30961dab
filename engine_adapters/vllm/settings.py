"""What an operator may set, in vLLM's `kv_connector_extra_config`. `docs/engines/vllm.md` lists it all."""

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from engine_adapters.namespace.namespace import PREFIX_LENGTH_MAX
from metaservice.client.config import ClientConfig
from metaservice.wire.schemas import NAME_PATTERN

Mib = 1 << 20
_NAME = re.compile(NAME_PATTERN)
_ADDRESS = re.compile(r"[^\s@/]+:[0-9]{1,5}")
_ENDPOINT = re.compile(r"tcp://[^\s*/]+:[1-9][0-9]{0,4}")


class SettingsRefused(ValueError):
    """A setting cannot be: the message names it, what it was and what would be right."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durations in ms, sizes in bytes."""

    url: str = "http://127.0.0.1:8600"
    """Where the service is; several replicas with commas between."""
    group: str
    """The instance group that pays for the blocks; an operator made it."""
    engine: str = ""
    """The engine's id, kept over restarts and never another engine's; empty: a new one with each start."""
    instance_prefix: str = "vllm"
    """Instances are named `<prefix>-<digest of the namespace>`."""
    tenant: str = ""
    salt: str = ""
    """Engines with different tenants or salts never share a block."""
    revision: str = ""
    """The model's revision where vLLM was told none (a folder of one's own)."""
    weight_version: str = ""
    weight_version_file: str = ""
    """A file whose text is the version of the weights; read at start and when vLLM resets its caches."""

    load: Literal["async", "sync"] = "async"
    """`async`: a request waits for its blocks beside the engine's steps. `sync`: the step waits for them."""
    save: bool = True
    """Whether this engine stores what it computes."""
    min_load_blocks: int = 1
    """A shorter hit is computed, not loaded."""

    timeout_ms: int = 1_000
    """Of one call to the service."""
    lookup_wait_ms: int = 500
    """How long a request waits for its lookup before it goes on as a miss."""
    lease_ms: int = 10_000
    """Of read leases; they are renewed while a request waits."""
    write_ttl_ms: int = 30_000
    load_wait_ms: int = 10_000
    """A load that takes longer is given up, and its blocks are computed."""
    load_threads: int = 2
    save_threads: int = 2
    load_batch_blocks: int = 32
    save_buffer_bytes: int = 256 * Mib
    """Host memory for pages on their way to a storage. When it is full saves wait, then are dropped."""
    load_buffer_bytes: int = 64 * Mib
    save_wait_ms: int = 2_000
    """How long a save waits for a buffer before it is dropped."""
    save_queue_blocks_max: int = 8_192
    """More blocks than this waiting to be saved are dropped: each is a miss later, no more."""
    start_wait_ms: int = 3_000
    """How long the engine's start waits for the service; it begins without it then, and joins later."""
    bad_blocks_per_minute_max: int = 600
    """Blocks that were named and could not be read are removed for everybody, at most so many: an engine
    whose mount is broken must not clear the whole cache."""
    publish: bool = False
    """Whether routers are told of what this engine stores: token ids go along with each write."""
    publish_model: str = ""
    """The name that routers know the model by; empty: the first one that vLLM serves it under."""
    publish_blocks_max: int = 50_000
    """At most so many blocks of the instance are announced at a time, those used last."""
    routing_group: str = ""
    """Instances that routers do not tell apart; empty: all of one model name. They must name blocks alike."""
    pool_events: bool | str = False
    """Whether what the service announces goes out with this engine's own KV cache events: true, or the
    streams' ZMQ endpoints with commas between, each one's replays at the port behind it."""
    curve_secret: str = ""
    curve_server: str = ""
    """Where these streams are encrypted: a file with this engine's CURVE key pair (`zmq.auth`), and the
    service's public key."""
    node: str = ""
    """Whose local storages this engine reaches: a storage's fault domain."""
    address: str = ""
    """`host:port` by which routers know this engine."""
    worker_id: int = 0
    """Its number in Dynamo; 0: made from its id."""
    audit_path: str = ""
    """A file to which each page copied, published and loaded is noted with its checksum, for
    investigations."""
    spans: bool = False
    """OpenTelemetry spans of each request, exported as OTEL_* variables of the environment say."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if type(value) is int and value < (field != "worker_id"):
                raise SettingsRefused(f"kv_connector_extra_config.{field}: {value} is not positive")
        for field in ("group", "engine", "instance_prefix", "node", "routing_group"):
            name = getattr(self, field)
            if (name or field in ("group", "instance_prefix")) and not _NAME.match(name):
                raise SettingsRefused(
                    f"kv_connector_extra_config.{field}: {name!r} is no name: letters, digits and ._:@+-"
                )
        if len(self.instance_prefix) > PREFIX_LENGTH_MAX:
            raise SettingsRefused(
                f"kv_connector_extra_config.instance_prefix: at most {PREFIX_LENGTH_MAX} characters"
            )
        if self.address and not _ADDRESS.fullmatch(self.address):
            raise SettingsRefused(
                f"kv_connector_extra_config.address: {self.address!r} is not host:port as routers know it"
            )
        for endpoint in self.pool_endpoints:
            if not _ENDPOINT.fullmatch(endpoint):
                raise SettingsRefused(
                    f"kv_connector_extra_config.pool_events: {endpoint!r} is not true, false or tcp://host:port"
                )
        try:
            self.client()
        except ValueError as error:
            raise SettingsRefused(f"kv_connector_extra_config.{error}") from None

    @property
    def pool_endpoints(self) -> list[str]:
        """The streams that an operator named; empty where the service is asked for them."""
        named = self.pool_events
        return [one.strip() for one in named.split(",")] if isinstance(named, str) else []

    def client(self) -> ClientConfig:
        """How the engine's processes talk to the service."""
        return ClientConfig(url=self.url, timeout_ms=self.timeout_ms, breaker_slow_ms=self.timeout_ms)


def settings_of(extra: Mapping[str, Any]) -> Settings:
    """The settings in `kv_connector_extra_config`. Raises SettingsRefused."""
    try:
        return msgspec.convert(dict(extra), Settings)
    except msgspec.ValidationError as error:
        known = ", ".join(Settings.__struct_fields__)
        raise SettingsRefused(f"kv_connector_extra_config: {error}; known are {known}") from None
