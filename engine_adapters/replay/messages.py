"""What the demo and its engine processes say to each other: one JSON object a line, over the engine's stdin
and stdout.

An engine tells each step as it comes to it, so that what an engine had done before it was killed is known
afterwards.
"""

from typing import Literal

from msgspec import Struct

Step = Literal["loading", "writing", "finishing"]
"""`loading`: blocks were found and are read under their lease. `writing`: the write session is open and
bytes are being written. `finishing`: all bytes are written; whether the service has heard of it is not
known until `Done`."""


class Job(Struct, tag="job", frozen=True):
    """A request for an engine: packed tokens to hash, or the keys of a trace."""

    index: int
    tokens: bytes = b""
    keys: list[bytes] = []


class Ready(Struct, tag="ready", frozen=True):
    """The engine waits for jobs. It is registered, or had waited for the service in vain."""

    incarnation: str


class Phase(Struct, tag="phase", frozen=True):
    """The engine came to `step` of request `index`, which concerns so many blocks."""

    index: int
    step: Step
    blocks: int


class Done(Struct, tag="done", frozen=True, kw_only=True):
    """A request was answered, from the cache as far as it went and by computing the rest.

    `hits` blocks were found, loaded and verified; `asked - hits` were computed, of which `written` were
    published, `present` had been published by another engine meanwhile, `in_progress` were being written by
    another engine and `refused` might not be written. `dirty` blocks were named as readable and were not
    what they must be. `lost` blocks were gone because their lease had run out. `failures`: calls that
    failed and what was computed or left unwritten for it. Durations are in ms.
    """

    index: int
    asked: int
    hits: int = 0
    written: int = 0
    present: int = 0
    in_progress: int = 0
    refused: int = 0
    dirty: int = 0
    lost: int = 0
    failures: list[str] = []
    lookup_ms: float = 0.0
    load_ms: float = 0.0
    total_ms: float = 0.0


EngineMessage = Ready | Phase | Done
