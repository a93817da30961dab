"""Everything that can go wrong in the journal, one type for each thing that a caller does about it.

A message says what happened, where (path, shard, seq) and what to do. Whether a batch is in the journal is
never left open: `Fenced`, `JournalRegressed`, `JournalFull`, `JournalBusy`, `JournalUnavailable` and
`JournalClosed` mean *not written*; only `FateUnknown` means that somebody has to look.
"""


class JournalError(Exception):
    """Base of all errors of this room."""


class JournalClosed(JournalError):
    """A call before `open()` or after `close()`. Nothing was written."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{where} is not open: call open() first, and nothing after close()")


class JournalLocked(JournalError):
    """Another writer holds the lock. Starting anyway would give one journal two writers."""

    def __init__(self, where: str, lock: str, holder_pid: int | None) -> None:
        holder = f"process {holder_pid}" if holder_pid is not None else "another process"
        super().__init__(
            f"{where} is held by {holder} (lock {lock}): stop it, or give this service another path; "
            "the lock of a process that died is free by itself"
        )
        self.lock = lock
        self.holder_pid = holder_pid


class CorruptBatch(JournalError):
    """The bytes of one batch are not what was written."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"corrupt batch: {reason}")
        self.reason = reason


class CorruptJournal(JournalError):
    """The journal cannot be trusted from `seq` on (None: as a whole), and cutting its tail would not mend it.

    Going on would serve a state that never existed, so the start stops here.
    """

    def __init__(self, where: str, seq: int | None, reason: str) -> None:
        at = f" at seq {seq}" if seq is not None else ""
        super().__init__(
            f"{where} is corrupt{at}: {reason}; restore the file and its snapshots from one backup, "
            "or move both away to start empty (engines then compute their prefixes again)"
        )
        self.seq = seq
        self.reason = reason


class CorruptSnapshot(JournalError):
    """A snapshot is damaged, or was removed because newer ones exist; ask `latest()` again."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"snapshot {where} cannot be used: {reason}; ask for the latest one again")
        self.reason = reason


class UnsupportedVersion(JournalError):
    """Written by a newer release. The data is good: it is neither cut nor changed."""

    def __init__(self, what: str, found: int, newest_known: int) -> None:
        super().__init__(
            f"{what} has format version {found}, this release reads up to {newest_known}: "
            "run the release that wrote it"
        )
        self.found = found
        self.newest_known = newest_known


class JournalTrimmed(JournalError):
    """What a reader asked for is behind the trim point: load the newest snapshot and read on from its seq."""

    def __init__(self, where: str, after_seq: int, trimmed_seq: int) -> None:
        super().__init__(
            f"{where} was trimmed up to seq {trimmed_seq}, so it cannot be read after seq {after_seq}: "
            "load the newest snapshot and read on from there"
        )
        self.after_seq = after_seq
        self.trimmed_seq = trimmed_seq


class Fenced(JournalError):
    """The append does not continue this journal: another epoch has been claimed, or the head is elsewhere.

    Nothing was written. The state that decided the batch is not the journal's: throw it away and rebuild.
    """

    def __init__(self, where: str, first_seq: int, epoch: int, stored_epoch: int, head_seq: int) -> None:
        super().__init__(
            f"{where} refused seq {first_seq} of epoch {epoch}: it stands at seq {head_seq} "
            f"of epoch {stored_epoch}; nothing was written, rebuild the state from the journal"
        )
        self.first_seq = first_seq
        self.epoch = epoch
        self.stored_epoch = stored_epoch
        self.head_seq = head_seq


class JournalFull(JournalError):
    """No space. Nothing was written; the same call succeeds by itself once there is space again."""

    def __init__(self, where: str, doing: str) -> None:
        super().__init__(
            f"no space left for {where} ({doing}): nothing was written; free space and try again"
        )


class JournalBusy(JournalError):
    """Another connection held the database for longer than the bounded wait.

    Nothing was written; try again.
    """

    def __init__(self, where: str, waited_ms: int) -> None:
        super().__init__(
            f"{where} was locked by another program for more than {waited_ms} ms: nothing was written; "
            "close that program's transaction and try again"
        )
        self.waited_ms = waited_ms


class JournalUnavailable(JournalError):
    """The store cannot be asked now: not reached, not answering, or a standby that takes no writes.

    Nothing was written; the same call succeeds by itself once the store is back.
    """

    def __init__(self, where: str, doing: str, reason: str) -> None:
        super().__init__(f"{where} cannot be reached ({doing}): {reason}; it is tried again")
        self.reason = reason


class JournalRegressed(JournalError):
    """The journal is behind what was read from it or written to it before, or another history has taken its
    place: a failover to a standby that was not synchronous does that.

    What is in memory must not be written again: others may have read the shorter history already. Raise the
    alarm, throw the state away and load what there is.
    """

    def __init__(self, where: str, head_seq: int, known_seq: int, reason: str = "") -> None:
        found = reason or f"it ends at seq {head_seq}"
        super().__init__(
            f"{where} went back: {found}, though seq {known_seq} was in it before; its newest history is "
            "lost (a failover to an asynchronous standby?); going on from what there is"
        )
        self.head_seq = head_seq
        self.known_seq = known_seq


class FateUnknown(JournalError):
    """It cannot be known yet whether the batch is in.

    Acknowledge nothing; ask `resolve()`, or open anew and replay.
    """

    def __init__(self, where: str, first_seq: int, reason: str) -> None:
        super().__init__(
            f"{where} does not know whether seq {first_seq} was written ({reason}): "
            "acknowledge nothing, ask resolve(), or open the journal again and replay it"
        )
        self.first_seq = first_seq
        self.reason = reason


class JournalMissing(JournalError):
    """A reader asked for a journal that no writer has made yet."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{where} does not exist: start the service that writes it first, or check the path")


class JournalFailed(JournalError):
    """The store itself failed (I/O, permission, read-only file system), or is not what it should be. No batch
    was acknowledged by this call, and trying again changes nothing before an operator does something.
    """

    def __init__(
        self,
        where: str,
        doing: str,
        reason: str,
        advice: str = "check the disk, the mount and the permissions, then start again",
    ) -> None:
        super().__init__(f"{where} failed ({doing}): {reason}; {advice}")
        self.reason = reason
