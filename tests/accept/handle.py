"""Engines as the judge holds them: started, asked, killed."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from metaservice.cli.local.process import LocalFailed, launch_command, tail
from tests.accept.messages import Answer, Counts, EngineOptions, Job, Message, Ready

READY_TIMEOUT_S = 180.0
ANSWER_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Of an engine that asks nobody outside, shares its cores with others, and is one process."""


class EngineFailed(LocalFailed):
    """An engine ended or did not answer. The message ends with the tail of its log."""


class EngineProcess:
    """One engine. The thread that makes it must live as long as it does: the kernel kills it with that one.

    A context manager; leaving it ends the engine. Not safe to use from two threads at once.
    """

    def __init__(
        self,
        name: str,
        options: EngineOptions,
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        inbox: "queue.Queue[tuple[EngineProcess, Message | None]] | None" = None,
    ) -> None:
        """Start it; it takes jobs when `await_ready` returns. Its log is added to `<folder>/<name>.log`. What
        it says goes to `inbox`, with None when it has ended: one for several engines, or its own."""
        self.name = name
        self.log = folder / f"{name}.log"
        self.counts = Counts()
        """As of its last answer."""
        self.ready = False
        self.inbox: queue.Queue[tuple[EngineProcess, Message | None]] = inbox or queue.Queue()
        program = [sys.executable, "-m", "tests.accept.engine", msgspec.json.encode(options).decode()]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                launch_command(program),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **ENVIRONMENT, **(environment or {})},
                start_new_session=True,
            )
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.inbox.put((self, msgspec.json.decode(line, type=Ready | Answer)))
        self.inbox.put((self, None))

    def heard(self, message: Message | None) -> Answer | None:
        """Take note of a message of its own from the inbox; the answer in it, if it is one. Raises
        EngineFailed when it has ended."""
        if message is None:
            self._process.wait()
            raise self.failure(f"ended with status {self._process.returncode}")
        if isinstance(message, Ready):
            self.ready = True
            return None
        self.counts = message.counts
        return message

    def await_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Returns when it takes jobs; its inbox must be its own. Raises EngineFailed."""
        deadline_s = time.monotonic() + timeout_s
        while not self.ready:
            self._next(deadline_s)

    def send(self, job: Job) -> None:
        """Give it a job. Nothing happens when it has ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
            self._process.stdin.flush()

    def answers(self, count: int, timeout_s: float = ANSWER_TIMEOUT_S) -> Iterator[Answer]:
        """The next answers in its own inbox. Raises EngineFailed when they do not come in time."""
        deadline_s = time.monotonic() + timeout_s
        while count:
            answer = self._next(deadline_s)
            if answer is not None:
                count -= 1
                yield answer

    def ask(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, salt: str = "", at_once: bool = True
    ) -> list[Answer]:
        """Answers to all prompts in their order; together, or one after the other. Raises EngineFailed."""
        jobs = [
            Job(op="ask", id=f"{number}", tokens=list(prompt), max_tokens=max_tokens, salt=salt)
            for number, prompt in enumerate(prompts)
        ]
        found: dict[str, Answer] = {}
        for batch in [jobs] if at_once else [[job] for job in jobs]:
            for job in batch:
                self.send(job)
            found.update((answer.id, answer) for answer in self.answers(len(batch)))
        return [found[job.id] for job in jobs]

    def do(self, job: Job) -> Answer:
        """One job, with nothing else under way. Raises EngineFailed."""
        self.send(job)
        (answer,) = self.answers(1)
        return answer

    def reset(self, *, external: bool = False) -> None:
        """Let it forget its own prefix cache. Raises EngineFailed when requests were under way."""
        answer = self.do(Job(op="reset", external=external))
        if answer.finish != "reset":
            raise self.failure("could not forget its prefix cache")

    def freeze(self) -> None:
        """SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; gone when this returns."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Let it end in order, and kill it when it does not."""
        self.send(Job(op="stop"))
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        self.kill()

    def failure(self, what: str) -> EngineFailed:
        """The error that says what happened to it, and what it said last."""
        return EngineFailed(f"engine {self.name} {what}; its log {self.log} ends with:\n{tail(self.log)}")

    def _next(self, deadline_s: float) -> Answer | None:
        try:
            _, message = self.inbox.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise self.failure("did not answer in time") from None
        return self.heard(message)
