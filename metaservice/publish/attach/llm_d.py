"""`llm-d`: the streams as its endpoint picker takes them, which binds a socket and waits for publishers.

It knows a pod by the topic, `kv@ip:port@model`, so each engine that registered its address gets a copy of
what its streams say, under a topic of its own. It asks for no replays in this mode: whatever it may have
missed (it was started anew, or took too long) is told again by the leader.
"""

import struct
from collections import Counter
from collections.abc import Sequence

import zmq

from metaservice.core.windows import Window
from metaservice.publish.attach.names import metric
from metaservice.publish.attach.rows import Row
from metaservice.publish.emitters.port import Stream
from metaservice.publish.feed import EngineUp
from metaservice.publish.plan import topic as topic_of
from metaservice.publish.sockets import Socket, Watched
from metaservice.publish.view import View
from metaservice.wire.schemas_events import AttachmentView, StreamView

AGAIN_S = 5.0
"""A consumer that comes and goes does not have everything told again more often."""
ALONE_S = 10.0
KEEPALIVE_S = 30
_SEQ = struct.Struct(">Q")
Pod = tuple[str, str]
"""Its address, and the instance it uses."""


class Link:
    """One endpoint picker. It subscribes when it is there, which is how its start is seen."""

    def __init__(self, view: View, endpoint: str, queue: int) -> None:
        self._view = view
        self._queue = queue
        self._watched: Watched | None = None
        self._monitor: Watched | None = None
        self._alone_s = 0.0
        self.endpoint = endpoint
        self.topics = 0
        """Subscriptions that it holds now."""
        self.joined = False
        """It has to be told everything."""
        self.behind = False
        """Something was dropped since it was last told everything."""
        self.sent = 0
        self.dropped = 0

    def open(self) -> None:
        """Connect. It need not be there."""
        socket = self._socket(zmq.XPUB)
        socket.setsockopt(zmq.SNDHWM, self._queue)
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        socket.setsockopt(zmq.XPUB_NODROP, 1)  # what does not fit is seen, and told again
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
        place = f"inproc://{id(socket)}"
        socket.monitor(place, zmq.EVENT_DISCONNECTED)
        monitor = self._socket(zmq.PAIR)
        monitor.connect(place)
        socket.connect(self.endpoint)
        self._watched = Watched(socket, self._heard)
        self._monitor = Watched(monitor, self._gone)
        self._alone_s = self._view.now_s()

    def close(self) -> None:
        """Disconnect; what is queued is dropped, since somebody else sends now."""
        if self._watched is not None and self._monitor is not None:
            self._watched.socket.monitor(None, 0)
            self._monitor.close()
            self._watched.close()
            self._watched = self._monitor = None
        self.topics = 0
        self.joined = self.behind = False

    def tend(self) -> None:
        """Begin anew when nobody was there for long: a connection that ended with an error of the protocol is
        never made again by ZeroMQ itself."""
        if self._watched is None or self.topics:
            self._alone_s = self._view.now_s()
        elif self._view.now_s() - self._alone_s > ALONE_S:
            self.close()
            self.open()

    def send(self, topic: bytes, number: int, payload: bytes) -> None:
        """Queue one batch; one that does not fit is dropped and counted."""
        if self._watched is None or not self.topics:
            return
        try:
            self._watched.socket.send_multipart((topic, _SEQ.pack(number), payload), zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += 1
            self.behind = True
        else:
            self.sent += 1
            if self.behind:
                self.behind, self.joined = False, True
        self._watched.look()

    def _socket(self, kind: int) -> Socket:
        socket: Socket = zmq.Context.socket(self._view.context, kind, socket_class=zmq.Socket)
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    def _heard(self, message: Sequence[bytes]) -> None:
        """A subscription, or the end of one."""
        begins = message[0][:1] == b"\x01"
        self.topics = max(0, self.topics + (1 if begins else -1))
        self.joined = self.joined or begins

    def _gone(self, message: Sequence[bytes]) -> None:
        """The connection ended; if it is made again, the subscriptions come again too."""
        self.topics = 0


class LlmD:
    """Options: `endpoint` (of the pickers, several parted by `;`); `model`, `instance` (only the engines of
    these); `queue` (batches that may wait for a picker)."""

    def __init__(self, row: Row, view: View) -> None:
        self._row = row
        self._view = view
        self._links = [Link(view, one, row.number("queue")) for one in row.several("endpoint")]
        self._leads: set[int] = set()
        self._known: dict[Pod, EngineUp] = {}
        """Those that the pickers were told of, each by the engine whose streams it is told."""
        self._told_s = -AGAIN_S
        self._owed: set[str] = set()
        """Instances that have to be told again, "" for all."""
        self._counts: Counter[str] = Counter(restatements=0)

    @property
    def name(self) -> str:
        """Kind and endpoints, and what it is limited to."""
        limits = [f"{name}={value}" for name in ("model", "instance") if (value := self._row.text(name))]
        return " ".join((self._row.kind, ";".join(link.endpoint for link in self._links), *limits))

    async def start(self) -> None:
        """Connects once this replica leads."""

    async def close(self) -> None:
        """Disconnect."""
        for link in self._links:
            link.close()

    def leads(self, shard: int, leads: bool) -> None:
        """Only who leads is connected: so a picker's subscription at its new leader is seen, and answered
        with everything."""
        before = bool(self._leads)
        (self._leads.add if leads else self._leads.discard)(shard)
        if bool(self._leads) == before:
            return
        for link in self._links:
            if leads:
                link.open()
            else:
                link.close()
        self._known = self._pods()

    def changed(self) -> None:
        """A pod that is new is told all that its instance has."""
        if not self._leads:
            return
        pods = self._pods()
        for pod, engine in pods.items():
            if self._channels(self._known.get(pod)) != self._channels(engine):
                self._owed.add(engine.instance)
        for pod in self._known.keys() - pods.keys():
            self._farewell(self._known[pod])
        self._known = pods

    def window(self, shard: int, window: Window) -> None:
        """Each pod of the shard is told what its streams said."""
        if shard not in self._leads:
            return
        made: dict[tuple[int, int], bytes] = {}
        for engine in self._known.values():
            if engine.shard != shard:
                continue
            channels = self._channels(engine)
            if channels not in made:
                made[channels] = self._payload(channels, window)
            self._send(engine, window.number, made[channels])
        self._catch_up()

    def status(self) -> AttachmentView:
        """`engines`: the pods that are told."""
        away = [link.endpoint for link in self._links if self._leads and not link.topics]
        said = f"nobody subscribes at {', '.join(away)}" if away else ""
        return AttachmentView(
            name=self.name,
            kind=self._row.kind,
            target=";".join(link.endpoint for link in self._links),
            ok=not away,
            detail=said or ("" if self._leads else "another replica leads, and sends"),
            engines=len(self._known) if self._leads else 0,
        )

    def streams(self) -> list[StreamView]:
        """None: nobody but the pickers reads these."""
        return []

    def stats(self) -> dict[str, float]:
        """Gauges and counters."""
        restatements = metric("attachment_restatements_total", attachment=self.name)
        stats = {restatements: float(self._counts["restatements"])}
        for link in self._links:
            values = {"reached": link.topics > 0, "sent_total": link.sent, "dropped_total": link.dropped}
            stats |= {
                metric(f"attachment_{name}", attachment=self.name, endpoint=link.endpoint): float(value)
                for name, value in values.items()
            }
        stats[metric("attachment_engines", attachment=self.name)] = float(len(self._known))
        return stats

    def _pods(self) -> dict[Pod, EngineUp]:
        """Engines with an address, of instances that are minded, of shards that are led here. One an address:
        a picker counts copies of a block without regard to ranks, so one that was told for each would outlive
        its removal."""
        pods: dict[Pod, EngineUp] = {}
        instances = self._view.instances
        for engine in sorted(self._view.engines.values(), key=lambda one: (one.rank, one.engine)):
            instance = instances.get(engine.instance)
            if instance is None or not engine.address or engine.shard not in self._leads:
                continue
            minded = self._row.text("model") in ("", instance.model)
            if minded and self._row.text("instance") in ("", engine.instance):
                pods.setdefault((engine.address, engine.instance), engine)
        return pods

    @staticmethod
    def _channels(engine: EngineUp | None) -> tuple[int, int]:
        return (engine.pool_channel, engine.local_channel) if engine is not None else (-1, -1)

    def _streams(self, channels: tuple[int, int]) -> list[Stream]:
        streams = self._view.streams
        return [streams[channel] for channel in channels if channel in streams]

    def _payload(self, channels: tuple[int, int], window: Window) -> bytes:
        streams = self._streams(channels)
        if not streams:
            return b""
        events = [event for one in streams for event in self._view.events(one.channel, window)]
        return self._view.emitter.payload(streams[0], events, window.now_ms)

    def _send(self, engine: EngineUp, number: int, payload: bytes) -> None:
        instance = self._view.instances.get(engine.instance)
        if instance is None or not payload:
            return
        topic = topic_of(engine.address, instance.model)
        for link in self._links:
            if self._view.may_send(engine.shard):
                link.send(topic, number, payload)

    def _farewell(self, engine: EngineUp) -> None:
        """What a pod that is gone had of us is taken back. Not all of its blocks: those in its own memory are
        its own stream's, and the picker drops a pod that it sees no more."""
        number = self._view.number(engine.shard)
        for stream in self._streams(self._channels(engine)):
            for events in self._view.withdrawal(stream.channel):
                self._send(engine, number, self._view.emitter.payload(stream, events, 0))

    def _catch_up(self) -> None:
        """Ask for what somebody who joined, or lost something, has to be told again."""
        for link in self._links:
            link.tend()
        if any(link.joined for link in self._links):
            self._owed.add("")
            for link in self._links:
                link.joined = False
        if not self._owed or self._view.now_s() - self._told_s < AGAIN_S:
            return
        self._told_s = self._view.now_s()
        instances = self._view.instances
        wanted = {engine.instance for engine in self._known.values() if {"", engine.instance} & self._owed}
        for id in sorted(wanted):
            self._counts["restatements"] += 1
            self._view.restate(instances[id].shard, id, "joined")
        self._owed.clear()
