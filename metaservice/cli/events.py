"""`ucm-meta events tail|replay|verify|attach|keys`: what routers are told, read as they read it."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer

from metaservice.cli.events_read import (
    END,
    Desk,
    EventsUnreadable,
    Keys,
    Message,
    Place,
    Streams,
    collect,
    decoded,
    load_keys,
    places,
)
from metaservice.cli.events_recipes import RECIPES
from metaservice.cli.events_verify import Verifier
from metaservice.client import ClientError
from metaservice.wire.schemas_events import EventsReply

app = typer.Typer(
    name="events",
    help="Read what routers are told, see whether it holds, and attach routers.",
    no_args_is_help=True,
    add_completion=False,
)

EXIT_HOLDS = 0
EXIT_BROKEN = 1
EXIT_UNREADABLE = 2
DEFAULT_URL = "http://127.0.0.1:8600"
LOOK_MS = 200

Urls = Annotated[
    str,
    typer.Option(help="Where replicas are, with commas: whoever leads publishes.", envvar="UCM_URL"),
]
Endpoint = Annotated[
    str, typer.Option(help="Read this stream (tcp://host:port), and ask no replica where streams are.")
]
Replay = Annotated[str, typer.Option(help="With --endpoint: where its replays are asked for.")]
Channel = Annotated[int | None, typer.Option(min=0, help="Only the stream of this channel.")]
Instance = Annotated[str, typer.Option(help="Only streams of this instance.")]
TimeoutMs = Annotated[int, typer.Option(min=1, help="How long a replica may take to answer.")]
CurveSecret = Annotated[Path | None, typer.Option(help="File with our CURVE key pair (*.key_secret).")]
CurveServer = Annotated[str, typer.Option(help="The service's CURVE public key (40 characters).")]
Tokens = Annotated[bool, typer.Option("--tokens", help="Print token ids too, not only how many.")]


@app.command()
def tail(
    url: Urls = DEFAULT_URL,
    endpoint: Endpoint = "",
    channel: Channel = None,
    instance: Instance = "",
    seconds: Annotated[float, typer.Option(min=0, help="Stop after so long; 0: never.")] = 0,
    count: Annotated[int, typer.Option(min=0, help="Stop after so many lines; 0: never.")] = 0,
    beats: Annotated[bool, typer.Option("--beats", help="Print heartbeats too.")] = False,
    tokens: Tokens = False,
    timeout_ms: TimeoutMs = 2_000,
    curve_secret: CurveSecret = None,
    curve_server: CurveServer = "",
) -> None:
    """Follow streams and print their events, one JSON object a line."""
    with _refused():
        found = _places(url, endpoint, "", channel, instance, timeout_ms, merged=True)
        _warn(found)
        until_s = time.monotonic() + seconds if seconds else float("inf")
        left = count or sys.maxsize
        with Streams(found, _keys(curve_secret, curve_server)) as streams:
            while time.monotonic() < until_s:
                for at, message in streams.live(LOOK_MS):
                    for line in _lines(found[at], message, beats=beats, tokens=tokens):
                        _print(line)
                        left -= 1
                        if not left:
                            return


@app.command()
def replay(
    url: Urls = DEFAULT_URL,
    endpoint: Annotated[
        str, typer.Option(help="Ask this replay endpoint (tcp://host:port), and no replica.")
    ] = "",
    channel: Channel = None,
    instance: Instance = "",
    first: Annotated[int, typer.Option("--from", min=0, max=END - 1, help="From this number on.")] = 0,
    last: Annotated[int | None, typer.Option("--to", min=0, help="Up to this number.")] = None,
    tokens: Tokens = False,
    timeout_ms: TimeoutMs = 2_000,
    curve_secret: CurveSecret = None,
    curve_server: CurveServer = "",
) -> None:
    """Ask for past batches and print their events, one JSON object a line. From 0: the state as a snapshot,
    and what came since."""
    with _refused():
        found = _places(url, "", endpoint, channel, instance, timeout_ms, merged=True)
        with Streams(
            [one._replace(endpoints=()) for one in found], _keys(curve_secret, curve_server)
        ) as streams:
            for place in found:
                for message in streams.replay(place.replays[0].endpoint, first):
                    if last is not None and message.number > last:
                        break
                    for line in _lines(place, message, beats=True, tokens=tokens):
                        _print(line)


@app.command()
def verify(
    url: Urls = DEFAULT_URL,
    endpoint: Endpoint = "",
    replay: Replay = "",
    channel: Channel = None,
    instance: Instance = "",
    seconds: Annotated[float, typer.Option(min=0, help="Follow the streams for so long.")] = 10,
    silence_ms_max: Annotated[
        int,
        typer.Option(
            min=1_000, help="A stream that says nothing for longer does not hold: a failover is shorter."
        ),
    ] = 15_000,
    timeout_ms: TimeoutMs = 2_000,
    curve_secret: CurveSecret = None,
    curve_server: CurveServer = "",
) -> None:
    """Follow streams as a router does, and see whether they hold: numbers without a gap that no replay fills,
    events that every router can read, and the same blocks as every replica replays. The last line is a JSON
    object. Exit status 0: they hold; 1: they do not; 2: they cannot be read. A replica that is away is named,
    and is no fault of the streams."""
    with _refused():
        if endpoint and not replay:
            raise EventsUnreadable("with --endpoint, --replay has to say where its replays are")
        found = _places(url, endpoint, replay, channel, instance, timeout_ms, merged=False)
        _warn(found)
        offered = partial(_offered, found, "" if replay else url, timeout_ms)
        with Streams(found, _keys(curve_secret, curve_server)) as streams:
            report = Verifier(streams, silence_ms_max, offered).run(seconds)
        for problem in report["problems"]:
            sys.stderr.write(f"{problem}\n")
        for away in report["unanswered"]:
            sys.stderr.write(f"{away} did not answer replays\n")
        _print(report)
    raise typer.Exit(EXIT_HOLDS if report["ok"] else EXIT_BROKEN)


class Consumer(StrEnum):
    """What can be attached."""

    dynamo_indexer = "dynamo-indexer"
    dynamo_peer = "dynamo-peer"
    dynamo_frontend = "dynamo-frontend"
    select_service = "select-service"
    llm_d = "llm-d"
    aibrix = "aibrix"
    mooncake = "mooncake"
    hicache = "hicache"
    generic = "generic"


@app.command()
def attach(
    consumer: Annotated[Consumer, typer.Argument(help="What reads the streams.")],
    url: Urls = DEFAULT_URL,
    instance: Instance = "",
    indexer: Annotated[
        str, typer.Option(help="dynamo-indexer: register our streams there now (http://host:8090).")
    ] = "",
    spare_rank: Annotated[
        int, typer.Option(min=1, help="dynamo-indexer: our ranks there begin here; none of an engine's.")
    ] = 1_000,
    remove: Annotated[bool, typer.Option("--remove", help="dynamo-indexer: take all of ours away.")] = False,
    timeout_ms: TimeoutMs = 2_000,
) -> None:
    """Print the exact settings for a router; for Dynamo's indexer, register the streams there.

    What is registered once is not kept right: for that, set events_attachments.
    """
    with _refused():
        replies = [_only(reply, instance) for reply in collect(_several(url), timeout_ms)]
        if instance and not any(reply.streams or reply.engines for reply in replies):
            raise EventsUnreadable(f"{instance} has no stream and no engine")
        if not indexer:
            for line in RECIPES[consumer](replies):
                print(line)
            return
        if consumer is not Consumer.dynamo_indexer:
            _stop(f"--indexer is for {Consumer.dynamo_indexer}", EXIT_UNREADABLE)
        from metaservice.cli.events_register import IndexerFailed, groups, register  # noqa: PLC0415

        group_of = groups(_several(url)[0], timeout_ms)
        try:
            refused = register(
                indexer, replies, group_of, print, spare_rank=spare_rank, timeout_ms=timeout_ms, remove=remove
            )
        except IndexerFailed as error:
            _stop(str(error), EXIT_UNREADABLE)
    raise typer.Exit(EXIT_BROKEN if refused else EXIT_HOLDS)


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="Where the files go.", exists=True, file_okay=False)],
    name: Annotated[str, typer.Argument(help="Of the pair: server, or a client's name.")],
) -> None:
    """Make a CURVE key pair: FOLDER/NAME.key_secret, which only you can read, and print the public key. A
    pair that is there is never overwritten."""
    from metaservice.publish.curve import make_keys  # noqa: PLC0415

    try:
        path, public = make_keys(folder, name)
    except (OSError, ValueError) as error:
        _stop(str(error), EXIT_UNREADABLE)
    print(f"{public}  {path}")


# --- helpers -------------------------------------------------------------------------------------------


def _places(
    url: str,
    endpoint: str,
    replay: str,
    channel: int | None,
    instance: str,
    timeout_ms: int,
    *,
    merged: bool,
) -> list[Place]:
    if endpoint or replay:
        live, replays = (endpoint,) * bool(endpoint), (Desk(replay, replay),) * bool(replay)
        return [Place(channel or 0, endpoint or replay, instance, "", live, replays)]
    return places(collect(_several(url), timeout_ms), channel, instance, merged=merged)


def _warn(found: Sequence[Place]) -> None:
    """Say which streams nobody that was asked publishes: nothing will come of them."""
    for place in found:
        if not place.live:
            sys.stderr.write(
                f"channel {place.channel} ({place.name}): no replica of --url publishes it: name all\n"
            )


def _offered(found: Sequence[Place], url: str, timeout_ms: int) -> set[str]:
    """The replay endpoints that the replicas name now; without replicas to ask, all."""
    if not url:
        return {desk.endpoint for place in found for desk in place.replays}
    try:
        replies = collect(_several(url), timeout_ms)
    except EventsUnreadable:
        return set()
    return {view.replay for reply in replies for view in reply.streams}


def _only(reply: EventsReply, instance: str) -> EventsReply:
    if not instance:
        return reply
    return EventsReply(
        replica=reply.replica,
        streams=[one for one in reply.streams if one.instance == instance],
        engines=[one for one in reply.engines if one.instance == instance],
        attachments=reply.attachments,
    )


def _keys(secret: Path | None, server: str) -> Keys | None:
    if secret is None and not server:
        return None
    if secret is None or not server:
        raise EventsUnreadable("--curve-secret and --curve-server go together")
    return load_keys(secret, server)


def _lines(place: Place, message: Message, *, beats: bool, tokens: bool) -> Iterator[dict[str, Any]]:
    head = {"channel": place.channel, "topic": message.topic, "seq": message.number}
    batch = decoded(message)
    if batch is None:
        yield head | {"type": "unreadable", "bytes": len(message.payload)}
        return
    head |= {"ts": batch.ts, "rank": batch.rank}
    if message.number == END:
        yield head | {"seq": None, "type": "reset"}
        return
    if beats and not batch.events:
        yield head | {"type": "heartbeat"}
    for event in batch.events:
        shown = event if isinstance(event, dict) else {"type": "array", "event": event}
        if not tokens and isinstance(shown.get("token_ids"), list):
            shown = shown | {"token_ids": len(shown["token_ids"])}
        yield head | shown


def _print(line: dict[str, Any]) -> None:
    sys.stdout.write(msgspec.json.encode(_readable(line)).decode() + "\n")
    sys.stdout.flush()


def _readable(value: Any) -> Any:
    """JSON has no bytes, and no keys but texts."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): _readable(item) for key, item in value.items()}
    return [_readable(item) for item in value] if isinstance(value, list) else value


def _several(urls: str) -> list[str]:
    return [url for piece in urls.split(",") if (url := piece.strip().rstrip("/"))]


@contextmanager
def _refused() -> Iterator[None]:
    """What cannot be read is said, with the exit status for it. Whoever reads us may have seen enough."""
    try:
        yield
    except EventsUnreadable as error:
        _stop(str(error), EXIT_UNREADABLE)
    except ClientError as error:
        _stop(f"the service: {error}", EXIT_UNREADABLE)
    except (BrokenPipeError, KeyboardInterrupt):
        sys.stderr.close()
        raise typer.Exit(EXIT_HOLDS) from None


def _stop(message: str, status: int) -> NoReturn:
    sys.stderr.write(f"ucm-meta events: {message}\n")
    raise typer.Exit(status)
