"""The measurement of cache events runs, and what it counts adds up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.bench
@pytest.mark.parametrize("ranks", [1, 2])
def test_events_are_measured(ranks: int) -> None:
    command = [sys.executable, str(Path(__file__).with_name("bench_events.py"))]
    sizes = {"blocks": 8_192, "workers": 4, "ranks": ranks, "seconds": 0.3, "turns": 1, "replays": 1}
    command += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["blocks"] == 8_192
    assert result["streams"] == 2 * ranks
    assert 60 < result["fill"]["bytes_a_block"] < 200
    assert result["recovery"]["blocks"] == result["blocks"] - 1_024
    assert result["lookups"]["p99_ratio"] > 0
    assert run.stderr == "", "progress is for terminals only"
