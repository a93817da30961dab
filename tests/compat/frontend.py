"""The real `dynamo.frontend --router-mode kv` and toy workers that serve behind it."""

import json
import os
from contextlib import ExitStack, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from time import monotonic
from typing import Any

from metaservice.cli.local.places import HOST, free_port
from metaservice.cli.local.process import LocalFailed, LocalProcess, until
from tests.compat.indexer import LOOPBACK

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 3.0
ASK_TIMEOUT_S = 10.0
WORDS = 4_000
"""Of the tiny tokenizer: a prompt of words `w17` is tokens, one a word."""
_FIRST_WORD = 10


def word_token(word: int) -> int:
    """The id of the token of `w<word>`."""
    return _FIRST_WORD + word


def write_model(folder: Path) -> Path:
    """A model folder with all that a frontend reads, and no weights; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    vocabulary = {word: at for at, word in enumerate(special)}
    vocabulary |= {f"x{at}": at for at in range(len(special), _FIRST_WORD)}
    vocabulary |= {f"w{at}": word_token(at) for at in range(WORDS)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": at,
                "content": word,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for at, word in enumerate(special)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 16_384,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    files = {
        "tokenizer.json": tokenizer,
        "config.json": config,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "add_bos_token": False,
        },
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


class ToyWorker:
    """One worker process; what it served is in its log."""

    def __init__(
        self, python: Path, folder: Path, name: str, stream: str, model: str, block_size: int
    ) -> None:
        command = [
            *(str(python.absolute()), str(Path(__file__).with_name("toy_worker.py"))),
            *("--stream", stream, "--model-path", str(folder / "model")),
            *("--model", model, "--block-size", str(block_size)),
        ]
        self.name = name
        self.process = LocalProcess(name, command, folder / f"{name}.log", environment=_environment(folder))

    @property
    def served(self) -> list[list[int]]:
        """The prompts that it got, as token ids, in their order."""
        return [line["served"] for line in self._said() if "served" in line]

    @property
    def ready(self) -> bool:
        """Whether it serves. Raises LocalFailed when it has ended."""
        if not self.process.running:
            raise self.process.failure(f"ended with status {self.process.status}")
        return any("ready" in line for line in self._said())

    def _said(self) -> list[dict[str, Any]]:
        lines = self.process.log.read_text(encoding="utf-8", errors="replace").splitlines()
        found = []
        for line in lines:
            if line.startswith('{"'):
                with suppress(ValueError):
                    found.append(json.loads(line))
        return found


class Frontend:
    """A frontend and its workers, each of which relays one stream. A context manager."""

    def __init__(
        self, python: Path, folder: Path, model: str, block_size: int, streams: dict[str, str]
    ) -> None:
        """`streams`: by worker's name, the endpoint that it relays. Raises LocalFailed."""
        self.model = model
        self.port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder / "model")
        self._stack = ExitStack()
        command = [
            *(str(python.absolute()), "-m", "dynamo.frontend"),
            *("--http-host", HOST, "--http-port", str(self.port)),
            *("--router-mode", "kv", "--kv-cache-block-size", str(block_size)),
            *("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"),
        ]
        self._frontend = LocalProcess(
            "frontend", command, folder / "frontend.log", environment=_environment(folder)
        )
        self._stack.callback(self._frontend.end, STOP_TIMEOUT_S)
        self.workers: dict[str, ToyWorker] = {}
        for name, stream in streams.items():
            worker = ToyWorker(python, folder, name, stream, model, block_size)
            self._stack.callback(worker.process.kill)
            self.workers[name] = worker

    def __enter__(self) -> "Frontend":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything."""
        self._stack.close()

    def await_ready(self) -> None:
        """Returns once the frontend offers the model and all workers serve. Raises LocalFailed."""
        for _ in until(monotonic() + START_TIMEOUT_S):
            if not self._frontend.running:
                raise self._frontend.failure(f"ended with status {self._frontend.status}")
            if all(worker.ready for worker in self.workers.values()) and self._offered():
                return
        raise self._frontend.failure("did not offer the model in time")

    def _offered(self) -> bool:
        with suppress(OSError, HTTPException, ValueError):
            status, body = self._exchange("GET", "/v1/models", None)
            return status == 200 and any(one["id"] == self.model for one in json.loads(body)["data"])
        return False

    def complete(self, prompt: str) -> str:
        """Have a prompt completed; the name of the worker that served it. Raises LocalFailed."""
        before = {name: len(worker.served) for name, worker in self.workers.items()}
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "stream": False}
        status, said = self._exchange("POST", "/v1/completions", json.dumps(body))
        if status != 200:
            raise LocalFailed(f"the frontend answered {status}: {said[:500].decode(errors='replace')}")
        for _ in until(monotonic() + ASK_TIMEOUT_S):
            for name, worker in self.workers.items():
                if len(worker.served) > before[name]:
                    return name
        raise LocalFailed("no worker says that it served a request that was answered")

    def _exchange(self, method: str, path: str, body: str | None) -> tuple[int, bytes]:
        connection = HTTPConnection(HOST, self.port, timeout=ASK_TIMEOUT_S)
        try:
            connection.request(method, path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def _environment(folder: Path) -> dict[str, str]:
    """Discovery through files of this run only, and nothing from outside this machine."""
    return {
        **os.environ,
        **LOOPBACK,
        "DYN_FILE_KV": str(folder / "discovery"),
        "HF_HUB_OFFLINE": "1",
        "DYN_LOG": "info",
        "DYN_DISABLE_TELEMETRY": "1",
    }
