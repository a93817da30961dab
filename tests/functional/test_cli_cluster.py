"""`ucm-meta serve --check-config` and `cluster` as an operator calls them, with one real replica."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from metaservice.client import Client, ClientConfig
from tests.functional.cli_house import ROOT, cluster_status, program, ucm_meta
from tests.functional.client_service import Service

# --- configuration -------------------------------------------------------------------------------------


def test_check_config_of_the_command_prints_settings_and_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "meta.toml"
    file.write_text(f'data = "{tmp_path / "data"}"\nport = 7\n')
    run = program("serve", "--check-config", "--config", str(file), UCM_GRACE_MS="77")
    assert (run.returncode, run.stderr) == (0, "")
    assert re.search(rf"^port = 7 +# {re.escape(str(file))}:2$", run.stdout, re.MULTILINE)
    assert re.search(r"^grace_ms = 77 +# UCM_GRACE_MS$", run.stdout, re.MULTILINE)
    assert not (tmp_path / "data").exists()


def test_a_wrong_setting_ends_serve_with_2_and_one_line(tmp_path: Path) -> None:
    file = tmp_path / "meta.toml"
    file.write_text('leadersip = "etcd"\n')
    run = program("serve", "--config", str(file))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        f"ucm-meta serve: {file}:1: there is no setting leadersip; did you mean leadership?\n"
    )


# --- one replica ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[Service]:
    one = Service(
        tmp_path_factory.mktemp("alone"), free_port(), "--replica", "lone", "--log-level", "warning"
    )
    one.start()
    yield one
    one.stop()


def test_one_replica_is_a_cluster_too(alone: Service) -> None:
    code, seen = cluster_status(alone.url)
    assert (code, seen["led"], [one["replica"] for one in seen["replicas"]]) == (0, True, ["lone"])
    (shard,) = seen["shards"]
    assert (shard["leader"], shard["leader_url"], shard["followers"]) == ("lone", alone.url, [])
    assert shard["epoch"] >= 1
    drawn = ucm_meta("cluster", "status", UCM_URL=f" {alone.url}/ ,")
    assert drawn.returncode == 0
    assert seen["cluster"] in drawn.stdout
    assert "lone" in drawn.stdout


def test_the_program_answers_as_the_command_does(alone: Service) -> None:
    run = program("cluster", "status", "--json", "--url", alone.url)
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(run.stdout)["shards"][0]["leader"] == "lone"


def test_one_replica_has_nobody_to_hand_over_to(alone: Service) -> None:
    run = ucm_meta("cluster", "handover", "--shard", "0", "--url", alone.url)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("error: shard 0 stays with lone: ")
    assert cluster_status(alone.url)[0] == 0
    already = ucm_meta("cluster", "handover", "--shard", "0", "--to", "lone", "--url", alone.url)
    assert (already.returncode, already.stderr) == (0, "")
    assert already.stdout.startswith("shard 0 is led by lone already (epoch ")


def test_handovers_that_cannot_be_are_refused_before_anything_moves(alone: Service) -> None:
    run = ucm_meta("cluster", "handover", "--shard", "1", "--url", alone.url)
    assert (run.returncode, run.stderr) == (2, "error: there is no shard 1: they are 0 to 0\n")
    run = ucm_meta("cluster", "handover", "--shard", "0", "--to", "r9", "--url", alone.url)
    assert (run.returncode, run.stderr) == (2, "error: no replica 'r9' answers: lone do\n")


def test_nobody_there_is_said_for_each_url(free_port: Callable[[], int]) -> None:
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    for command in (("status",), ("handover", "--shard", "0")):
        run = ucm_meta("cluster", *command, "--url", ",".join(urls))
        assert (run.returncode, run.stdout) == (2, "")
        for url in urls:
            assert f"error: no status from {url}: refused_connection" in run.stderr


def test_a_url_that_is_none_is_said_and_no_traceback(alone: Service) -> None:
    run = ucm_meta("cluster", "status", "--url", "ftp://x")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("error: no status from ftp://x: url: ")
    code, seen = cluster_status("ftp://x", alone.url)
    assert (code, [one["answers"] for one in seen["replicas"]]) == (0, [True, False])


def test_replicas_of_two_clusters_are_not_put_together(
    alone: Service, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    other = Service(tmp_path, free_port(), "--replica", "other", "--log-level", "warning")
    other.start()
    try:
        run = ucm_meta("cluster", "status", "--json", "--url", f"{alone.url},{other.url}")
        assert (run.returncode, run.stdout) == (2, "")
        assert "are not of one cluster" in run.stderr
        assert "lone to " in run.stderr
        assert "other to " in run.stderr
    finally:
        other.stop()


def test_metrics_named_in_the_operators_page_exist(alone: Service) -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    named = set(re.findall(r"ucm_meta_[a-z_]*[a-z]", page)) - {"ucm_meta_events"}
    assert len(named) > 10
    with Client(ClientConfig(url=alone.url)) as client:
        client.put_tenant("t")
        scraped = client.get_text("/metrics")
    told = set(re.findall(r"^# TYPE (\S+)", scraped, re.MULTILINE))
    assert named - told == set()
