"""`ucm-meta worker`: the command line of a data-plane worker. Needs the base install only, so that it also
runs as `python -m metaservice.cli.worker` beside an engine."""

import argparse
import dataclasses
import logging
import os
import socket
import sys
from collections.abc import Sequence

from dataplane import Backend, OpenFailed, open_backend
from dataplane.options import WorkerOptions
from dataplane.worker import run_worker
from metaservice.client import Client, ClientConfig

EXIT_STOPPED = 0
EXIT_USAGE = 2


def arguments() -> argparse.ArgumentParser:
    """The command line. Each field of `WorkerOptions` is an option."""
    parser = argparse.ArgumentParser(
        prog="ucm-meta worker",
        description="Delete the bytes that the service names, sweep up those that it does not know, and own "
        "the shared memory of storages of kind shm: for these give the worker a name that stays.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--url",
        default="http://127.0.0.1:8600",
        help="where the service is; of several replicas all, with commas between (%(default)s)",
    )
    add("--worker", default=_default_name(), metavar="ID", help="the worker's id (%(default)s)")
    add(
        "--storage", action="append", required=True, type=_storage, metavar="NAME[=KIND:ROOT]",
        help="a storage to work in, opened as the service describes it, or at ROOT; may be given again",
    )  # fmt: skip
    add(
        "--timeout-ms",
        type=int,
        default=10_000,
        metavar="MS",
        help="of one call to the service (%(default)s)",
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(%(default)s)")
    behaviour = parser.add_argument_group("behaviour")
    for field in dataclasses.fields(WorkerOptions):
        kind = str if field.name == "cluster" else int
        flag = "--" + field.name.replace("_", "-")
        default = "the first that answers" if field.default is None else field.default
        metavar = field.name.rpartition("_")[2].upper()
        behaviour.add_argument(flag, type=kind, default=field.default, metavar=metavar, help=f"({default})")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Work until SIGTERM or SIGINT. Exit status 0 after a stop, 2 for a wrong setting or a storage that is
    not there."""
    parser = arguments()
    parsed = vars(parser.parse_args(argv))
    fields = {field.name for field in dataclasses.fields(WorkerOptions)}
    try:
        options = WorkerOptions(**{name: parsed[name] for name in fields})
        config = ClientConfig(url=parsed["url"], timeout_ms=parsed["timeout_ms"])
        storages = _opened(parsed["storage"])
    except (ValueError, OpenFailed) as error:
        parser.error(str(error))
    logging.basicConfig(
        stream=sys.stderr,
        level=parsed["log_level"].upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        with Client(config) as client:
            run_worker(client, parsed["worker"], storages, options)
    finally:
        for backend in storages.values():
            if backend is not None:
                backend.close()
    return EXIT_STOPPED


def _opened(storages: Sequence[tuple[str, str, str]]) -> dict[str, Backend | None]:
    """Backends by name; None where the service is to say how to open one. Raises `OpenFailed`, and
    `ValueError` for a name given twice."""
    opened: dict[str, Backend | None] = {}
    for name, kind, root in storages:
        if name in opened:
            raise ValueError(f"--storage: {name!r} is given twice")
        opened[name] = open_backend(kind, {"root": root}) if kind else None
    return opened


def _storage(text: str) -> tuple[str, str, str]:
    """(name, kind, root) of NAME or NAME=KIND:ROOT; kind and root are empty in the first."""
    name, given, place = text.partition("=")
    kind, _, root = place.partition(":")
    if not name or (given and not (kind and root)):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME or NAME=KIND:ROOT")
    return name, kind, root


def _default_name() -> str:
    return f"worker-{socket.gethostname().partition('.')[0]}-{os.getpid()}"


if __name__ == "__main__":
    sys.exit(main())
