"""What a call costs in the client itself: against a canned answer, and against moving the same bytes."""

import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from socket import IPPROTO_TCP, TCP_NODELAY, create_server
from typing import Any

import msgspec

from tests.bench.bench_service import (
    INSTANCE,
    RECEIVE_BYTES,
    BenchError,
    RawConnection,
    chain,
    content_length,
    lookup_request,
    new_client,
)

MSGPACK = "application/msgpack"


class SdkCost(msgspec.Struct, kw_only=True):
    """Processor time of the calling thread per lookup, in us: with the SDK, and when only the bytes are moved
    through a socket. `wall_us`: the median call with the SDK, the responder's time included."""

    keys: int
    cpu_us: float
    socket_cpu_us: float
    wall_us: float

    @property
    def own_us(self) -> float:
        """What the SDK adds to moving the bytes."""
        return self.cpu_us - self.socket_cpu_us


def sdk_cost(port: int, keys_count: int, calls: int, rounds: int) -> SdkCost:
    """The best of `rounds`: the answer is what the service at `port` said once."""
    keys = chain(0, keys_count)
    body = msgspec.msgpack.encode({"keys": keys})
    request = lookup_request(body, MSGPACK)
    connection = RawConnection(port)
    reply = connection.exchange(request)
    connection.close()
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    responder = context.Process(target=respond, args=(theirs, reply), daemon=True)
    responder.start()
    try:
        canned_port: int = ours.recv()
        raw = RawConnection(canned_port)
        socket_cpu_us = min(_timed(lambda: raw.exchange(request), calls)[0] for _ in range(rounds))
        raw.close()
        with new_client(canned_port) as client:

            def lookup() -> None:
                if client.lookup(INSTANCE, keys).hits != keys_count:
                    raise BenchError("the canned answer was not understood")

            measured = [_timed(lookup, calls) for _ in range(rounds)]
    finally:
        responder.kill()
        responder.join()
    return SdkCost(
        keys=keys_count,
        cpu_us=min(cpu_us for cpu_us, _ in measured),
        socket_cpu_us=socket_cpu_us,
        wall_us=min(wall_us for _, wall_us in measured),
    )


def _timed(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """(processor time a call, median time of a call), us."""
    for _ in range(20):
        call()
    clock = time.perf_counter_ns
    times = []
    cpu_ns = time.thread_time_ns()
    for _ in range(calls):
        before_ns = clock()
        call()
        times.append(clock() - before_ns)
    cpu_ns = time.thread_time_ns() - cpu_ns
    return cpu_ns / calls / 1000, sorted(times)[calls // 2] / 1000


def respond(pipe: "Connection[Any, Any]", reply: bytes) -> None:
    """Answer every request, on one connection at a time, with the same bytes."""
    with create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        while True:
            connection, _ = server.accept()
            with connection:
                connection.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
                while request := connection.recv(RECEIVE_BYTES):
                    head, _, body = request.partition(b"\r\n\r\n")
                    left = content_length(head) - len(body)
                    while left > 0 and (more := connection.recv(RECEIVE_BYTES)):
                        left -= len(more)
                    connection.sendall(reply)
