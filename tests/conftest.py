"""What all tests share: the seed and commit printed with a failure, free ports, a PostgreSQL and an etcd of
the run's own, and the recorded traces."""

import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from socket import AF_INET, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, socket

import pytest

from metaservice.cli.local.etcd import LocalEtcd
from metaservice.cli.local.postgres import LocalPostgres

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("metaservice")
    group.addoption(
        "--seed", type=int, default=1, help="seed of tests that use the `seed` fixture (default 1)"
    )
    group.addoption(
        "--trace-dir",
        type=Path,
        default=ROOT.parent / "shared" / "traces",
        help="folder of recorded traces (*.jsonl.gz); tests that need one are skipped where it is absent",
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add to a failure of a test that takes `seed` the seed, the commit and the command that reruns it."""
    outcome = yield
    report: pytest.TestReport = outcome.get_result()  # type: ignore[attr-defined]
    seed = getattr(item, "funcargs", {}).get("seed")
    if seed is not None and report.failed:
        report.sections.append(("seed", f"seed={seed} commit={_commit()}\n{_rerun(item, seed)}"))


def _rerun(item: pytest.Item, seed: object) -> str:
    parametrized = "seed" in getattr(getattr(item, "callspec", None), "params", {})
    option = "" if parametrized else f" --seed {seed}"
    return f"rerun: python -m pytest -m '' '{item.nodeid}'{option}"


def _commit() -> str:
    """The commit under test, with `+` where files differ from it; `unknown` outside a repository."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run's chance, from `--seed`. A failing test prints it."""
    value: int = request.config.getoption("--seed")
    return value


@pytest.fixture(scope="session")
def traces_dir(request: pytest.FixtureRequest) -> Path:
    """The folder of recorded traces. Skips the test, saying where it looked, where there is none."""
    folder: Path = request.config.getoption("--trace-dir")
    if not any(folder.glob("*.jsonl.gz")):
        pytest.skip(f"traces absent: no *.jsonl.gz in {folder}; name their folder with --trace-dir")
    return folder


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """A function that returns a loopback TCP port nobody listens on, another one on each call.

    The port is free when it is returned and not held: bind it at once. Where the program under test can bind
    port 0 and say which it got, prefer that.
    """
    given: set[int] = set()

    def find() -> int:
        while True:
            with socket(AF_INET, SOCK_STREAM) as probe:
                probe.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", 0))
                port: int = probe.getsockname()[1]
            if port not in given:
                given.add(port)
                return port

    return find


_numbers = count(1)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[LocalPostgres]:
    """The PostgreSQL of this run. For tests that leave it as they found it: one that kills or freezes it
    starts its own."""
    with LocalPostgres() as server:
        yield server


@pytest.fixture
def postgres(postgres_server: LocalPostgres) -> Iterator[str]:
    """The DSN of an empty database of this test's own."""
    name = f"test_{next(_numbers)}"
    yield postgres_server.create_database(name)
    postgres_server.drop_database(name)


@pytest.fixture(scope="session")
def etcd_server() -> Iterator[LocalEtcd]:
    """The etcd of this run, one member. For tests that leave it running."""
    with LocalEtcd() as server:
        yield server


@pytest.fixture
def etcd(etcd_server: LocalEtcd) -> tuple[str, ...]:
    """The endpoints of the run's etcd, as URLs."""
    return etcd_server.endpoints


@pytest.fixture
def etcd_prefix(request: pytest.FixtureRequest) -> str:
    """A prefix of keys of this test's own."""
    return f"/{request.node.name}/{next(_numbers)}"
