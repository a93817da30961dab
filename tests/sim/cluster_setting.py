"""Where a clustered history takes place: shards, limits, timing, catalogue. All of one seed."""

from random import Random

from metaservice.core.commands import Command, PutGroup, PutInstance, PutStorage, PutTenant
from metaservice.core.model import EvictionPolicy, Fingerprint, Limits, Part, Publication, Quota
from metaservice.wire.tokens import pack_tokens

from .setting import TREE, Deployment

NAMES = tuple(TREE)

TTL_MS = 1_000
MARGIN_MS = 100
RENEW_MS = 200
TIMEOUT_MS = 150
"""renew + 2 * timeout <= ttl / 2"""
STALENESS_MS_MAX = 400
POLL_MS = 160
TICK_MS = 100
VOLATILE_PART = 0.35
PUBLISHED_PART = 0.6
HISTORY_MS = 5_000
"""How long clients act and faults happen."""

LIMITS = Limits(
    keys_per_request_max=32,
    write_ttl_ms_min=2 * TTL_MS,
    write_ttl_ms_default=2_500,
    write_ttl_ms_max=3_500,
    lease_ms_min=100,
    lease_ms_max=2_600,
    reclaim_delay_ms=TTL_MS + STALENESS_MS_MAX,
    late_write_ms=800,
    task_ttl_ms=1_000,
    task_retry_ms=200,
    heartbeat_ms=900,
    suspect_ms=2_000,
    expire_ms=5_000,
    forget_ms=60_000,
    hot_summary_ms=1_000,
    errand_ms=300,
    window_blocks_max=8,
    window_removed_max=8,
    beat_ms=400,
    restate_ms=2_000,
)
"""Scaled down, within the timing laws."""


FAMILIES = "12345"
"""Chains of the same shape with other keys."""


def chain(deployment: Deployment, rng: Random) -> list[bytes]:
    """The keys from a root to somewhere."""
    family = rng.choice(FAMILIES).encode()
    return [family + key[:-1] for key in deployment.chain(rng.choice(NAMES))]


def published(seed: int) -> bool:
    """Whether routers are told of the blocks of a seed's cluster: in most they are. (With this number the
    seeds that are known to find something are without routers, as they were when they did.)"""
    return Random(f"routers 344 {seed}").random() < PUBLISHED_PART


def tokens_of(keys: list[bytes]) -> list[bytes]:
    """Packed token ids of these blocks: of a key always the same."""
    return [pack_tokens([key[0] * 256 + key[1] + at for at in range(16)]) for key in keys]


def volatile_of(seed: int) -> str:
    """Which storage of a seed's cluster is volatile, '' for none: a third of them have one."""
    rng = Random(f"volatile {seed}")  # apart, so that the other histories are what they were
    return rng.choice(("s0", "s1", "s1")) if rng.random() < VOLATILE_PART else ""


class Setting:
    """What a seed decides before anything happens."""

    def __init__(self, rng: Random, shards: int, volatile: str = "", published: bool = False) -> None:
        """`volatile`: which of the storages is one, '' for none. `published`: routers are told of blocks."""
        self.shards = shards
        self.volatile = volatile
        self.published = published
        self.limits = LIMITS
        low, high = (10, 30) if rng.random() < 0.6 else (24, 90)
        self.tenants = [PutTenant(tenant="t0", quota=self.quota(rng, low, high))]
        self.storages = [
            PutStorage(
                storage=name,
                kind="shm" if name == volatile else "posix",
                options={"root": f"/{name}"},
                capacity_bytes=rng.randint(20 * low, 20 * high) if rng.random() < 0.5 else None,
                fault_domain="n1",
            )
            for name in ("s0", "s1")
        ]
        self.groups = [self.group(rng, "g0", ("s0", "s1")), self.group(rng, "g1", ("s1",))]
        self.deployments = [
            self.deployment(rng, f"i{number}", f"g{number % 2}", number % shards)
            for number in range(max(2, shards))
        ]

    @property
    def catalogue(self) -> list[Command]:
        """The commands that register everything, in order."""
        return [*self.tenants, *self.storages, *self.groups, *(each.command for each in self.deployments)]

    @staticmethod
    def quota(rng: Random, low: int, high: int) -> Quota:
        """A quota of so many blocks, give or take, or none."""
        blocks = rng.randint(low, high) if rng.random() < 0.6 else None
        size_bytes = rng.randint(20 * low, 20 * high) if rng.random() < 0.3 else None
        return Quota(bytes=size_bytes, blocks=blocks)

    def group(self, rng: Random, name: str, storages: tuple[str, ...]) -> PutGroup:
        """An instance group with some policy."""
        low = rng.choice((600, 900, 1000))
        return PutGroup(
            group=name,
            tenant="t0",
            storages=storages,
            quota=self.quota(rng, 8, 24),
            high_permille=rng.choice((low, 1000)),
            low_permille=low,
            eviction=EvictionPolicy.reject if rng.random() < 0.2 else EvictionPolicy.lru,
        )

    def deployment(self, rng: Random, name: str, group: str, shard: int) -> Deployment:
        """Full attention on one or two ranks, in a shard."""
        parts = tuple(Part(f"tp{rank}", 10) for rank in range(rng.choice((1, 2))))
        fingerprint = Fingerprint("m", "1", "bf16", 16, 16, "sha256", "0", parts)
        command = PutInstance(
            instance=name,
            group=group,
            fingerprint=fingerprint,
            quota=self.quota(rng, 8, 20),
            shard=shard,
            publication=Publication(name, entries_max=6 if shard else 1_000) if self.published else None,
        )
        return Deployment(command, ("full",))
