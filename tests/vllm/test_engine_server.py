"""vLLM's own server with the connector: its metrics, and its resets."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from metaservice.cli.local.places import HOST, free_port
from metaservice.cli.local.process import LocalProcess, until
from metaservice.cli.local.replicas import ask
from tests.accept.handle import ENVIRONMENT
from tests.accept.messages import BLOCK_SIZE_TOKENS, CONNECTOR_CLASS, CONNECTOR_MODULE
from tests.vllm.engine_house import GROUP, ServiceProcess, prompts

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

START_TIMEOUT_S = 180.0
BLOCKS = 10


class Server:
    """`vllm serve`, as an operator starts it."""

    def __init__(self, service: ServiceProcess, model: Path, folder: Path) -> None:
        port = free_port()
        self.url = f"http://{HOST}:{port}"
        transfer = {
            "kv_connector": CONNECTOR_CLASS,
            "kv_connector_module_path": CONNECTOR_MODULE,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"url": service.url, "group": GROUP, "salt": "server"},
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", HOST, "--port", str(port), "--served-model-name", "tiny"]
        command += ["--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_SIZE_TOKENS)]
        command += ["--max-model-len", "1024", "--kv-transfer-config", json.dumps(transfer)]
        environment = {**os.environ, **ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}
        del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # as a server is: its engine is another process
        self.process = LocalProcess("vllm", command, folder / "server.log", environment=environment)

    def await_ready(self) -> None:
        for _ in until(time.monotonic() + START_TIMEOUT_S):
            if ask(self.url, "/health")[0] == 200:
                return
            if not self.process.running:
                raise self.process.failure("ended")
            time.sleep(0.2)
        raise self.process.failure("was not ready")

    def post(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        connection = HTTPConnection(self.url.removeprefix("http://"), timeout=60)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body or {}), headers)
        response = connection.getresponse()
        found = response.read()
        assert response.status == 200, found
        connection.close()
        return found

    def complete(self, prompt: list[int]) -> str:
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        choice = json.loads(self.post("/v1/completions", asked))["choices"][0]
        assert choice["finish_reason"] == "length"
        text: str = choice["text"]
        return text

    def metric(self, name: str) -> float:
        """The sum over its labels; 0 when it is not there."""
        status, body = ask(self.url, "/metrics")
        assert status == 200
        lines = [line for line in body.decode().splitlines() if line.startswith(f"{name}{{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.fixture
def server(service: ServiceProcess, models: Callable[[str], Path], tmp_path: Path) -> Iterator[Server]:
    found = Server(service, models("llama"), tmp_path)
    try:
        found.await_ready()
        yield found
    finally:
        found.process.end(10.0)


def test_a_server_counts_what_it_loaded_in_its_own_metrics(
    server: Server, service: ServiceProcess, models: Callable[[str], Path]
) -> None:
    asked = prompts(models("llama"), 3, BLOCKS, first=800)
    cold = [server.complete(prompt) for prompt in asked]
    service.settle()
    server.post("/reset_prefix_cache")
    assert [server.complete(prompt) for prompt in asked] == cold
    assert server.metric("vllm:ucm_loaded_blocks_total") == 3 * BLOCKS
    assert server.metric("vllm:ucm_saved_blocks_total") >= 3 * BLOCKS
    assert server.metric("vllm:ucm_lookups_total") == server.metric("vllm:ucm_requests_total")
    assert server.metric("vllm:ucm_step_seconds_count") > 0
    assert server.metric("vllm:external_prefix_cache_hits_total") == 3 * BLOCKS * BLOCK_SIZE_TOKENS
    server.post("/reset_prefix_cache?reset_external=true")
    assert [server.complete(prompt) for prompt in asked] == cold
    assert server.metric("vllm:ucm_loaded_blocks_total") == 3 * BLOCKS, "a reset leaves stored blocks behind"
