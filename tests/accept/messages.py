"""What the judge and its engines say to each other, a line of JSON each. Imports nothing heavy: the judge has
no engine in its own process."""

from typing import Any, Literal

from msgspec import Struct

BLOCK_SIZE_TOKENS = 32
"""The smallest that vLLM's attention on CPUs takes."""
CONNECTOR_MODULE = "engine_adapters.vllm.connector"
CONNECTOR_CLASS = "UcmConnector"


class EngineOptions(Struct, frozen=True, kw_only=True):
    """How an engine is started. `connector`: its extra configuration; None: without one. `arguments`: more
    of vLLM's, by name."""

    model: str
    connector: dict[str, Any] | None = None
    connector_module: str = CONNECTOR_MODULE
    connector_class: str = CONNECTOR_CLASS
    load_failure_policy: str = "recompute"
    arguments: dict[str, Any] = {}


class Job(Struct, frozen=True, kw_only=True):
    """Something to do. `ask` wants `max_tokens` greedy tokens behind `tokens`; `reset` forgets what the
    engine has in its own prefix cache, with `external` the connector is told too; `counts` also tells how
    long steps took since the last time; `stop` ends the process."""

    op: Literal["ask", "abort", "reset", "counts", "stop"]
    id: str = ""
    tokens: list[int] = []
    max_tokens: int = 0
    salt: str = ""
    external: bool = False


class Counts(Struct, kw_only=True):
    """Since the engine's start. Tokens of prompts that were in the engine's own cache, and those that vLLM
    believes came from the connector; `connector` are the connector's own counters. `idle_ms` and
    `step_ms`: what the connector's scheduler side added to each step in which nothing was computed, and to
    each other one."""

    local_tokens: int = 0
    external_tokens: int = 0
    preempted: int = 0
    steps: int = 0
    connector: dict[str, float] = {}
    idle_ms: list[float] = []
    step_ms: list[float] = []


class Ready(Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine takes jobs."""

    pid: int


class Answer(Struct, frozen=True, tag="answer"):
    """A job is done. `finish`: vLLM's reason (`length`, `error`), or `abort`, `reset`, `busy`, `counts`.
    `first_ms`: from the job's arrival to the first token. `keys`: names of the prompt's full blocks."""

    id: str
    tokens: list[int]
    finish: str
    counts: Counts
    first_ms: float = 0.0
    keys: list[str] = []


Message = Ready | Answer
