"""`make bench` works: a quick run measures everything it should, and leaves nothing behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.bench, pytest.mark.slow, pytest.mark.timeout(300)]


def run_bench(tmp_path: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """The benchmark, with its temporary files under `tmp_path`."""
    return subprocess.run(
        [sys.executable, "tests/bench/run.py", *options],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def processes_that_name(place: Path) -> list[str]:
    """Command lines of processes that name a path."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes()
        except OSError:
            continue  # it ended meanwhile
        if str(place).encode() in words:
            found.append(words.replace(b"\0", b" ").decode(errors="replace"))
    return found


def test_a_quick_run_measures_everything_and_leaves_nothing(tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    run = run_bench(tmp_path, "--quick", "--json", str(written))
    assert run.returncode == 0, run.stderr
    report = json.loads(written.read_text())
    cells = {(row["cell"]["what"], row["cell"]["clients"], row["cell"]["keys"]) for row in report["calls"]}
    assert cells == {
        (what, clients, keys)
        for what in ("lookup", "miss", "write")
        for clients in (1, 4)
        for keys in (1, 256)
    }
    for row in report["calls"]:
        for figures in (row["service"], row["bare"]):
            assert figures["keys_per_s"] == pytest.approx(figures["calls_per_s"] * row["cell"]["keys"])
            assert 0 < figures["p50_us"] <= figures["p99_us"]
        name = f"{row['service']['keys_per_s']:,.0f}"
        assert name in run.stdout
    facts = {fact["name"]: fact["value"] for fact in report["facts"]}
    assert all(value > 0 for value in facts.values()), facts
    for part in ("memory", "replay", "restart from the journal", "restart from a snapshot", "SDK", "JSON"):
        assert any(part in name for name in facts), part
    assert report["blocks"] == 65_536
    assert report["machine"]["cpu"] in run.stdout
    assert [path for path in tmp_path.iterdir() if path != written] == []
    assert processes_that_name(tmp_path) == []


def test_a_wrong_option_is_told_and_nothing_runs(tmp_path: Path) -> None:
    run = run_bench(tmp_path, "--only", "everything")
    assert run.returncode == 2
    assert "invalid choice: 'everything'" in run.stderr
    assert list(tmp_path.iterdir()) == []
