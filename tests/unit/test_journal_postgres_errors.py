"""What a server said decides whether a batch is not in, or nobody knows."""

import asyncpg
import pytest

from metaservice.journal.errors import (
    JournalBusy,
    JournalError,
    JournalFailed,
    JournalFull,
    JournalUnavailable,
)
from metaservice.journal.postgres_errors import (
    NotMigrated,
    Unanswered,
    failed_statement,
    refused_connection,
)


def said(code: str, severity: str = "ERROR") -> asyncpg.PostgresError:
    """An error as the server sends it."""
    fields = {"S": "FEHLER", "V": severity, "C": code, "M": "es ging\nnicht"}
    error = asyncpg.PostgresError.new(fields)
    assert isinstance(error, asyncpg.PostgresError)
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (said("53100"), JournalFull),
        (said("55P03"), JournalBusy),
        (said("40001"), JournalBusy),
        (said("40P01"), JournalBusy),
        (said("25006"), JournalUnavailable),
        (said("57014"), JournalUnavailable),
        (said("53200"), JournalUnavailable),
        (said("42P01"), NotMigrated),
        (said("3F000"), NotMigrated),
        (said("26000"), JournalFailed),
        (said("23505"), JournalFailed),
        (said("42501"), JournalFailed),
        # no answer: it may have been committed before
        (said("57P01", "FATAL"), Unanswered),
        (said("53100", "PANIC"), Unanswered),
        (said("08P01"), Unanswered),
        (asyncpg.ConnectionDoesNotExistError("closed in the middle of operation"), Unanswered),
        (asyncpg.InternalClientError("another operation is in progress"), Unanswered),
        (asyncpg.InterfaceError("the connection is closed"), Unanswered),
        (ConnectionResetError(), Unanswered),
    ],
)
def test_a_statement_that_failed(error: Exception, expected: type[JournalError]) -> None:
    found = failed_statement(error, "journal", "appending", 100)
    assert type(found) is expected
    assert "\n" not in str(found)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (said("28P01", "FATAL"), JournalFailed),
        (said("3D000", "FATAL"), JournalFailed),
        (said("08P01", "FATAL"), JournalFailed),
        (asyncpg.ClientConfigurationError("no such option"), JournalFailed),
        (said("57P03", "FATAL"), JournalUnavailable),
        (said("53300", "FATAL"), JournalUnavailable),
        (asyncpg.TargetServerAttributeNotMatched("none"), JournalUnavailable),
        (ConnectionRefusedError(111, "refused"), JournalUnavailable),
        (TimeoutError(), JournalUnavailable),
    ],
)
def test_a_connection_that_was_not_made(error: Exception, expected: type[JournalError]) -> None:
    assert type(refused_connection(error, "journal", "appending")) is expected
