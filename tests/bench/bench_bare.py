"""What Python itself can do here: a dict behind a socket, without rules, durability or HTTP.

It bounds the service from above on whatever machine this runs: lookups read a dict and write a lease deadline
for each key, starts give places out, finishes put keys into the dict. Messages are a length and msgpack, on
uvloop. `python -m tests.bench.bench_bare READY_FILE BLOCKS`.
"""

import asyncio
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from tests.bench.bench_service import (
    CHAIN_KEYS,
    RECEIVE_BYTES,
    BenchError,
    Process,
    blocking_socket,
    chain,
)

LOOKUP, START, FINISH = 0, 1, 2
_LENGTH = struct.Struct("<I")
_PLACE = struct.Struct("<QIHQ")
"""Location, generation, storage, checksum: what a lookup of the service gives for a block."""
_encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode


class Table:
    """Places by key, and until when each is leased."""

    def __init__(self, blocks: int) -> None:
        self.places: dict[bytes, bytes] = {}
        self.leased: dict[bytes, int] = {}
        self.open: dict[int, tuple[list[bytes], list[bytes]]] = {}
        for number in range(blocks // CHAIN_KEYS):
            keys = chain(number, CHAIN_KEYS)
            self.places.update(zip(keys, self._new(len(keys), number), strict=True))

    def _new(self, count: int, start: int) -> list[bytes]:
        first = start * CHAIN_KEYS
        return [_PLACE.pack(slot, 1, 0, slot) for slot in range(first, first + count)]

    def answer(self, request: tuple[int, Any, int]) -> Any:
        """Lookup: packed places of the hits. Start: a session and packed places. Finish: how many serve."""
        what, argument, number = request
        if what == LOOKUP:
            found = list(map(self.places.get, argument))
            hits = found.index(None) if None in found else len(found)
            self.leased.update(dict.fromkeys(argument[:hits], time.monotonic_ns() // 1_000_000 + number))
            return b"".join(found[:hits])  # type: ignore[arg-type]
        if what == START:
            session = len(self.open) + 1
            self.open[session] = argument, self._new(len(argument), session)
            return session, b"".join(self.open[session][1])
        keys, places = self.open[number]
        self.places.update(zip(keys, places, strict=True))
        return len(keys)


class Bare(asyncio.Protocol):
    """One connection: one message at a time."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._received = bytearray()
        self._decode = msgspec.msgpack.Decoder(tuple[int, Any, int]).decode

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) < 4 + _LENGTH.unpack_from(self._received)[0]:
            return
        reply = _encode(self._table.answer(self._decode(memoryview(self._received)[4:])))
        self._received = bytearray()
        self._transport.write(_LENGTH.pack(len(reply)) + reply)


class BareClient:
    """Talks to it over one connection."""

    def __init__(self, port: int) -> None:
        self._socket = blocking_socket(port)

    def _ask(self, what: int, argument: Any, number: int) -> Any:
        body = _encode((what, argument, number))
        self._socket.sendall(_LENGTH.pack(len(body)) + body)
        reply = self._socket.recv(RECEIVE_BYTES)
        size = 4 + _LENGTH.unpack_from(reply)[0]
        while len(reply) < size:
            reply += self._socket.recv(RECEIVE_BYTES)
        return msgspec.msgpack.decode(memoryview(reply)[4:])

    def lookup(self, keys: list[bytes], lease_ms: int) -> int:
        """How many are hits."""
        return len(self._ask(LOOKUP, keys, lease_ms)) // _PLACE.size

    def start(self, keys: list[bytes]) -> int:
        """The session."""
        session, places = self._ask(START, keys, 0)
        if len(places) != len(keys) * _PLACE.size:
            raise BenchError("the bare server gave too few places")
        return int(session)

    def finish(self, session: int) -> int:
        """How many blocks serve by it."""
        return int(self._ask(FINISH, None, session))


class BareServer(Process):
    """The bare server over `blocks` blocks, ready when this returns."""

    def __init__(self, directory: Path, blocks: int) -> None:
        ready = directory / "bare.port"
        command = [sys.executable, "-m", "tests.bench.bench_bare", str(ready), str(blocks)]
        super().__init__(command, directory / "bare.log")
        try:
            self.port = int(self.wait_for(ready))
        except BaseException:
            self.stop()
            raise


async def serve(ready: Path, blocks: int) -> None:
    """Until killed."""
    table = Table(blocks)
    server = await asyncio.get_running_loop().create_server(lambda: Bare(table), "127.0.0.1", 0)
    partial = ready.with_suffix(".partial")
    partial.write_text(str(server.sockets[0].getsockname()[1]))
    partial.replace(ready)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
