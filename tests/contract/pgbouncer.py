"""A PgBouncer that pools transactions, in front of a PostgreSQL."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import create_connection
from urllib.parse import urlsplit

import pytest

from metaservice.cli.local.places import free_port, temporary_folder

CONFIG = """
[databases]
* = host={host} port={port} user={user} password={password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 3
min_pool_size = 3
server_round_robin = 1
"""
"""Several servers, taken in turn: what one transaction left in its session, the next does not find."""


@contextmanager
def pgbouncer(dsn: str) -> Iterator[str]:
    """Its DSN. Skips the test where there is no PgBouncer."""
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        pytest.skip("needs a pgbouncer on PATH")
    parts = urlsplit(dsn)
    listen = free_port()
    with temporary_folder() as folder:
        config = Path(folder) / "pgbouncer.ini"
        config.write_text(
            CONFIG.format(
                host=parts.hostname,
                port=parts.port,
                user=parts.username,
                password=parts.password,
                listen=listen,
            )
        )
        user = "nobody" if os.geteuid() == 0 else None  # it does not run as root
        with (Path(folder) / "pgbouncer.log").open("w") as log:
            process = subprocess.Popen([program, str(config)], user=user, stdout=log, stderr=log)
        try:
            _await(listen)
            yield parts._replace(
                netloc=f"{parts.username}:{parts.password}@127.0.0.1:{listen}", query="sslmode=disable"
            ).geturl()
        finally:
            process.kill()
            process.wait()


def _await(port: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with suppress(OSError):
            create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.02)
    pytest.fail("pgbouncer did not start")
