"""What must hold of the settings: ranges, what needs what, and the timing laws, each with its reason."""

import re
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from metaservice.config.events import faults, file_faults
from metaservice.config.secrets import HIDDEN, SECRETS, redact
from metaservice.config.settings import CLOCK_STEP_MS, SETTINGS, Config, ConfigError, Setting, value_of

DRIFT_SHARE = 50
"""Two machines' monotonic clocks may differ by one part in so many."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,47}")
DSN_SCHEMES = ("postgresql", "postgres", "postgresql+asyncpg")


class Law(NamedTuple):
    """`sum of factor * setting <= factor * setting`."""

    small: tuple[tuple[int, str], ...]
    large: tuple[int, str]
    why: str


def _law(small: str, large: str, why: str) -> Law:
    """A law written as `2 * a + b`, `c`."""

    def terms(text: str) -> tuple[tuple[int, str], ...]:
        pairs = (term.rpartition(" * ") for term in text.split(" + "))
        return tuple((int(factor or 1), name) for factor, _, name in pairs)

    return Law(terms(small), terms(large)[0], why)


LAWS = (
    _law("2 * heartbeat_ms", "suspect_ms", "a member that loses one heartbeat must not be suspected"),
    _law("2 * heartbeat_ms", "expire_ms", "a member that loses one heartbeat must not expire"),
    _law("suspect_ms", "expire_ms", "suspicion comes before expiry"),
    _law("write_ttl_ms_min", "write_ttl_ms_default", "the default must be allowed"),
    _law("write_ttl_ms_default", "write_ttl_ms_max", "the default must be allowed"),
    _law("lease_ms_min", "lease_ms_max", "some read lease must be allowed"),
    _law("low_permille", "high_permille", "eviction goes down from the high watermark to the low one"),
    _law("2 * beat_ms", "restate_ms", "routers are told again in steps, one a beat at least"),
    _law("evict_batch_max", "keys_per_request_max", "a tick must not evict more than a request can bring"),
)
"""Hold always."""

REPLICATED_LAWS = (
    _law(
        "2 * lead_renew_ms + 4 * lead_timeout_ms",
        "lead_ttl_ms",
        "a leader whose renewal hangs must be able to try once more within half of its lease",
    ),
    _law("4 * lead_margin_ms", "lead_ttl_ms", "a leader must serve for most of its lease"),
    _law(
        "lead_ttl_ms",
        f"{DRIFT_SHARE} * lead_margin_ms",
        f"clocks may drift by one part in {DRIFT_SHARE}, and a leader has to stop before its lease is free",
    ),
    _law("2 * lead_ttl_ms", "write_ttl_ms_min", "a write session must outlive a take-over"),
    _law("2 * lead_ttl_ms", "expire_ms", "engines and workers must not expire during a take-over"),
    _law(
        "lead_ttl_ms + staleness_ms_max",
        "reclaim_delay_ms",
        "a leader that was cut off, or a follower, may name a block for so long after it was removed",
    ),
    _law("2 * poll_ms", "staleness_ms_max", "a follower that misses one poll must not be too stale"),
    _law(
        "handover_ms",
        "lead_ttl_ms",
        "a successor that does not take what it was handed must not cost more than a crash",
    ),
)
"""Hold where other replicas may take over: leadership other than single."""


def check(config: Config, origins: Mapping[str, str] | None = None) -> None:
    """Raises ConfigError for what cannot work, naming settings, values, and what would be right. `origins`:
    where each setting that was given comes from, for the message."""
    _Checks(config, origins or {}).run()


def check_files(config: Config, origins: Mapping[str, str]) -> None:
    """Raises ConfigError for a file that a setting names and that cannot be used, as it is now."""
    _Checks(config, origins).refuse(file_faults(config))


def dsn_fault(url: str) -> str:
    """What keeps a text from being the URL of a database, '' when nothing does. Says nothing of what is in
    it: it has a password."""
    scheme, separator, _ = url.partition("://")
    if scheme not in DSN_SCHEMES or not separator:
        return f"it does not begin with {DSN_SCHEMES[0]}://"
    if redact(url) == HIDDEN:
        return "it cannot be taken apart: of the password, write @ : / ? # [ ] and % as %40, %3A and so on"
    parts = urlsplit(url)
    named = dict(parse_qsl(parts.query))
    addresses = parts.netloc.rpartition("@")[2]
    hosts = named["host"].split(",") if "host" in named else addresses.split(",")
    if any(not host or host.startswith(":") for host in hosts):
        return "it names no host, or an empty one"
    if not parts.path.strip("/"):
        return "it names no database"
    ports = [address.rpartition("]")[2].partition(":")[2] for address in addresses.split(",")]
    ports += named.get("port", "").split(",")
    if not all(not port or (port.isascii() and port.isdigit() and 0 < int(port) < 65_536) for port in ports):
        return "one of its ports is none"
    return ""


class _Checks:
    def __init__(self, config: Config, origins: Mapping[str, str]) -> None:
        self._config = config
        self._origins = origins

    def run(self) -> None:
        for setting in SETTINGS.values():
            self._range(setting)
        if not 0 < self._config.trace_ratio <= 1:
            self._fail("trace_ratio", "expected more than 0 and at most 1")
        self._names()
        self._journal()
        self._etcd()
        self.refuse(faults(self._config))
        if self._config.replicated:
            self._addresses()
        for law in LAWS:
            self._law(law)
        for name in ("write_ttl_ms_min", "lease_ms_max", "expire_ms"):
            if value_of(self._config, name) < 4 * CLOCK_STEP_MS:
                self._fail(
                    name,
                    f"it has to be {4 * CLOCK_STEP_MS} or more: after a stall the service's clock may step "
                    f"by {CLOCK_STEP_MS} ms before waiting renewals are read",
                )
        if self._config.replicated:
            for law in REPLICATED_LAWS:
                self._law(law)

    def refuse(self, found: Iterable[tuple[str, str]]) -> None:
        """The first fault, with settings by their flags."""
        for name, wrong in found:
            self._fail(name, wrong.format_map({row.name: row.flag for row in SETTINGS.values()}))

    def _range(self, setting: Setting) -> None:
        value = value_of(self._config, setting.name)
        if setting.choices and value not in setting.choices:
            self._fail(setting.name, f"expected one of {', '.join(setting.choices)}")
        if setting.least is not None and value < setting.least:
            least = "it cannot be negative" if setting.least == 0 else f"it has to be {setting.least} or more"
            self._fail(setting.name, least)
        if setting.most is not None and value > setting.most:
            self._fail(setting.name, f"it has to be {setting.most} or less")

    def _names(self) -> None:
        if self._config.replica and not NAME.fullmatch(self._config.replica):
            self._fail("replica", "expected 1 to 128 letters, digits, '.', '_' or '-'")
        if self._config.advertise:
            self._url("advertise", self._config.advertise)
        if not SCHEMA.fullmatch(self._config.postgres_schema):
            self._fail(
                "postgres_schema", "expected 1 to 48 small letters, digits or '_', with no digit first"
            )
        if not self._config.etcd_prefix.startswith("/") or self._config.etcd_prefix.endswith("/"):
            self._fail("etcd_prefix", "expected a path such as /ucm, without a slash at its end")

    def _journal(self) -> None:
        config = self._config
        if config.replicated and config.journal != "postgres":
            self._fail(
                "leadership",
                f"but {self._value('journal')}: replicas need a journal that all of them reach, "
                f"{self._name('journal')} postgres",
            )
        if config.journal == "postgres" and not config.postgres_dsn:
            self._fail("journal", f"and {self._name('postgres_dsn')} has to say where the database is")
        if config.journal != "postgres" and config.postgres_dsn:
            self._fail(
                "postgres_dsn",
                f"but {self._value('journal')}: the database would not be used; did you mean "
                f"{self._name('journal')} postgres?",
            )
        if config.journal == "sqlite" and config.shards > 1:
            self._fail("shards", f"but {self._value('journal')}: the embedded journal holds one shard")
        if config.postgres_dsn and (wrong := dsn_fault(config.postgres_dsn)):
            self._fail(
                "postgres_dsn", f"{wrong}; expected a URL such as postgresql://user:password@host:5432/name"
            )

    def _etcd(self) -> None:
        config = self._config
        if config.leadership == "etcd" and not config.etcd_endpoints:
            self._fail("leadership", f"and {self._name('etcd_endpoints')} has to say where etcd is")
        if config.leadership != "etcd" and config.etcd_endpoints:
            self._fail(
                "etcd_endpoints",
                f"but {self._value('leadership')}: etcd would not be used; did you mean "
                f"{self._name('leadership')} etcd?",
            )
        for url in config.etcd_endpoints:
            self._url("etcd_endpoints", url)
            if config.etcd_ca is not None and not url.startswith("https:"):
                self._fail("etcd_endpoints", f"but {self._value('etcd_ca')}: expected https URLs")
        if (config.etcd_cert is None) != (config.etcd_key is None):
            given, absent = ("etcd_cert", "etcd_key") if config.etcd_cert else ("etcd_key", "etcd_cert")
            self._fail(given, f"and {self._name(absent)} has to be given too")
        if config.etcd_password and not config.etcd_user:
            self._fail("etcd_password", f"and {self._name('etcd_user')} has to be given too")
        if config.leadership == "etcd" and (config.lead_ttl_ms < 2_000 or config.lead_ttl_ms % 1_000):
            self._fail("lead_ttl_ms", "etcd counts leases in whole seconds, 2000 ms at least")

    def _addresses(self) -> None:
        config = self._config
        if config.port == 0 and not config.advertise:
            self._fail(
                "port",
                f"the other replicas have to know it: set it, or {self._name('advertise')}",
            )
        host = urlsplit(config.advertise).hostname or config.host
        try:
            anywhere = ip_address(host).is_unspecified
        except ValueError:
            anywhere = False
        if anywhere:
            name = "advertise" if config.advertise else "host"
            self._fail(
                name, f"no other replica reaches that: {self._name('advertise')} has to name a real host"
            )

    def _url(self, name: str, url: str) -> None:
        try:
            parts = urlsplit(url)
            fine = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            fine = False
        else:
            fine = fine and not (parts.path.strip("/") or parts.query or parts.fragment or parts.username)
        if not fine:
            self._fail(name, "expected a URL such as http://host:8600, with nothing after the port")

    def _law(self, law: Law) -> None:
        low = sum(factor * value_of(self._config, name) for factor, name in law.small)
        factor, name = law.large
        high = factor * value_of(self._config, name)
        if low <= high:
            return
        names = [*dict.fromkeys(name for _, name in (*law.small, law.large))]
        described = [f"{self._name(name)} ({self._number(name)})" for name in names]
        left = " + ".join(self._product(*term) for term in law.small)
        left = left if left == str(low) or len(law.small) == 1 else f"{left} = {low}"
        raise ConfigError(
            f"{', '.join(described[:-1])} and {described[-1]} clash: {left} > {self._product(*law.large)}, "
            f"but {law.why}"
        )

    def _product(self, factor: int, name: str) -> str:
        value = value_of(self._config, name)
        return f"{factor} * {value}" if factor > 1 else f"{value}"

    def _number(self, name: str) -> str:
        origin = self._origins.get(name, "")
        value = value_of(self._config, name)
        return f"{value}, {origin}" if origin else f"{value}"

    def _name(self, name: str) -> str:
        return SETTINGS[name].flag

    def _value(self, name: str) -> str:
        value: Any = value_of(self._config, name)
        origin = self._origins.get(name, "")
        where = f" ({origin})" if origin else ""
        if name in SECRETS:
            return f"{self._name(name)} is set{where}"
        if isinstance(value, tuple):
            return f"{self._name(name)} is {','.join(value)!r}{where}"
        return (
            f"{self._name(name)} is {value!r}{where}"
            if isinstance(value, str)
            else (f"{self._name(name)} is {value}{where}")
        )

    def _fail(self, name: str, what: str) -> None:
        joint = " " if what.startswith(("but ", "and ", "which ")) else "; "
        comma = "," if joint == " " else ""
        raise ConfigError(f"{self._value(name)}{comma}{joint}{what}")
