"""What a run is going to be, worked out before any process is started: bad input ends here, with nothing to
clean up."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from engine_adapters.replay.ideal import IdealCache
from engine_adapters.replay.requests import Request

ENGINE_KILL_AT = 0.45
"""Share of the requests handed out when one engine is to be killed at its next write."""
SERVICE_KILL_AT = 0.72
"""Share of the requests handed out when the service is killed."""
CLUSTER_ENGINE_KILL_AT = 0.3
LEADER_KILL_AT = 0.5
"""The same two in a cluster: what comes after the leader's end has to be long beside the time without one."""


@dataclass(slots=True)
class Plan:
    """Requests, one ideal figure each, and what they need.

    `ideal_hits[i]` are the blocks of request `i` that an infinite cache would have hit in this order.
    """

    requests: Iterable[Request]
    block_size_tokens: int
    ideal_hits: list[int] = field(default_factory=list)
    blocks_asked: int = 0
    blocks_unique: int = 0
    ideal_hit_rate: float = 0.0
    engine_kill_share: float = ENGINE_KILL_AT
    service_kill_share: float = SERVICE_KILL_AT

    @classmethod
    def of(cls, requests: Iterable[Request], block_size_tokens: int) -> "Plan":
        """Go once through `requests`, which can be gone through again. Raises what they raise."""
        plan = cls(requests, block_size_tokens)
        cache = IdealCache()
        for request in requests:
            plan.ideal_hits.append(cache.serve(request.contents(block_size_tokens)))
        plan.blocks_asked = cache.asked
        plan.blocks_unique = cache.blocks
        plan.ideal_hit_rate = cache.hit_rate
        return plan

    @property
    def count(self) -> int:
        """How many requests there are."""
        return len(self.ideal_hits)

    @property
    def engine_kill_at(self) -> int:
        """Index of the request from which on an engine is killed at its next write."""
        return int(self.count * self.engine_kill_share)

    @property
    def service_kill_at(self) -> int:
        """Index of the request with which the service is killed."""
        return int(self.count * self.service_kill_share)

    def __iter__(self) -> Iterator[Request]:
        return islice(iter(self.requests), self.count)
