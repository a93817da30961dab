"""Settings of replicas: what needs what, the laws between them with their numbers, and what follows."""

import pytest
from msgspec.structs import replace

from metaservice.config import Config, ConfigError, check, load, redact
from metaservice.config.laws import LAWS, REPLICATED_LAWS
from metaservice.config.settings import value_of
from metaservice.core.model import Limits

SQL = ("--journal", "postgres", "--leadership", "sql_lease")
ENVIRONMENT = {"UCM_POSTGRES_DSN": "postgresql://ucm:hunter2@db/ucm"}


def replicated(*flags: str) -> Config:
    return load([*SQL, *flags], ENVIRONMENT).config


def refusal(*flags: str) -> str:
    with pytest.raises(ConfigError) as raised:
        replicated(*flags)
    assert "hunter2" not in str(raised.value)
    return str(raised.value)


def test_replicas_need_nothing_but_the_database() -> None:
    config = replicated()
    assert config.replicated
    limits = config.limits
    assert limits == Limits(write_ttl_ms_min=10_000, reclaim_delay_ms=10_000)
    assert config.advertise == "http://127.0.0.1:8600"
    assert config.replica.endswith("-8600")


def test_one_replica_keeps_the_short_times_of_the_embedded_service() -> None:
    config = load(["--journal", "postgres"], ENVIRONMENT).config
    assert not config.replicated
    assert config.limits == Limits()


@pytest.mark.parametrize("ttl_ms", [1_000, 1_001, 1_999, 2_000, 4_999, 5_000, 9_000, 30_000, 120_000])
def test_what_follows_from_the_lease_keeps_every_law(ttl_ms: int) -> None:
    config = replicated("--lead-ttl-ms", str(ttl_ms))
    assert config.lead_renew_ms == ttl_ms // 5
    assert config.limits.write_ttl_ms_min == max(1_000, 2 * ttl_ms)
    assert config.limits.expire_ms == max(15_000, 2 * ttl_ms)
    assert config.limits.reclaim_delay_ms == ttl_ms + config.staleness_ms_max


def test_what_was_given_is_not_changed() -> None:
    given = {
        "write_ttl_ms_min": 20_000,
        "reclaim_delay_ms": 12_345,
        "expire_ms": 10_000,
        "lead_renew_ms": 999,
    }
    flags = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    config = replicated(*flags)
    assert {name: value_of(config, name) for name in given} == given


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            ("--lead-renew-ms", "1001"),
            ("--lead-renew-ms (1001, flag), --lead-timeout-ms (750) and --lead-ttl-ms (5000)",
             "2 * 1001 + 4 * 750 = 5002 > 5000", "within half of its lease"),
        ),
        (("--lead-timeout-ms", "751"), ("2 * 1000 + 4 * 751 = 5004 > 5000",)),
        (("--lead-margin-ms", "1251"), ("4 * 1251 > 5000",)),
        (("--lead-margin-ms", "99"), ("5000 > 50 * 99", "clocks may drift by one part in 50")),
        (("--write-ttl-ms-min", "9999"), ("2 * 5000 > 9999", "a write session must outlive a take-over")),
        (("--reclaim-delay-ms", "9999"), ("--lead-ttl-ms (5000)", "--staleness-ms-max (5000)",
                                          "5000 + 5000 = 10000 > 9999")),
        (("--expire-ms", "9999"), ("2 * 5000 > 9999",)),
        (("--poll-ms", "2501"), ("2 * 2501 > 5000",)),
        (("--handover-ms", "5001"), ("5001 > 5000", "must not cost more than a crash")),
        (("--lead-ttl-ms", "20000", "--reclaim-delay-ms", "12000"), ("20000 + 5000 = 25000 > 12000",)),
    ],
)  # fmt: skip
def test_laws_between_replicas_are_asserted_with_their_numbers(
    flags: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    said = refusal(*flags)
    for part in parts:
        assert part in said


def test_every_law_between_replicas_is_tight_at_the_defaults_or_broken_by_one_step() -> None:
    """Each law is broken by some value of one of its settings, and only replicas keep it."""
    config = replicated()
    for law in REPLICATED_LAWS:
        name = law.small[0][1]
        factor = law.small[0][0]
        rest = sum(times * value_of(config, other) for times, other in law.small[1:])
        most = (law.large[0] * value_of(config, law.large[1]) - rest) // factor
        broken = replace(config, **{name: most + 1})
        with pytest.raises(ConfigError, match="clash"):
            check(broken)
        alone = replace(
            broken, leadership="single", **({"lead_ttl_ms": 5_000} if name == "lead_ttl_ms" else {})
        )
        check(alone)


def test_laws_name_settings_that_exist() -> None:
    config = replicated()
    for law in (*LAWS, *REPLICATED_LAWS):
        for _, name in (*law.small, law.large):
            assert value_of(config, name) > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--leadership", "etcd"], "--leadership is 'etcd' (flag), but --journal is 'sqlite': replicas need"),
        (
            ["--leadership", "sql_lease", "--journal", "memory"],
            "but --journal is 'memory' (flag): replicas need",
        ),
        (["--journal", "postgres"], "--journal is 'postgres' (flag), and --postgres-dsn has to say where"),
        (["--postgres-dsn", "postgresql://h/d"], "--postgres-dsn is set (flag), but --journal is 'sqlite'"),
        (["--etcd-endpoints", "http://h:2379"], "is 'http://h:2379' (flag), but --leadership is 'single'"),
        (["--shards", "257"], "--shards is 257 (flag); it has to be 256 or less"),
        (
            ["--shards", "2"],
            "--shards is 2 (flag), but --journal is 'sqlite': the embedded journal holds one",
        ),
        (["--shards", "0"], "--shards is 0 (flag); it has to be 1 or more"),
        (["--replica", "a b"], "--replica is 'a b' (flag); expected 1 to 128 letters"),
        (["--advertise", "host:8600"], "--advertise is 'host:8600' (flag); expected a URL such as http://"),
        (["--advertise", "http://h:8600/path"], "with nothing after the port"),
        (["--advertise", "http://h:x"], "expected a URL such as http://"),
        (["--advertise", "http://u:p@h:1"], "expected a URL such as http://"),
        (["--postgres-schema", 'ucm"; drop'], "--postgres-schema is"),
        (["--etcd-prefix", "ucm/"], "--etcd-prefix is 'ucm/' (flag); expected a path such as /ucm"),
    ],
)
def test_what_needs_what(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(flags, {})
    assert message in str(raised.value)


ETCD = ("--leadership", "etcd", "--etcd-endpoints")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--leadership", "etcd"), "and --etcd-endpoints has to say where etcd is"),
        ((*ETCD, "a:2379"), "--etcd-endpoints is 'a:2379' (flag); expected a URL"),
        ((*ETCD, "http://a:2379", "--etcd-ca", "c.pem"), "expected https URLs"),
        ((*ETCD, "https://a:2379", "--etcd-cert", "c.pem"), "and --etcd-key has to be given too"),
        ((*ETCD, "https://a:2379", "--etcd-key", "k.pem"), "and --etcd-cert has to be given too"),
        ((*ETCD, "https://a:2379", "--etcd-password", "hunter2"), "and --etcd-user has to be given too"),
        ((*ETCD, "http://a:2379", "--lead-ttl-ms", "1000"), "etcd counts leases in whole seconds, 2000 ms"),
        ((*ETCD, "http://a:2379", "--lead-ttl-ms", "5500"), "etcd counts leases in whole seconds"),
        (("--port", "0"), "--port is 0 (flag); the other replicas have to know it"),
        (("--host", "0.0.0.0"), "--advertise has to name a real host"),
        (("--host", "::"), "--advertise has to name a real host"),
        (("--advertise", "http://0.0.0.0:1"), "--advertise is 'http://0.0.0.0:1' (flag); no other replica"),
    ],
)
def test_replicas_are_told_what_they_lack(flags: tuple[str, ...], message: str) -> None:
    assert message in refusal(*flags)


def test_addresses_that_replicas_may_use() -> None:
    assert (
        replicated("--host", "0.0.0.0", "--advertise", "http://meta-1:8600/").advertise
        == "http://meta-1:8600"
    )
    assert replicated("--host", "::1", "--port", "7").advertise == "http://[::1]:7"
    assert replicated("--port", "0", "--advertise", "https://meta-1").advertise == "https://meta-1"
    assert load(["--port", "0"], {}).config.advertise == "", "known only once the port is bound"
    config = replicated(*ETCD, "https://a:2379, https://b:2379,", "--etcd-ca", "c.pem")
    assert config.etcd_endpoints == ("https://a:2379", "https://b:2379")


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("postgresql://ucm:pw@db:5432/ucm", "postgresql://ucm:***@db:5432/ucm"),
        ("postgresql://ucm@db/ucm", "postgresql://ucm@db/ucm"),
        ("postgresql://db/ucm", "postgresql://db/ucm"),
        ("postgresql+asyncpg://u:pw@/ucm?host=a:1&host=b:2", "postgresql+asyncpg://u:***@/ucm?host=a:1&host=b:2"),
        ("postgresql:///ucm?host=/run/pg&user=x", "postgresql:///ucm?host=/run/pg&user=***"),
        ("postgresql://h/d?password=pw&sslmode=require", "postgresql://h/d?password=***&sslmode=require"),
        ("postgresql://u:p@w@h/d", "***"),
        ("postgresql://u:p/pw@h/d", "***"),
        ("postgresql://u:p?pw@h/d", "***"),
        ("postgresql://u:p#pw@h/d", "***"),
        ("postgresql://u:[pw@h/d", "***"),
        ("host=h password=pw", "***"),
        ("", "***"),
    ],
)  # fmt: skip
def test_a_database_url_is_shown_without_its_password(url: str, seen: str) -> None:
    assert redact(url) == seen
    assert "pw" not in seen


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ucm:pw@db:5432/ucm",
        "postgres://db/ucm",
        "postgresql://ucm:p%40w@db-1,db-2:6432/ucm?sslmode=require",
        "postgresql+asyncpg://u:pw@[::1]:5432/ucm",
        "postgresql:///ucm?host=/run/postgresql&user=x",
        "postgresql://u@/ucm?host=a,b&port=1,2",
        "postgresql://u:pw@127.0.0.1:1,127.0.0.1:2/ucm?target_session_attrs=read-write",
    ],
)
def test_urls_of_databases(url: str) -> None:
    assert load(["--journal", "postgres"], {"UCM_POSTGRES_DSN": url}).config.postgres_dsn == url


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://u:hunter2@h/d", "it does not begin with postgresql://"),
        ("host=h password=hunter2", "it does not begin with postgresql://"),
        ("postgresql://u:hun/ter2@h/d", "it cannot be taken apart: of the password, write @"),
        ("postgresql://u:hun@ter2@h/d", "it cannot be taken apart"),
        ("postgresql://u:hunter2@[::1/d", "it cannot be taken apart"),
        ("postgresql://u:hunter2@/d", "it names no host, or an empty one"),
        ("postgresql://u:hunter2@:5432/d", "it names no host, or an empty one"),
        ("postgresql://u:hunter2@a,,b/d", "it names no host, or an empty one"),
        ("postgresql://u:hunter2@h", "it names no database"),
        ("postgresql://u:hunter2@h/", "it names no database"),
        ("postgresql://u:hunter2@h:port/d", "one of its ports is none"),
        ("postgresql://u:hunter2@a:1,b:99999/d", "one of its ports is none"),
        ("postgresql://u:hunter2@/d?host=a&port=x", "one of its ports is none"),
    ],
)
def test_what_is_no_url_of_a_database_is_told_without_showing_it(url: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(["--journal", "postgres"], {"UCM_POSTGRES_DSN": url})
    said = str(raised.value)
    assert said.startswith(f"--postgres-dsn is set (UCM_POSTGRES_DSN); {message}")
    assert "hunter" not in said
    assert "ter2" not in said
