"""What the demo takes from the description of a cluster."""

from pathlib import Path

import pytest

from engine_adapters.replay import demo
from engine_adapters.replay.replicas import ClusterFailed, Description

FILE = """
{"replicas": [{"replica": "r1", "url": "http://127.0.0.1:1", "pid": 11},
              {"replica": "r2", "url": "http://127.0.0.1:2", "pid": 0}],
 "shards": 4, "storage_root": "/s", "ttl_ms": 2000, "of_another_release": true,
 "limits": {"write_ttl_ms": 4000, "late_write_ms": 500, "lease_ms_max": 3000, "reclaim_delay_ms": 9}}
"""


def test_times_follow_the_limits(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(FILE)
    described = Description.read(file)
    assert [replica.pid for replica in described.replicas] == [11, 0]
    times = described.times
    assert (times.lease_ms, times.write_ttl_ms) == (3_000, 4_000)
    assert times.safe_age_ms >= 4_000 + 500 + 2_000, "a write session, its late writes, a take-over"


def test_of_urls_alone_the_service_as_it_comes_is_expected(tmp_path: Path) -> None:
    described = Description.at(["http://a:1", "http://b:1"], tmp_path)
    assert not any(replica.pid for replica in described.replicas)
    assert described.times.write_ttl_ms >= 2 * described.ttl_ms


@pytest.mark.parametrize("text", ["", "{", "[]", '{"replicas": [{}], "storage_root": "/s"}'])
def test_a_description_that_is_none_is_said_so(tmp_path: Path, text: str) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(text)
    with pytest.raises(ClusterFailed, match=r"cluster\.json"):
        Description.read(file)
    with pytest.raises(ClusterFailed, match="absent"):
        Description.read(tmp_path / "absent")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--url", "http://a:1"], "--url goes with --storage-root"),
        (["--url", "http://a:1", "--storage-root", "x", "--cluster", "f"], "without --cluster"),
        (["--storage-root", "x"], "are about --url"),
        (["--cluster", "f", "--no-worker"], "are about --url"),
    ],
)
def test_options_that_do_not_go_together(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        demo.main(args)
    assert end.value.code == 2
    assert says in capsys.readouterr().err
