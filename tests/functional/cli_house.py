"""`ucm-meta` as tests call it: in a process of its own, or in theirs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from typer.testing import CliRunner

from metaservice.cli.commands import app

ROOT = Path(__file__).resolve().parent.parent.parent
UCM_META = [sys.executable, "-c", "from metaservice.cli.app import main; main()"]


class Ran(NamedTuple):
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


def program(*args: str, **environment: str) -> Ran:
    """The command in a process of its own."""
    run = subprocess.run(
        [*UCM_META, *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", **environment},
    )
    return Ran(run.returncode, run.stdout, run.stderr)


def ucm_meta(*args: str, **environment: str) -> Ran:
    """The command in this process, which starts in no time."""
    run = CliRunner().invoke(app, args, env={"COLUMNS": "160", "UCM_URL": None, **environment})
    assert run.exception is None or isinstance(run.exception, SystemExit), run.exc_info
    return Ran(run.exit_code, run.stdout, run.stderr)


def cluster_status(*urls: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of `cluster status`."""
    run = ucm_meta("cluster", "status", "--json", "--timeout-ms", "1000", "--url", ",".join(urls))
    return run.returncode, json.loads(run.stdout)


def leader_of(seen: dict[str, Any], shard: int) -> str:
    """Who leads a shard, by such a JSON."""
    return str(seen["shards"][shard]["leader"])
