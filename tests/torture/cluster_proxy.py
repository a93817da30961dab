"""Networks that can be cut: a TCP proxy between every replica and what it needs, in a process of its own.

A replica reaches PostgreSQL and each etcd member through ports that nobody else uses, so that one replica can
be cut off from either, in one direction or both. A cut is silent as a real one: connections stay open, what
was sent waits and arrives late when the cut ends (as TCP would send it again), and nobody is told that the
other side closed. Or it is loud: connections are reset and new ones refused, as when a port is closed.

The program reads one JSON command a line from its stdin and answers each with a line.
"""

import asyncio
import json
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET
from typing import Any, Literal, Self

HOST = "127.0.0.1"
CHUNK_BYTES = 1 << 16
ANSWER_TIMEOUT_S = 10.0

Direction = Literal["out", "in"]
"""Seen from the replica: what it sends, what it receives."""
BOTH: tuple[Direction, ...] = ("out", "in")


class Link:
    """One port and where it leads to."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.loud = False
        self.open = {direction: asyncio.Event() for direction in BOTH}
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self.heal()

    async def listen(self) -> int:
        """Take connections; the port."""
        server = await asyncio.start_server(self._serve, HOST, 0, backlog=256)
        port: int = server.sockets[0].getsockname()[1]
        return port

    def cut(self, directions: Iterable[Direction], *, loud: bool) -> None:
        """Nothing passes in these directions any more."""
        for direction in directions:
            self.open[direction].clear()
        self.loud = loud
        if loud:
            for writer in list(self._writers):
                reset(writer)
            for pump in list(self._pumps):
                pump.cancel()

    def heal(self) -> None:
        """Everything passes, and what waited goes first."""
        self.loud = False
        for gate in self.open.values():
            gate.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.loud:
            reset(writer)
            return
        self._writers.add(writer)
        back: asyncio.StreamWriter | None = None
        try:
            answers, back = await asyncio.open_connection(HOST, self.target)
            self._writers.add(back)
            pumps = [
                asyncio.create_task(self._pump("out", reader, back)),
                asyncio.create_task(self._pump("in", answers, writer)),
            ]
            self._pumps.update(pumps)
            try:
                await asyncio.wait(pumps)
            finally:
                for pump in pumps:
                    pump.cancel()
                self._pumps.difference_update(pumps)
        except OSError:
            await self.open["in"].wait()  # a refusal is an answer too
        finally:
            for one in (writer, back):
                if one is not None:
                    self._writers.discard(one)
                    one.close()

    async def _pump(
        self, direction: Direction, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        gate = self.open[direction]
        with suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                await gate.wait()
                sink.write(data)
                await sink.drain()
        await gate.wait()
        with suppress(OSError, RuntimeError):
            if sink.can_write_eof():
                sink.write_eof()


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection as a host does that knows nothing of it."""
    writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def serve(targets: Mapping[str, int]) -> None:
    """The program: says the ports, then does as it is told until stdin ends."""
    links = {name: Link(target) for name, target in targets.items()}
    say({name: await link.listen() for name, link in links.items()})
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin.buffer
    )
    while line := await lines.readline():
        command: dict[str, Any] = json.loads(line)
        for name in command["links"]:
            if command["do"] == "cut":
                links[name].cut(command["directions"], loud=command["loud"])
            else:
                links[name].heal()
        say({"done": command["do"]})


def say(what: Mapping[str, Any]) -> None:
    """One line."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Proxies:
    """The program seen from its starter. A context manager. For one thread at a time."""

    def __init__(self, targets: Mapping[str, int]) -> None:
        """`targets`: link name -> port it leads to."""
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), json.dumps(dict(targets))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.ports: dict[str, int] = self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cut(
        self, links: Iterable[str], directions: Iterable[Direction] = BOTH, *, loud: bool = False
    ) -> None:
        """Cut these links; returns once they are."""
        self._tell({"do": "cut", "links": list(links), "directions": list(directions), "loud": loud})

    def heal(self, links: Iterable[str] | None = None) -> None:
        """Undo all cuts of these links (None: of all)."""
        self._tell({"do": "heal", "links": list(self.ports if links is None else links)})

    def close(self) -> None:
        """End the program, and with it every connection through it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def _tell(self, command: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OSError(f"the proxy ended with status {self._process.wait(ANSWER_TIMEOUT_S)}")
        found: dict[str, Any] = json.loads(line)
        return found


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
