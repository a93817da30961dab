"""What PostgreSQL and asyncpg say, as errors of the journal.

An ERROR is an answer: the statement was rolled back. A lost connection or a FATAL is none: the statement may
have been committed before it.
"""

import asyncpg

from metaservice.journal.errors import (
    JournalBusy,
    JournalError,
    JournalFailed,
    JournalFull,
    JournalUnavailable,
)

DRIVER_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
"""Everything that asyncpg raises because of the server, the network or a deadline."""

READ_ONLY = "25006"
QUEUE_FULL = "54000"
_MISSING = ("42P01", "3F000", "42703")
_CHECK_DSN = "check the DSN, the password, the database's name and pg_hba.conf, then start again"
_CHECK_SERVER = "see the database's log, mend it and start again"
_SAY_POOLER = "behind a transaction-pooling PgBouncer, say so in the settings"
_STARTUP = "08P01"
_PREPARED = ("26000", "42P05")
_FULL = ("53100",)
_RETRIED = ("40001", "40P01")
_BUSY = ("55P03", *_RETRIED)
_REFUSED = ("28", "3D", "42", "0A")
_TRANSIENT = ("08", "53", "55", "57", "58")


class Unanswered(JournalUnavailable):
    """The statement was sent, and no answer came: it may have been carried out, or may yet be."""


class NotMigrated(JournalFailed):
    """The tables are not there, or are older than this release."""


def sqlstate(error: BaseException) -> str:
    """The SQLSTATE of a server's error, '' when the server said nothing."""
    return (error.sqlstate or "") if isinstance(error, asyncpg.PostgresError) else ""


def is_answer(error: BaseException) -> bool:
    """Whether the server said that the statement failed; else nobody said anything about it."""
    state = sqlstate(error)
    if not state or state.startswith("08"):
        return False
    severity = getattr(error, "severity_en", None) or getattr(error, "severity", None)
    return severity == "ERROR"


def is_callers(error: BaseException) -> bool:
    """Whether asyncpg refused a value before anything was sent."""
    return isinstance(error, asyncpg.DataError) and getattr(error, "severity", None) is None


def is_retried(error: BaseException) -> bool:
    """A deadlock or a serialization failure: rolled back for another's sake."""
    return sqlstate(error) in _RETRIED


def text_of(error: BaseException) -> str:
    """In one line, with the code. A server's message shows no value that was bound."""
    state = sqlstate(error)
    said = " ".join(str(error).split()) or type(error).__name__
    return f"{said} ({state})" if state else said


def refused_connection(error: BaseException, where: str, doing: str) -> JournalError:
    """No connection could be made, so nothing was sent."""
    if sqlstate(error).startswith(_REFUSED) or isinstance(error, asyncpg.ClientConfigurationError):
        return JournalFailed(where, "connecting", text_of(error), _CHECK_DSN)
    if sqlstate(error) == _STARTUP:
        return JournalFailed(where, "connecting", text_of(error), _SAY_POOLER)
    if isinstance(error, TimeoutError):
        return JournalUnavailable(where, doing, "no server answered within the deadline")
    return JournalUnavailable(where, doing, text_of(error))


def failed_statement(error: BaseException, where: str, doing: str, waited_ms: int) -> JournalError:
    """A statement that was sent has failed, or nothing was heard of it."""
    state = sqlstate(error)
    if not is_answer(error):
        return Unanswered(where, doing, text_of(error))
    if state in _FULL:
        return JournalFull(where, doing)
    if state in _BUSY:
        return JournalBusy(where, waited_ms)
    if state == READ_ONLY:
        return JournalUnavailable(where, doing, "the server takes no writes (25006): a standby, or demoted")
    if state in _MISSING:
        return NotMigrated(
            where, doing, text_of(error), "its tables are missing or older: start a replica, it makes them"
        )
    if state in _PREPARED:
        return JournalFailed(where, doing, text_of(error), _SAY_POOLER)
    if state.startswith(_TRANSIENT):
        return JournalUnavailable(where, doing, text_of(error))
    return JournalFailed(where, doing, text_of(error), _CHECK_SERVER)
