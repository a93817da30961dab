"""Answers routers that ask rather than subscribe: which engine holds how much of this prompt?"""

import asyncio
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Protocol

import msgspec

from metaservice.core.windows import CPU, EXTERNAL, STORAGE
from metaservice.publish import holdings
from metaservice.publish.attach.names import worker_number
from metaservice.publish.errors import PublisherUnavailable
from metaservice.publish.feed import InstanceUp
from metaservice.publish.hashes import block_keys, event_hashes, token_keys
from metaservice.publish.holdings import TIERS, Holdings, Member, SourceHoldings
from metaservice.publish.packing import ids_of, pack_windows, root_of
from metaservice.wire.schemas_events import EngineRoute, RouteAnswer, RouteAsk, TierBlocks

_ASK = msgspec.msgpack.Decoder(RouteAsk)
_ENCODE = msgspec.msgpack.Encoder().encode
_TOKEN_BYTES = 4
_TIER_OF = {CPU: holdings.CPU, STORAGE: holdings.STORAGE, EXTERNAL: holdings.EXTERNAL}


class Announced(Protocol):
    """What routers are told of the pool and of nodes' storages."""

    def find(self, instance: str, keys: Sequence[bytes]) -> Sequence[Collection[tuple[str, str]]]:
        """Where each key, from the first on, is announced: (medium, node). It ends before the first that is
        announced nowhere."""
        ...


class Prompt:
    """The blocks of one question, by every name they may be known by."""

    def __init__(self, ask: RouteAsk, instance: InstanceUp) -> None:
        """Raises PublisherUnavailable."""
        self._ask = ask
        self._instance = instance
        self._lora = ask.lora or instance.lora
        size = instance.block_size_tokens
        self.keys: list[bytes] = ask.keys
        self.hashes: Sequence[int] = ()
        if ask.keys:
            self.blocks = len(ask.keys)
            self.set_keys(ask.keys)
        else:
            self.blocks = len(ask.token_ids) // (_TOKEN_BYTES * size)

    def set_keys(self, keys: list[bytes]) -> None:
        """The blocks' keys, and with them the engines' hashes."""
        length = self._instance.key_length
        if any(len(key) != length for key in keys):
            raise PublisherUnavailable("key_length", f"keys of this instance have {length} bytes")
        self.keys = keys
        self.hashes = event_hashes(b"".join(keys), length, self._instance.hash_of)

    def computed_keys(self) -> list[bytes]:
        """The keys of the token ids; empty where they cannot be computed."""
        instance = self._instance
        ids = ids_of(self._ask.token_ids)
        size = instance.block_size_tokens
        made = block_keys(instance.hash_scheme, instance.hash_seed, ids, size, self._lora, self._ask.salt)
        return made if made and len(made[0]) == instance.key_length else []

    @cached_property
    def by_tokens(self) -> list[bytes]:
        """Token keys of the blocks."""
        return self._token_keys(0)

    @cached_property
    def by_pairs(self) -> list[bytes]:
        """Token keys of the blocks as an engine has them that keeps pairs of tokens."""
        return self._token_keys(1)

    def _token_keys(self, overlap: int) -> list[bytes]:
        size = self._instance.block_size_tokens
        raw = self._ask.token_ids
        count = max(len(raw) // _TOKEN_BYTES - overlap, 0) // size
        return token_keys(root_of(self._lora, self._ask.salt), pack_windows(raw, size + overlap, size, count))

    def names(self, member: Member, source: SourceHoldings) -> list[Sequence[int | None]]:
        """The hashes by which a source may hold the blocks: computed ones, and those it told for these
        tokens."""
        found: list[Sequence[int | None]] = [self.hashes] if self.hashes else []
        if self._ask.token_ids:
            told = source.hashes_of(self.by_pairs if member.overlap else self.by_tokens)
            if told:
                found.append(told)
        return found


class Router:
    """Answers from what is known here and now."""

    def __init__(
        self,
        known: Holdings,
        instances: Mapping[str, InstanceUp],
        announced: Announced,
        now_s: Callable[[], float],
        slice_blocks: int,
    ) -> None:
        """After about `slice_blocks` the loop is given back in between."""
        self._known = known
        self._instances = instances
        self._announced = announced
        self._now_s = now_s
        self._slice_blocks = slice_blocks

    async def route(self, body: bytes) -> bytes:
        """A RouteAsk, answered by a RouteAnswer. PublisherUnavailable: `instance_unknown` (not announced),
        `key_length`, or `invalid_field`."""
        try:
            ask = _ASK.decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise PublisherUnavailable("invalid_field", f"this is no question: {error}") from None
        instance = self._meant(ask)
        prompt = Prompt(ask, instance)
        made: list[bytes] = []
        if not ask.keys:
            if prompt.blocks > self._slice_blocks:
                made = await asyncio.to_thread(prompt.computed_keys)
            else:
                made = prompt.computed_keys()
            prompt.set_keys(made)
        placed = self._announced.find(instance.instance, prompt.keys)
        engines: list[EngineRoute] = []
        done = 0
        for member in self._engines_of(instance):
            found, looked = self._engine(member, prompt, placed, instance.block_size_tokens)
            if found is not None:
                engines.append(found)
            done += looked
            if done >= self._slice_blocks:
                done = 0
                await asyncio.sleep(0)
        engines.sort(key=_best_first)
        if ask.top_k:
            del engines[ask.top_k :]
        pool = _prefix(placed, EXTERNAL)
        return _ENCODE(
            RouteAnswer(prompt.blocks, instance.block_size_tokens, pool, engines, made, instance.instance)
        )

    def _engines_of(self, instance: InstanceUp) -> Collection[Member]:
        """Those that use its blocks. An adapter's are used by the engines of the base model."""
        own = self._known.of(instance.instance)
        if instance.base in ("", instance.instance):
            return own
        return [*own, *self._known.of(instance.base)]

    def _meant(self, ask: RouteAsk) -> InstanceUp:
        """The instance that has these blocks: that of the adapter, where the base model's is asked for one.
        Raises PublisherUnavailable."""
        instance = self._instances.get(ask.instance)
        if instance is None:
            raise PublisherUnavailable("instance_unknown", f"instance {ask.instance!r} is not announced")
        if ask.lora in ("", instance.lora):
            return instance
        adapters = (
            one for one in self._instances.values() if (one.base, one.lora) == (ask.instance, ask.lora)
        )
        return next(adapters, instance)

    def _engine(
        self,
        member: Member,
        prompt: Prompt,
        placed: Sequence[Collection[tuple[str, str]]],
        size: int,
    ) -> tuple[EngineRoute | None, int]:
        """How much one engine has (None: nothing), and how many blocks were looked at."""
        tiers = reach(member, prompt, placed)
        blocks = tiers[-1]
        if not blocks:
            return None, 1
        up = member.up
        heard_s = member.heard_s
        found = EngineRoute(
            engine=up.engine,
            instance=up.instance,
            rank=up.rank,
            address=up.address,
            worker_id=worker_number(up),
            node=up.node,
            tiers=TierBlocks(**dict(zip(TIERS, tiers, strict=True))),
            blocks=blocks,
            tokens=blocks * size,
            staleness_ms=-1 if heard_s is None else max(0, round((self._now_s() - heard_s) * 1_000)),
            visible=member.visible,
        )
        return found, blocks


def reach(member: Member, prompt: Prompt, placed: Sequence[Collection[tuple[str, str]]]) -> list[int]:
    """For each tier: how many blocks from the first on an engine has without a gap in it and all nearer
    ones."""
    views = [(names, source.tables) for source in member.sources() for names in prompt.names(member, source)]
    node = member.up.node
    found = []
    at = 0
    for tier in range(len(TIERS)):
        before = -1
        while before < at < prompt.blocks:
            before = at
            for names, tables in views:
                for table in tables[: tier + 1]:
                    at = _while_in(table, names, at)
            while at < len(placed) and _is_near(placed[at], node, tier):
                at += 1
        found.append(at)
    return found


def _while_in(table: Container[int | None], names: Sequence[int | None], at: int) -> int:
    """The first of `names` from `at` on that is not in the table."""
    for name in islice(names, at, None):
        if name not in table:
            break
        at += 1
    return at


def _is_near(places: Collection[tuple[str, str]], node: str, tier: int) -> bool:
    """Whether one of these is that near to who is on `node`."""
    return any(_TIER_OF[medium] <= tier and (not where or where == node) for medium, where in places)


def _prefix(placed: Sequence[Collection[tuple[str, str]]], medium: str) -> int:
    """How many of the first are announced in this medium."""
    for row, places in enumerate(placed):
        if all(one != medium for one, _ in places):
            return row
    return len(placed)


def _best_first(route: EngineRoute) -> tuple[int, int, int, int, str]:
    tiers = route.tiers
    return -route.blocks, -tiers.gpu, -tiers.cpu, -tiers.storage, route.engine
