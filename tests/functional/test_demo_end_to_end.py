"""The demo as a whole: real processes, real kills, and figures that hold."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
DEMO = [sys.executable, "-m", "engine_adapters.replay.demo"]
UCM_META = [sys.executable, "-c", "from metaservice.cli.app import main; main()"]

KEYS = [
    "requests", "blocks_asked", "blocks_hit", "hit_rate", "ideal_hit_rate", "dirty_reads",
    "hit_rate_before_kill", "hit_rate_after_kill", "hit_rate_drop", "orphans_left", "seconds",
]  # fmt: skip


def processes_of(folder: Path) -> list[str]:
    """Command lines of running processes that name `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(folder) in line:
                found.append(line)
    return found


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
    assert processes_of(folder) == []
    assert (folder / "service.log").exists(), "a folder that was asked for stays"
    assert "Traceback" not in "".join(log.read_text() for log in folder.glob("*.log"))


@pytest.mark.slow
@pytest.mark.accept
def test_the_demo_as_it_stands() -> None:
    check(run_demo(*UCM_META, "demo"), 1_000)


@pytest.mark.slow
@pytest.mark.accept
@pytest.mark.parametrize(
    "name", ["mooncake_conversation", "lmcache_agent_text64", "ragpulse_component_prefix"]
)
def test_a_recorded_trace_reaches_its_ideal(traces_dir: Path, name: str) -> None:
    trace = traces_dir / f"{name}.jsonl.gz"
    if not trace.exists():
        pytest.skip(f"no {trace}")
    limit = 2_000 if name == "mooncake_conversation" else 1_000
    check(run_demo(*UCM_META, "demo", "--trace", str(trace), "--limit", str(limit)), limit)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "demo"
    command = [*DEMO, "--requests", "5000", "--dir", str(folder)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        deadline = time.monotonic() + 60
        while not any(
            "engine_adapters.replay.engine" in line for line in processes_of(folder) or engines(demo.pid)
        ):
            assert time.monotonic() < deadline, "no engine was started"
            time.sleep(0.05)
        demo.send_signal(number)
        demo.send_signal(number)  # an impatient person
        _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert processes_of(folder) == []
    assert engines(demo.pid) == []


def engines(parent: int) -> list[str]:
    """Command lines of the running children of a process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text().rpartition(")")[2].split()
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if int(status[1]) == parent:
                found.append(line)
    return found


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
def test_what_cannot_be_run_is_said_before_anything_starts(args: list[str], says: str) -> None:
    run = run_demo(*DEMO, *args)
    assert run.returncode == 2
    assert says in run.stderr
    assert run.stdout == ""
    assert "Traceback" not in run.stderr


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
