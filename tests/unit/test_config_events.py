"""Settings of cache events: what cannot work is refused at start, with the setting to change."""

import subprocess
import sys
from pathlib import Path

import pytest

from metaservice.config import ConfigError, parse
from metaservice.config.events import publish_config
from metaservice.publish.attach.rows import AttachmentError, ports
from metaservice.publish.attach.rows import parse as parse_row
from metaservice.publish.curve import make_keys

KEY = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
ON = ["--events-port-base", "20000"]


def test_events_are_off_by_default() -> None:
    assert publish_config(parse([], {})) is None


def test_the_publisher_gets_what_was_set() -> None:
    rows = "dynamo-indexer url=http://indexer:8090, llm-d endpoint=tcp://127.0.0.1:5557"
    config = publish_config(
        parse(
            [*ON, "--events-channels-max", "10", "--no-events-ingest"],
            {"UCM_EVENTS_ATTACHMENTS": rows, "UCM_EVENTS_ADVERTISE": "ucm.example"},
        )
    )
    assert config is not None
    assert (config.port_base, config.host, config.public_host) == (20_000, "127.0.0.1", "ucm.example")
    assert (config.channels_max, config.ingest, config.allow_plain) == (10, False, False)
    assert config.attachments == tuple(rows.split(", "))
    config.check()


def test_clients_of_curve_are_told_by_the_length_of_their_key() -> None:
    """Z85 has `=` in its alphabet, and `:` and `{`."""
    odd = "=" * 40
    flags = [*ON, "--events-host", "10.0.0.1", "--events-curve-secret", "server.key_secret"]
    config = publish_config(parse([*flags, "--events-curve-clients", f"{KEY}=*,{odd}=acme"], {}))
    assert config is not None
    assert config.curve_clients == {KEY: "*", odd: "acme"}
    config.check()


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (["--events-attachments", "llm-d endpoint=tcp://e:1"], ["--events-port-base is not set"]),
        (["--events-port-base", "65000"], ["--events-port-base is 65000", "66999", "63536 or less"]),
        ([*ON, "--port", "21999"], ["--port is 21999", "20000 to 21999", "--events-port-base"]),
        ([*ON, "--events-host", "10.0.0.1"], ["--events-curve-secret", "--events-allow-plain"]),
        ([*ON, "--events-host", "*", "--events-allow-plain"], ["--events-advertise"]),
        ([*ON, "--events-shared-address"], ["--events-shared-address", "--events-advertise"]),
        ([*ON, "--events-curve-secret", "f"], ["--events-curve-secret", "--events-curve-clients"]),
        ([*ON, "--events-curve-clients", f"{KEY}=*"], ["--events-curve-secret everybody"]),
        ([*ON, "--events-curve-secret", "f", "--events-curve-clients", "short=*"], ["KEY=TENANT", "40"]),
        ([*ON, "--events-curve-secret", "f", "--events-curve-clients", f"{KEY}="], ["KEY=TENANT"]),
        ([*ON, "--events-attachments", "dynamo url=http://a"], ["no attachment 'dynamo'", "dynamo-indexer"]),
        ([*ON, "--events-attachments", "llm-d"], ["endpoint has to be given"]),
        ([*ON, "--events-attachments", "llm-d endpoint=http://{a}"], ["'http://{a}'", "tcp://host:5557"]),
        ([*ON, "--events-attachments", "llm-d endpoint=tcp://epp:5557"], ["--events-allow-plain"]),
        ([*ON, "--events-attachments", "dynamo-peer port=20007"], ["dynamo-peer", "the streams"]),
        ([*ON, "--events-attachments", "dynamo-peer port=8600"], ["the API"]),
        ([*ON, "--events-attachments", "dynamo-peer port=70000"], ["65535"]),
        ([*ON, "--events-attachments", "dynamo-peer port=9,dynamo-peer port=9"], ["twice"]),
        ([*ON, "--beat-ms", "1001"], ["--beat-ms is 1001", "1000 or less"]),
        ([*ON, "--restate-ms", "1000"], ["--beat-ms", "--restate-ms"]),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_by_name(flags: list[str], messages: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(flags, {})
    for message in messages:
        assert message in str(raised.value)


def test_check_config_refuses_a_key_file_that_a_start_would_refuse(tmp_path: Path) -> None:
    flags = [*ON, "--events-curve-clients", f"{KEY}=*", "--check-config", "--events-curve-secret"]
    with pytest.raises(ConfigError, match=r"--events-curve-secret .*cannot be used"):
        parse([*flags, str(tmp_path / "none")], {})
    secret, _ = make_keys(tmp_path, "server")
    with pytest.raises(SystemExit) as raised:
        parse([*flags, str(secret)], {})
    assert raised.value.code == 0
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        parse([*flags, str(secret)], {})


def test_row_18_merged_streams_have_ports_of_their_own() -> None:
    rows = "merge port_base=23000 engines=a;b,merge port_base=23003 engines=c"
    with pytest.raises(ConfigError, match="23003 to 23004, which are another merge"):
        parse([*ON, "--events-attachments", rows], {})
    with pytest.raises(ConfigError, match="the streams"):
        parse([*ON, "--events-attachments", "merge port_base=19999 engines=a"], {})
    assert parse([*ON, "--events-attachments", rows.replace("23003", "23004")], {})


@pytest.mark.parametrize(
    "row",
    [
        "", "llm-d endpoint", "llm-d endpoint=", "llm-d endpoint=tcp://h", "llm-d endpoint=tcp://h:1 x=1",
        "llm-d endpoint=tcp://h:1 endpoint=tcp://h:2", "dynamo-indexer url=h:8090",
        "dynamo-indexer url=http://h:8090/path", "dynamo-indexer url=http://h spare_rank=0",
        "dynamo-indexer url=http://h engine_streams=yes", "dynamo-indexer url=http://h poll_ms=-1",
        "merge port_base=1 engines=a;a", "merge port_base=1 engines=;", "dynamo-peer port=",
    ],
)  # fmt: skip
def test_a_row_that_says_nothing_is_refused(row: str) -> None:
    with pytest.raises(AttachmentError):
        parse_row(row)


def test_a_row_has_its_defaults() -> None:
    row = parse_row("dynamo-indexer url=http://h:8090")
    assert (row.number("spare_rank"), row.switch("engine_streams"), row.text("model")) == (1000, False, "")
    assert ports(row) == range(0)
    assert ports(parse_row("merge port_base=7000 engines=a;b;c")) == range(7000, 7006)


def test_checking_settings_opens_no_socket_library() -> None:
    code = "import sys, metaservice.config; sys.exit(any(name in sys.modules for name in ('zmq', 'httpx')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
