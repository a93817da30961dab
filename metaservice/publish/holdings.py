"""What engines hold in their own tiers, as far as they told.

A block is known by the engine's own event hash, and where its tokens were told by its token key too
(`hashes.token_key`), on which engines that hash differently agree. Each source keeps its own names: what one
engine says can spoil nothing that is known of another.

Removing what is not there, storing what is there and telling a child before its parent are no errors: events
get lost.
"""

from collections.abc import Collection, Container, Iterator, KeysView, Mapping, Sequence
from enum import Enum

from metaservice.publish.feed import EngineUp
from metaservice.publish.hashes import token_key, token_keys

TIERS = ("gpu", "cpu", "storage", "external")
"""The nearest first; a tier is named by its number here."""
GPU, CPU, STORAGE, EXTERNAL = range(4)

_UNTOLD = b""
"""The token key of a block whose tokens, or those of a block before it, are not known."""


class Stored(Enum):
    """What became of blocks that were told as stored.

    `held`: their parent is not known, so nor is their content; they are found by their hash, and by their
    tokens as soon as the parent is told. `full`: left out, a bound is reached.
    """

    taken = "taken"
    held = "held"
    full = "full"


class Room:
    """Bounds of one source and of all together, and what was counted beside them."""

    def __init__(self, entries_max: int, source_max: int, orphans_max: int) -> None:
        self.entries_max = entries_max
        self.source_max = source_max
        self.orphans_max = orphans_max
        self.entries = 0
        self.orphans = 0
        self.refused = 0
        """Blocks that were left out since the start."""
        self.orphaned = 0
        """Blocks that came before their parent, since the start."""
        self.orphans_dropped = 0
        """Of those, ones whose tokens were given up: they are found by their hash only."""
        self.conflicts = 0
        """Blocks that were told again with other tokens; the first stay."""
        self.unknown_removed = 0


class SourceHoldings:
    """What one source says that an engine holds. Not for several threads at a time."""

    def __init__(self, room: Room, counted: bool) -> None:
        """`counted`: the source tells every copy of a block, when it comes and when it goes (vLLM: its block
        tables may hold a block twice); a block is there until its last copy went. Else a block is there or
        not, however often it is told."""
        self._room = room
        self._counted = counted
        self._tiers: tuple[dict[int, bytes], ...] = ({}, {}, {}, {})
        self._copies: tuple[dict[int, int], ...] = ({}, {}, {}, {})
        """How many, of blocks with more than one."""
        self._by_token: dict[bytes, int] = {}
        self._waiting: dict[int, list[tuple[list[int], list[bytes]]]] = {}
        """By the parent that is missing: hashes and packed tokens of runs."""
        self._waiting_blocks = 0
        self.entries = 0

    def __len__(self) -> int:
        return self.entries

    # ------------------------------------------------------------ what is told

    def store(
        self,
        tier: int,
        parent: int | None,
        hashes: Sequence[int],
        tokens: list[bytes] | None,
        root: bytes,
    ) -> Stored:
        """Blocks that follow each other are in `tier`. `parent`: the hash before the first (None: a prompt
        begins here). `tokens`: packed, one for each hash, and what else the content depends on appended;
        None: not told. `root`: the token key before a prompt's first block (`hashes.token_root`). The hashes
        must be different, and none the parent.
        """
        there = self._tiers[tier]
        new = there.keys().isdisjoint(hashes)
        fresh = len(hashes) if new else sum(one not in there for one in hashes)
        room = self._room
        if room.entries + fresh > room.entries_max or self.entries + fresh > room.source_max:
            room.refused += fresh
            return Stored.full
        keys, held = self._keys(parent, hashes, tokens, root)
        if new:
            there.update(zip(hashes, keys, strict=True))
        else:
            self._again(there, self._copies[tier], hashes, keys)
        self.entries += fresh
        room.entries += fresh
        if held:
            assert tokens is not None and parent is not None
            self._hold(parent, list(hashes), tokens)
            return Stored.held
        self._name(hashes, keys)
        if self._waiting:
            self._adopt([one for one in hashes if one in self._waiting])
        return Stored.taken

    def remove(self, tier: int, hashes: Sequence[int]) -> int:
        """These are not in `tier` any more (where copies are counted: one of each is not); how many went."""
        there, copies = self._tiers[tier], self._copies[tier]
        gone = 0
        for one in hashes:
            if one in copies:
                copies[one] -= 1
                if copies[one] < 2:
                    del copies[one]
                continue
            key = there.pop(one, None)
            if key is None:
                self._room.unknown_removed += 1
                continue
            gone += 1
            if key and not any(one in other for other in self._tiers) and self._by_token.get(key) == one:
                del self._by_token[key]
        self.entries -= gone
        self._room.entries -= gone
        return gone

    def clear(self) -> None:
        """All tiers are empty."""
        self._room.entries -= self.entries
        self._room.orphans -= self._waiting_blocks
        self.entries = self._waiting_blocks = 0
        for there, copies in zip(self._tiers, self._copies, strict=True):
            there.clear()
            copies.clear()
        self._by_token.clear()
        self._waiting.clear()

    # ------------------------------------------------------------ what is asked

    @property
    def tables(self) -> Sequence[Container[int]]:
        """The hashes in each tier, to be read at once."""
        return self._tiers

    def hash_of(self, key: bytes) -> int | None:
        """The hash by which the source knows this token key; None: it does not hold it."""
        return self._by_token.get(key)

    def hashes_of(self, keys: Sequence[bytes]) -> list[int | None]:
        """`hash_of` of each; nothing at all when it does not hold the first."""
        if not keys or keys[0] not in self._by_token:
            return []
        return list(map(self._by_token.get, keys))

    def hashes(self, tier: int) -> KeysView[int]:
        """What is in a tier, to be read at once."""
        return self._tiers[tier].keys()

    def blocks(self) -> dict[str, int]:
        """How many are in each tier."""
        return {name: len(there) for name, there in zip(TIERS, self._tiers, strict=True)}

    @property
    def orphans(self) -> int:
        """Blocks that wait for a parent."""
        return self._waiting_blocks

    # ------------------------------------------------------------ inside

    def _key_of(self, one: int) -> bytes:
        """Its token key, _UNTOLD when that is not known."""
        for there in self._tiers:
            if key := there.get(one):
                return key
        return _UNTOLD

    def _keys(
        self, parent: int | None, hashes: Sequence[int], tokens: list[bytes] | None, root: bytes
    ) -> tuple[list[bytes], bool]:
        """Token keys of a run, and whether it has to wait for them."""
        if tokens is None:
            return [self._key_of(one) for one in hashes], False
        before = root if parent is None else self._key_of(parent)
        if before:
            return token_keys(before, tokens), False
        first = self._key_of(hashes[0])
        if first:
            return [first, *token_keys(first, tokens[1:])], False
        return [_UNTOLD] * len(hashes), True

    def _again(
        self, there: dict[int, bytes], copies: dict[int, int], hashes: Sequence[int], keys: list[bytes]
    ) -> None:
        """Store a run of which some are there."""
        for row, (one, key) in enumerate(zip(hashes, keys, strict=True)):
            known = there.get(one)
            if known is None:
                there[one] = key
                continue
            if self._counted:
                copies[one] = copies.get(one, 1) + 1
            if not known:
                there[one] = key
            elif key and key != known:
                self._room.conflicts += 1
                keys[row] = known

    def _name(self, hashes: Sequence[int], keys: list[bytes]) -> None:
        """They are found by their tokens from now on."""
        if all(keys):
            self._by_token.update(zip(keys, hashes, strict=True))
            return
        self._by_token.update((key, one) for key, one in zip(keys, hashes, strict=True) if key)

    def _hold(self, parent: int, hashes: list[int], tokens: list[bytes]) -> None:
        room = self._room
        room.orphaned += len(hashes)
        if self._waiting_blocks + len(hashes) > room.orphans_max:
            self._forget_dead()
        if self._waiting_blocks + len(hashes) > room.orphans_max:
            room.orphans_dropped += len(hashes)
            return
        self._waiting.setdefault(parent, []).append((hashes, tokens))
        self._waits(len(hashes))

    def _waits(self, more: int) -> None:
        self._waiting_blocks += more
        self._room.orphans += more

    def _forget_dead(self) -> None:
        """Runs that went before their parent came."""
        for parent, runs in list(self._waiting.items()):
            alive = [run for run in runs if any(one in there for one in run[0] for there in self._tiers)]
            if len(alive) == len(runs):
                continue
            self._waits(sum(len(run[0]) for run in alive) - sum(len(run[0]) for run in runs))
            if alive:
                self._waiting[parent] = alive
            else:
                del self._waiting[parent]

    def _adopt(self, parents: list[int]) -> None:
        """What waited for these has a name now, and so on."""
        while parents:
            parent = parents.pop()
            before = self._key_of(parent)
            for hashes, tokens in self._waiting.pop(parent, ()):
                self._waits(-len(hashes))
                key = before
                for one, packed in zip(hashes, tokens, strict=True):
                    key = token_key(key, packed)
                    if self._learnt(one, key) and one in self._waiting:
                        parents.append(one)

    def _learnt(self, one: int, key: bytes) -> bool:
        """Its token key is known now; False when it is not there any more."""
        present = False
        for there in self._tiers:
            if one in there:
                present = True
                if not there[one]:
                    there[one] = key
        if present:
            self._by_token[self._key_of(one)] = one
        return present


class Member:
    """One live engine: what it registered as, and what is known of its caches from its own events (`own`) and
    from reports (`reported`). The latter count while they are `visible`."""

    __slots__ = ("heard_s", "overlap", "own", "reported", "up", "visible")

    def __init__(self, up: EngineUp, own: SourceHoldings, reported: SourceHoldings) -> None:
        self.up = up
        self.own = own
        self.reported = reported
        self.heard_s: float | None = None
        """When it was last heard of, on the clock of whoever made it."""
        self.visible = True
        self.overlap = 0
        """How many tokens of the next block its blocks' content takes in: 1 for an engine whose cache keeps
        pairs of tokens (speculative decoding)."""

    def sources(self) -> tuple[SourceHoldings, ...]:
        """Those that count now and hold anything."""
        reported = self.reported if self.visible else None
        return tuple(source for source in (self.own, reported) if source is not None and source.entries)

    def blocks(self) -> dict[str, int]:
        """How many it holds in each tier; one that two sources tell counts once for each."""
        found = dict.fromkeys(TIERS, 0)
        for source in self.sources():
            for tier, count in source.blocks().items():
                found[tier] += count
        return found


class Holdings:
    """All live engines, by instance."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self._engines: dict[str, Member] = {}
        self._instances: dict[str, dict[str, Member]] = {}

    def __len__(self) -> int:
        return len(self._engines)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._engines.values()))

    def get(self, engine: str) -> Member | None:
        """None: it is not live, or nobody told this replica yet."""
        return self._engines.get(engine)

    def of(self, instance: str) -> Collection[Member]:
        """The engines of an instance."""
        members: Mapping[str, Member] = self._instances.get(instance, {})
        return list(members.values())

    def add(self, up: EngineUp, counted: bool) -> Member:
        """An engine that holds nothing yet; what it was before is forgotten."""
        self.drop(up.engine)
        member = Member(up, SourceHoldings(self.room, counted), SourceHoldings(self.room, False))
        self._engines[up.engine] = member
        self._instances.setdefault(up.instance, {})[up.engine] = member
        return member

    def drop(self, engine: str) -> Member | None:
        """It is gone, with all that it held."""
        member = self._engines.pop(engine, None)
        if member is None:
            return None
        member.own.clear()
        member.reported.clear()
        peers = self._instances[member.up.instance]
        del peers[engine]
        if not peers:
            del self._instances[member.up.instance]
        return member
