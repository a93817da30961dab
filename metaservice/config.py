"""Configuration: every setting with its default, its check, and the laws that hold between them."""

import argparse
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from metaservice.core.model import Limits

CLOCK_STEP_MS = 250
"""What one reading of the shard's clock may add. It is read every 100 ms: only a stalled process gets
there."""


class ConfigError(ValueError):
    """A setting is impossible; the message has the numbers and what would be right."""


class Config(Struct, kw_only=True, frozen=True):
    """How one process of the service runs."""

    data: Path
    """Directory of the journal and its snapshots; made when it is not there."""
    host: str = "127.0.0.1"
    port: int = 8600
    allow_remote: bool = False
    """Bind an address that other machines can reach although there are no credentials yet."""
    journal: str = "sqlite"
    """`sqlite`, or `memory`: forgets everything at exit."""
    ready_file: Path | None = None
    """Written once the service answers: JSON with host, port and pid."""
    snapshot_batches: int = 20_000
    snapshot_bytes: int = 64 * 1024 * 1024
    """A snapshot is cut when the journal has grown by so much."""
    otlp_endpoint: str = ""
    """Where spans go; empty: tracing is off."""
    trace_ratio: float = 0.1
    drain_ms: int = 0
    """On SIGTERM: how long requests are still taken after readiness fell."""
    grace_ms: int = 5_000
    """On SIGTERM: how long requests in progress may take to end."""
    log_level: str = "info"
    limits: Limits = field(default_factory=Limits)


_TEXT = {
    "data": "directory of the journal and its snapshots; made when it is not there",
    "host": "address to bind",
    "port": "port to bind; 0 finds one",
    "allow_remote": "bind an address that other machines can reach, although there are no credentials yet",
    "journal": "sqlite, or memory (forgets everything at exit)",
    "ready_file": "written once the service answers: JSON with host, port and pid",
    "snapshot_batches": "cut a snapshot when the journal has grown by so many batches",
    "snapshot_bytes": "cut a snapshot when the journal has grown by so many bytes",
    "otlp_endpoint": "OTLP/HTTP URL for spans; without it tracing is off",
    "trace_ratio": "share of requests that are traced",
    "drain_ms": "on SIGTERM: how long requests are still taken after readiness fell",
    "grace_ms": "on SIGTERM: how long requests in progress may take to end",
    "log_level": "debug, info, warning or error",
}
_LIMIT_TEXT = {
    "keys_per_request_max": "keys that one request may name",
    "write_ttl_ms_min": "shortest deadline a write session may ask for",
    "write_ttl_ms_max": "longest deadline a write session may ask for",
    "lease_ms_min": "shortest read lease",
    "sessions_max": "write sessions open at once",
    "leases_max": "read leases held at once",
    "registered_max": "tenants, storages, groups, instances, engines, workers: so many of each",
    "ended_leases_max": "ended read leases that are still told apart from unknown ones",
    "ended_tasks_max": "ended deletion tasks that may still be confirmed",
    "hot_summary_ms": "how often what is hot is journaled for the next leader",
    "hot_summary_max": "blocks in one such summary",
    "task_retry_ms": "pause before a failed deletion is handed out again",
    "parts_max": "parts of a block in one attention group (64 at most)",
    "groups_max": "attention groups of an instance",
    "evict_batch_max": "blocks evicted for a watermark in one tick",
    "retire_batch_max": "blocks removed from a retiring instance in one tick",
    "write_ttl_ms_default": "deadline of a write session that asks for none",
    "lease_ms_max": "longest read lease; after a take-over nothing is deleted for so long",
    "reclaim_delay_ms": "from the end of a block's service to the deletion of its bytes",
    "late_write_ms": "how long after its session ended a writer may still be writing",
    "task_ttl_ms": "a deletion task that is not confirmed for so long goes to another worker",
    "heartbeat_ms": "how often engines and workers are asked to be heard",
    "suspect_ms": "silence after which a member is suspect",
    "expire_ms": "silence after which a member is expired",
    "forget_ms": "an expired member is forgotten after so long",
    "high_permille": "high watermark of tenants and storages, in thousandths of their limit",
    "low_permille": "low watermark of tenants and storages, in thousandths of their limit",
}
_JOURNALS = ("sqlite", "memory")
_LEVELS = ("debug", "info", "warning", "error")


def check(config: Config) -> None:
    """The timing laws and bounds. Raises ConfigError naming the settings and their values."""
    limits = config.limits
    for name in limits.__struct_fields__:
        value = getattr(limits, name)
        if value < 1 and name not in ("reclaim_delay_ms", "late_write_ms"):
            raise ConfigError(f"{_flag(name)} is {value}; it has to be 1 or more")
        if value < 0:
            raise ConfigError(f"{_flag(name)} is {value}; it cannot be negative")
    laws = (
        ("heartbeat_ms", 2, "suspect_ms", "a member that loses one heartbeat must not be suspected"),
        ("heartbeat_ms", 2, "expire_ms", "a member that loses one heartbeat must not expire"),
        ("suspect_ms", 1, "expire_ms", "suspicion comes before expiry"),
        ("write_ttl_ms_min", 1, "write_ttl_ms_default", "the default must be allowed"),
        ("write_ttl_ms_default", 1, "write_ttl_ms_max", "the default must be allowed"),
        ("lease_ms_min", 1, "lease_ms_max", "some read lease must be allowed"),
        ("low_permille", 1, "high_permille", "eviction goes down from the high watermark to the low one"),
        ("evict_batch_max", 1, "keys_per_request_max", "a tick must not evict more than a request can bring"),
    )
    for small, factor, large, why in laws:
        low, high = getattr(limits, small), getattr(limits, large)
        if factor * low > high:
            product = f"{factor} * {low}" if factor > 1 else f"{low}"
            raise ConfigError(
                f"{_flag(small)} ({low}) and {_flag(large)} ({high}) clash: {product} > {high}, but {why}"
            )
    for name in ("write_ttl_ms_min", "lease_ms_max", "expire_ms"):
        if getattr(limits, name) < 4 * CLOCK_STEP_MS:
            raise ConfigError(
                f"{_flag(name)} is {getattr(limits, name)}; it has to be {4 * CLOCK_STEP_MS} or more: after "
                f"a stall the service's clock may step by {CLOCK_STEP_MS} ms before waiting renewals are read"
            )
    if limits.parts_max > 64:
        raise ConfigError(f"{_flag('parts_max')} is {limits.parts_max}; a part mask holds 64")
    if limits.high_permille > 1000:
        raise ConfigError(f"{_flag('high_permille')} is {limits.high_permille}; 1000 is the whole limit")
    for name, least in (("snapshot_batches", 1), ("snapshot_bytes", 1), ("drain_ms", 0), ("grace_ms", 1)):
        if getattr(config, name) < least:
            raise ConfigError(f"{_flag(name)} is {getattr(config, name)}; it has to be {least} or more")
    if not 0 <= config.port <= 65_535:
        raise ConfigError(f"--port is {config.port}; expected 0..65535")
    if config.journal not in _JOURNALS:
        raise ConfigError(f"--journal is {config.journal!r}; expected one of {', '.join(_JOURNALS)}")
    if config.log_level not in _LEVELS:
        raise ConfigError(f"--log-level is {config.log_level!r}; expected one of {', '.join(_LEVELS)}")
    if not 0 < config.trace_ratio <= 1:
        raise ConfigError(f"--trace-ratio is {config.trace_ratio}; expected more than 0 and at most 1")


def parse(arguments: list[str]) -> Config:
    """Command line of `serve` to Config. Raises ConfigError, or SystemExit for --help and unknown flags."""
    parser = argparse.ArgumentParser(
        prog="ucm-meta serve",
        description="Run the metadata service on an embedded journal.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=140),
        allow_abbrev=False,
    )
    defaults = Config(data=Path("ucm-data"))
    for name in Config.__struct_fields__:
        if name != "limits":
            _add(parser, name, getattr(defaults, name), _TEXT[name])
    bounds = parser.add_argument_group("limits and timing of the core")
    for name in Limits.__struct_fields__:
        _add(bounds, name, getattr(defaults.limits, name), _LIMIT_TEXT[name])
    parsed = vars(parser.parse_args(arguments))
    limits = Limits(**{name: parsed.pop(name) for name in Limits.__struct_fields__})
    config = Config(**parsed, limits=limits)
    check(config)
    return config


def _add(parser: Any, name: str, default: object, text: str) -> None:
    if isinstance(default, bool):
        parser.add_argument(_flag(name), action="store_true", default=default, help=text)
        return
    kind = Path if name in ("data", "ready_file") else type(default)
    shown = f"{text} (default: {default})" if default not in (None, "") else text
    parser.add_argument(
        _flag(name), type=kind, default=default, metavar=name.rsplit("_", maxsplit=1)[-1].upper(), help=shown
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
