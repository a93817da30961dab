"""One request on its way through the hot routes: what handlers need besides the body."""

from collections.abc import Callable, Coroutine, Iterator
from itertools import count
from typing import Any

from msgspec import Struct

from metaservice.telemetry.tracing import Span

from .http import HttpRequest

NOWHERE = -1
"""No shard was found for the call (yet)."""
_numbers = count(1)


class Call:
    """One request on its way. `shard` is the number of the shard that answers it, once that is known;
    `lines` are header lines that its reply will have, as they are sent, where the handler made them
    itself.
    """

    __slots__ = (
        "_id",
        "as_msgpack",
        "attributes",
        "lines",
        "request",
        "segments",
        "shard",
        "span",
    )

    def __init__(self, request: HttpRequest, segments: list[str]) -> None:
        self.request = request
        self.segments = segments
        self.as_msgpack = False
        self.shard = NOWHERE
        self.lines = b""
        self.span: Span | None = None
        self.attributes: dict[str, Any] = {}
        self._id = ""

    @property
    def request_id(self) -> str:
        """The client's X-Request-Id when it is a decent one, else a number of this process; made when first
        asked.
        """
        if not self._id:
            self._id = request_id_of(self.request)
        return self._id


def request_id_of(request: HttpRequest) -> str:
    """What names this request in problems and in the log."""
    given = request.request_id
    if given and len(given) <= 64 and given.isascii() and given.decode("ascii").isprintable():
        return given.decode("ascii")
    return f"req-{next(_numbers)}"


Reply = Struct | Coroutine[Any, Any, Struct]
Handler = Callable[[Call, Any], Reply]
Table = Iterator[tuple[str, str, type[Struct], type[Struct], Handler]]
"""Hot routes: method, path template, request, reply and handler of each."""
