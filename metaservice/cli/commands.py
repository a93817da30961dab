"""The commands of `ucm-meta`. Each is handed to the program that does it; what they need is imported when
they run, so that `--help` and `version` answer at once."""

import os
import sys
from enum import StrEnum
from typing import Annotated, NoReturn

import typer

import metaservice

app = typer.Typer(
    name="ucm-meta",
    help="The metadata service that knows every KV block of an inference fleet.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DEFAULT_URL = "http://127.0.0.1:8600"
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Options of these commands belong to the program behind them, which also answers `--help`."""


@app.command(context_settings=PASSED_ON, add_help_option=False)
def serve(context: typer.Context) -> None:
    """Run the service. Its options: ucm-meta serve --help"""
    from metaservice import main as service  # noqa: PLC0415

    raise typer.Exit(service.main(["serve", *context.args]))


@app.command(context_settings=PASSED_ON, add_help_option=False)
def worker(context: typer.Context) -> None:
    """Run a data-plane worker, which deletes and sweeps. Its options: ucm-meta worker --help"""
    _become("metaservice.cli.worker", context.args)


@app.command(context_settings=PASSED_ON, add_help_option=False)
def demo(context: typer.Context) -> None:
    """Engines share a cache through the service, two parts are killed. Its options: ucm-meta demo --help"""
    module = "engine_adapters.replay.demo"
    if not sys.stdout.isatty() or {"--help", "-h", "--events"} & set(context.args):
        _become(module, context.args)
    from metaservice.cli.demo_screen import run_drawn  # noqa: PLC0415

    raise typer.Exit(run_drawn([sys.executable, "-m", module, *context.args, "--events"]))


@app.command()
def status(
    url: Annotated[str, typer.Option(help="Where the service is.", envvar="UCM_URL")] = DEFAULT_URL,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Show what a running service is, holds and hears from."""
    from metaservice.cli import status as command  # noqa: PLC0415

    raise typer.Exit(command.show(url, as_json=json))


cluster = typer.Typer(
    name="cluster", help="Look at a cluster of replicas, and move its leaderships.", no_args_is_help=True
)
app.add_typer(cluster)

Urls = Annotated[
    str,
    typer.Option(
        help="Where replicas are, with commas; those that they name are asked too.", envvar="UCM_URL"
    ),
]
TimeoutMs = Annotated[int, typer.Option(min=1, help="How long a replica may take to answer.")]


@cluster.command("status")
def cluster_status(
    url: Urls = DEFAULT_URL,
    timeout_ms: TimeoutMs = 2_000,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Show who leads which shard, how far the followers are behind, and who does not answer.

    Exit status 1: some shard has no leader.
    """
    from metaservice.cli import cluster as command  # noqa: PLC0415

    raise typer.Exit(command.status(_several(url), timeout_ms=timeout_ms, as_json=json))


@cluster.command("handover")
def cluster_handover(
    shard: Annotated[int, typer.Option(min=0, help="The shard to move.")],
    to: Annotated[
        str, typer.Option(help="The replica that shall lead it; without it the leader chooses.")
    ] = "",
    url: Urls = DEFAULT_URL,
    timeout_ms: TimeoutMs = 2_000,
) -> None:
    """Move the leadership of a shard to another replica, and wait until that one leads."""
    from metaservice.cli import cluster as command  # noqa: PLC0415

    raise typer.Exit(command.handover(_several(url), shard, to, timeout_ms=timeout_ms))


members = typer.Typer(
    name="members", help="Look at engines and workers, and take away what is gone.", no_args_is_help=True
)
app.add_typer(members)

Url = Annotated[str, typer.Option(help="Where the service is.", envvar="UCM_URL")]


class Kind(StrEnum):
    """Of a member."""

    engine = "engine"
    worker = "worker"


class MemberStatus(StrEnum):
    """Of a member."""

    active = "active"
    suspect = "suspect"
    expired = "expired"


@members.command("list")
def members_list(
    kind: Annotated[Kind | None, typer.Option(help="Only these.")] = None,
    status: Annotated[MemberStatus | None, typer.Option(help="Only those in this status.")] = None,
    url: Url = DEFAULT_URL,
    json: Annotated[bool, typer.Option("--json", help="A JSON list instead of a table.")] = False,
) -> None:
    """List engines and workers."""
    from metaservice.cli import members as command  # noqa: PLC0415

    kinds = [kind] if kind is not None else [*Kind]
    raise typer.Exit(command.show(url, kinds, status or "", as_json=json))


@members.command("forget")
def members_forget(
    kind: Annotated[Kind, typer.Argument(help="What it is.")],
    id: Annotated[str, typer.Argument(help="Its id.")],
    incarnation: Annotated[
        str, typer.Option(help="End this one although it has not expired: it is told to register again.")
    ] = "",
    url: Url = DEFAULT_URL,
) -> None:
    """Take away one that has expired.

    Exit status 1: there is none, or it has not.
    """
    from metaservice.cli import members as command  # noqa: PLC0415

    raise typer.Exit(command.forget(url, kind, id, incarnation))


@members.command("forget-expired")
def members_forget_expired(url: Url = DEFAULT_URL) -> None:
    """Take away all that have expired, which the service does by itself after forget_ms."""
    from metaservice.cli import members as command  # noqa: PLC0415

    raise typer.Exit(command.forget_expired(url))


@app.command(context_settings=PASSED_ON, add_help_option=False)
def journal(context: typer.Context) -> None:
    """Check a journal, or print what is in it. Its commands: ucm-meta journal --help"""
    from metaservice.cli import journal as command  # noqa: PLC0415

    command.app(args=context.args, prog_name="ucm-meta journal")


@app.command(context_settings=PASSED_ON, add_help_option=False)
def events(context: typer.Context) -> None:
    """Read what routers are told, verify it, attach routers. Its commands: ucm-meta events --help"""
    from metaservice.cli import events as command  # noqa: PLC0415

    command.app(args=context.args, prog_name="ucm-meta events")


@app.command()
def version() -> None:
    """Print the version."""
    print(metaservice.__version__)


def _several(urls: str) -> list[str]:
    return [url for piece in urls.split(",") if (url := piece.strip().rstrip("/"))]


def _become(module: str, args: list[str]) -> NoReturn:
    """Go on as another program of this installation, under the same process id: signals reach it directly."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *args])  # noqa: S606 - no shell, and that is meant
