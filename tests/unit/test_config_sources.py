"""Where settings come from: what wins, and refusals that name the place, what is wrong, and what is right."""

import subprocess
import sys
from pathlib import Path

import pytest

from metaservice.config import ConfigError, load, parse
from metaservice.config.document import page
from metaservice.config.settings import _TEXT, SETTINGS, Config
from metaservice.core.model import Limits

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "ucm.toml"


def refusal(file: Path | None = None, *flags: str, **variables: str) -> str:
    words = [*flags] if file is None else ["--config", str(file), *flags]
    with pytest.raises(ConfigError) as raised:
        load(words, variables)
    return str(raised.value)


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(file: Path) -> None:
    file.write_text("port = 1\ngrace_ms = 2\ndrain_ms = 3\n")
    variables = {"UCM_GRACE_MS": "20", "UCM_DRAIN_MS": "30", "UCM_CONFIG": "/nowhere/else"}
    loaded = load(["--config", str(file), "--drain-ms", "300"], variables)
    config = loaded.config
    assert (config.port, config.grace_ms, config.drain_ms, config.snapshot_batches) == (1, 20, 300, 20_000)
    assert loaded.origins == {
        "port": f"{file}:1",
        "grace_ms": "UCM_GRACE_MS",
        "drain_ms": "flag",
        "replica": "host name and port",
        "advertise": "host and port",
    }


def test_a_switch_that_is_on_in_the_file_can_be_put_off_by_a_flag(file: Path) -> None:
    file.write_text("allow_remote = true\nspread = false\n")
    config = load(["--config", str(file), "--no-allow-remote", "--spread"], {}).config
    assert (config.allow_remote, config.spread) == (False, True)


def test_limits_of_the_core_are_settings_like_the_others(file: Path) -> None:
    file.write_text("heartbeat_ms = 1_000\n")
    limits = load(["--config", str(file)], {"UCM_SUSPECT_MS": "7000"}).config.limits
    assert limits == Limits(heartbeat_ms=1_000, suspect_ms=7_000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nlead_tll_ms = 5", ":2: there is no setting lead_tll_ms; did you mean lead_ttl_ms?"),
        ("lead-ttl-ms = 5", ":1: there is no setting lead-ttl-ms; did you mean lead_ttl_ms?"),
        ("completely_other = 5", ":1: there is no setting completely_other"),
        ("[limits]\nheartbeat_ms = 5", ":1: there is no setting limits; settings are not in tables"),
        ("etcd.prefix = '/x'", ":1: there is no setting etcd; settings are not in tables"),
        ("# ms\nlead_ttl_ms = '5s'", ":2: lead_ttl_ms is '5s', a text; expected an integer (milliseconds)"),
        (
            "lead_ttl_ms = 5.0",
            ":1: lead_ttl_ms is 5.0, a number; expected an integer (milliseconds), such as",
        ),
        ("lead_ttl_ms = true", ":1: lead_ttl_ms is True, true or false; expected an integer"),
        ("spread = 'yes'", ":1: spread is 'yes', a text; expected true or false, such as spread = true"),
        ("spread = 1", ":1: spread is 1, an integer; expected true or false"),
        ("etcd_endpoints = 'http://a:1'", """a text; expected a list of texts, such as etcd_endpoints = ["""),
        ("etcd_endpoints = [1]", ":1: etcd_endpoints is [1], a list; expected a list of texts"),
        ("data = 2026-01-01", "a date or time; expected a path"),
        ("journal = 3", ":1: journal is 3, an integer; expected one of sqlite, memory, postgres"),
        ("journal = 'oracle'", "--journal is 'oracle' (FILE:1); expected one of sqlite, memory, postgres"),
        (
            "trace_ratio = 'all'",
            ":1: trace_ratio is 'all', a text; expected a number, such as trace_ratio = 0.1",
        ),
        ("port = 1\nport = 2", "is not TOML: Cannot overwrite a value (at line 2"),
        ("port = ", "is not TOML: Invalid value (at"),
        ("postgres_dsn = 77", ":1: postgres_dsn is an integer; expected a text"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(file: Path, text: str, message: str) -> None:
    file.write_text(text + "\n")
    said = refusal(file)
    assert message.replace("FILE", str(file)) in said
    assert str(file) in said


def test_a_line_inside_a_text_of_several_lines_is_not_taken_for_the_setting(file: Path) -> None:
    file.write_text('log_level = """\ngrace_ms = 5\n"""\n\n"grace_ms" = "x"\n')
    assert f"{file}:5: grace_ms" in refusal(file)


def test_a_file_that_cannot_be_read_is_named(file: Path, tmp_path: Path) -> None:
    assert refusal(file) == f"{file}: cannot be read: No such file or directory"
    assert refusal(tmp_path) == f"{tmp_path}: cannot be read: Is a directory"
    file.write_bytes(b"\xff\xfe")
    assert refusal(file) == f"{file}: cannot be read: it is not UTF-8"
    missing = tmp_path / "missing"
    assert refusal(None, UCM_CONFIG=str(missing)) == f"{missing}: cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("UCM_LEAD_TTL", "5", "environment: there is no setting UCM_LEAD_TTL; did you mean UCM_LEAD_TTL_MS?"),
        ("UCM_CONFG", "f", "environment: there is no setting UCM_CONFG; did you mean UCM_CONFIG?"),
        ("UCM_PORT", "many", "environment: UCM_PORT is 'many'; expected an integer"),
        ("UCM_SPREAD", "maybe", "environment: UCM_SPREAD is 'maybe'; expected true or false"),
        ("UCM_TRACE_RATIO", "", "environment: UCM_TRACE_RATIO is ''; expected a number"),
        ("UCM_PORT", "70000", "--port is 70000 (UCM_PORT); it has to be 65535 or less"),
    ],
)
def test_what_is_wrong_in_the_environment_is_named(variable: str, value: str, message: str) -> None:
    assert refusal(None, **{variable: value}) == message


@pytest.mark.parametrize("word", ["true", "YES", "on", "1"])
def test_switches_in_the_environment_are_words(word: str) -> None:
    assert load([], {"UCM_ALLOW_REMOTE": word}).config.allow_remote is True
    assert (
        load([], {"UCM_SPREAD": {"true": "false", "YES": "no", "on": "Off", "1": "0"}[word]}).config.spread
        is False
    )


def test_what_kubernetes_sets_for_a_service_named_ucm_is_no_setting() -> None:
    links = {
        "UCM_SERVICE_HOST": "10.0.0.1",
        "UCM_SERVICE_PORT": "8600",
        "UCM_SERVICE_PORT_HTTP": "8600",
        "UCM_PORT": "tcp://10.0.0.1:8600",
        "UCM_PORT_8600_TCP": "tcp://10.0.0.1:8600",
        "UCM_PORT_8600_TCP_ADDR": "10.0.0.1",
        "UCM_META_SERVICE_HOST": "10.0.0.2",
        "UCM_META_PORT": "tcp://10.0.0.2:8600",
        "UCM_META_PORT_8600_TCP_PROTO": "tcp",
    }
    assert load([], links) == load([], {})


def test_other_programs_variables_are_left_alone() -> None:
    assert load([], {"UCM_URL": "http://a:1", "PATH": "/bin", "MYUCM_X": "1"}) == load([], {})


def test_check_config_prints_every_setting_with_its_origin(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text('journal = "postgres"\n\npostgres_dsn = "postgresql://ucm:hunter2@db-1,db-2/ucm"\n')
    words = ["--config", str(file), "--check-config", "--shards", "4"]
    with pytest.raises(SystemExit) as raised:
        parse(words, {"UCM_LEADERSHIP": "sql_lease", "UCM_LEAD_TTL_MS": "9000", "UCM_ETCD_PASSWORD": ""})
    assert raised.value.code == 0
    shown = capsys.readouterr().out
    assert "hunter2" not in shown
    rows = {line.lstrip("# ").split()[0]: " ".join(line.split()) for line in shown.splitlines() if line}
    assert rows["postgres_dsn"] == f'postgres_dsn = "postgresql://ucm:***@db-1,db-2/ucm" # {file}:3'
    assert rows["shards"] == "shards = 4 # flag"
    assert rows["leadership"] == 'leadership = "sql_lease" # UCM_LEADERSHIP'
    assert rows["reclaim_delay_ms"] == "reclaim_delay_ms = 14000 # lead_ttl_ms + staleness_ms_max"
    assert rows["lead_renew_ms"] == "lead_renew_ms = 1800 # lead_ttl_ms"
    assert rows["poll_ms"] == "poll_ms = 100 # default"
    assert rows["etcd_ca"] == "# etcd_ca is not set"
    assert SETTINGS.keys() <= rows.keys()


def test_what_check_config_prints_is_a_file_that_gives_the_same_settings(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        "--port",
        "1",
        "--ready-file",
        'a "b"',
        "--trace-ratio",
        "0.25",
        "--no-spread",
        "--lease-ms-max",
        "70000",
    ]
    with pytest.raises(SystemExit):
        parse([*given, "--check-config"], {})
    file.write_text(capsys.readouterr().out)
    assert parse(["--config", str(file)], {}) == parse(given, {})


def test_check_config_refuses_what_a_start_would_refuse() -> None:
    with pytest.raises(ConfigError, match="--port"):
        parse(["--check-config", "--port", "65536"], {})


def test_secrets_are_in_no_message_and_no_repr(file: Path) -> None:
    secret = "postgresql://ucm:hunter2@h/d"
    config = load(["--journal", "postgres"], {"UCM_POSTGRES_DSN": secret}).config
    assert config.postgres_dsn == secret
    assert "hunter2" not in repr(config) + str(config) + f"{config}" + str([config])
    assert "postgresql://ucm:***@h/d" in repr(config)
    assert "hunter2" not in str(list(config.__rich_repr__()))
    wrong = {
        "UCM_POSTGRES_DSN": "mysql://u:hunter2@h/d",
        "UCM_ETCD_PASSWORD": "hunter2",
    }
    for variable, value in wrong.items():
        said = refusal(None, "--journal", "postgres" if "DSN" in variable else "sqlite", **{variable: value})
        assert "hunter2" not in said
        assert f"is set ({variable})" in said
    file.write_text('postgres_dsn = ["hunter2"]\n')
    assert "hunter2" not in refusal(file)


def test_docs_configuration_is_the_generated_page() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    command = [sys.executable, "-m", "metaservice.config.document"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert written == page() == told, "run: python -m metaservice.config.document > docs/configuration.md"
    for name in (*Config.__struct_fields__, *Limits.__struct_fields__):
        assert name == "limits" or f"| `{name}` |" in written


def test_every_setting_has_a_text_and_every_text_a_setting() -> None:
    assert [name for name, setting in SETTINGS.items() if not setting.text] == []
    assert {name for texts in _TEXT.values() for name in texts} == SETTINGS.keys()


def test_defaults_in_the_table_are_those_of_the_structs() -> None:
    config = load([], {}).config
    for name, setting in SETTINGS.items():
        if name not in ("replica", "advertise"):
            value = getattr(config.limits if hasattr(config.limits, name) else config, name)
            assert value == setting.default, name
