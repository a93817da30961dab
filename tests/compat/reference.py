"""What the scores of an indexer have to be, worked out from what was done and nothing that was published.

A prompt is a chain of blocks. For each worker an indexer walks it once, tier after tier: as far as the blocks
are on the device, on from there as far as they are in host memory, then on its node's disk, then in storage
that every engine reaches. It never goes back: a block in host memory behind one that only the shared storage
has does not count. A score is where a tier's walk ended, in tokens.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

HASH_LOWEST = 2**32
"""Hashes below it are refused by some consumers."""

DEVICE = "GPU"
HOST = "CPU"
DISK = "STORAGE"
SHARED = "EXTERNAL"
TIERS = (DEVICE, HOST, DISK, SHARED)
"""In the order in which a prompt is walked."""

Score = tuple[int, int, int]
"""Tokens on the device, on it or in host memory, anywhere."""
Board = dict[int, Score]
"""By worker; those that have nothing of the prompt are left out."""


@dataclass(frozen=True, slots=True)
class Document:
    """A prompt: `keys` and the token ids of each block, from its beginning on. Equal prompts with another
    adapter or salt have other keys."""

    keys: tuple[bytes, ...]
    tokens: tuple[tuple[int, ...], ...]
    lora: str = ""
    salt: str = ""

    @property
    def prompt(self) -> list[int]:
        """All token ids."""
        return [token for block in self.tokens for token in block]

    @property
    def hashes(self) -> list[int]:
        """What engines call the blocks in their events: the last 8 bytes of the keys."""
        return [event_hash(key) for key in self.keys]

    def upto(self, blocks: int) -> "Document":
        """Its first blocks."""
        return Document(self.keys[:blocks], self.tokens[:blocks], self.lora, self.salt)


def event_hash(key: bytes) -> int:
    """The last 8 bytes of a key, big-endian, as vLLM makes hashes of events."""
    return int.from_bytes(key[-8:], "big")


class Author:
    """Makes documents by chance, from a seed."""

    def __init__(
        self, chance: random.Random, block_size: int, key_length: int = 32, tokens: int = 50_000
    ) -> None:
        """Token ids are 10 to `tokens` - 1."""
        self._chance = chance
        self._block_size = block_size
        self._key_length = key_length
        self._tokens = tokens

    def key(self) -> bytes:
        """A block's key whose event hash every consumer takes."""
        while True:
            key = self._chance.randbytes(self._key_length)
            if event_hash(key) >= HASH_LOWEST:
                return key

    def block(self) -> tuple[int, ...]:
        """Token ids of one block."""
        return tuple(self._chance.randrange(10, self._tokens) for _ in range(self._block_size))

    def write(self, blocks: int, lead: Document | None = None) -> Document:
        """A document of so many new blocks behind those of `lead`."""
        before = lead or Document((), ())
        keys = tuple(self.key() for _ in range(blocks))
        tokens = tuple(self.block() for _ in range(blocks))
        return Document(before.keys + keys, before.tokens + tokens, before.lora, before.salt)

    def retold(self, document: Document, lora: str = "", salt: str = "") -> Document:
        """The same tokens for another adapter or under another salt."""
        return Document(tuple(self.key() for _ in document.keys), document.tokens, lora, salt)

    def family(self, heirs: int, lead_blocks: int, own_blocks: int) -> list[Document]:
        """Documents with the same beginning."""
        lead = self.write(lead_blocks)
        return [self.write(own_blocks, lead) for _ in range(heirs)]


@dataclass(slots=True)
class Reach:
    """What one worker can use: sets of keys by tier. `DEVICE` is its own; the others it may share with the
    workers of its node, or with all."""

    tiers: dict[str, set[bytes]] = field(default_factory=dict)

    def keys(self, tier: str) -> set[bytes]:
        """Of one tier."""
        return self.tiers.setdefault(tier, set())

    def score(self, keys: Sequence[bytes], announced: int, block_size: int) -> Score:
        """Of one prompt, of which the service announces no more than the first `announced` blocks."""
        at = 0
        ends = []
        for tier in TIERS:
            held = self.tiers.get(tier, ())
            last = len(keys) if tier == DEVICE else announced
            while at < last and keys[at] in held:
                at += 1
            ends.append(at * block_size)
        return ends[0], ends[1], ends[3]


class Truth:
    """What every worker of one model has, as the harness did it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.workers: dict[int, Reach] = {}
        self.shared: set[bytes] = set()
        """In storage that every engine reaches."""
        self._nodes: dict[tuple[str, str], set[bytes]] = {}

    def at_node(self, node: str, tier: str) -> set[bytes]:
        """Keys in one tier (`HOST`, `DISK`) of one node."""
        return self._nodes.setdefault((node, tier), set())

    def join(self, worker: int, node: str = "") -> Reach:
        """A worker that reaches the shared storage and the tiers of its node."""
        reach = Reach({DEVICE: set(), SHARED: self.shared})
        if node:
            reach.tiers[HOST] = self.at_node(node, HOST)
            reach.tiers[DISK] = self.at_node(node, DISK)
        self.workers[worker] = reach
        return reach

    def leave(self, worker: int) -> None:
        """It counts no more."""
        del self.workers[worker]

    def drop(self, keys: Iterable[bytes]) -> None:
        """Blocks that no storage has any more; devices keep theirs."""
        gone = set(keys)
        for held in (self.shared, *self._nodes.values()):
            held.difference_update(gone)

    def stored(self, key: bytes) -> bool:
        """Whether any storage has it."""
        return self.place(key) is not None

    def place(self, key: bytes) -> str | None:
        """The node whose storage has it, "" when all reach it; None: no storage has it."""
        if key in self.shared:
            return ""
        return next((node for (node, _), held in self._nodes.items() if key in held), None)

    def announced(self, keys: Sequence[bytes]) -> int:
        """How many of a prompt's first blocks are announced: each only while the one before it is, and never
        one of a node behind one of another node, for no engine reaches both."""
        before = ""
        for at, key in enumerate(keys):
            here = self.place(key)
            if here is None or (before and here and here != before):
                return at
            before = here
        return len(keys)

    def board(self, document: Document) -> Board:
        """The scores that an indexer has to give."""
        keys = document.keys
        announced = self.announced(keys)
        found = {
            worker: reach.score(keys, announced, self.block_size) for worker, reach in self.workers.items()
        }
        return {worker: score for worker, score in found.items() if any(score)}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A prompt for which an indexer says something else."""

    worker: int
    wanted: Score
    found: Score

    def __str__(self) -> str:
        return f"worker {self.worker}: {self.found} and not {self.wanted} (device, host, anywhere; tokens)"


def mismatches(wanted: Board, found: Board) -> Iterator[Mismatch]:
    """Where two boards differ."""
    nothing = (0, 0, 0)
    for worker in sorted(wanted.keys() | found.keys()):
        pair = wanted.get(worker, nothing), found.get(worker, nothing)
        if pair[0] != pair[1]:
            yield Mismatch(worker, *pair)
