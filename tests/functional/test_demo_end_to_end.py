"""The demo as a whole: real processes, real kills, and figures that hold."""

import json
import signal
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from engine_adapters.replay import demo

ROOT = Path(__file__).resolve().parent.parent.parent
DEMO = [sys.executable, "-m", "engine_adapters.replay.demo"]
UCM_META = [sys.executable, "-c", "from metaservice.cli.app import main; main()"]

KEYS = [
    "requests", "blocks_asked", "blocks_hit", "hit_rate", "ideal_hit_rate", "dirty_reads",
    "hit_rate_before_kill", "hit_rate_after_kill", "hit_rate_drop", "orphans_left", "seconds",
]  # fmt: skip


def children_of(parent: int) -> dict[int, str]:
    """Command lines of the running children of a process, by their pids."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it has just ended
            if int(ppid) == parent and state != "Z":
                found[int(entry.name)] = line
    return found


def still_running(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def run_demo(*command: str, timeout_s: float = 110.0) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )


def check(run: "subprocess.CompletedProcess[str]", requests: int) -> dict[str, float]:
    """All that the demo has to show, from its output."""
    assert run.returncode == 0, run.stdout + run.stderr
    figures: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    assert list(figures) == KEYS
    assert figures["requests"] == requests
    assert figures["dirty_reads"] == 0
    assert figures["orphans_left"] == 0
    assert abs(figures["hit_rate"] - figures["ideal_hit_rate"]) <= 0.02
    assert figures["hit_rate_drop"] < 0.15
    assert figures["hit_rate"] == pytest.approx(figures["blocks_hit"] / figures["blocks_asked"], abs=1e-4)
    assert "was killed (SIGKILL) in request" in run.stdout
    assert "the service was killed (SIGKILL)" in run.stdout
    assert "the service is back on the same data" in run.stdout
    assert "FAILED" not in run.stdout
    assert "\x1b" not in run.stdout, "no colours and no bar where nobody watches"
    return figures


def test_a_small_run_shows_everything(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    run = run_demo(*UCM_META, "demo", "--requests", "300", "--dir", str(folder))
    figures = check(run, 300)
    assert figures["ideal_hit_rate"] > 0.8
    assert (folder / "service.log").exists(), "a folder that was asked for stays"
    assert "Traceback" not in "".join(log.read_text() for log in folder.glob("*.log"))


@pytest.mark.slow
@pytest.mark.accept
@pytest.mark.timeout(240)
def test_the_demo_as_it_stands() -> None:
    check(run_demo(*UCM_META, "demo", timeout_s=230), 1_000)


@pytest.mark.slow
@pytest.mark.accept
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name", ["mooncake_conversation", "lmcache_agent_text64", "ragpulse_component_prefix"]
)
def test_a_recorded_trace_reaches_its_ideal(traces_dir: Path, name: str) -> None:
    trace = traces_dir / f"{name}.jsonl.gz"
    if not trace.exists():
        pytest.skip(f"no {trace}")
    limit = 2_000 if name == "mooncake_conversation" else 1_000
    check(run_demo(*UCM_META, "demo", "--trace", str(trace), "--limit", str(limit), timeout_s=230), limit)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    command = [*DEMO, "--requests", "2000", "--dir", str(tmp_path / "demo")]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        deadline = time.monotonic() + 60
        while len(children := children_of(running.pid)) < 5:
            assert time.monotonic() < deadline, f"the service, a worker and three engines: {children}"
            time.sleep(0.05)
        running.send_signal(number)
        running.send_signal(number)  # an impatient person
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert still_running(children) == []


def test_h1_an_engine_that_is_started_without_the_service_serves(free_port: Callable[[], int]) -> None:
    """It computes everything; nobody waits for a cache that is not there longer than its patience."""
    options = {
        "url": f"http://127.0.0.1:{free_port()}", "engine": "e", "instance": "i", "part": "kv",
        "part-bytes": 64, "block-size-tokens": 4, "hash-seed": "s", "key-length": 32,
        "lease-ms": 1000, "write-ttl-ms": 1000,
    }  # fmt: skip
    command = [sys.executable, "-m", "engine_adapters.replay.engine", "--start-patience-ms", "200"]
    command += [f"--{name}={value}" for name, value in options.items()]
    job = b'{"type": "job", "index": 1, "tokens": "' + b64encode(bytes(4 * 12)) + b'"}\n'
    run = subprocess.run(command, cwd=ROOT, input=job, capture_output=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr.decode()
    ready, done = map(json.loads, run.stdout.splitlines())
    assert ready["type"] == "ready"
    assert (done["asked"], done["hits"], done["written"], done["dirty"]) == (3, 0, 0, 0)
    assert len(done["failures"]) == 2


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--trace", "absent.jsonl"], "absent.jsonl: cannot be read"),
        (["--limit", "5"], "--limit is about a trace"),
        (["--trace", "x", "--requests", "5"], "--requests is about the text workload"),
        (["--requests", "0"], "not a number of 1 or more"),
        (["--engines", "-1"], "not a number of 1 or more"),
        (["--block-bytes", "x"], "not a number of 1 or more"),
        (["--dir", "."], "is not empty"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_starts(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = demo.main(args)
    except SystemExit as end:
        status = int(end.code or 0)
    told = capsys.readouterr()
    assert status == 2
    assert says in told.err
    assert told.out == ""


def test_a_bad_line_deep_in_a_trace_is_found_before_anything_starts(tmp_path: Path) -> None:
    trace = tmp_path / "bad.jsonl"
    row = '{"timestamp": 0, "input_length": 512, "hash_ids": [%d]}\n'
    trace.write_text(
        "".join(row % i for i in range(50)) + '{"timestamp": 0, "input_length": 5, "hash_ids": [-1]}\n'
    )
    run = run_demo(*DEMO, "--trace", str(trace), "--dir", str(tmp_path / "demo"))
    assert run.returncode == 2
    assert f"{trace}:51: hash_ids[0]: Expected `int` >= 0" in run.stderr
    assert not (tmp_path / "demo" / "service.log").exists()
