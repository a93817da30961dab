"""The real `dynamo.indexer`: its process and its HTTP interface."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from time import monotonic
from typing import Any

from metaservice.cli.local.places import HOST, free_port
from metaservice.cli.local.process import LocalFailed, LocalProcess, until
from tests.compat.reference import Board, Document

ASK_TIMEOUT_S = 10.0
START_TIMEOUT_S = 30.0
NOT_FOUND = 404
LOOPBACK = {"DYN_EVENT_PLANE_HOST": HOST, "DYN_TCP_RPC_HOST": HOST}
"""Dynamo would bind and advertise the first network card otherwise."""

DEFAULT_GROUP = "default"
"""The routing group of those that name none."""


class Indexer:
    """One indexer. Its port stays the same from start to start; what it knows does not."""

    def __init__(self, python: Path, folder: Path, name: str = "indexer") -> None:
        """`python`: the interpreter of the environment that Dynamo is installed in."""
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self._python = python
        self._name = name
        self._log = folder / f"{name}.log"
        self._process: LocalProcess | None = None
        self._connection = HTTPConnection(HOST, self.port, timeout=ASK_TIMEOUT_S)

    def start(self) -> None:
        """Returns once it answers. Raises LocalFailed."""
        command = [str(self._python.absolute()), "-m", "dynamo.indexer", "--port", str(self.port)]
        self._process = LocalProcess(
            self._name, command, self._log, environment={**os.environ, **LOOPBACK, "RUST_LOG": "info"}
        )
        for _ in until(monotonic() + START_TIMEOUT_S):
            if not self._process.running:
                raise self._process.failure(f"ended with status {self._process.status}")
            with suppress(OSError, HTTPException):
                self._exchange("GET", "/health", None)
                return
        raise self._process.failure("did not answer in time")

    def kill(self) -> None:
        """SIGKILL; gone when this returns."""
        self._connection.close()
        if self._process is not None:
            self._process.kill()

    close = kill

    def mend(self) -> None:
        """Have it run and not be frozen. Raises LocalFailed."""
        if self._process is not None and self._process.running:
            self._process.thaw()
        else:
            self.start()

    def freeze(self) -> None:
        """SIGSTOP: it keeps its connections and reads nothing."""
        assert self._process is not None
        self._process.freeze()

    def thaw(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.thaw()

    def register(
        self,
        worker: int,
        endpoint: str,
        model: str,
        block_size: int,
        *,
        replay: str = "",
        rank: int = 0,
        group: str = "",
    ) -> None:
        """Have it follow a stream as that of (worker, rank). Raises LocalFailed when it refuses."""
        body: dict[str, Any] = {
            "instance_id": worker,
            "endpoint": endpoint,
            "model_name": model,
            "block_size": block_size,
            "dp_rank": rank,
        }
        if replay:
            body["replay_endpoint"] = replay
        if group:
            body["routing_group"] = group
        self.ask("/register", body)

    def unregister(self, worker: int, model: str, rank: int, *, group: str = "") -> None:
        """Have it forget one stream, and what it knows of that rank. (It would forget the worker with all its
        ranks if no group were named.)"""
        body = {
            "instance_id": worker,
            "model_name": model,
            "dp_rank": rank,
            "routing_group": group or DEFAULT_GROUP,
        }
        self.ask("/unregister", body)

    def board(self, model: str, document: Document, *, group: str = "") -> Board:
        """How much of a prompt each worker has; workers with nothing of it are left out."""
        body: dict[str, Any] = {"token_ids": document.prompt, "model_name": model}
        if document.lora:
            body["lora_name"] = document.lora
        if document.salt:
            body["cache_salt"] = document.salt
        if group:
            body["routing_group"] = group
        status, said = self._exchange("POST", "/query", json.dumps(body))
        if status == NOT_FOUND:
            return {}  # it has no worker of this model
        rows = self._answer(status, said)["instances"]
        found = {int(worker): (row["gpu"], row["cpu"], row["disk"]) for worker, row in rows.items()}
        return {worker: score for worker, score in found.items() if any(score)}

    def workers(self) -> Any:
        """What it says of the streams that it follows."""
        return self._answer(*self._exchange("GET", "/workers", None))

    def blocks_by_rank(self, model: str, worker: int) -> dict[int, int]:
        """How many blocks a worker has beyond its devices, by rank."""
        found: dict[int, set[int]] = {}
        for name, index in self._answer(*self._exchange("GET", "/dump", None)).items():
            for row in index["events"] if name.split(":")[0] == model else ():
                event = row["event"]
                if row["worker_id"] == worker and row["storage_tier"] != "device":
                    hashes = [block["block_hash"] for block in event["data"]["stored"]["blocks"]]
                    found.setdefault(event["dp_rank"], set()).update(hashes)
        return {rank: len(hashes) for rank, hashes in found.items()}

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST; the decoded answer. Raises LocalFailed for a refusal, OSError when it does not answer."""
        return self._answer(*self._exchange("POST", path, json.dumps(body)))

    def _answer(self, status: int, body: bytes) -> Any:
        if status >= 300:
            raise LocalFailed(f"the indexer answered {status}: {body[:300].decode(errors='replace')}")
        return json.loads(body) if body else None

    def _exchange(self, method: str, path: str, body: str | None) -> tuple[int, bytes]:
        """Status and body. Raises OSError or HTTPException when it does not answer."""
        try:
            self._connection.request(method, path, body, {"content-type": "application/json"})
            response = self._connection.getresponse()
            return response.status, response.read()
        except BaseException:
            self._connection.close()  # the next request opens it again
            raise
