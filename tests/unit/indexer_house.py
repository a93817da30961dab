"""A server that keeps registrations as Dynamo's standalone indexer 1.6.1 does. What it answers was tried on
the real one."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeIndexer:
    """`workers`: id -> model, group, block size and endpoints by rank. `cleared`: (worker, rank) whose
    entries were dropped, in order; rank -1 is all of the worker. `calls`: every POST with its status."""

    def __init__(self) -> None:
        self.workers: dict[int, dict[str, Any]] = {}
        self.cleared: list[tuple[int, int]] = []
        self.calls: list[tuple[str, dict[str, Any], int]] = []
        self.looks = 0
        self.broken = False
        indexer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                indexer.looks += 1
                self._say(500 if indexer.broken else 200, indexer.listing())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = indexer.answer(self.path, body)
                indexer.calls.append((self.path, body, status))
                self._say(status, answer)

            def _say(self, status: int, answer: object) -> None:
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """A client that hung up is nobody's fault."""

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def ranks(self) -> dict[int, dict[int, str]]:
        """Endpoints by worker and rank."""
        return {id: dict(row["ranks"]) for id, row in self.workers.items()}

    def listing(self) -> list[dict[str, Any]]:
        return [
            {
                "instance_id": id,
                "source": "zmq",
                "status": "active",
                "model_name": row["model"],
                "routing_group": row["group"],
                "block_size": row["block_size"],
                "endpoints": {str(rank): endpoint for rank, endpoint in row["ranks"].items()},
            }
            for id, row in self.workers.items()
        ]

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, str]]:
        worker, group = body["instance_id"], body.get("routing_group")
        row = self.workers.get(worker)
        if path == "/register":
            return self._register(worker, group or "default", body)
        if row is None:
            return 404, {"error": f"instance {worker} not found"}
        if group is None or "dp_rank" not in body:  # takes all, whatever rank was named
            return self._drop(worker)
        if (row["model"], row["group"]) != (body["model_name"], group):
            return 404, {"error": f"instance {worker} is registered for model={row['model']}"}
        rank = body["dp_rank"]
        if rank not in row["ranks"]:
            return 404, {"error": f"instance {worker} dp_rank {rank} not found"}
        del row["ranks"][rank]
        if not row["ranks"]:
            return self._drop(worker)
        self.cleared.append((worker, rank))
        return 200, {"status": "ok"}

    def _register(self, worker: int, group: str, body: dict[str, Any]) -> tuple[int, dict[str, str]]:
        row = self.workers.get(worker)
        rank = body.get("dp_rank", 0)
        model, size = body["model_name"], body["block_size"]
        if row is not None and (row["model"], row["group"]) != (model, group):
            return 409, {"error": f"instance {worker} is already registered for model={row['model']}"}
        if row is not None and rank in row["ranks"]:
            return 409, {"error": f"instance {worker} dp_rank {rank} already registered"}
        for other in self.workers.values():
            if (other["model"], other["group"]) == (model, group) and other["block_size"] != size:
                return 409, {"error": f"block_size mismatch for model={model} routing_group={group}"}
        new = {"model": model, "group": group, "block_size": size, "ranks": {}}
        self.workers.setdefault(worker, new)["ranks"][rank] = body["endpoint"]
        return 201, {"status": "ok"}

    def _drop(self, worker: int) -> tuple[int, dict[str, str]]:
        del self.workers[worker]
        self.cleared.append((worker, -1))
        return 200, {"status": "ok"}
