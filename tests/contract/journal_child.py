"""A process that uses a journal until it is killed, and prints what a client would have heard.

append PATH              opens, claims, appends for ever; prints "open HEAD EPOCH CUT", then "FIRST LAST" for
                         each acknowledged batch
hold PATH                opens and waits
snapshot PATH SEQ        saves a snapshot of 3 chunks and prints its seq
half-snapshot PATH SEQ   begins to save one and stops in the middle
limit PATH               appends under a file size limit until that fails, then lifts it; prints the outcomes
sync PATH FLAG           appends; syncs fail while the file FLAG exists (the caller preloads what does that)
"""

import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from metaservice.journal import frame
from metaservice.journal.errors import FateUnknown, JournalFull
from metaservice.journal.sqlite import SqliteJournal, open_reader


def payload_of(first_seq: int, last_seq: int) -> bytes:
    """Contents that follow from the place, of uneven size."""
    return frame.seal(b"%d-%d;" % (first_seq, last_seq) * (1 + first_seq * 37 % 1500))


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def append(path: Path) -> None:
    journal = SqliteJournal(path, 0)
    report = journal.open()
    epoch = journal.claim()
    say("open", report.head_seq, epoch, report.last_cut)
    seq = report.head_seq
    while True:
        first, last = seq + 1, seq + 1 + seq % 3
        journal.append(first, last, epoch, payload_of(first, last))
        say(first, last)
        seq = last


def hold(path: Path) -> None:
    say("open", SqliteJournal(path, 0).open().head_seq)
    time.sleep(60)


def snapshot(path: Path, seq: int) -> None:
    reader = open_reader(path, 0)
    say(reader.snapshots.save(seq, 1, b"digest", [b"a" * 10, b"b", b"c"]).seq)


def half_snapshot(path: Path, seq: int) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"a" * 3_000_000
        say("half")
        time.sleep(60)

    open_reader(path, 0).snapshots.save(seq, 1, b"digest", chunks())


def limit(path: Path) -> None:
    journal = SqliteJournal(path, 0)
    journal.open()
    epoch = journal.claim()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    seq = 1
    while True:
        try:
            journal.append(seq, seq, epoch, payload_of(seq, seq))
        except (FateUnknown, JournalFull) as error:
            say(type(error).__name__, seq)
            break
        say(seq, seq)
        seq += 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    if not journal.resolve(seq, payload_of(seq, seq)):
        journal.append(seq, seq, epoch, payload_of(seq, seq))
    say("then", seq)
    journal.close()


def sync(path: Path, flag: Path, beside: str) -> None:
    journal = SqliteJournal(path, 0)
    journal.open()
    epoch = journal.claim()
    journal.append(1, 1, epoch, payload_of(1, 1))
    reader = open_reader(path, 0) if beside == "reader" else None
    flag.touch()
    for _ in range(2):
        try:
            journal.append(2, 2, epoch, payload_of(2, 2))
        except FateUnknown as error:
            say(type(error).__name__, error.first_seq)
    try:
        journal.resolve(2, payload_of(2, 2))
    except FateUnknown as error:
        say("unsettled", error.first_seq)
    flag.unlink()
    written = journal.resolve(2, payload_of(2, 2))
    if reader is not None:
        assert reader.head() == journal.head()
    say("settled", written)
    time.sleep(60)


if __name__ == "__main__":
    job, where, *more = sys.argv[1:]
    if job == "append":
        append(Path(where))
    elif job == "hold":
        hold(Path(where))
    elif job == "snapshot":
        snapshot(Path(where), int(more[0]))
    elif job == "half-snapshot":
        half_snapshot(Path(where), int(more[0]))
    elif job == "limit":
        limit(Path(where))
    elif job == "sync":
        sync(Path(where), Path(more[0]), more[1])
