"""`dynamo-peer`: an HTTP server that Dynamo's indexer takes for another indexer.

Started with `--peers http://us:port` it asks `GET /dump` once, before it listens to anything, and so begins
with all that is announced, however much that is. Only the little that changed between the dump and its first
batch is not known to it; that is told again in time like everything.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator

from metaservice.core.windows import Window
from metaservice.publish.attach.names import group_name, metric, worker_number
from metaservice.publish.attach.rows import Row
from metaservice.publish.emitters.dump import Held, dump
from metaservice.publish.emitters.spans import Checks
from metaservice.publish.sockets import address
from metaservice.publish.view import View
from metaservice.wire.schemas_events import AttachmentView, StreamView

HEAD_BYTES_MAX = 16 * 1024
ASKING_MAX = 4
"""Dumps at once; others are told to come again."""
STALL_S = 10.0
"""A reader that takes nothing for so long is hung up on."""
BIND_AGAIN_S = 1.0
_HEAD = b"HTTP/1.1 %s\r\nConnection: close\r\n"
_JSON = _HEAD % b"200 OK" + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
_EMPTY = b"Content-Length: 0\r\n\r\n"


class DynamoPeer:
    """Option: `port`. It is bound where the streams are."""

    def __init__(self, row: Row, view: View) -> None:
        self._row = row
        self._view = view
        self._port = row.number("port")
        self._asking = 0
        self._counts: Counter[str] = Counter(dumps=0, dump_bytes=0, failures=0)
        self._invalid: Counter[str] = Counter()
        self._detail = "not listening yet"
        self._server: asyncio.Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Kind and port."""
        return f"{self._row.kind} {self._port}"

    async def start(self) -> None:
        """Listen as soon as the port is free."""
        self._task = asyncio.create_task(self._listen(), name=self.name)

    async def close(self) -> None:
        """Hang up."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._server is not None:
            self._server.close()

    def window(self, shard: int, window: Window) -> None:
        """Nothing to do: a dump is made of what stands."""

    def leads(self, shard: int, leads: bool) -> None:
        """Nothing to do: whoever is asked answers."""

    def changed(self) -> None:
        """Nothing to do."""

    def status(self) -> AttachmentView:
        """`engines`: those that a dump would tell of."""
        return AttachmentView(
            name=self.name,
            kind=self._row.kind,
            target=self._url,
            ok=not self._detail,
            detail=self._detail,
            engines=len(self._view.engines),
        )

    def streams(self) -> list[StreamView]:
        """None."""
        return []

    def stats(self) -> dict[str, float]:
        """Counters."""
        counts = self._counts | {"invalid": self._invalid.total()}
        return {
            metric(f"attachment_{name}_total", attachment=self.name): float(count)
            for name, count in counts.items()
        }

    @property
    def _url(self) -> str:
        return address(self._view.config.public_host, self._port).replace("tcp:", "http:", 1)

    async def _listen(self) -> None:
        host = self._view.config.host
        while self._server is None:
            try:
                self._server = await asyncio.start_server(
                    self._serve, None if host == "*" else host.strip("[]"), self._port, limit=HEAD_BYTES_MAX
                )
            except OSError as error:
                detail = f"cannot listen: {error.strerror or error}"
                if detail != self._detail:
                    self._view.say("warning", f"attachment {self.name}: {detail}")
                self._detail = detail
                await asyncio.sleep(BIND_AGAIN_S)
        self._detail = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(STALL_S):
                head = await reader.readuntil(b"\r\n\r\n")
            await self._answer(head.split(b"\r\n", 1)[0], writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            self._counts["failures"] += 1
        finally:
            writer.close()

    async def _answer(self, request: bytes, writer: asyncio.StreamWriter) -> None:
        method, _, rest = request.partition(b" ")
        path = rest.split(b" ")[0].split(b"?")[0]
        if method != b"GET" or path not in (b"/dump", b"/health"):
            writer.write(_HEAD % b"404 Not Found" + _EMPTY)
        elif path == b"/health":
            writer.write(_HEAD % b"200 OK" + _EMPTY)
        elif self._asking >= ASKING_MAX:
            writer.write(_HEAD % b"503 Service Unavailable" + _EMPTY)
        else:
            self._asking += 1
            try:
                await self._dump(writer)
            finally:
                self._asking -= 1
        async with asyncio.timeout(STALL_S):
            await writer.drain()

    async def _dump(self, writer: asyncio.StreamWriter) -> None:
        writer.write(_JSON)
        for piece in dump(self._held(), Checks(self._invalid)):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self._counts["dump_bytes"] += len(piece)
            async with asyncio.timeout(STALL_S):
                await writer.drain()
            await asyncio.sleep(0)  # the streams go first
        writer.write(b"0\r\n\r\n")
        self._counts["dumps"] += 1

    def _held(self) -> Iterator[Held]:
        engines = list(self._view.engines.values())
        for channel, stream in list(self._view.streams.items()):
            instance = self._view.instances.get(stream.instance)
            here = [one for one in engines if channel in (one.pool_channel, one.local_channel)]
            if instance is not None and here:
                workers = [(worker_number(engine), engine.rank) for engine in here]
                yield Held(stream, group_name(instance), workers, self._view.runs(channel))
