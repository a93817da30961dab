"""The messages of etcd's JSON gateway that an elector needs.

In JSON, int64 are strings, bytes are base64, and fields that are zero, false or empty are absent.
"""

from typing import Any

import msgspec

NOT_FOUND = 5
"""The code of a lease that is not there (any more)."""
FAILED_PRECONDITION = 9
"""The code of a lease that is there already, and of authentication while it is switched off."""
INVALID_ARGUMENT = 3
PERMISSION_DENIED = 7
UNAUTHENTICATED = 16
"""The code of a token that has run out."""


class EtcdRefusal(Exception):
    """etcd answered with an error that another member would give too."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class KeyValue(msgspec.Struct, frozen=True):
    key: bytes = b""
    value: bytes = b""
    mod_revision: int = 0
    lease: int = 0


class RangeReply(msgspec.Struct, frozen=True):
    kvs: tuple[KeyValue, ...] = ()


class TxnResponse(msgspec.Struct, frozen=True):
    response_range: RangeReply | None = None


class TxnReply(msgspec.Struct, frozen=True):
    succeeded: bool = False
    responses: tuple[TxnResponse, ...] = ()

    @property
    def kvs(self) -> tuple[KeyValue, ...]:
        """The pairs of the last range in it."""
        ranges = [response.response_range for response in self.responses if response.response_range]
        return ranges[-1].kvs if ranges else ()


class GrantReply(msgspec.Struct, frozen=True):
    ttl_s: int = msgspec.field(default=0, name="TTL")


class KeepAliveReply(msgspec.Struct, frozen=True):
    """`result.ttl_s` is 0 when the lease is gone."""

    result: GrantReply = GrantReply()


class TokenReply(msgspec.Struct, frozen=True):
    token: str = ""


class StreamError(msgspec.Struct, frozen=True):
    grpc_code: int = 2
    message: str = ""


class ErrorReply(msgspec.Struct, frozen=True):
    """`error` is a text, or for a call that streams an object."""

    error: str | StreamError = ""
    code: int = 2
    message: str = ""

    def refusal(self) -> EtcdRefusal:
        """As an exception."""
        if isinstance(self.error, StreamError):
            return EtcdRefusal(self.error.grpc_code, self.error.message)
        return EtcdRefusal(self.code, self.message or self.error)


def leased(key: bytes, lease: int) -> dict[str, Any]:
    """The condition that `key` is there, under this lease."""
    return {"key": key, "target": "LEASE", "result": "EQUAL", "lease": str(lease)}


def unchanged(key: bytes, mod_revision: int) -> dict[str, Any]:
    """The condition that nobody has written `key` since that revision; 0: that it is not there."""
    return {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": str(mod_revision)}


def put(key: bytes, value: bytes, lease: int) -> dict[str, Any]:
    """The step of a transaction that writes a key that goes with the lease."""
    return {"request_put": {"key": key, "value": value, "lease": str(lease)}}


def delete(key: bytes) -> dict[str, Any]:
    """The step that deletes a key if it is there."""
    return {"request_delete_range": {"key": key}}


def fetch(span: dict[str, bytes]) -> dict[str, Any]:
    """The step that reads a key or a span of keys."""
    return {"request_range": span}


def below(folder: bytes) -> dict[str, bytes]:
    """The span of all keys that begin with `folder`, which ends with '/'."""
    assert folder.endswith(b"/")
    return {"key": folder, "range_end": folder[:-1] + b"0"}
