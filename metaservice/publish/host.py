"""The publisher process as its replica sees it: started, fed, asked, started again when it ends.

Nothing here waits for it. The replica serves lookups; a publisher that is slow, stopped or gone costs routers
their news and nobody anything else.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from .curve import load_keys
from .errors import PublisherUnavailable
from .feed import Answer, Ask, Beat, FromPublisher, Restate, Said, Stats, Stop, ToPublisher
from .fence import FencePage
from .pipe import Pipe
from .settings import PublishConfig

log = logging.getLogger("metaservice.publish")

COMMAND: Final = (sys.executable, "-m", "metaservice.publisher")
ASKS_MAX = 1_024
"""Questions that wait for an answer at most."""
STALL_S = 30.0
"""A publisher that says nothing for so long hangs: it is ended and started anew. It says something each
second."""
AGAIN_S = (0.1, 5.0)
"""Pause before another start: doubled with each one from the first of these to the last ..."""
SETTLED_S = 30.0
"""... and back to the first once one has lived for so long."""
STOP_S = 3.0
"""For a publisher to end by itself when it is told to."""
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Publisher:
    """Runs the publisher process beside a replica. Everything is called on the replica's event loop, which
    has to be in a thread that lives as long as the replica: the kernel ends the process with that thread."""

    def __init__(
        self, config: PublishConfig, now_s: Callable[[], float], *, command: Sequence[str] = COMMAND
    ) -> None:
        """`now_s`: the clock of leases. `command` is started with three more words: the descriptors of its
        end of the pipe and of the fence's page, and our process id."""
        self._config = config
        self._now_s = now_s
        self._command = command
        self._page = FencePage.make()
        self._pipe: Pipe | None = None
        self._child: asyncio.subprocess.Process | None = None
        self._living: asyncio.Task[None] | None = None
        self._asks: dict[int, asyncio.Future[bytes]] = {}
        self._ask_id = 0
        self._heard_s = 0.0
        self._starved = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromPublisher] = msgspec.msgpack.Decoder(FromPublisher)
        self.stats: dict[str, float] = {}
        """What the publisher said last of its counters and gauges; empty while there is none."""
        self.starts = 0
        """How often a process was started."""
        self.overflows = 0
        """How often it was so far behind that it had to begin anew."""
        self.on_begin: Callable[[], None] = _ignore
        """Called when the publisher knows nothing: tell everything from `Begin` on, of every shard."""
        self.on_restate: Callable[[int, str, str], None] = _ignore
        """Called with shard, instance and why: tell all of it again."""
        self.on_beat: Callable[[int], None] = _ignore
        """Called with the shard: make a window now."""

    @property
    def backlog_bytes(self) -> int:
        """Bytes that the process has not read yet. Whoever tells much at once (what stands) pauses while this
        is more than a few MiB: beyond `pipe.BACKLOG_BYTES_MAX` everything is dropped and begun anew."""
        return self._pipe.backlog_bytes if self._pipe is not None else 0

    @property
    def pid(self) -> int | None:
        """Of the process, None while there is none."""
        return self._child.pid if self._child is not None and self._child.returncode is None else None

    async def start(self) -> None:
        """Start the process; `on_begin` is called before this returns. Raises PublishRefused. A process that
        cannot be started or ends is started again later."""
        assert self._living is None, "started twice"
        self._config.check()
        if self._config.curve_secret:
            load_keys(self._config.curve_secret)
        first = asyncio.Event()
        self._living = asyncio.create_task(self._live(first), name="publisher")
        await first.wait()

    async def close(self) -> None:
        """Have it send what it has, and end it. May be called again."""
        living, self._living = self._living, None
        if living is None:
            return
        self.tell(Stop())
        child = self._child
        if child is not None and child.returncode is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await child.wait()
        living.cancel()
        await asyncio.wait([living])
        self._page.close()

    def tell(self, message: ToPublisher) -> None:
        """Feed it. Never waits; what is told while there is no process, or while it is too far behind, is
        dropped, and `on_begin` called when it can hear again."""
        if self._pipe is None or self._starved:
            return
        if not self._pipe.send(self._encoder.encode(message)):
            self._starved = True
            self.overflows += 1
            log.warning("the publisher does not read; it will be told everything anew when it does")
            self._fail_asks("the publisher is too far behind")
            self._pipe.forget(self._fed)

    def fence(self, shard: int, epoch: int, until_s: float) -> None:
        """The shard is led by this replica in `epoch` until `until_s` of the clock of leases (0.0: not any
        more). Holds at once, also for a publisher that stands still. Call it before telling `Leads`."""
        self._page.set(shard, epoch, until_s)

    async def ask(self, what: str, body: bytes, timeout_ms: int) -> bytes:
        """The publisher's answer. Raises PublisherUnavailable."""
        if self._pipe is None or self._starved:
            raise PublisherUnavailable("events_unavailable", "the publisher is starting")
        if len(self._asks) >= ASKS_MAX:
            raise PublisherUnavailable("overloaded", f"{ASKS_MAX} questions wait for the publisher already")
        self._ask_id += 1
        number = self._ask_id
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asks[number] = answer
        try:
            self.tell(Ask(number, what, body))
            async with asyncio.timeout(timeout_ms / 1000):
                return await answer
        except TimeoutError:
            raise PublisherUnavailable(
                "events_unavailable", f"the publisher did not answer in {timeout_ms} ms"
            ) from None
        finally:
            self._asks.pop(number, None)

    # ------------------------------------------------------------ the process

    async def _live(self, first: asyncio.Event) -> None:
        pause_s = AGAIN_S[0]
        while True:
            started_s = self._now_s()
            try:
                await self._one_life(first)
            except OSError as error:
                log.error("the publisher cannot be started: %s", error)
            except Exception:
                log.exception("the publisher could not be told anything")
            finally:
                first.set()
            if self._now_s() - started_s >= SETTLED_S:
                pause_s = AGAIN_S[0]
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, AGAIN_S[1])

    async def _one_life(self, first: asyncio.Event) -> None:
        """From the start of a process to its end. Raises OSError when it does not start."""
        ours, theirs = socket.socketpair()
        try:
            child = await asyncio.create_subprocess_exec(
                *self._command,
                str(theirs.fileno()),
                str(self._page.descriptor),
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self._page.descriptor),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._child = child
        self.starts += 1
        self._heard_s = self._now_s()
        self._starved = False
        pipe = self._pipe = Pipe(ours, self._heard, self._deaf)
        try:
            pipe.send(self._encoder.encode(self._config))
            self.on_begin()
            first.set()
            await self._watch(child)
        finally:
            self._pipe = None
            pipe.close()
            self.stats = {}
            self._fail_asks("the publisher ended")
            if child.returncode is None:
                with suppress(ProcessLookupError):
                    child.kill()
                await asyncio.shield(child.wait())
        if self._living is not None:
            log.error("the publisher ended with status %s; it is started again", child.returncode)

    async def _watch(self, child: asyncio.subprocess.Process) -> None:
        """Returns once it has ended, or hangs."""
        while True:
            try:
                async with asyncio.timeout(STALL_S / 4):
                    await child.wait()
                    return
            except TimeoutError:
                if self._now_s() - self._heard_s > STALL_S:
                    log.error("the publisher said nothing for %g s; ending it", STALL_S)
                    return

    # ------------------------------------------------------------ what it says

    def _heard(self, frame: memoryview) -> None:
        self._heard_s = self._now_s()
        try:
            message = self._decoder.decode(frame)
        except msgspec.DecodeError:
            log.exception("the publisher says what nobody understands; ending it")
            self._deaf()
            return
        match message:
            case Answer():
                waiting = self._asks.get(message.id)
                if waiting is not None and not waiting.done():
                    if message.problem:
                        text = message.body.decode(errors="replace")
                        waiting.set_exception(PublisherUnavailable(message.problem, text))
                    else:
                        waiting.set_result(message.body)
            case Restate():
                self.on_restate(message.shard, message.instance, message.why)
            case Beat():
                self.on_beat(message.shard)
            case Stats():
                self.stats = message.values
            case Said():
                log.log(_LEVELS.get(message.level, logging.INFO), "%s", message.text)

    def _deaf(self) -> None:
        """It closed its end: it is ending, or shall."""
        child = self._child
        if child is not None and child.returncode is None:
            with suppress(ProcessLookupError):
                child.kill()

    def _fed(self) -> None:
        """It has read what it was sent before it fell behind."""
        self._starved = False
        self.on_begin()

    def _fail_asks(self, why: str) -> None:
        for answer in self._asks.values():
            if not answer.done():
                answer.set_exception(PublisherUnavailable("events_unavailable", why))


def _ignore(*_: object) -> None:
    return
