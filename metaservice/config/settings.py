"""The settings of one process of the service, and what each of them is: kind, range, meaning.

`SETTINGS` is the one table behind the flags, the environment, the file, the checks and the documentation.
"""

from pathlib import Path
from typing import Any, NamedTuple

from msgspec import NODEFAULT, Struct, field
from msgspec.structs import fields

from metaservice.config.secrets import shown
from metaservice.core.ids import SHARDS_MAX
from metaservice.core.model import Limits

CLOCK_STEP_MS = 250
"""What one reading of the shard's clock may add. It is read every 100 ms: only a stalled process gets
there."""


class ConfigError(ValueError):
    """A setting is impossible; the message has its name and value, where it was set, and what would be right.
    It never has a secret."""


class Config(Struct, kw_only=True, frozen=True):
    """How one process of the service runs. What each field means: `SETTINGS`. Its repr hides secrets."""

    data: Path
    host: str = "127.0.0.1"
    port: int = 8600
    allow_remote: bool = False
    replica: str = ""
    """Filled in by `load`: host name and port."""
    advertise: str = ""
    """Filled in by `load`: host and port. Empty: whatever port was bound, which no other replica learns."""
    shards: int = 1
    ready_file: Path | None = None
    drain_ms: int = 0
    grace_ms: int = 5_000
    log_level: str = "info"
    otlp_endpoint: str = ""
    trace_ratio: float = 0.1

    journal: str = "sqlite"
    postgres_dsn: str = ""
    postgres_schema: str = "ucm"
    postgres_timeout_ms: int = 2_000
    postgres_pooler: bool = False
    postgres_notify: bool = True
    snapshot_batches: int = 20_000
    snapshot_bytes: int = 64 * 1024 * 1024
    snapshot_check_ms: int = 5_000

    leadership: str = "single"
    lead_ttl_ms: int = 5_000
    lead_renew_ms: int = 1_000
    lead_timeout_ms: int = 750
    lead_margin_ms: int = 500
    poll_ms: int = 100
    staleness_ms_max: int = 5_000
    spread: bool = True
    handover_ms: int = 1_000
    etcd_endpoints: tuple[str, ...] = ()
    etcd_prefix: str = "/ucm"
    etcd_ca: Path | None = None
    etcd_cert: Path | None = None
    etcd_key: Path | None = None
    etcd_user: str = ""
    etcd_password: str = ""

    events_port_base: int = 0
    events_host: str = "127.0.0.1"
    events_advertise: str = ""
    events_shared_address: bool = False
    events_channels_max: int = 1_000
    events_ring_windows: int = 10_000
    events_ring_bytes_max: int = 256 * 1024 * 1024
    events_subscriber_hwm: int = 1_000
    events_curve_secret: Path | None = None
    events_curve_clients: tuple[str, ...] = ()
    events_allow_plain: bool = False
    events_attachments: tuple[str, ...] = ()
    events_ingest: bool = True

    limits: Limits = field(default_factory=Limits)

    @property
    def replicated(self) -> bool:
        """Whether other replicas may take over from this one: the laws between them hold."""
        return self.leadership != "single"

    def __repr__(self) -> str:
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return f"Config({', '.join(f'{name}={shown(name, value)!r}' for name, value in values)})"

    def __rich_repr__(self) -> Any:
        for name in self.__struct_fields__:
            yield name, shown(name, getattr(self, name))


class Setting(NamedTuple):
    """One row of the table."""

    name: str
    """The key in the file; `--` with dashes is its flag, `UCM_` in capitals its environment variable."""
    group: str
    kind: str
    """`integer`, `number`, `text`, `switch`, `path` or `list`."""
    default: Any
    text: str
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "UCM_" + self.name.upper()


_KINDS: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "switch",
    Path: "path",
    Path | None: "path",
    tuple[str, ...]: "list",
}
_CHOICES = {
    "journal": ("sqlite", "memory", "postgres"),
    "leadership": ("single", "sql_lease", "etcd"),
    "log_level": ("debug", "info", "warning", "error"),
}
_LEAST = {"port": 0, "events_port_base": 0, "drain_ms": 0, "reclaim_delay_ms": 0, "late_write_ms": 0}
"""Of all other integers: 1."""
_MOST = {
    "port": 65_535,
    "shards": SHARDS_MAX,
    "parts_max": 64,
    "high_permille": 1_000,
    "events_port_base": 65_535,
    "events_channels_max": 1_000,
    "beat_ms": 1_000,
}

_TEXT: dict[str, dict[str, str]] = {
    "This replica": {
        "data": "directory of the embedded journal and its snapshots; made when it is not there",
        "host": "address to bind",
        "port": "port to bind; 0 finds one",
        "allow_remote": "bind an address that others can reach, although there are no credentials yet",
        "replica": "name of this replica, unlike every other one's; without it: host name and port",
        "advertise": "URL at which the other replicas and clients reach this one; without it: host and port",
        "shards": "shards of the cluster; fixed when the cluster is made",
        "ready_file": "written once the service answers: JSON with host, port and pid",
        "drain_ms": "on SIGTERM: how long requests are still taken after readiness fell",
        "grace_ms": "on SIGTERM: how long requests in progress may take to end",
        "log_level": "what is logged, to stderr",
        "otlp_endpoint": "OTLP/HTTP URL for spans; without it tracing is off",
        "trace_ratio": "share of requests that are traced; more than 0, at most 1",
    },
    "Journal": {
        "journal": "where the journal is: a file here, memory (forgets everything at exit), or PostgreSQL",
        "postgres_dsn": "URL of the database; may name several hosts. A secret: set it in the file or the "
        "environment, since everybody on the machine can read the flags of a process",
        "postgres_schema": "schema that holds the tables; made when it is not there",
        "postgres_timeout_ms": "deadline of one statement; an append that passes it is read back before "
        "anything else is appended",
        "postgres_pooler": "a PgBouncer that pools transactions is in between; safe through it, and slower",
        "postgres_notify": "appends wake the followers, which otherwise look every poll_ms",
        "snapshot_batches": "cut a snapshot when the journal has grown by so many batches",
        "snapshot_bytes": "cut a snapshot when the journal has grown by so many bytes",
        "snapshot_check_ms": "how often it is looked whether a snapshot is due",
    },
    "Leadership and followers": {
        "leadership": "who elects the leaders of the shards: nobody (one replica), the rows of the shards "
        "in PostgreSQL, or etcd",
        "lead_ttl_ms": "how long a lease lasts without renewal; a dead leader's shards are free then",
        "lead_renew_ms": "pause between two renewals",
        "lead_timeout_ms": "deadline of one call of etcd or of the lease table",
        "lead_margin_ms": "a leader stops answering so long before its lease ends: for clocks that drift",
        "poll_ms": "how often a follower reads the journal",
        "staleness_ms_max": "how far behind a follower's answer may be; bytes are kept so much longer",
        "spread": "lead each shard on a replica of its own, as far as there are some, by planned handover",
        "handover_ms": "how long the others leave a shard that was handed over to its successor",
        "etcd_endpoints": "URLs of all members of etcd",
        "etcd_prefix": "where the keys are; another one for each cluster that shares an etcd",
        "etcd_ca": "certificates (PEM) that etcd's must be signed by; without it: those of the system",
        "etcd_cert": "client certificate (PEM) for etcd",
        "etcd_key": "key (PEM) of the client certificate",
        "etcd_user": "user name for etcd",
        "etcd_password": "password for etcd. A secret: set it in the file or the environment",
    },
    "Cache events for routers": {
        "events_port_base": "the first port of the streams: stream c is published at it + 2 * c, and its "
        "replays are asked for at the port after; 0: routers are told nothing",
        "events_host": "address that the streams are bound to; `*` is every one",
        "events_advertise": "host that consumers are told to connect to; without it: events_host",
        "events_shared_address": "all replicas have the same events_advertise, which leads to the leader",
        "events_channels_max": "streams that are served at most; each takes two ports",
        "events_ring_windows": "batches of a stream that can be replayed; who missed more gets a snapshot",
        "events_ring_bytes_max": "and what they may take in memory, all together",
        "events_subscriber_hwm": "batches that may wait for one slow subscriber before it misses some",
        "events_curve_secret": "file with the key pair of the CURVE server, as `zmq.auth` writes them "
        "(`*.key_secret`); readable by its owner only",
        "events_curve_clients": "who may subscribe: `KEY=TENANT`, the public key (40 characters) and whose "
        "instances it may see, `*` for all",
        "events_allow_plain": "publish unencrypted where other machines reach it: a trusted network; Dynamo "
        "and llm-d know no encryption",
        "events_attachments": "consumers that we attach: texts of `KIND name=value ...`, see "
        "[routers](routers.md)",
        "events_ingest": "follow the engines' own event streams, so that it is known what they hold",
    },
    "Limits and timing of the core": {
        "keys_per_request_max": "keys that one request may name",
        "write_ttl_ms_min": "shortest deadline a write session may ask for",
        "write_ttl_ms_default": "deadline of a write session that asks for none",
        "write_ttl_ms_max": "longest deadline a write session may ask for",
        "lease_ms_min": "shortest read lease",
        "lease_ms_max": "longest read lease; after a take-over nothing is deleted for so long",
        "reclaim_delay_ms": "from the end of a block's service to the deletion of its bytes",
        "late_write_ms": "how long after its session ended a writer may still be writing",
        "task_ttl_ms": "a deletion task that is not confirmed for so long goes to another worker",
        "task_retry_ms": "pause before a failed deletion is handed out again",
        "heartbeat_ms": "how often engines and workers are asked to be heard",
        "suspect_ms": "silence after which a member is suspect",
        "expire_ms": "silence after which a member is expired",
        "forget_ms": "an expired member is forgotten after so long",
        "sessions_max": "write sessions open at once",
        "leases_max": "read leases held at once",
        "registered_max": "tenants, storages, groups, instances, engines, workers: so many of each",
        "ended_leases_max": "ended read leases that are still told apart from unknown ones",
        "ended_tasks_max": "ended deletion tasks that may still be confirmed",
        "hot_summary_ms": "how often what is hot is journaled for the next leader",
        "hot_summary_max": "blocks in one such summary",
        "errand_ms": "how often a shard without news tells the catalogue how it is",
        "high_permille": "high watermark of tenants and storages, in thousandths of their limit",
        "window_blocks_max": "blocks that routers are told of in one step, and as many told again",
        "window_removed_max": "blocks that routers are told to forget in one step",
        "beat_ms": "every stream of events sends a batch so often at least, if an empty one",
        "restate_ms": "in this time routers are told again of everything that is announced",
        "low_permille": "low watermark of tenants and storages, in thousandths of their limit",
        "parts_max": "parts of a block in one attention group",
        "groups_max": "attention groups of an instance",
        "evict_batch_max": "blocks evicted for a watermark in one tick",
        "retire_batch_max": "blocks removed from a retiring instance in one tick",
    },
}


def _table() -> dict[str, Setting]:
    known = {row.name: row for struct in (Config, Limits) for row in fields(struct) if row.name != "limits"}
    rows: dict[str, Setting] = {}
    texts = {name: (group, text) for group, some in _TEXT.items() for name, text in some.items()}
    # A setting without a text works all the same; a test finds it, and a text without a setting.
    texts |= {name: (list(_TEXT)[-1], "") for name in known if name not in texts}
    for name, (group, text) in texts.items():
        info = known.get(name)
        if info is None:
            continue
        kind = _KINDS[info.type]
        default = Path("ucm-data") if info.default is NODEFAULT else info.default
        least = _LEAST.get(name, 1) if kind == "integer" else None
        rows[name] = Setting(name, group, kind, default, text, least, _MOST.get(name), _CHOICES.get(name, ()))
    return rows


SETTINGS: dict[str, Setting] = _table()
"""Every setting by name, in the order of the documentation."""


def make(values: dict[str, Any]) -> Config:
    """A Config of values by name; what is absent has its default. Nothing is checked."""
    of_core = {name: value for name, value in values.items() if name in Limits.__struct_fields__}
    own = {name: value for name, value in values.items() if name not in of_core}
    return Config(**{"data": SETTINGS["data"].default, **own}, limits=Limits(**of_core))


def value_of(config: Config, name: str) -> Any:
    """The value of the setting of that name."""
    return getattr(config.limits if name in Limits.__struct_fields__ else config, name)
