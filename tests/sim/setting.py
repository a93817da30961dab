"""Where a history takes place: limits, catalogue and keys of one seed. Small, so that all meet all."""

from random import Random
from typing import NamedTuple

from msgspec.structs import replace

from metaservice.core.commands import Command, PutGroup, PutInstance, PutStorage, PutTenant
from metaservice.core.model import (
    AttentionGroup,
    EvictionPolicy,
    Fingerprint,
    GroupKind,
    Limits,
    Part,
    Publication,
    Quota,
)
from metaservice.wire.tokens import pack_tokens

TREE = {
    "a": None, "b": "a", "c": "b", "d": "c", "e": "d",
    "x": "b", "y": "x", "z": "y",
    "p": "a", "q": "p",
    "r": None, "s": "r",
}  # fmt: skip
"""name of a key -> the key before it"""

LIMITS = Limits(
    keys_per_request_max=16,
    write_ttl_ms_min=100,
    write_ttl_ms_default=2_000,
    write_ttl_ms_max=8_000,
    lease_ms_min=50,
    lease_ms_max=2_000,
    reclaim_delay_ms=300,
    late_write_ms=600,
    task_ttl_ms=1_500,
    task_retry_ms=200,
    heartbeat_ms=500,
    suspect_ms=2_000,
    expire_ms=5_000,
    forget_ms=20_000,
    hot_summary_ms=1_000,
    window_blocks_max=4,
    window_removed_max=5,
    beat_ms=400,
    restate_ms=3_000,
)


class Deployment(NamedTuple):
    """One instance of a setting."""

    command: PutInstance
    groups: tuple[str, ...]

    @property
    def name(self) -> str:
        """The instance's id."""
        return self.command.instance

    def key(self, name: str) -> bytes:
        """The key of that name: in every instance of this key length the same bytes."""
        return name.encode().ljust(self.command.fingerprint.key_length, b".")

    def chain(self, name: str) -> list[bytes]:
        """The keys from the root to that one."""
        names = [name]
        while (parent := TREE[names[0]]) is not None:
            names.insert(0, parent)
        return [self.key(each) for each in names]

    def parts(self, group: str) -> list[str]:
        """The names of the parts of an attention group."""
        return [part.name for part in self.command.fingerprint.parts if part.group == group]


class Setting:
    """What a seed decides before anything happens."""

    def __init__(
        self, rng: Random, volatile: str = "", stacked: bool = False, routers: Random | None = None
    ) -> None:
        """`volatile`: which of the storages is one, '' for none. `stacked`: no group has anything that it
        prefers to `s0`, and all have another behind it. `routers`: what is told to routers, and how, is
        drawn from it; None: nothing is."""
        self.limits = LIMITS
        self.volatile = volatile
        if rng.random() < 0.3:
            self.limits = replace(self.limits, evict_batch_max=2, retire_batch_max=2)
        if rng.random() < 0.2:
            self.limits = replace(self.limits, lease_ms_max=500)
        self.storages = [
            PutStorage(
                storage=name,
                kind=self.kind(name),
                options={"root": f"/{name}"},
                capacity_bytes=self.maybe(rng, 80, 400),
            )
            for name in ("s0", "s1")
        ]
        self.tenants = [PutTenant(tenant=name, quota=self.quota(rng, 8, 16)) for name in ("t0", "t1")]
        self.groups = [
            self.group(rng, "g0", "t0", ("s0", "s1")),
            self.group(rng, "g1", "t0", ("s1",)),
            self.group(rng, "g2", "t1", ("s0", "s1") if stacked else ("s1", "s0")),
        ]
        self.deployments = [
            self.plain(rng, "i0", "g0", 16),
            self.hybrid(rng, "i1", rng.choice(("g0", "g1")), 16),
            self.plain(rng, "i2", "g2", 64),
        ]
        self.tokenless: frozenset[str] = frozenset()
        """Names of keys whose tokens no writer sends."""
        if routers is not None:
            self.deployments = [
                each._replace(command=replace(each.command, publication=self.publication(routers, each.name)))
                for each in self.deployments
            ]
            self.storages = [
                replace(each, fault_domain=f"n{routers.randrange(2)}", reach=routers.choice(("", "", "node")))
                for each in self.storages
            ]
            self.tokenless = frozenset(name for name in TREE if routers.random() < 0.05)

    @property
    def catalogue(self) -> list[Command]:
        """The commands that register everything."""
        return [*self.tenants, *self.storages, *self.groups, *(each.command for each in self.deployments)]

    @staticmethod
    def publication(routers: Random, instance: str) -> Publication | None:
        """How an instance is announced, if it is; now and then in a group that others may be in."""
        group = routers.choice(("", "", "shared"))
        entries_max = routers.choice((2, 4, 8, 100))
        if routers.random() < 0.2:
            return None
        return Publication(f"model-{instance}", group, entries_max=entries_max)

    def tokens(self, deployment: Deployment, keys: list[bytes]) -> list[bytes]:
        """The packed ids of these blocks: of a key always the same."""
        count = deployment.command.fingerprint.block_size_tokens
        rows = []
        for key in keys:
            name = key.rstrip(b".").decode()
            ids = [ord(name) * 300 + at for at in range(count)]
            rows.append(b"" if name in self.tokenless else pack_tokens(ids))
        return rows

    def kind(self, storage: str) -> str:
        """The kind of a storage."""
        return "shm" if storage == self.volatile else "posix"

    @staticmethod
    def maybe(rng: Random, low: int, high: int) -> int | None:
        """A limit, or none."""
        return rng.randint(low, high) if rng.random() < 0.5 else None

    def quota(self, rng: Random, low: int, high: int) -> Quota:
        """A quota of so many blocks, give or take, or none."""
        blocks = self.maybe(rng, low, high)
        size_bytes = self.maybe(rng, 15 * low, 25 * high)
        return Quota(bytes=size_bytes, blocks=blocks)

    def group(self, rng: Random, name: str, tenant: str, storages: tuple[str, ...]) -> PutGroup:
        """An instance group with some policy."""
        low = rng.choice((300, 600, 900, 1000))
        return PutGroup(
            group=name,
            tenant=tenant,
            storages=storages,
            quota=self.quota(rng, 5, 12),
            high_permille=rng.choice((low, 1000)),
            low_permille=low,
            eviction=EvictionPolicy.reject if rng.random() < 0.2 else EvictionPolicy.lru,
        )

    def plain(self, rng: Random, name: str, group: str, key_length: int) -> Deployment:
        """Full attention on one or two ranks."""
        parts = tuple(Part(f"tp{rank}", 10) for rank in range(rng.choice((1, 2))))
        fingerprint = Fingerprint("m", "1", "bf16", 16, key_length, "sha256", "0", parts)
        command = PutInstance(
            instance=name, group=group, fingerprint=fingerprint, quota=self.quota(rng, 4, 9)
        )
        return Deployment(command, ("full",))

    def hybrid(self, rng: Random, name: str, group: str, key_length: int) -> Deployment:
        """Full attention on two ranks, a sliding window and a state."""
        parts = (Part("tp0", 8), Part("tp1", 8), Part("w", 5, "swa"), Part("m", 12, "mamba"))
        groups = (
            AttentionGroup("full"),
            AttentionGroup("swa", GroupKind.sliding_window, 2),
            AttentionGroup("mamba", GroupKind.state),
        )
        fingerprint = Fingerprint("h", "1", "fp8", 16, key_length, "sha256", "0", parts, groups)
        command = PutInstance(
            instance=name, group=group, fingerprint=fingerprint, quota=self.quota(rng, 6, 14)
        )
        return Deployment(command, ("full", "swa", "mamba"))
