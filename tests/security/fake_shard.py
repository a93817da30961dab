"""A replica that knows nothing and answers at once: what guards keep out, and where requests are passed
on to, has nothing to do with the rules of its shards.
"""

import asyncio
from array import array
from types import SimpleNamespace
from typing import Any

import msgspec

from metaservice.core import commands, replies, views
from metaservice.core.model import Fingerprint, Limits, Part, Publication, Quota, SwitchMode
from metaservice.core.rejections import Rejection
from metaservice.replica.errors import NotLeader, ShardUnavailable
from metaservice.wire.schemas_cluster import ClusterMember, ClusterReply, ClusterShard

KEY = b"k" * 16
PARTS = (Part("tp0", 1024),)
FINGERPRINT = Fingerprint(
    model="m",
    revision="",
    kv_dtype="bf16",
    block_size_tokens=16,
    key_length=16,
    hash_scheme="x",
    hash_seed="",
    parts=PARTS,
)
STORAGE = SimpleNamespace(name="s1", kind="posix", options={"root": "/s1"}, volatile=False, pool="")
UNKNOWN_MS = 1 << 53


class FakeCluster:
    """Who leads which shard, where replicas are, and which instance lives in which shard; changed by hand."""

    def __init__(self, shards: int = 1) -> None:
        self.shards = shards
        self.leaders: dict[int, str] = dict.fromkeys(range(shards), "r1")
        self.urls: dict[str, str] = {}
        self.homes = {f"m{number}": number % shards for number in range(max(shards, 2))}


class FakeShard:
    """Every lookup is a full hit; every command is done after `delay_s`. `asked` has every command that
    was answered as the leader, `looked` those answered as a follower.
    """

    def __init__(self, replica: "FakeReplica", number: int) -> None:
        self.number = number
        self.epoch = 1
        self.durable_seq = 1
        self.status = "leading"
        self.reason = "epoch 1"
        self.delay_s = 0.0
        self.behind_ms = UNKNOWN_MS
        self.tasks: list[replies.Task] = []
        self.asked: list[commands.Command] = []
        self.looked: list[commands.Command] = []
        self.rejects: list[Rejection] = []
        """What is answered to the next reads and commands, once each."""
        self.switch: replies.Switched | None = None
        self.publication: Publication | None = None
        self._replica = replica

    @property
    def ready(self) -> bool:
        return self._replica.leads(self.number)

    @property
    def role(self) -> str:
        return "leader" if self.ready else "follower"

    @property
    def staleness_ms(self) -> int:
        return 0 if self.ready else self.behind_ms

    def _lead(self, command: commands.Command) -> None:
        if not self.ready:
            raise NotLeader(self.number, "led elsewhere", "", self._replica.leader_url(self.number))
        self.asked.append(command)

    def instance(self, name: str) -> Any:
        if name not in self._replica.known:
            return None
        return SimpleNamespace(
            key_length=16, groups={"full": SimpleNamespace(parts=PARTS)}, fingerprint=FINGERPRINT
        )

    def storage(self, number: int) -> Any:
        return STORAGE

    def read(self, command: commands.Command) -> Any:
        self._lead(command)
        if self.rejects:
            return self.rejects.pop(0)
        if isinstance(command, commands.Lookup):
            return found(command)
        if isinstance(command, commands.TakeTasks):
            tasks, self.tasks = self.tasks[:1], self.tasks[1:]
            return replies.Tasks(tasks)
        if isinstance(command, commands.RenewLeases | commands.ReleaseLeases):
            if "r-0-1-666" in command.leases:
                raise RuntimeError("a planted fault")
            outcome = isinstance(command, commands.ReleaseLeases)
            count = len(command.leases)
            return replies.LeasesAnswered(
                command.leases, bytes([outcome]) * count, array("I", [self.number]) * count, 1000
            )
        if isinstance(command, commands.Unknown):
            return replies.UnknownPlaces(bytes([1]) * len(command.locations))
        return replies.Beat("active")

    def look(self, command: commands.Lookup) -> Any:
        if self.behind_ms == UNKNOWN_MS and not self.ready:
            raise ShardUnavailable("not_ready", "there is no state")
        self.looked.append(command)
        return found(command)

    async def submit(self, command: commands.Command) -> Any:
        self._lead(command)
        await asyncio.sleep(self.delay_s)
        if self.rejects:
            return self.rejects.pop(0)
        self.durable_seq += 1
        if isinstance(command, commands.StartWrite):
            count = len(command.keys)
            return replies.Started(
                7, 1000, "full", bytes(count), bytes(count), array("Q", range(count)),
                array("I", [1]) * count, array("H", [0]) * count, array("I", [0]) * count,
            )  # fmt: skip
        if isinstance(command, commands.ConfirmTask):
            return replies.Confirmed(1, 0)
        if isinstance(command, commands.Finish):
            return replies.Finished(bytes(len(command.locations)), len(command.locations), 0)
        if isinstance(command, commands.RenewWrite):
            return replies.Renewed(1)
        return replies.Done(True)

    async def take_tasks(self, command: commands.TakeTasks, wait_ms: int) -> Any:
        self._lead(command)
        await asyncio.sleep(wait_ms / 1000)
        return replies.Tasks([])

    async def watch_switch(self, instance: str, known: SwitchMode | None, wait_ms: int) -> Any:
        self._lead(commands.Heartbeat(kind="engine", id=instance, incarnation=""))
        mode = SwitchMode.normal if self.switch is None else self.switch.mode
        if mode is known:
            await asyncio.sleep(wait_ms / 1000)
        return self.switch

    def describe(self, kind: str, after: str = "", limit: int | None = None) -> list[Any]:
        return []

    def gauges(self) -> dict[str, float]:
        return {}

    def usages(self, kind: str) -> list[tuple[str, tuple[int, int, int, int]]]:
        return []

    def describe_one(self, kind: str, id: str) -> Any:
        if kind == "instances" and id in self._replica.known:
            return views.InstanceView(
                id, "chat", "acme", FINGERPRINT, Quota(), SwitchMode.normal, None, False, replies.Usage(0, 0),
                self.number, self.publication, 7,
            )  # fmt: skip
        return STORAGE if kind == "storages" else None

    def block(self, instance: str, group: str | None, key: bytes) -> Any:
        return replies.Done()


class FakeReplica:
    """One replica of a FakeCluster; alone it leads everything. `known` are the instances in its copy of
    the catalogue, `learns` those that a refresh adds.
    """

    limits = Limits()
    cluster = "c1"

    def __init__(self, cluster: FakeCluster | None = None, id: str = "r1") -> None:
        self.id = id
        self.fleet = cluster or FakeCluster()
        self.shards = self.fleet.shards
        self.ready = True
        self.status = "leading"
        self.reason = "answering everybody"
        self.known = set(self.fleet.homes)
        self.learns: set[str] = set()
        self.refreshed = 0
        self.waited_ms: list[int] = []
        self.handed: list[tuple[int, str]] = []
        self.settled: list[bytes] = []
        self._shards = [FakeShard(self, number) for number in range(self.shards)]

    @property
    def url(self) -> str:
        return self.fleet.urls.get(self.id, "http://127.0.0.1:1")

    def shard(self, number: int) -> FakeShard:
        return self._shards[number]

    def home(self, instance: str) -> int | None:
        return self.fleet.homes.get(instance) if instance in self.known else None

    def leads(self, number: int) -> bool:
        return self.fleet.leaders.get(number) == self.id

    def leader_url(self, number: int) -> str:
        return self.fleet.urls.get(self.fleet.leaders.get(number, ""), "")

    async def await_leader(self, number: int, wait_ms: int) -> str:
        self.waited_ms.append(wait_ms)
        for _ in range(wait_ms // 5):
            if url := self.leader_url(number):
                return url
            await asyncio.sleep(0.005)
        return ""

    async def refresh(self) -> bool:
        self.refreshed += 1
        learned = bool(self.learns - self.known)
        self.known |= self.learns
        return learned

    async def handover(self, number: int, to: str = "") -> str:
        if not self.leads(number):
            raise NotLeader(number, "led elsewhere")
        self.handed.append((number, to))
        return to or "r2"

    async def settle(self, errands: bytes) -> bytes:
        if not self.leads(0):
            raise NotLeader(0, "led elsewhere")
        if not errands.startswith(b"\x80"):
            raise ValueError("these are no errands")
        self.settled.append(errands)
        return b"\x81\xa2ok\xc3"

    def gauges(self) -> dict[str, float]:
        return {}

    def cluster_status(self) -> dict[str, Any]:
        members = [ClusterMember(replica=id, url=url, ready=True) for id, url in self.fleet.urls.items()]
        shards = [
            ClusterShard(
                shard=number, role="leader" if self.leads(number) else "follower", status="", reason="",
                ready=self.ready, leader=leader, leader_url=self.leader_url(number), epoch=1, seq=1,
            )
            for number, leader in self.fleet.leaders.items()
        ]  # fmt: skip
        told = ClusterReply(
            replica=self.id, url=self.url, cluster=self.cluster, status=self.status, reason=self.reason,
            ready=self.ready, members=members, shards=shards,
        )  # fmt: skip
        return dict(msgspec.to_builtins(told))


def found(command: commands.Lookup) -> replies.Looked:
    """A hit for every key."""
    count = len(command.keys)
    places = replies.Located(
        array("Q", range(count)), array("I", [1]) * count, array("H", [0]) * count, bytes(8 * count)
    )
    return replies.Looked(
        command.mode, count, count, 0, "none", count, "full", located=places, state_group=""
    )
