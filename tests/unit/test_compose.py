"""docker-compose.yml and Dockerfile say only what exists: stages, services, settings, options, ports.

Nothing of Docker runs here. Each command is given to the parser of the program that will get it, each setting
to the configuration that will read it.
"""

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from engine_adapters.replay import demo
from metaservice.cli import worker
from metaservice.cli.local.binaries import etcd_program
from metaservice.config import Config, ConfigError, load

ROOT = Path(__file__).resolve().parent.parent.parent
REPLICAS = ("replica-1", "replica-2", "replica-3")
ETCD = ("etcd-1", "etcd-2", "etcd-3")
SERVICE_KEYS = {
    "build", "command", "depends_on", "environment", "healthcheck", "image", "ports", "restart",
    "stop_grace_period", "volumes",
}  # fmt: skip
"""Of the compose specification, what this file uses."""


def interpolated(text: str) -> str:
    """As `docker compose` reads it where no variable is set."""
    found = re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", text)
    assert "$" not in found, "a variable without a default stops who just wants to look"
    return found


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    text = interpolated((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    document: dict[str, Any] = yaml.safe_load(text)
    return document


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose["services"]
    return found


@pytest.fixture(scope="module")
def stages() -> dict[str, list[list[str]]]:
    """Of the Dockerfile: name of a stage -> its instructions as words."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, list[list[str]]] = {}
    current: list[list[str]] = []
    for line in text.splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if words[0] == "FROM":
            current = [words]
            found[words[3]] = current
        else:
            current.append(words)
    return found


def config_of(service: Mapping[str, Any]) -> Config:
    """What a replica makes of its environment, with every law checked."""
    command = service["command"]
    assert command[0] == "serve"
    return load(command[1:], service["environment"]).config


def port_of(url: str) -> tuple[str, int | None]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port


# --- the cluster --------------------------------------------------------------------------------------


def test_the_topology_is_whole(services: dict[str, dict[str, Any]]) -> None:
    assert set(services) == {"postgres", *ETCD, *REPLICAS, "worker", "demo"}


def test_every_key_and_name_exists(
    compose: dict[str, Any], services: dict[str, dict[str, Any]], stages: dict[str, list[list[str]]]
) -> None:
    assert {key for key in compose if not key.startswith("x-")} == {"name", "services", "volumes"}
    built = {service["image"] for service in services.values() if "build" in service}
    for name, service in services.items():
        assert set(service) <= SERVICE_KEYS, name
        if "build" in service:
            assert service["build"]["target"] in stages
        else:
            assert service["image"] in built | {"postgres:18"}
        for needed, how in service.get("depends_on", {}).items():
            assert needed in services
            wanted = how["condition"]
            assert wanted in ("service_started", "service_healthy")
            assert wanted == "service_started" or "healthcheck" in services[needed]
        for volume in service.get("volumes", []):
            assert volume.partition(":")[0] in compose["volumes"]


def test_replicas_have_settings_that_the_service_takes(services: dict[str, dict[str, Any]]) -> None:
    configs = {name: config_of(services[name]) for name in REPLICAS}
    for name, config in configs.items():
        assert config.replica == name
        assert config.advertise == f"http://{name}:{config.port}"
        assert services[name]["ports"][0].endswith(f":{config.port}")
        assert services[name]["ports"][0].startswith("127.0.0.1:"), "published to this machine only"
        assert (config.journal, config.leadership) == ("postgres", "etcd")
    own = {"UCM_REPLICA", "UCM_ADVERTISE"}
    shared = [
        {key: value for key, value in services[name]["environment"].items() if key not in own}
        for name in REPLICAS
    ]
    assert shared[0] == shared[1] == shared[2]
    assert len({services[name]["ports"][0] for name in REPLICAS}) == 3


def test_a_wrong_setting_would_be_seen(services: dict[str, dict[str, Any]]) -> None:
    replica = services["replica-1"]
    for wrong in ({"UCM_LEAD_TLL_MS": "5000"}, {"UCM_SHARDS": "many"}, {"UCM_RECLAIM_DELAY_MS": "1"}):
        with pytest.raises(ConfigError):
            config_of({**replica, "environment": replica["environment"] | wrong})


def test_a_replica_has_time_to_hand_over(services: dict[str, dict[str, Any]]) -> None:
    config = config_of(services["replica-1"])
    grace_s = int(services["replica-1"]["stop_grace_period"].removesuffix("s"))
    assert grace_s * 1_000 > config.drain_ms + config.handover_ms + config.grace_ms


def test_the_database_is_the_one_that_replicas_know(services: dict[str, dict[str, Any]]) -> None:
    given = services["postgres"]["environment"]
    dsn = urlsplit(config_of(services["replica-1"]).postgres_dsn)
    assert (dsn.username, dsn.password) == (given["POSTGRES_USER"], given["POSTGRES_PASSWORD"])
    assert (dsn.hostname, dsn.port, dsn.path) == ("postgres", 5432, "/" + given["POSTGRES_DB"])


def test_etcd_members_know_each_other_and_replicas_know_them(services: dict[str, dict[str, Any]]) -> None:
    config = config_of(services["replica-1"])
    peers = {}
    clients = []
    for name in ETCD:
        given = services[name]["environment"]
        assert given["ETCD_NAME"] == name
        clients.append(given["ETCD_ADVERTISE_CLIENT_URLS"])
        peers[name] = given["ETCD_INITIAL_ADVERTISE_PEER_URLS"]
        assert port_of(clients[-1]) == (name, port_of(given["ETCD_LISTEN_CLIENT_URLS"])[1])
        assert port_of(peers[name]) == (name, port_of(given["ETCD_LISTEN_PEER_URLS"])[1])
        assert given["ETCD_DATA_DIR"].startswith(services[name]["volumes"][0].partition(":")[2] + "/")
    assert list(config.etcd_endpoints) == clients
    for name in ETCD:
        listed = services[name]["environment"]["ETCD_INITIAL_CLUSTER"].split(",")
        assert dict(entry.split("=", 1) for entry in listed) == peers


def test_etcd_knows_its_options(services: dict[str, dict[str, Any]]) -> None:
    usage = subprocess.run(
        [etcd_program(), "--help"], capture_output=True, text=True, check=False, timeout=20
    )
    options = set(re.findall(r"--([a-z-]+)", usage.stdout + usage.stderr))
    for variable in services["etcd-1"]["environment"]:
        assert variable.removeprefix("ETCD_").lower().replace("_", "-") in options


def test_the_worker_and_the_demo_know_their_options(services: dict[str, dict[str, Any]]) -> None:
    parsers = {"worker": worker.arguments(), "demo": demo.arguments()}
    replicas = [config_of(services[name]).advertise for name in REPLICAS]
    for name, parser in parsers.items():
        command = services[name]["command"]
        assert command[0] == name
        options = parser.parse_args(command[1:])
        assert options.url.split(",") == replicas
        assert services[name]["volumes"] == ["storage:/storage"]
    assert "--storage-root=/storage" in services["demo"]["command"]
    assert "--no-worker" in services["demo"]["command"], "one works already"


# --- the images ---------------------------------------------------------------------------------------


def words_of(stages: dict[str, list[list[str]]], instruction: str) -> Iterator[tuple[str, list[str]]]:
    for stage, lines in stages.items():
        for words in lines:
            if words[0] == instruction:
                yield stage, words[1:]


def test_stages_build_on_stages_that_exist(stages: dict[str, list[list[str]]]) -> None:
    assert {"server", "engine", "etcd"} <= set(stages)
    for stage, words in words_of(stages, "FROM"):
        assert words[0] in stages or words[0].startswith("python:"), stage
    for _, words in words_of(stages, "COPY"):
        if words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages


def test_what_is_copied_from_the_checkout_is_there(stages: dict[str, list[list[str]]]) -> None:
    copied = [words for _, words in words_of(stages, "COPY") if not words[0].startswith("--from=")]
    assert len(copied) > 4
    for words in copied:
        for name in words[:-1]:
            assert (ROOT / name).exists(), name


def test_everything_is_installed_by_hash(stages: dict[str, list[list[str]]]) -> None:
    installs = [
        shlex.join(words)
        for _, words in words_of(stages, "RUN")
        if any(word.endswith("bin/pip") for word in words)
    ]
    assert len(installs) == 4
    for command in re.split(r"'?&&'?", " && ".join(installs)):
        if "pip install" in command:
            assert "--require-hashes" in command or "--no-index" in command


def test_nothing_runs_as_root(stages: dict[str, list[list[str]]]) -> None:
    users = dict(words_of(stages, "USER"))
    assert users == {"run": ["10001"]}
    final = {stage: words[0] for stage, words in words_of(stages, "FROM")}
    assert {final[stage] for stage in ("server", "engine", "etcd")} == {"run"}


def test_the_entry_points_exist(stages: dict[str, list[list[str]]]) -> None:
    entries = {stage: " ".join(words) for stage, words in words_of(stages, "ENTRYPOINT")}
    assert entries == {
        "server": '["ucm-meta"]',
        "engine": '["python", "-m", "metaservice.cli.worker"]',
        "etcd": '["etcd"]',
    }
    scripts = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'ucm-meta = "metaservice.cli.app:main"' in scripts
