"""The composition root of the publisher process: `python -m metaservice.publisher PIPE FENCE PARENT`.

Started by `publish.host` with its end of the pipe, the page of the fence, and the process id of the replica.
It is nicer than the replica, so that routers' news never cost a lookup, and ends with it: the kernel kills it
when the thread that started it ends, and the pipe's end says so too.
"""

import asyncio
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable

import uvloop

from metaservice import clock
from metaservice.publish.attach import AttachmentError
from metaservice.publish.fence import FencePage
from metaservice.publish.pipe import Pipe
from metaservice.publish.process import Process, opened
from metaservice.publish.settings import PublishRefused

log = logging.getLogger("metaservice.publisher")

NICENESS = 5
EXIT_FAILED = 1
EXIT_REFUSED = 2
PR_SET_PDEATHSIG = 1
COLLECT_EVERY = (50_000, 20, 100)
"""Hundreds of thousands of blocks are no garbage: looking through them often would stop the streams for
nothing."""


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent's thread ends. Exits when the parent is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit(1)


async def run(pipe_descriptor: int, fence_descriptor: int) -> int:
    """Serve until told to stop; the exit status."""
    fence = FencePage(fence_descriptor)
    first: asyncio.Future[Process] = asyncio.get_running_loop().create_future()
    taking: list[Callable[[memoryview], None]] = []

    def take(frame: memoryview) -> None:
        try:
            if taking:
                taking[0](frame)
            else:
                process = opened(frame, fence, pipe, clock.lease_s)
                taking.append(process.take)
                first.set_result(process)
        except (PublishRefused, AttachmentError) as error:
            log.error("%s", error)
            os._exit(EXIT_REFUSED)
        except Exception:
            # What is known is not whole any more: it is told anew to the next process.
            log.exception("ending")
            os._exit(EXIT_FAILED)

    def end() -> None:
        # The replica is gone. Nothing may be sent any more, not even what waits.
        os._exit(0)

    pipe = Pipe(socket.socket(fileno=pipe_descriptor), take, end)
    process = await first
    await process.start()
    await process.run()
    await process.close()
    return 0


def main() -> int:
    """See the module."""
    pipe_descriptor, fence_descriptor, parent = map(int, sys.argv[1:])
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # its replica ends it
    os.nice(NICENESS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.set_threshold(*COLLECT_EVERY)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for chatty in ("httpx", "httpcore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    return uvloop.run(run(pipe_descriptor, fence_descriptor))


if __name__ == "__main__":
    sys.exit(main())
