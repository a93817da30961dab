"""SIGKILL under write load: nothing acknowledged is lost, everything unfinished ends, all counters add up."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torture.service_process import ROOT
from tests.torture.sigkill import good, run


@pytest.mark.torture
def test_a_few_kills_lose_nothing(tmp_path: Path, seed: int) -> None:
    """A1-A3, A5, B, D10, I1, I2, I4, I7, I8 from outside; see tests/torture/sigkill.py."""
    outcome, ledger = run(tmp_path, kills=2, seed=seed, between_s=(0.2, 0.5), writers=2)
    assert ledger.problems == []
    assert good(outcome), outcome


@pytest.mark.torture
@pytest.mark.slow
def test_d5_kills_while_snapshots_are_cut_lose_nothing(tmp_path: Path, seed: int) -> None:
    """Lives long enough for snapshots: restarts begin at one, the journal behind it is trimmed, and a process
    that still cuts while its service is killed does no harm."""
    outcome, ledger = run(tmp_path, kills=4, seed=seed, between_s=(5.5, 7.5), writers=3, snapshot_batches=100)
    assert ledger.problems == []
    assert good(outcome), outcome
    log = (tmp_path / "service.log").read_text()
    assert "restored snapshot at seq" in log
    assert "no snapshot was cut" not in log
    connection = sqlite3.connect(tmp_path / "data" / "journal.sqlite")
    [(first_seq,)] = connection.execute("SELECT min(first_seq) FROM journal").fetchall()
    connection.close()
    assert first_seq > 1, "the journal was never trimmed"


@pytest.mark.torture
@pytest.mark.slow
@pytest.mark.accept
@pytest.mark.timeout(1_200)
def test_fifty_kills_lose_nothing(seed: int) -> None:
    """As a person runs it: the exit status and the last line say it all."""
    command = [sys.executable, "tests/torture/sigkill.py", "--kills", "50", "--seed", str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1_100)
    assert done.returncode == 0, done.stderr[-3_000:] + done.stdout[-500:]
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["kills"], last["lost"], last["not_freed"], last["usage_mismatch"]) == (50, 0, 0, 0)
    assert last["epochs_increasing"] is True
    assert last["acked_finishes"] > 50 and last["unfinished"] > 50
