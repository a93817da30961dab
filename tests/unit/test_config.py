"""Settings of `serve`: allowed defaults, checked laws, and messages that name flags and numbers."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from metaservice.config import Config, ConfigError, check, parse
from metaservice.config.settings import SETTINGS
from metaservice.core.model import Limits


def config_with(**limits: int) -> Config:
    return Config(data=Path("d"), limits=Limits(**limits))


def test_defaults_are_allowed_and_bind_loopback() -> None:
    config = parse([])
    check(config)
    assert (config.host, config.port, config.allow_remote) == ("127.0.0.1", 8600, False)
    assert config.journal == "sqlite"
    assert config.limits == Limits()


CURVE_KEY = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
LLMD = "llm-d endpoint=tcp://epp:5557"
GIVEN: dict[str, tuple[str, object]] = {
    "data": ("7", Path("7")),
    "allow_remote": ("true", True),
    "replica": ("r7", "r7"),
    "advertise": ("http://a:7", "http://a:7"),
    "ready_file": ("7", Path("7")),
    "log_level": ("debug", "debug"),
    "trace_ratio": ("0.5", 0.5),
    "journal": ("postgres", "postgres"),
    "postgres_dsn": ("postgresql://h/d", "postgresql://h/d"),
    "lead_ttl_ms": ("6000", 6_000),
    "lead_margin_ms": ("207", 207),
    "staleness_ms_max": ("207", 207),
    "spread": ("false", False),
    "leadership": ("etcd", "etcd"),
    "etcd_endpoints": ("https://a:1,https://b:1", ("https://a:1", "https://b:1")),
    "etcd_prefix": ("/seven", "/seven"),
    "etcd_ca": ("7", Path("7")),
    "etcd_cert": ("7", Path("7")),
    "etcd_key": ("7", Path("7")),
    "postgres_schema": ("seven", "seven"),
    "postgres_pooler": ("true", True),
    "postgres_notify": ("false", False),
    "events_port_base": ("21000", 21_000),
    "events_host": ("127.0.0.7", "127.0.0.7"),
    "events_shared_address": ("true", True),
    "events_curve_secret": ("7", Path("7")),
    "events_curve_clients": (f"{CURVE_KEY}=*", (f"{CURVE_KEY}=*",)),
    "events_allow_plain": ("true", True),
    "events_attachments": (LLMD, (LLMD,)),
    "events_ingest": ("false", False),
}
"""A value other than the default for each setting, as text and as it is read; 7 for those not named."""


def given(name: str) -> tuple[str, object]:
    if name in GIVEN:
        return GIVEN[name]
    return ("7", 7) if SETTINGS[name].kind == "integer" else ("seven", "seven")


def test_every_setting_has_a_flag_a_variable_and_a_key(tmp_path: Path) -> None:
    names = [name for name in Config.__struct_fields__ if name != "limits"]
    flags = []
    for name in names:
        text, value = given(name)
        flag = SETTINGS[name].flag
        switch = flag if value else f"--no-{flag[2:]}"
        flags.append(switch if isinstance(value, bool) else f"{flag}={text}")
    variables = {f"UCM_{name.upper()}": given(name)[0] for name in names}
    file = tmp_path / "ucm.toml"
    lines = []
    for name in names:
        value = given(name)[1]
        plain = isinstance(value, bool | int | float | tuple)
        lines.append(f"{name} = {json.dumps(value if plain else str(value))}")
    file.write_text("\n".join(lines))
    ways = (
        parse(flags, {}),
        parse([], variables),
        parse(["--config", str(file)], {}),
        parse([], {"UCM_CONFIG": str(file)}),
    )
    for config in ways:
        for name in names:
            assert getattr(config, name) == given(name)[1] != SETTINGS[name].default, name


@pytest.mark.parametrize("name", Limits.__struct_fields__)
def test_every_limit_has_a_flag_and_a_lower_bound(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    value = getattr(Limits(), name)
    assert getattr(parse([flag, str(value)]).limits, name) == value
    with pytest.raises(ConfigError, match=flag):
        parse([flag, "-1"])


@pytest.mark.parametrize(
    ("limits", "flags", "numbers"),
    [
        ({"heartbeat_ms": 3_001}, ("--heartbeat-ms", "--suspect-ms"), ("2 * 3001", "6000")),
        ({"suspect_ms": 16_000}, ("--suspect-ms", "--expire-ms"), ("16000", "15000")),
        (
            {"write_ttl_ms_default": 500},
            ("--write-ttl-ms-min", "--write-ttl-ms-default"),
            ("1000", "500"),
        ),
        (
            {"write_ttl_ms_max": 20_000},
            ("--write-ttl-ms-default", "--write-ttl-ms-max"),
            ("30000", "20000"),
        ),
        ({"lease_ms_min": 70_000}, ("--lease-ms-min", "--lease-ms-max"), ("70000", "60000")),
        ({"low_permille": 960}, ("--low-permille", "--high-permille"), ("960", "950")),
        ({"high_permille": 1_001}, ("--high-permille",), ("1001", "1000")),
        ({"write_ttl_ms_min": 999}, ("--write-ttl-ms-min",), ("999", "1000", "250 ms")),
        ({"lease_ms_max": 999}, ("--lease-ms-max",), ("999", "1000", "250 ms")),
        (
            {"heartbeat_ms": 300, "suspect_ms": 600, "expire_ms": 900},
            ("--expire-ms",),
            ("900", "1000", "250 ms"),
        ),
        ({"parts_max": 65}, ("--parts-max",), ("65", "64")),
        ({"evict_batch_max": 20_000}, ("--evict-batch-max", "--keys-per-request-max"), ("20000", "16384")),
    ],
)
def test_timing_laws_are_asserted_with_their_numbers(
    limits: dict[str, int], flags: tuple[str, ...], numbers: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as raised:
        check(config_with(**limits))
    for text in (*flags, *numbers):
        assert text in str(raised.value)


def test_c2_heartbeats_slower_than_half_the_expiry_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 \* 5000 > 9999"):
        parse(["--heartbeat-ms", "5000", "--suspect-ms", "9999", "--expire-ms", "9999"])
    assert parse(["--heartbeat-ms", "5000", "--suspect-ms", "10000", "--expire-ms", "10000"])


def test_bounds_that_meet_exactly_are_allowed() -> None:
    check(config_with(heartbeat_ms=3_000, suspect_ms=6_000, expire_ms=6_000))
    check(config_with(reclaim_delay_ms=0, late_write_ms=0))
    check(config_with(write_ttl_ms_min=30_000, lease_ms_min=60_000))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "65536"], "--port is 65536 (flag); it has to be 65535 or less"),
        (["--journal", "etcd"], "--journal is 'etcd' (flag); expected one of sqlite, memory, postgres"),
        (["--log-level", "loud"], "--log-level is 'loud'"),
        (["--trace-ratio", "0"], "--trace-ratio is 0.0"),
        (["--trace-ratio", "1.5"], "--trace-ratio is 1.5"),
        (["--trace-ratio", "nan"], "--trace-ratio is nan"),
        (["--snapshot-batches", "0"], "--snapshot-batches is 0"),
        (["--snapshot-bytes", "-5"], "--snapshot-bytes is -5"),
        (["--drain-ms", "-1"], "--drain-ms is -1"),
        (["--grace-ms", "0"], "--grace-ms is 0"),
    ],
)
def test_impossible_settings_are_refused_by_name(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(flags)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nonsense", "1"], "there is no flag --nonsense"),
        (["--snapshot-batch", "5"], "there is no flag --snapshot-batch; did you mean --snapshot-batches?"),
        (["--lead_ttl_ms=5"], "there is no flag --lead_ttl_ms; did you mean --lead-ttl-ms?"),
        (["--postgres-dns", "postgresql://u:hunter2@h/d"], "did you mean --postgres-dsn?"),
        (["postgresql://u:hunter2@h/d"], "an argument has no flag before it"),
        (["--port", "many"], "--port is 'many'; expected an integer"),
        (["--lead-ttl-ms", "5s"], "--lead-ttl-ms is '5s'; expected an integer (milliseconds)"),
    ],
)
def test_a_flag_nobody_knows_and_a_wrong_value_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(flags, {})
    assert message in str(raised.value)
    assert "hunter2" not in str(raised.value)


def test_a_flag_without_its_value_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse(["--port"])
    assert raised.value.code == 2
    assert "--port" in capsys.readouterr().err


def test_help_names_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse(["--help"])
    assert raised.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name in (*Config.__struct_fields__, *Limits.__struct_fields__):
        assert name == "limits" or "--" + name.replace("_", "-") in shown
    assert shown.count("default: ") >= len(Limits.__struct_fields__) + 8
    assert "20000" in shown


def test_a_config_does_not_change() -> None:
    config = parse([])
    with pytest.raises(AttributeError):
        config.port = 1  # type: ignore[misc]
    assert replace(config, port=1).port == 1
