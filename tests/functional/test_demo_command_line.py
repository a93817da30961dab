"""`ucm-meta` as a person calls it."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import metaservice
from metaservice.cli import worker

ROOT = Path(__file__).resolve().parent.parent.parent
UCM_META = [sys.executable, "-c", "from metaservice.cli.app import main; main()"]

BLOCKED = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from metaservice.cli.app import main
main()
"""


def ucm_meta(*args: str, timeout_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*UCM_META, *args], cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout_s
    )


def test_version_is_the_packages() -> None:
    run = ucm_meta("version")
    assert (run.returncode, run.stdout, run.stderr) == (0, metaservice.__version__ + "\n", "")


def test_help_lists_the_commands() -> None:
    run = ucm_meta("--help")
    assert run.returncode == 0
    for command in ("serve", "worker", "demo", "status", "version"):
        assert command in run.stdout


@pytest.mark.parametrize(
    ("command", "option"), [("demo", "--trace"), ("worker", "--safe-age-ms"), ("serve", "--ready-file")]
)
def test_help_of_a_program_behind_is_its_own(command: str, option: str) -> None:
    run = ucm_meta(command, "--help")
    assert run.returncode == 0
    assert run.stdout.startswith(f"usage: ucm-meta {command}")
    assert option in run.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "--storage"),
        (["--storage", "disk=posix"], "'disk=posix' is not NAME or NAME=KIND:ROOT"),
        (["--storage", "=posix:/x"], "is not NAME or NAME=KIND:ROOT"),
        (["--storage", "disk=tape:/x"], "'tape' is not one of posix"),
        (["--storage", "disk=posix:/nonexistent"], "/nonexistent"),
        (["--storage", "disk", "--storage", "disk"], "'disk' is given twice"),
        (["--storage", "disk", "--sweep-ms", "0"], "sweep_ms: 0 is not positive"),
        (["--storage", "disk", "--url", "ftp://x"], "url"),
    ],
)
def test_wrong_settings_of_a_worker_are_named(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        worker.main(args)
    assert end.value.code == 2
    assert says in capsys.readouterr().err


def test_a_worker_runs_on_the_base_install_and_stops_when_told(free_port: Callable[[], int]) -> None:
    """Nobody answers at its service's address: it waits for it, and ends at once when it is asked to."""
    program = BLOCKED.format(absent=["typer", "rich", "fastapi", "uvicorn", "pydantic"]).replace(
        "from metaservice.cli.app import main", "from metaservice.cli.worker import main"
    )
    command = [sys.executable, "-c", program, "--storage", "disk", "--url", f"http://127.0.0.1:{free_port()}"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        while "not registered" not in running.stderr.readline():
            assert running.poll() is None
        running.send_signal(signal.SIGTERM)
        rest = running.stderr.read()
        assert running.wait(timeout=30) == 0
    assert "Traceback" not in rest


@pytest.mark.parametrize("args", [["nonsense"], ["status", "--nonsense"], ["demo", "--nonsense"]])
def test_what_nobody_knows_is_refused(args: list[str]) -> None:
    run = ucm_meta(*args)
    assert run.returncode == 2
    assert run.stdout == ""
    assert "onsense" in run.stderr
    assert "Traceback" not in run.stderr


def test_without_the_server_extra_it_says_so_in_one_line() -> None:
    program = BLOCKED.format(absent=["typer"])
    run = subprocess.run(
        [sys.executable, "-c", program, "version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 2
    assert run.stdout == ""
    assert (
        run.stderr == 'ucm-meta needs what the server extra installs: pip install "ucm-metaservice[server]"\n'
    )


def test_a_broken_installation_is_not_called_a_missing_extra() -> None:
    run = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(absent=["msgspec"]), "status"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 1
    assert "No module named 'msgspec'" in run.stderr


def test_importing_the_command_line_loads_no_service_and_no_engine() -> None:
    program = (
        "import sys, metaservice.cli.app; print(*sorted(sys.modules)); import metaservice.cli.commands;"
        "print(*sorted(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    entry, commands = (line.split() for line in run.stdout.splitlines())
    assert "typer" not in entry
    heavy = {
        "fastapi",
        "uvicorn",
        "pydantic",
        "rich.progress",
        "metaservice.api",
        "metaservice.core",
        "dataplane",
    }
    assert not heavy & set(commands)


def test_status_of_nobody_is_an_error_and_not_a_traceback(free_port: Callable[[], int]) -> None:
    run = ucm_meta("status", "--url", f"http://127.0.0.1:{free_port()}")
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.startswith("error: no status from http://127.0.0.1:")
    assert run.stderr.count("\n") == 1


def test_status_with_a_malformed_url_is_an_error() -> None:
    run = ucm_meta("status", "--url", "ftp://x")
    assert run.returncode == 2
    assert "url" in run.stderr
    assert "Traceback" not in run.stderr


def on_terminal(*args: str) -> tuple[int, str]:
    """Exit status and output of `ucm-meta` with a terminal for its stdout."""
    primary, secondary = pty.openpty()
    environment = {**os.environ, "COLUMNS": "100", "TERM": "xterm"}
    with subprocess.Popen(
        [*UCM_META, *args], cwd=ROOT, stdout=secondary, stderr=secondary, env=environment
    ) as run:
        os.close(secondary)
        output = b""
        while True:
            try:
                if not (part := os.read(primary, 65536)):
                    break
            except OSError:
                break  # the terminal's other side was closed
            output += part
    os.close(primary)
    return run.returncode, output.decode()


def test_on_a_terminal_a_fault_of_the_demo_is_drawn(tmp_path: Path) -> None:
    trace = tmp_path / "bad.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5}\n')
    status, output = on_terminal("demo", "--trace", str(trace))
    assert status == 2
    assert "bad.jsonl:1: hash_ids: is missing" in output.replace("\r\n", "")


@pytest.mark.slow
def test_on_a_terminal_the_demo_has_a_bar_tables_and_a_last_line_of_json() -> None:
    """So few requests with two kills among them do not reach the ideal: only the drawing is looked at."""
    status, output = on_terminal("demo", "--requests", "24", "--engines", "2")
    assert status in (0, 1), output
    lines = output.splitlines()
    figures = json.loads(lines[-1])
    assert (figures["requests"], figures["dirty_reads"], figures["orphans_left"]) == (24, 0, 0)
    assert "24/24" in output
    assert "━" in output
    assert "Engines" in output
    assert "orphans_left" in output
