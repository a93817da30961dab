"""Reports: what connectors say of their engine's caches, where no event stream says it.

Every replica keeps what it was told itself. A report goes on from the one before, or it is a snapshot; what
was not heard in time, or is of another incarnation, does not count.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from struct import Struct as Layout

import msgspec

from metaservice.publish.errors import PublisherUnavailable
from metaservice.publish.feed import InstanceUp
from metaservice.publish.hashes import EVENT_HASH_MIN
from metaservice.publish.holdings import TIERS, Holdings, Member, Stored
from metaservice.publish.packing import pack_windows, root_of
from metaservice.wire.schemas_events import (
    REPORTED_TIERS,
    RemovedAsk,
    ReportAsk,
    ReportOutcome,
    ReportReply,
    StoredAsk,
)

from .limits import IngestLimits

_ASK = msgspec.msgpack.Decoder(ReportAsk)
_ENCODE = msgspec.msgpack.Encoder().encode
_HASH_BYTES = 8
_TOKEN_BYTES = 4


class _Left(Exception):
    """An item is left out, for this reason."""


class Reporter:
    """One engine's reports, in this incarnation of it."""

    def __init__(self) -> None:
        self.number: int | None = None
        """Of the last report that was taken; None: a snapshot is needed."""
        self.reply = b""
        self.heard_s = 0.0
        self.lock = asyncio.Lock()


class Reports:
    """Takes in reports. All calls are made on one loop."""

    def __init__(
        self,
        holdings: Holdings,
        instances: Mapping[str, InstanceUp],
        limits: IngestLimits,
        tally: Counter[str],
        now_s: Callable[[], float],
    ) -> None:
        self._holdings = holdings
        self._instances = instances
        self._limits = limits
        self._tally = tally
        self._now_s = now_s
        self._reporters: dict[str, Reporter] = {}

    def forget(self, engine: str) -> None:
        """It began another life, or is gone."""
        self._reporters.pop(engine, None)

    def reporter(self, engine: str) -> Reporter | None:
        """None: it reports nothing."""
        return self._reporters.get(engine)

    def look(self) -> None:
        """Hides what was not confirmed in time, and drops it later. To be called about once a second."""
        now_s = self._now_s()
        for engine, reporter in self._reporters.items():
            silent_ms = (now_s - reporter.heard_s) * 1_000
            member = self._holdings.get(engine)
            if member is None or silent_ms <= self._limits.visible_ms:
                continue
            member.visible = False
            if silent_ms > self._limits.expire_ms and reporter.number is not None:
                member.reported.clear()
                reporter.number = None
                self._tally["reports_expired"] += 1

    async def take(self, body: bytes) -> bytes:
        """A ReportAsk, answered by a ReportReply. PublisherUnavailable: `invalid_field` (not one), or
        `engine_unknown` or `reregister`."""
        try:
            ask = _ASK.decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise PublisherUnavailable("invalid_field", f"this is no report: {error}") from None
        member = self._member(ask)
        reporter = self._reporters.setdefault(ask.engine, Reporter())
        async with reporter.lock:
            member = self._member(ask)
            self._tally["reports"] += 1
            last = reporter.number
            if last is not None and ask.number <= last:
                self._hear(member, reporter)
                if ask.number == last and (ask.stored or ask.removed or ask.cleared):
                    return reporter.reply
                return _ENCODE(self._reply([], [], "", last))
            if ask.base is not None and ask.base != last:
                self._tally["reports_refused"] += 1
                return _ENCODE(self._reply([], [], "snapshot", last or 0))
            reporter.reply = await self._apply(ask, member, reporter)
            self._hear(member, reporter)
            return reporter.reply

    @staticmethod
    def sender(body: bytes) -> tuple[str, str]:
        """Engine and incarnation of a report."""
        ask = _ASK.decode(body)
        return ask.engine, ask.incarnation

    # ------------------------------------------------------------ inside

    def _member(self, ask: ReportAsk) -> Member:
        member = self._holdings.get(ask.engine)
        if member is None:
            raise PublisherUnavailable("engine_unknown", f"engine {ask.engine!r} is not known here")
        if member.up.incarnation != ask.incarnation:
            raise PublisherUnavailable(
                "reregister", f"engine {ask.engine!r} is known here as {member.up.incarnation!r}"
            )
        return member

    def _hear(self, member: Member, reporter: Reporter) -> None:
        reporter.heard_s = member.heard_s = self._now_s()
        member.visible = True

    async def _apply(self, ask: ReportAsk, member: Member, reporter: Reporter) -> bytes:
        """All items, those removed first. The loop is given back in between, and the engine may be gone then:
        what it told half goes with it."""
        reporter.number = None
        if ask.base is None or ask.cleared:
            member.reported.clear()
        removed = [self._outcome(member, gone) for gone in ask.removed]
        stored: list[str] = []
        done = 0
        for item in ask.stored:
            stored.append(self._outcome(member, item))
            done += len(item.hashes) // _HASH_BYTES
            if done >= self._limits.slice_blocks:
                done = 0
                await asyncio.sleep(0)
                self._member(ask)
        reporter.number = ask.number
        return _ENCODE(self._reply(stored, removed, "", ask.number))

    def _outcome(self, member: Member, item: StoredAsk | RemovedAsk) -> str:
        try:
            if isinstance(item, StoredAsk):
                return self._store(member, item)
            return self._remove(member, item)
        except _Left as left:
            return str(left)

    def _reply(self, stored: list[str], removed: list[str], want: str, number: int) -> ReportReply:
        visible_ms = self._limits.visible_ms
        return ReportReply(stored=stored, removed=removed, want=want, visible_ms=visible_ms, number=number)

    def _remove(self, member: Member, item: RemovedAsk) -> str:
        tier = _tier(item.tier)
        self._tally["removed"] += member.reported.remove(tier, _hashes(item.hashes))
        return ReportOutcome.taken

    def _store(self, member: Member, item: StoredAsk) -> str:
        tier = _tier(item.tier)
        hashes = _hashes(item.hashes)
        if item.parent in hashes or len(set(hashes)) != len(hashes):
            raise _Left(ReportOutcome.hashes)
        instance = self._instances[member.up.instance]
        size = instance.block_size_tokens
        tokens = None
        if item.token_ids:
            if len(item.token_ids) != _TOKEN_BYTES * size * len(hashes):
                raise _Left(ReportOutcome.tokens)
            tokens = pack_windows(item.token_ids, size, size, len(hashes))
        root = root_of(item.lora or instance.lora, item.salt)
        stored = member.reported.store(tier, item.parent, hashes, tokens, root)
        if stored is not Stored.full:
            self._tally["stored"] += len(hashes)
        return stored.value


def _tier(name: str) -> int:
    if name not in REPORTED_TIERS:
        raise _Left(ReportOutcome.tier)
    return TIERS.index(name)


def _hashes(packed: bytes) -> tuple[int, ...]:
    count, rest = divmod(len(packed), _HASH_BYTES)
    if rest or not count:
        raise _Left(ReportOutcome.hashes)
    hashes: tuple[int, ...] = Layout(f"<{count}Q").unpack(packed)
    if min(hashes) < EVENT_HASH_MIN:
        raise _Left(ReportOutcome.hashes)
    return hashes
