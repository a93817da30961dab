"""One vLLM engine in a process of its own: jobs come in as JSON lines on stdin, answers go out on stdout.

`python -m tests.accept.engine OPTIONS`, with OPTIONS as JSON. The engine steps in this very process, so that
SIGKILL ends all of it at once, and requests join a batch that is under way, as on a server.
"""

import os
import queue
import sys
import threading
import time
from typing import Any

import msgspec
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from tests.accept.messages import BLOCK_SIZE_TOKENS, Answer, Counts, EngineOptions, Job, Message, Ready
from tests.accept.recorder import Recorder, Stopwatch

IDLE_STEP_S = 0.001
"""Between two steps in which nothing was computed, as vLLM's own loop has it."""
_CHUNK_BYTES = 1 << 16


class Pending(msgspec.Struct):
    """A request that is under way. `keys` are the names of the full blocks of its prompt."""

    id: str
    arrived_s: float
    keys: list[str]
    first_s: float = 0.0


class Engine:
    """The engine and its loop. Everything but the reading of stdin happens in one thread."""

    def __init__(self, options: EngineOptions, out: int) -> None:
        self._out = out
        self._jobs: queue.Queue[tuple[float, Job | None]] = queue.Queue()
        self._recorder = Recorder()
        self._engine = LLMEngine.from_engine_args(
            arguments(options), stat_loggers=[lambda config, index=0: self._recorder.bound(config, index)]
        )
        self._scheduler: Any = self._engine.engine_core.engine_core.scheduler
        self._stopwatch = Stopwatch(self._scheduler.connector)
        self._pending: dict[str, Pending] = {}

    def run(self) -> None:
        """Serve until stdin ends or a job says stop."""
        threading.Thread(target=self._read, daemon=True).start()
        self._say(Ready(pid=os.getpid()))
        while self._take_jobs():
            if self._scheduler.has_requests():
                began_s = time.monotonic()
                outputs = self._engine.step()
                self._stopwatch.step()
                self._report(outputs)
                if not outputs and time.monotonic() - began_s < IDLE_STEP_S:
                    time.sleep(IDLE_STEP_S)
        self._engine.engine_core.shutdown()

    def _read(self) -> None:
        rest = b""
        while chunk := os.read(0, _CHUNK_BYTES):  # a buffered stdin must not be in use when Python ends
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._jobs.put((time.monotonic(), msgspec.json.decode(line, type=Job)))
        self._jobs.put((time.monotonic(), None))

    def _take_jobs(self) -> bool:
        """Do what has come in; waits while there is nothing else to do. False: it is over."""
        wait = not self._scheduler.has_requests()
        while True:
            try:
                arrived_s, job = self._jobs.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if job is None or job.op == "stop":
                return False
            self._do(job, arrived_s)

    def _do(self, job: Job, arrived_s: float) -> None:
        match job.op:
            case "ask":
                self._ask(job, arrived_s)
            case "abort":
                named = [internal for internal, one in self._pending.items() if one.id == job.id]
                self._engine.abort_request(named, internal=True)
                for internal in named:
                    self._answer(self._pending.pop(internal), [], "abort")
            case "reset":
                done = self._engine.reset_prefix_cache(reset_connector=job.external)
                self._say(Answer(job.id, [], "reset" if done else "busy", self._counts()))
            case "counts":
                counts = self._counts()
                counts.idle_ms, counts.step_ms = self._stopwatch.taken()
                self._say(Answer(job.id, [], "counts", counts))

    def _ask(self, job: Job, arrived_s: float) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True)
        prompt: Any = {"prompt_token_ids": job.tokens}
        if job.salt:
            prompt["cache_salt"] = job.salt
        internal = self._engine.add_request(job.id, prompt, params)
        hashes = self._scheduler.requests[internal].block_hashes
        keys = [bytes(key).hex() for key in hashes[: len(job.tokens) // BLOCK_SIZE_TOKENS]]
        self._pending[internal] = Pending(job.id, arrived_s, keys)

    def _report(self, outputs: list[Any]) -> None:
        """Say what has finished. Outputs name requests as the caller does, and so do we."""
        by_id = {one.id: internal for internal, one in self._pending.items()}
        for output in outputs:
            internal = by_id.get(output.request_id, output.request_id)
            pending = self._pending.get(internal)
            if pending is None:
                continue
            (only,) = output.outputs
            if only.token_ids and not pending.first_s:
                pending.first_s = time.monotonic()
            if output.finished:
                self._answer(self._pending.pop(internal), list(only.token_ids), str(only.finish_reason))

    def _answer(self, pending: Pending, tokens: list[int], finish: str) -> None:
        first_ms = 1_000 * (pending.first_s - pending.arrived_s) if pending.first_s else 0.0
        self._say(Answer(pending.id, tokens, finish, self._counts(), first_ms, pending.keys))

    def _counts(self) -> Counts:
        return self._recorder.counts(steps=self._stopwatch.steps)

    def _say(self, message: Message) -> None:
        line = msgspec.json.encode(message) + b"\n"
        while line:
            line = line[os.write(self._out, line) :]


def arguments(options: EngineOptions) -> EngineArgs:
    """vLLM's arguments."""
    transfer = None
    if options.connector is not None:
        transfer = KVTransferConfig(
            kv_connector=options.connector_class,
            kv_connector_module_path=options.connector_module,
            kv_role="kv_both",
            kv_load_failure_policy=options.load_failure_policy,
            kv_connector_extra_config=options.connector,
        )
    given: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK_SIZE_TOKENS,
        "max_num_seqs": 8,
        **options.arguments,
    }
    return EngineArgs(model=options.model, kv_transfer_config=transfer, **given)


def main() -> None:
    """From a command line. Nothing but messages may reach stdout, whoever prints."""
    out = os.dup(1)
    os.dup2(2, 1)
    options = msgspec.json.decode(sys.argv[1], type=EngineOptions)
    Engine(options, out).run()


if __name__ == "__main__":
    main()
