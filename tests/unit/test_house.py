"""The house's own promises: what a failing seeded test prints, and what `make` says when it cannot start."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


INNER = """
import pytest

def test_one(seed):
    assert seed != 77

@pytest.mark.parametrize("seed", range(3))
def test_many(seed):
    assert seed != 2

def test_trace(traces_dir):
    raise AssertionError
"""


def test_failures_print_seeds_and_skips_say_what_is_absent(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(INNER)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-rs"]
    command += ["test_inner.py", "--seed", "77", "--trace-dir", "nowhere"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    run = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert "seed=77 commit=" in run.stdout
    assert "test_inner.py::test_one' --seed 77\n" in run.stdout
    assert "seed=2 commit=" in run.stdout
    assert "test_inner.py::test_many[2]'\n" in run.stdout
    assert "traces absent: no *.jsonl.gz in nowhere" in run.stdout
    assert "2 failed, 2 passed, 1 skipped" in run.stdout


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (None, "error: no '{python}' on PATH; install Python 3.11 or later"),
        # answers the version question as Python 3.9 does
        (
            "[ $1 = -V ] && echo Python 3.9.2",
            "error: '{python}' is Python 3.9.2, and 3.11",
        ),
        # Debian's Python without its python3-venv package
        (
            "case $2 in *ensurepip*) exit 1;; esac",
            "error: '{python}' lacks its venv module; on Debian",
        ),
    ],
    ids=["absent", "old", "no-venv"],
)
def test_make_says_in_one_line_what_python_lacks(tmp_path: Path, script: str | None, says: str) -> None:
    python = tmp_path / "python-of-this-test"
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    command = ["make", f"PYTHON={python}", f"VENV={tmp_path}/venv", "demo"]
    # MAKEFLAGS: this test may itself run under `make test`
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode != 0
    first, make_says = run.stderr.strip().splitlines()
    assert first.startswith(says.format(python=python))
    assert make_says.startswith("make: ***")
    assert run.stdout == ""


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {line.split()[1] for line in makefile.splitlines() if line.startswith(".PHONY: ")}
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    run = subprocess.run(["make"], cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=60)
    listed = {
        line.split()[0]
        for line in run.stdout.splitlines()
        if line.startswith("  ") and "Variables" not in line
    }
    assert listed == targets >= {"help", "demo", "test", "lint", "bench", "serve", "sim", "lock", "clean"}


def test_the_wheel_holds_both_wings_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60)
    [wheel] = tmp_path.glob("ucm_metaservice-*.whl")
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        [entry_points] = (name for name in names if name.endswith("/entry_points.txt"))
        assert "ucm-meta = metaservice.cli.app:main" in archive.read(entry_points).decode()
    packages = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert packages == {"metaservice", "dataplane", "engine_adapters"}
    assert {"metaservice/py.typed", "metaservice/wire/schemas.py", "dataplane/backends/__init__.py"} <= {
        *names
    }
    assert {name.rsplit("/", 1)[1] for name in names if "/licenses/" in name} == {"LICENSE", "NOTICE"}
