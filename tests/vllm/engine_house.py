"""Real engines for tests: each a process of its own, over a service of one process with a posix storage."""

import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from engine_adapters.vllm.audit import PageEntry
from metaservice.cli.local.process import LocalProcess, until
from metaservice.cli.local.replicas import ask
from metaservice.client import Client, ClientConfig
from tests.accept import audit
from tests.accept.documents import tokenizer_of
from tests.accept.handle import EngineProcess
from tests.accept.messages import (
    BLOCK_SIZE_TOKENS,
    CONNECTOR_CLASS,
    CONNECTOR_MODULE,
    Answer,
    EngineOptions,
)

GROUP = "test-group"
STORAGE = "test-disk"
SETTLED_TIMEOUT_S = 10.0
SERVICE_TIMEOUT_S = 30.0
CONTEXT_TOKENS = 2_048
ANSWER_TOKENS = 8


class ServiceProcess:
    """The service on SQLite, with a group for engines. It can be frozen, ended and started again."""

    def __init__(self, folder: Path, port: int, *flags: str) -> None:
        self.folder = folder
        self.disk = folder / "disk"
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "metaservice.main", "serve"]
        self._command += ["--data", str(folder / "data"), "--port", str(port), "--reclaim-delay-ms", "250"]
        self._command += flags
        self.process = self._launch()

    def _launch(self) -> LocalProcess:
        return LocalProcess("service", self._command, self.folder / "service.log")

    def start_again(self) -> None:
        """After `process.kill()`: on the same data."""
        self.process = self._launch()
        self.await_ready()

    def await_ready(self) -> None:
        """Raises LocalFailed."""
        for _ in until(time.monotonic() + SERVICE_TIMEOUT_S):
            if ask(self.url, "/readyz")[0] == 200:
                return
        raise self.process.failure("was not ready")

    def set_up(self) -> None:
        """A storage, a tenant and a group."""
        self.disk.mkdir()
        with self.operator() as client:
            client.put_storage(STORAGE, "posix", {"root": str(self.disk), "fsync": "none"})
            client.put_tenant("test-tenant")
            client.put_group(GROUP, "test-tenant", [STORAGE])

    def operator(self) -> Client:
        """A client that raises its errors."""
        return Client(ClientConfig(url=self.url, timeout_ms=10_000, raise_errors=True))

    def gauge(self, name: str) -> int:
        """A number of now."""
        _, body = ask(self.url, "/metrics")
        for line in body.decode().splitlines():
            told, _, value = line.rpartition(" ")
            if told == f"ucm_meta_{name}":
                return round(float(value))
        return 0

    def settle(self) -> None:
        """Returns when nothing is being written and nobody holds a lease; fails when that takes long."""
        quiet = 0
        for _ in until(time.monotonic() + SETTLED_TIMEOUT_S):
            busy = self.gauge("sessions_open") or self.gauge("leases_held")
            quiet = 0 if busy else quiet + 1
            if quiet == 5:
                return
        raise AssertionError(
            f"{self.gauge('sessions_open')} sessions and {self.gauge('leases_held')} leases are left"
        )


class Engines:
    """Starts engines that share what they may share: those of one `salt`. They end with the test."""

    def __init__(self, service: ServiceProcess | None, folder: Path) -> None:
        """`service` None: for plain ones only."""
        self._service = service
        self.folder = folder
        self._all: list[EngineProcess] = []

    def start(
        self,
        name: str,
        model: Path,
        *,
        salt: str,
        policy: str = "recompute",
        arguments: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        ready: bool = True,
        spoiled: bool = False,
        **settings: Any,
    ) -> EngineProcess:
        """One with the connector. `ready`: it takes jobs when this returns. `spoiled`: it loads pages
        wrong."""
        assert self._service is not None
        options = EngineOptions(
            model=str(model),
            connector={
                "url": self._service.url,
                "group": GROUP,
                "salt": salt,
                "audit_path": str(self.audit_of(name)),
                **settings,
            },
            connector_module="tests.accept.spoiled" if spoiled else CONNECTOR_MODULE,
            connector_class="SpoiledConnector" if spoiled else CONNECTOR_CLASS,
            load_failure_policy=policy,
            arguments={"max_model_len": CONTEXT_TOKENS, **(arguments or {})},
        )
        return self._started(name, options, environment, ready)

    def plain(
        self,
        name: str,
        model: Path,
        arguments: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
    ) -> EngineProcess:
        """One without a connector and without a prefix cache."""
        given = {"max_model_len": CONTEXT_TOKENS, "enable_prefix_caching": False, **(arguments or {})}
        return self._started(name, EngineOptions(model=str(model), arguments=given), environment, True)

    def _started(
        self, name: str, options: EngineOptions, environment: dict[str, str] | None, ready: bool
    ) -> EngineProcess:
        engine = EngineProcess(name, options, self.folder, environment=environment)
        self._all.append(engine)
        if ready:
            engine.await_ready()
        return engine

    def audit_of(self, name: str) -> Path:
        return self.folder / f"{name}.audit"

    def pages(self, name: str, what: str) -> list[PageEntry]:
        """What an engine has noted."""
        return [entry for entry in audit.read([self.audit_of(name)]) if entry.what == what]

    def no_dirty_reads(self) -> int:
        """Every page that any engine loaded was whole and finished; how many that were."""
        found = audit.judge(audit.read(self.folder.glob("*.audit")))
        assert not found.dirty
        return found.pages

    def close(self) -> None:
        for engine in self._all:
            engine.kill()


@cache
def text_tokens(model: Path) -> list[int]:
    """A long run of tokens of real text."""
    from engine_adapters.replay.sources import Library

    library = Library()
    names = [name for names in library.projects.values() for name in names[-3:]]
    ids: list[int] = tokenizer_of(model).encode("\n".join(library.text(name) for name in names)).ids
    return ids


def prompts(model: Path, count: int, blocks: int, *, first: int = 0) -> list[list[int]]:
    """Different prompts of so many full blocks and a few tokens more."""
    ids = text_tokens(model)
    length = blocks * BLOCK_SIZE_TOKENS + 7
    starts = range(first * 97, first * 97 + count * length, length)
    found = [ids[at : at + length] for at in starts]
    assert len(found[-1]) == length, "the text is too short"
    return found


def tokens_of(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def loaded(engine: EngineProcess) -> int:
    """Blocks that it has loaded since its start, as of its last answer."""
    return round(engine.counts.connector.get("loaded_blocks", 0))
