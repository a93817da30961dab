"""A furnished service as a process of its own, for tests that load it, watch its memory or read its log.

Run as a module it serves on a free port, prints that port, and stops when its input ends.
"""

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from tests.functional.api_house import LIMITS, open_house

ROOT = Path(__file__).resolve().parent.parent.parent


class Child:
    """The process, its address and what it wrote."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
        self.pid = process.pid
        self.port = port
        self.log = log

    def rss_bytes(self) -> int:
        """Its resident memory."""
        return rss_bytes(self.pid)

    def tracebacks(self) -> int:
        """How many tracebacks its log holds."""
        return self.log.read_bytes().count(b"Traceback (most recent call last)")


def rss_bytes(pid: int) -> int:
    """Resident memory of a process on this machine."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no resident memory")


@contextmanager
def running_service(folder: Path) -> Iterator[Child]:
    """A running service whose log is in `folder`; it has ended afterwards."""
    log = folder / "service.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.security.service_child"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert process.stdout is not None and process.stdin is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the service did not start:\n{log.read_text(errors='replace')}")
            yield Child(process, int(line), log)
        finally:
            process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


async def _serve() -> None:
    logging.basicConfig(level=logging.WARNING)
    async with open_house(limits=LIMITS) as house:
        await house.furnish()
        await house.fill(64)
        sys.stdout.write(f"{house.port}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.buffer.read)


if __name__ == "__main__":
    uvloop.run(_serve())
