"""A refusal is a value, not an exception: which check failed, on which field, and what would have been
right."""

from msgspec import Struct


class Rejection(Struct, frozen=True):
    """`code` is one of the registry of problem codes; `field` the offending field (or empty); `detail` extra
    facts.

    Nothing was changed by a command that is answered with a Rejection.
    """

    code: str
    message: str
    field: str = ""
    detail: dict[str, object] = {}
