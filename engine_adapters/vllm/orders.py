"""What the scheduler's side tells the workers in each step, and what they tell it.

Plain data that pickles: orders ride in vLLM's connector metadata to every rank, reports ride back and are
added up over the ranks.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from metaservice.client import Places

NO_BLOCK = -1
"""In a column of engine blocks: this row is not in this group (it lies outside the sliding window)."""


class Identity(Struct, frozen=True):
    """As whom the engine writes now: its instance, its id and its incarnation."""

    instance: str
    engine: str
    incarnation: str


class LoadOrder(Struct, frozen=True):
    """Load the blocks of `places` (rows in prefix order) into the engine's blocks.

    `blocks` has a column for each KV cache group, one engine block a row, or NO_BLOCK. `ticket` is unique for
    each load of a request, `sync` says that this step's forward needs the pages.
    """

    request: str
    ticket: str
    places: Places
    blocks: tuple[tuple[int, ...], ...]
    sync: bool
    traceparent: str = ""


class SaveOrder(Struct, frozen=True):
    """Save blocks that are complete after this step's forward: `keys` are one chain below `parent`.

    `save` is the request id under which every rank starts the one write session. `blocks` has a column for
    each KV cache group. `urgent`: the engine may take some of these blocks back in the next step (a sliding
    window moves on), so they are copied before it begins.
    """

    save: str
    request: str
    instance: str
    keys: list[bytes]
    parent: bytes | None
    blocks: tuple[tuple[int, ...], ...]
    urgent: bool = False
    traceparent: str = ""
    tokens: Sequence[int] | None = None
    lora: str = ""
    salt: str = ""


class StepOrders(Struct, frozen=True):
    """All that the workers have to know in one step.

    `preempted`: requests whose blocks are taken back in this step: what is not copied yet never will be.
    `awaited`: requests that have finished, whose blocks vLLM holds until every rank says that it has copied
    what it was told to. `failures_seen`: how many failed synchronous loads of each rank the scheduler's side
    knew of when it made this: saves that were decided earlier are of pages computed from garbage.
    """

    identity: Identity | None = None
    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    preempted: tuple[str, ...] = ()
    awaited: tuple[str, ...] = ()
    failures_seen: Mapping[int, int] = {}


class Loaded(Struct, frozen=True):
    """One load is over on one rank: the first `blocks` of `asked` rows are in the engine's memory. `bad` are
    keys whose bytes were refused for good; `reason` is why the first row that is missing is."""

    request: str
    ticket: str
    blocks: int
    asked: int
    size_bytes: int
    reason: str = ""
    bad: tuple[bytes, ...] = ()
    began_ns: int = 0
    ended_ns: int = 0


class Saved(Struct, frozen=True):
    """One save is over on one rank. `published` are the keys that began to serve by this rank's finish,
    `present` those that had been stored by others; `dropped` blocks came to nothing, for `reason`. `tier` is
    the kind of storage of the first block that was written."""

    save: str
    request: str
    published: tuple[bytes, ...] = ()
    present: tuple[bytes, ...] = ()
    dropped: int = 0
    size_bytes: int = 0
    reason: str = ""
    began_ns: int = 0
    ended_ns: int = 0
    tier: str = ""


class WorkerReport(Struct):
    """What the workers have to say after a step; `plus` adds up two ranks'.

    `gathered`: save -> ranks that have copied its pages, or never will. `failures`: rank -> failed
    synchronous loads so far.
    """

    gathered: dict[str, int] = {}
    loaded: list[Loaded] = []
    saved: list[Saved] = []
    failures: dict[int, int] = {}

    def plus(self, other: "WorkerReport") -> "WorkerReport":
        """Both reports in one."""
        gathered = dict(self.gathered)
        for save, ranks in other.gathered.items():
            gathered[save] = gathered.get(save, 0) + ranks
        return WorkerReport(
            gathered,
            self.loaded + other.loaded,
            self.saved + other.saved,
            {**self.failures, **other.failures},
        )

    @property
    def empty(self) -> bool:
        """Whether there is nothing in it that the scheduler's side does not know."""
        return not (self.gathered or self.loaded or self.saved or self.failures)
