"""`ucm-meta journal verify|dump`: whether a journal holds, and what is in it. Neither changes anything, and
both may be run beside a service that is working."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer

from metaservice.core.events import Event, StoragePut
from metaservice.core.machine import Machine
from metaservice.core.model import Limits
from metaservice.journal import postgres, sqlite
from metaservice.journal.codec import decode_batch
from metaservice.journal.errors import (
    CorruptJournal,
    CorruptSnapshot,
    JournalError,
    JournalMissing,
    JournalTrimmed,
    JournalUnavailable,
    UnsupportedVersion,
)
from metaservice.journal.port import Batch, JournalReader
from metaservice.journal.postgres_migrate import count_shards
from metaservice.journal.postgres_settings import PostgresSettings
from metaservice.replica.replay import replay
from metaservice.replica.tail import Tail

app = typer.Typer(
    name="journal",
    help="Check a journal, or print what is in it.",
    no_args_is_help=True,
    add_completion=False,
)

EXIT_HOLDS = 0
EXIT_BROKEN = 1
EXIT_UNREADABLE = 2

HARMLESS_OPTIONS = ("root", "fsync", "threads")
"""Options of storages whose values are printed; any other may be a secret."""
HIDDEN = "***"
TRIM_TRIES = 5
"""How often a read begins anew because a trim has overtaken it."""

Data = Annotated[Path | None, typer.Option(help="The data folder of an embedded service.", envvar="UCM_DATA")]
Dsn = Annotated[
    str,
    typer.Option(
        help="The database of a cluster: postgresql://USER@HOST/DATABASE. Keep a password in the variable.",
        envvar="UCM_POSTGRES_DSN",
        show_envvar=True,
    ),
]
Schema = Annotated[str, typer.Option(help="The schema in it.", envvar="UCM_POSTGRES_SCHEMA")]
TimeoutMs = Annotated[int, typer.Option(min=1, help="How long the database may take for one answer.")]
Pooler = Annotated[bool, typer.Option("--pooler", help="The DSN leads to a transaction-pooling PgBouncer.")]

Open = Callable[[int], JournalReader]


@app.command()
def verify(
    data: Data = None,
    dsn: Dsn = "",
    schema: Schema = "ucm",
    timeout_ms: TimeoutMs = 10_000,
    pooler: Pooler = False,
    shard: Annotated[int | None, typer.Option(min=0, help="Only this shard.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Read every batch and snapshot: seqs follow each other, checksums match, epochs never fall, and a replay
    comes to the digest of every snapshot. Exit status 0: it holds; 1: it does not; 2: it cannot be read."""
    open_shard, shards = _source(data, dsn, schema, timeout_ms, pooler)
    numbers = range(shards) if shard is None else [shard]
    reports = [verified(open_shard, number, shards) for number in numbers]
    faulty = [report for report in reports if report["faults"]]
    if json:
        print(msgspec.json.encode({"holds": not faulty, "shards": reports}).decode())
    else:
        for report in reports:
            print(described(report))
    raise typer.Exit(EXIT_BROKEN if faulty else EXIT_HOLDS)


@app.command()
def dump(
    data: Data = None,
    dsn: Dsn = "",
    schema: Schema = "ucm",
    timeout_ms: TimeoutMs = 10_000,
    pooler: Pooler = False,
    shard: Annotated[int, typer.Option(min=0, help="Of this shard.")] = 0,
    first: Annotated[int, typer.Option("--from", min=1, help="From this seq on.")] = 1,
    last: Annotated[int | None, typer.Option("--to", min=1, help="Up to this seq.")] = None,
) -> None:
    """Print events, one JSON object a line: seq, epoch, event and its fields; bytes as hex. Values of storage
    options that may be secret are hidden. What was trimmed is not there: the first line may be later."""
    open_shard, _ = _source(data, dsn, schema, timeout_ms, pooler)
    try:
        reader = open_shard(shard)
        try:
            for line in lines(reader, first, last):
                sys.stdout.write(line + "\n")
            sys.stdout.flush()
        finally:
            reader.close()
    except BrokenPipeError:
        # Whoever read has seen enough; what is left in the buffer must not fail once more at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except JournalError as error:
        _stop(str(error), EXIT_UNREADABLE if _unreadable(error) else EXIT_BROKEN)


def verified(open_shard: Open, shard: int, shards: int) -> dict[str, Any]:
    """What was found in one shard; `faults` is empty when it holds."""
    for tries in range(1, TRIM_TRIES + 1):
        report: dict[str, Any] = {
            "shard": shard, "first_seq": 0, "head_seq": 0, "epoch": 0, "batches": 0, "events": 0,
            "snapshots": [], "faults": [],
        }  # fmt: skip
        try:
            reader = open_shard(shard)
            try:
                _verify(reader, shard, shards, report)
            finally:
                reader.close()
        except (JournalTrimmed, CorruptSnapshot) as error:
            # A service at work trims, and replaces snapshots.
            if tries < TRIM_TRIES:
                continue
            report["faults"].append(str(error))
        except JournalError as error:
            if _unreadable(error):
                _stop(str(error), EXIT_UNREADABLE)
            report["faults"].append(str(error))
        except AssertionError as error:
            report["faults"].append(f"an event does not fit the state before it: {error}")
        break
    return report


def described(report: Mapping[str, Any]) -> str:
    """A report as text for people."""
    lines_ = [
        f"shard {report['shard']}: seq {report['first_seq']} to {report['head_seq']}, "
        f"epoch {report['epoch']}, {report['batches']} batches, {report['events']} events, "
        f"{len(report['snapshots'])} snapshots"
    ]
    lines_ += [
        f"  snapshot of seq {one['seq']}: {one['size_bytes']} bytes, "
        + ("a replay comes to its digest" if one["replayed"] else "whole; nothing older to replay it from")
        for one in report["snapshots"]
    ]
    lines_ += [f"  FAULT: {fault}" for fault in report["faults"]]
    return "\n".join(lines_)


def lines(reader: JournalReader, first_seq: int, last_seq: int | None) -> Iterator[str]:
    """The events of these seqs as JSON. Begins where the journal does when its begin was trimmed."""
    for batch in _batches(reader, first_seq):
        if last_seq is not None and batch.first_seq > last_seq:
            return
        for seq, event in enumerate(decode_batch(batch.payload), batch.first_seq):
            if seq >= first_seq and (last_seq is None or seq <= last_seq):
                yield msgspec.json.encode(printable(seq, batch.epoch, event)).decode()


def printable(seq: int, epoch: int, event: Event) -> dict[str, Any]:
    """An event as plain data without secrets."""
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    if isinstance(event, StoragePut):
        fields["options"] = {
            name: value if name in HARMLESS_OPTIONS else HIDDEN for name, value in event.options.items()
        }
    return {"seq": seq, "epoch": epoch, "event": event.__struct_config__.tag} | {
        name: _plain(value) for name, value in fields.items()
    }


def _verify(reader: JournalReader, shard: int, shards: int, report: dict[str, Any]) -> None:
    """By two ways: as a start does, from the newest snapshot on; and from the oldest that there is, past all
    the others."""
    limits = Limits()
    infos = sorted(reader.snapshots.list(), key=lambda info: info.seq)
    report["faults"] += [f"{fault.location}: {fault.reason}" for fault in reader.snapshots.faults]
    report["snapshots"] = found = [
        {"seq": info.seq, "epoch": info.epoch, "size_bytes": info.size_bytes, "replayed": False}
        for info in infos
    ]
    started = replay(reader, shard, limits, shards)
    report["head_seq"], report["epoch"] = started.seq, started.state.epoch
    whole = not _trimmed_seq(reader)
    if infos and not whole:
        machine = Machine.restore(reader.snapshots.load(infos[0]), shard, limits, shards)
        if machine.digest() != infos[0].digest:
            raise CorruptJournal(
                infos[0].location, infos[0].seq, "it restores to another digest than its own"
            )
    else:
        machine = Machine(shard, limits, shards)
    report["first_seq"] = machine.seq + 1
    waiting = list(zip(infos, found, strict=True))
    tail = Tail(machine)

    def compare() -> None:
        while waiting and waiting[0][0].seq == machine.seq:
            info, entry = waiting.pop(0)
            if machine.digest() != info.digest:
                raise CorruptJournal(info.location, info.seq, "a replay comes to another digest than its own")
            entry["replayed"] = whole or info is not infos[0]

    compare()
    for batch in reader.read(machine.seq):
        report["events"] += len(tail.take(batch))
        report["batches"] += 1
        compare()
        if machine.seq >= started.seq:
            break
    for info, _ in waiting:
        raise CorruptJournal(info.location, info.seq, "no batch ends at its seq")
    if machine.digest() != started.digest():
        raise CorruptJournal(f"shard {shard}", machine.seq, "two replays of it come to two digests")


def _batches(reader: JournalReader, first_seq: int) -> Iterator[Batch]:
    after_seq = first_seq - 1
    for _ in range(TRIM_TRIES):
        try:
            for batch in reader.read(after_seq):
                after_seq = batch.last_seq
                yield batch
            return
        except JournalTrimmed as error:
            after_seq = error.trimmed_seq
        except ValueError:  # `first_seq` is inside a batch
            after_seq = _trimmed_seq(reader)
    raise JournalUnavailable("the journal", "reading", "it is trimmed faster than it can be read")


def _trimmed_seq(reader: JournalReader) -> int:
    """The seq behind which the journal begins."""
    try:
        next(reader.read(0), None)
    except JournalTrimmed as error:
        return error.trimmed_seq
    return 0


def _plain(value: Any) -> Any:
    """Bytes as hex, wherever they are."""
    plain = msgspec.to_builtins(value, builtin_types=(bytes,), str_keys=True)
    return _hex(plain)


def _hex(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: _hex(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hex(item) for item in value]
    return value


def _source(data: Path | None, dsn: str, schema: str, timeout_ms: int, pooler: bool) -> tuple[Open, int]:
    """How to open a shard, and how many there are."""
    if (data is None) == (not dsn):
        _stop("name the data folder (--data) or the database (--dsn), one of them", EXIT_UNREADABLE)
    if data is not None:
        path = data / "journal.sqlite"
        return lambda shard: sqlite.open_reader(path, shard), 1
    try:
        settings = PostgresSettings(dsn, schema, timeout_ms, pooler)
        shards = count_shards(settings)
    except (ValueError, JournalError) as error:
        _stop(str(error), EXIT_UNREADABLE)
    if not shards:
        _stop(f"there is no cluster in {settings.place}", EXIT_UNREADABLE)
    return lambda shard: postgres.open_reader(settings, shard), shards


def _unreadable(error: JournalError) -> bool:
    return isinstance(error, JournalUnavailable | JournalMissing | UnsupportedVersion)


def _stop(message: str, status: int) -> NoReturn:
    sys.stderr.write(f"ucm-meta journal: {message}\n")
    raise typer.Exit(status)
