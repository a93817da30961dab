"""What every backend is: the words, the typed errors and the one interface between places and bytes.

A backend moves the bytes of one block part to and from a *place*. It decides nothing: whether a place may be
written, read or deleted is the service's word. What it owes is that a read returns exactly the bytes that
were written to that very place, or a typed refusal.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from metaservice.client.results import PlaceRef

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Contiguous bytes. Arrays and tensors are handed over as `memoryview(array)`."""

LOCATION_MAX = (1 << 64) - 1
GENERATION_MAX = (1 << 32) - 1

ReadReason = Literal[
    "missing",
    "truncated",
    "malformed",
    "wrong_cluster",
    "wrong_location",
    "wrong_generation",
    "wrong_part",
    "wrong_key",
    "wrong_length",
    "bad_checksum",
    "bad_place",
    "bad_buffer",
    "io_error",
]
"""Why a read was refused. Every one of them is a miss to an engine; only `missing` is ordinary (the block was
evicted meanwhile), `io_error` may pass, the others say that something wrote what it should not have."""

WriteReason = Literal[
    "exists",
    "removed",
    "no_space",
    "read_only",
    "denied",
    "root_missing",
    "wrong_length",
    "bad_place",
    "bad_buffer",
    "io_error",
]
"""Why a write did not publish. `exists`: the place holds other bytes already. `removed`: the unfinished file
was swept away, the writer was far too slow. After any of them the block is to be finished with `ok` false."""

DeleteReason = Literal["read_only", "denied", "root_missing", "bad_place", "foreign", "io_error"]
"""Why bytes may still be there after a delete."""


class Place(NamedTuple):
    """One part of one copy of one block: where it is (the first four) and what it must be (`size_bytes`,
    `key`).

    `(location, generation)` is never used for two blocks, so a place has one content for ever. `size_bytes`
    and `key` matter to write and read; a delete needs neither.
    """

    cluster: str
    location: int
    generation: int
    part: str
    size_bytes: int = 0
    key: bytes = b""

    @classmethod
    def of(cls, ref: "PlaceRef") -> "Place":
        """The place that the service's answer to a lookup or start-write names."""
        return cls(ref.cluster, ref.location, ref.generation, ref.part, ref.size_bytes, ref.key)

    def __str__(self) -> str:
        return f"{self.cluster}/{self.location}-{self.generation}.{self.part}"


class Stamp(NamedTuple):
    """What tells a found file from another under the same name, and from itself after a change. Where blocks
    are not files of their own, `inode` is something else that tells them apart."""

    inode: int
    mtime_ns: int
    size_bytes: int


class Found(NamedTuple):
    """One file met by a scan.

    `published`: readable under `place` (whose key and size are not known from the outside: `b""` and 0).
    `temporary`: a write that is under way or was cut off; `place` is where it was going, without its part
    (""). `foreign`: not written by this project, `place` is None; it is reported and left alone. `size_bytes`
    is what it takes in the storage. `age_ms` is since its last change, by the storage's own clock, so that it
    is right whatever the difference between this machine's clock and the storage's.
    """

    state: Literal["published", "temporary", "foreign"]
    name: str
    place: Place | None
    size_bytes: int
    age_ms: int
    stamp: Stamp


class Capabilities(NamedTuple):
    """What a caller may expect of a backend.

    `memory`: kinds of memory that buffers may be in. `alignment_bytes`: what the address and length of
    buffers must be a multiple of. `batch_places_max`: places in one `*_many` call beyond which nothing is
    gained. `survives`: what an acknowledged write outlives: the writing `process`, or a loss of `power` of
    the machine it was made on. `volatile`: it does not outlive the worker that owns the storage.
    """

    kind: str
    memory: frozenset[str]
    alignment_bytes: int
    batch_places_max: int
    survives: Literal["process", "power"]
    volatile: bool = False


class DataPlaneError(Exception):
    """Base of everything that this package raises on purpose."""


class OpenFailed(DataPlaneError):
    """A backend cannot be opened: `field` names what is wrong (`kind`, `options.<name>`, `root`)."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(field, detail)
        self.field = field
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.field}: {self.detail}"


class ReadRefused(DataPlaneError):
    """No byte of `place` may be used, for `reason`. To an engine this is a miss."""

    def __init__(self, reason: ReadReason, place: Place, detail: str = "") -> None:
        super().__init__(reason, place, detail)
        self.reason: ReadReason = reason
        self.place = place
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


class WriteFailed(DataPlaneError):
    """Nothing was published at `place` by this write, for `reason`; nothing of it is left but for what a
    sweep removes."""

    def __init__(self, reason: WriteReason, place: Place, detail: str = "") -> None:
        super().__init__(reason, place, detail)
        self.reason: WriteReason = reason
        self.place = place
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


class DeleteFailed(DataPlaneError):
    """The bytes called `name` may still be there, for `reason`."""

    def __init__(self, reason: DeleteReason, name: str, detail: str = "") -> None:
        super().__init__(reason, name, detail)
        self.reason: DeleteReason = reason
        self.name = name
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


class ScanFailed(DataPlaneError):
    """A storage cannot be walked now. What was yielded before is right, but not all there is."""


class Backend(Protocol):
    """One opened storage. All methods may be called from any thread, and after a fork in the child too.

    The `*_many` methods answer one entry a place in the order given and raise nothing for a single place: one
    bad block must not take a batch of thousands with it.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What may be expected of this storage, as opened."""

    def write(self, place: Place, data: Buffer) -> int:
        """Publish `data`, `place.size_bytes` long, at `place`; returns its xxh3_64 checksum, which the finish
        reports.

        When it returns, a read anywhere finds all of it; when it raises WriteFailed, or the process dies,
        none of it. A place is never overwritten: one that holds the same bytes already is success, other
        bytes are `exists`.
        """

    def write_many(self, places: Sequence[Place], data: Sequence[Buffer]) -> list[int | WriteFailed]:
        """`write` for many places at a time; both sequences have the same length."""

    def read(self, place: Place, checksum: int | None = None) -> bytes:
        """The bytes of `place`, after every claim about them was verified; `checksum` is the one the service
        holds.

        Raises ReadRefused and nothing else.
        """

    def read_into(self, place: Place, buffer: bytearray | memoryview, checksum: int | None = None) -> None:
        """`read` into a writable `buffer` of exactly `place.size_bytes`.

        After ReadRefused the buffer is as before or all zeros: never bytes that failed verification.
        """

    def read_many(
        self, places: Sequence[Place], checksums: Sequence[int] | None = None
    ) -> list[bytes | ReadRefused]:
        """`read` for many places at a time; `checksums`, when given, has one entry a place.

        Every block comes in memory of its own: where buffers can be used again, `read_many_into` is 2 to 3
        times as fast for large blocks.
        """

    def read_many_into(
        self,
        places: Sequence[Place],
        buffers: Sequence[bytearray | memoryview],
        checksums: Sequence[int] | None = None,
    ) -> list[ReadRefused | None]:
        """`read_into` for many places at a time, one buffer a place; None where the buffer holds the
        block."""

    def delete(self, place: Place) -> bool:
        """Make the bytes of `place` unreadable for ever; False when there were none. Raises DeleteFailed."""

    def delete_many(self, places: Sequence[Place]) -> list[bool | DeleteFailed]:
        """`delete` for many places at a time."""

    def scan(self, cluster: str | None = None) -> Iterator[Found]:
        """Walk what is stored for `cluster`, or for every cluster, in no order. Raises ScanFailed.

        Robust against change: what vanishes meanwhile is left out, what appears meanwhile may be.
        """

    def discard(self, found: Found) -> bool:
        """Delete what a scan found if it is still the very same; False when it changed or is gone.

        Raises DeleteFailed, also for a foreign file.
        """

    def close(self) -> None:
        """Let go of threads and handles; to be called once, when no other call is under way."""
