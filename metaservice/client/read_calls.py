"""The calls that read: lookup, what happens to its leases, and the switch that holds."""

from array import array
from collections.abc import Sequence

from msgspec import UNSET
from msgspec.msgpack import Decoder

from metaservice.wire.columns import packed
from metaservice.wire.schemas import (
    LeaseOutcome,
    LeaseReleaseRequest,
    LeaseRenewRequest,
    LeaseReply,
    LookupReply,
    LookupRequest,
)
from metaservice.wire.switches import WatchSwitchReply

from . import checks
from .calls import Call, Keeps, Sending, Who, decoded, name, post, shard_of, token
from .checks import between, codes, lying
from .endpoints import Route
from .errors import INVALID_REQUEST, CallFailed
from .results import LeasesResult, LookupResult, Places, SwitchResult

_switch = Decoder(WatchSwitchReply)
_lookup = Decoder(LookupReply)
_leases = Decoder(LeaseReply)

MODES = ("normal", "read_only", "bypass")
"""What a switch can say, from the mildest to the strictest."""
_CUTS = frozenset({"none", "miss", "limit", "switch"})
_FROM_THE_ROOT = frozenset({"prefix", "state"})
_TTL_MS_MAX = 2**31


class Lookup(Call[LookupResult]):
    """`POST /v1/instances/{id}/lookup`."""

    __slots__ = (
        "group",
        "instance",
        "keys",
        "lease_ms",
        "limit",
        "mode",
        "parent",
        "renew",
        "staleness_ms_max",
        "traceparent",
        "window_blocks",
    )

    def __init__(
        self,
        instance: str,
        keys: list[bytes],
        mode: str,
        group: str | None,
        window_blocks: int | None,
        limit: int | None,
        parent: bytes | None,
        lease_ms: int,
        renew: bool,
        staleness_ms_max: int | None,
        traceparent: str = "",
    ) -> None:
        self.instance = instance
        self.keys = keys
        self.mode = mode
        self.group = group
        self.window_blocks = window_blocks
        self.limit = limit
        self.parent = parent
        self.lease_ms = lease_ms
        self.renew = renew
        self.staleness_ms_max = staleness_ms_max
        self.traceparent = traceparent

    @property
    def route(self) -> Route:
        # Whoever answers such a question is asked again, be it the leader or not. No instance has this name.
        return self.instance if self.staleness_ms_max is None else f"?{self.instance}"

    def nothing(self) -> LookupResult | None:
        return None if self.keys else LookupResult(asked=0, cut="none")

    def request(self, who: Who) -> Sending:
        body = LookupRequest(
            keys=self.keys,
            mode=self.mode,
            group=self.group,
            window_blocks=self.window_blocks,
            limit=self.limit,
            parent=self.parent,
            lease_ms=self.lease_ms,
            staleness_ms_max=self.staleness_ms_max,
        )
        if self.lease_ms and who.kind == "engine" and who.incarnation:
            # The lease is then the engine's, and a repeated call gets this lease and no second one.
            body.engine, body.incarnation, body.request_id = who.id, who.incarnation, who.request_id()
        return post(f"/v1/instances/{name(self.instance, 'instance')}/lookup", body, self.traceparent)

    def answer(self, body: bytes, sent_ms: int) -> LookupResult:
        reply = decoded(_lookup, body)
        asked = len(self.keys)
        if reply.mode != self.mode or reply.asked != asked or reply.cut not in _CUTS:
            raise lying("lookup: the answer to another question")
        hits = between(reply.hits, 0, asked if self.limit is None else min(asked, self.limit), "hits")
        start = between(
            reply.start, 0, 0 if self.mode in _FROM_THE_ROOT or not hits else asked - hits, "start"
        )
        keys, hit = self._hit_keys(reply, hits, start)
        places = checks.places(reply, hits, keys)
        leased = bool(hits and self.lease_ms)
        if leased != (reply.lease is not None):
            raise lying("lease: not given as asked")
        lease_ms = 0
        if reply.lease is not None:
            checks.token(reply.lease, "lease")
            lease_ms = min(between(reply.lease_ms, 1, _TTL_MS_MAX, "lease_ms"), self.lease_ms)
        return LookupResult(
            keys=places.keys,
            locations=places.locations,
            generations=places.generations,
            storages=places.storages,
            checksums=places.checksums,
            storage_table=places.storage_table,
            parts=places.parts,
            cluster=places.cluster,
            asked=asked,
            hits=hits,
            start=start,
            cut=reply.cut,
            cut_at=between(reply.cut_at, 0, asked, "cut_at"),
            switch=reply.switch,
            hit=hit,
            lease=reply.lease,
            lease_ms=lease_ms,
            lease_deadline_ms=sent_ms + lease_ms,
            state=self._state(reply, hits),
            epoch=reply.epoch,
            seq=reply.seq,
            staleness_ms=self._staleness(reply),
        )

    def _staleness(self, reply: LookupReply) -> int:
        """How old the answer may be. Only who allowed it may get an old one."""
        if reply.staleness_ms is UNSET:
            return 0
        return between(reply.staleness_ms, 0, self.staleness_ms_max or 0, "staleness_ms")

    def _hit_keys(self, reply: LookupReply, hits: int, start: int) -> tuple[list[bytes], bytes]:
        if self.mode != "each":
            if reply.cut == "none" and hits != len(self.keys) and self.mode in _FROM_THE_ROOT:
                raise lying("cut: none, with keys left out")
            return self.keys[start : start + hits], b""
        hit = codes(reply.hit, len(self.keys), 1, "hit")
        if hit.count(1) != hits:
            raise lying("hit: not as many as hits")
        return [key for key, one in zip(self.keys, hit, strict=True) if one], hit

    def _state(self, reply: LookupReply, hits: int) -> Places | None:
        if self.mode != "state" or not hits:
            return None
        if reply.state is None:
            raise lying("state: missing")
        return checks.places(reply.state, 1, [self.keys[hits - 1]])

    def failed(self, failure: str, detail: str) -> LookupResult:
        return LookupResult(asked=len(self.keys), failure=failure, detail=detail)

    def after(self, result: LookupResult, keeps: Keeps) -> None:
        if self.renew and result.lease:
            keeps.keep_lease(result.lease, result.lease_ms, result.lease_deadline_ms)


class WatchSwitch(Call[SwitchResult]):
    """`GET /v1/instances/{id}/switch`: long poll. Not repeated by itself, so that another replica is not
    asked while one still waits on purpose."""

    __slots__ = ("instance", "known", "wait_ms")

    repeatable = False

    def __init__(self, instance: str, known: str, wait_ms: int) -> None:
        self.instance = instance
        self.known = known
        self.wait_ms = wait_ms

    @property
    def route(self) -> Route:
        return self.instance

    def request(self, who: Who) -> Sending:
        if self.known not in ("", *MODES):
            raise CallFailed(INVALID_REQUEST, f"known is none of {', '.join(MODES)}", field="known")
        query = f"known={self.known}&wait_ms={int(self.wait_ms)}"
        return Sending("GET", f"/v1/instances/{name(self.instance, 'instance')}/switch?{query}", b"")

    def answer(self, body: bytes, sent_ms: int) -> SwitchResult:
        reply = decoded(_switch, body)
        if reply.mode not in MODES or reply.mode != ("normal" if reply.switch is None else reply.switch.mode):
            raise lying("switch: no mode of ours")
        return SwitchResult(mode=reply.mode, switch=reply.switch)

    def failed(self, failure: str, detail: str) -> SwitchResult:
        return SwitchResult(failure=failure, detail=detail)


class _OfLeases(Call[LeasesResult]):
    """What is said about leases of one shard, in the order named."""

    __slots__ = ("leases",)

    def __init__(self, leases: Sequence[str]) -> None:
        self.leases = list(leases)

    @property
    def route(self) -> Route:
        return shard_of(self.leases[0])

    def nothing(self) -> LeasesResult | None:
        return None if self.leases else LeasesResult()

    def path(self, verb: str) -> str:
        for lease in self.leases:
            token(lease, "lease")
        return f"/v1/leases/{self.leases[0]}/{verb}"

    def answer(self, body: bytes, sent_ms: int) -> LeasesResult:
        reply = decoded(_leases, body)
        if reply.leases != self.leases:
            raise lying("leases: others than asked")
        rows = len(self.leases)
        ttl_ms = between(reply.ttl_ms, 0, _TTL_MS_MAX, "ttl_ms")
        return LeasesResult(
            leases=reply.leases,
            outcomes=codes(reply.outcomes, rows, max(LeaseOutcome), "outcomes"),
            changed=checks.numbers(reply.changed, "I", rows, "changed"),
            ttl_ms=ttl_ms,
            deadline_ms=sent_ms + ttl_ms,
            switch=reply.switch,
        )

    def failed(self, failure: str, detail: str) -> LeasesResult:
        rows = len(self.leases)
        return LeasesResult(
            leases=self.leases,
            outcomes=bytes([LeaseOutcome.unknown]) * rows,
            changed=array("I", bytes(4 * rows)),
            failure=failure,
            detail=detail,
        )


class RenewLeases(_OfLeases):
    """`POST /v1/leases/{id}/renew`, all named leases in one call."""

    __slots__ = ("locations", "ttl_ms")

    def __init__(self, leases: Sequence[str], ttl_ms: int, locations: Sequence[int] | None) -> None:
        super().__init__(leases)
        self.ttl_ms = ttl_ms
        self.locations = locations

    def request(self, who: Who) -> Sending:
        body = LeaseRenewRequest(ttl_ms=self.ttl_ms, also=self.leases[1:])
        if self.locations is not None:
            body.locations = packed("Q", self.locations)
        return post(self.path("renew"), body)

    def after(self, result: LeasesResult, keeps: Keeps) -> None:
        renewed = [
            lease
            for lease, outcome in zip(result.leases, result.outcomes, strict=True)
            if outcome == LeaseOutcome.renewed
        ]
        if renewed and self.locations is None:
            keeps.leases_renewed(renewed, result.deadline_ms)


class ReleaseLeases(_OfLeases):
    """`POST /v1/leases/{id}/release`, all named leases in one call."""

    __slots__ = ()

    def request(self, who: Who) -> Sending:
        return post(self.path("release"), LeaseReleaseRequest(also=self.leases[1:]))

    def after(self, result: LeasesResult, keeps: Keeps) -> None:
        # Also when the call failed: the caller needs them no longer, so they end by themselves.
        keeps.drop_leases(self.leases)
