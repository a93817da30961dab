"""What the API needs of the replica behind it, and of each shard that the replica has: reads answered inline,
commands answered when they are durable, views for people.

Leadership is the replica's business. The API learns of it by `NotLeader` alone: a shard raises it when this
replica does not lead it, and only when the call certainly had no effect, so that it may be passed on.
"""

from typing import Any, Protocol

from msgspec import Struct

from metaservice.core import commands, replies
from metaservice.core.model import Fingerprint, Limits, Part, SwitchMode
from metaservice.core.rejections import Rejection

CATALOGUE = 0
"""The shard in which everything is registered, and heartbeats are counted."""


class GroupInfo(Protocol):
    """One attention group of an instance."""

    @property
    def parts(self) -> tuple[Part, ...]: ...


class InstanceInfo(Protocol):
    """A registered instance, as far as its requests have to be read."""

    @property
    def fingerprint(self) -> Fingerprint: ...
    @property
    def key_length(self) -> int: ...
    @property
    def groups(self) -> "dict[str, Any]": ...


class StorageView(Protocol):
    """A registered storage."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def options(self) -> dict[str, str]: ...


class ShardPort(Protocol):
    """One shard, led or followed here.

    `read`, `submit`, `take_tasks` and `watch_switch` are for the leader: elsewhere they raise NotLeader when
    the call certainly had no effect, and another ShardUnavailable when it may have had one or the shard
    cannot serve now. Views and `look` answer from the state that this replica has, in every role, and raise
    ShardUnavailable when it has none.
    """

    @property
    def number(self) -> int: ...
    @property
    def epoch(self) -> int:
        """Of the state that it has now, 0 without one. Never raises."""
        ...

    @property
    def durable_seq(self) -> int:
        """The journal position of that state: durable on the leader, applied on a follower. Never raises."""
        ...

    @property
    def staleness_ms(self) -> int:
        """How old a view from here may be: 0 on the leader. Never raises."""
        ...

    @property
    def role(self) -> str:
        """`follower`, `promoting`, `leader` or `demoting`."""
        ...

    @property
    def ready(self) -> bool:
        """Whether it leads and may answer."""
        ...

    @property
    def status(self) -> str: ...
    @property
    def reason(self) -> str: ...
    def read(self, command: commands.Command) -> Any: ...
    async def submit(self, command: commands.Command) -> Any: ...
    async def take_tasks(self, command: commands.TakeTasks, wait_ms: int) -> replies.Tasks | Rejection: ...
    async def watch_switch(
        self, instance: str, known: SwitchMode | None, wait_ms: int
    ) -> replies.Switched | Rejection | None:
        """The strictest switch on the instance (None: normal): at once when its mode is not `known`, else
        when it changes, or after `wait_ms`. Raises NotLeader as soon as it does not lead any more.
        """
        ...

    def look(self, command: commands.Lookup) -> Any:
        """A lookup in durable state only: without lease and without a trace in anybody's recency."""
        ...

    def instance(self, name: str) -> Any:
        """InstanceInfo, None when this state has none of the name."""
        ...

    def storage(self, number: int) -> Any:
        """StorageView. LookupError: there is none of this number."""
        ...

    def describe(self, kind: str, after: str = "", limit: int | None = None) -> list[Any]: ...
    def describe_one(self, kind: str, id: str) -> Struct | None: ...
    def usages(self, kind: str) -> "list[tuple[str, tuple[int, int, int, int]]]": ...
    def block(self, instance: str, group: str | None, key: bytes) -> replies.BlockDetail | Rejection: ...


class ReplicaPort(Protocol):
    """The replica behind this API, with every shard of the cluster. Properties never raise."""

    @property
    def id(self) -> str: ...
    @property
    def url(self) -> str:
        """Where others reach this replica."""
        ...

    @property
    def shards(self) -> int:
        """How many there are, numbered from 0; it never changes."""
        ...

    @property
    def limits(self) -> Limits: ...
    @property
    def cluster(self) -> str:
        """The cluster's id, '' while it is not known."""
        ...

    @property
    def ready(self) -> bool:
        """Whether it may be sent requests: everything is loaded, whoever leads."""
        ...

    @property
    def status(self) -> str: ...
    @property
    def reason(self) -> str:
        """Why it is in that status, in a sentence."""
        ...

    def shard(self, number: int) -> ShardPort:
        """The shard of that number (0 to shards - 1): the same object for the replica's whole life."""
        ...

    def home(self, instance: str) -> int | None:
        """The shard of an instance by this replica's copy of the catalogue; None: no such instance there.
        Never raises, asks nobody.
        """
        ...

    def leads(self, number: int) -> bool: ...
    def leader_url(self, number: int) -> str:
        """Where the leader of a shard is, as far as known; '' when it is not."""
        ...

    async def await_leader(self, number: int, wait_ms: int) -> str:
        """`leader_url` once it is known, '' when it is not within `wait_ms`. Raises ShardUnavailable when too
        many wait.
        """
        ...

    async def refresh(self) -> bool:
        """Catch up with the catalogue's journal; whether anything was learned. Calls that come meanwhile
        share one. Raises ShardUnavailable when the journal cannot be asked.
        """
        ...

    async def handover(self, number: int, to: str = "") -> str:
        """Give a shard that is led here to `to` ('': whom the replica chooses); the id of the successor.
        Raises NotLeader, or ShardUnavailable when it cannot be given.
        """
        ...

    async def settle(self, errands: bytes) -> bytes:
        """What a data shard's leader has to tell the catalogue's (msgpack both ways). Raises NotLeader or
        ShardUnavailable, and msgspec.MsgspecError or ValueError for bytes that are no errands.
        """
        ...

    def gauges(self) -> dict[str, float]:
        """Numbers of now over all shards, for a scrape. Never raises."""
        ...

    def cluster_status(self) -> dict[str, Any]:
        """What GET /v1/cluster shows, as `wire.schemas_cluster.ClusterReply` describes it. Never raises."""
        ...


class EventsPort(Protocol):
    """The process that publishes this replica's cache events, and knows what engines hold."""

    async def ask(self, what: str, body: bytes, timeout_ms: int) -> bytes:
        """The answer to `route` (RouteAsk: RouteAnswer), `report` (ReportAsk: ReportReply) or `status`
        (EventsRequest: EventsReply), msgpack of `wire.schemas_events` both ways. Raises PublisherUnavailable.
        """
        ...
