"""Where the service's streams of cache events for this engine are, replica by replica."""

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from engine_adapters.vllm.pool_stream import StreamAt
from engine_adapters.vllm.settings import Settings
from metaservice.client import Client, ClientConfig, ClientError
from metaservice.wire.schemas_events import EventsReply, StreamView

log = logging.getLogger(__name__)

REPLICAS_MAX = 16


def named(endpoints: list[str]) -> list[StreamAt]:
    """Streams by the endpoints that an operator named."""
    return [StreamAt(one, b"", (one,), (port_behind(one),)) for one in endpoints]


def port_behind(endpoint: str) -> str:
    """Where the replays of the stream at `endpoint` are."""
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + 1}"


class StreamFinder:
    """Asks every replica, since each sends from an address of its own while it leads. One thread's."""

    def __init__(self, settings: Settings, engine: str, instance: Callable[[], str | None]) -> None:
        """`instance`: the one that the engine is registered with now."""
        self._settings = settings
        self._engine = engine
        self._instance = instance
        self._clients: dict[str, Client] = {}
        self._heard: dict[str, EventsReply] = {}
        """By replica's URL: what it said last of `_of`."""
        self._of = ""
        self._members: list[str] = []
        self._trouble = ""

    def __call__(self) -> list[StreamAt] | None:
        """The streams; None when nobody knows now. Waits for the service."""
        instance = self._instance()
        if not instance:
            return None
        if instance != self._of:
            self._of, self._heard = instance, {}
        answered = False
        urls = self._urls()
        self._heard = {url: self._heard[url] for url in urls if url in self._heard}
        for url in urls:
            reply = self._asked(url, instance)
            if reply is not None:
                self._heard[url] = reply
                answered = True
        return self._streams() if answered else None

    def close(self) -> None:
        """Let go of the connections."""
        for client in self._clients.values():
            client.close(cut=True)

    def _urls(self) -> list[str]:
        """Those that an operator named, and those that they know."""
        told = [url.strip() for url in self._settings.url.split(",") if url.strip()]
        known = self._client(self._settings.url).cluster().members
        self._members = [member.url for member in known] or self._members
        return list(dict.fromkeys([*self._members, *told]))[:REPLICAS_MAX]

    def _client(self, url: str) -> Client:
        if url not in self._clients:
            patience_ms = self._settings.timeout_ms
            config = ClientConfig(url=url, timeout_ms=patience_ms, admin_timeout_ms=patience_ms)
            self._clients[url] = Client(config)
        return self._clients[url]

    def _asked(self, url: str, instance: str) -> EventsReply | None:
        try:
            told: Any = self._client(url).get_json(f"/v1/events?instance={instance}")
            return msgspec.convert(told, EventsReply)
        except (ClientError, msgspec.ValidationError) as error:
            if str(error) != self._trouble:
                log.warning("pool_events: %s does not say where its streams are: %s", url, error)
            self._trouble = str(error)
            return None

    def _streams(self) -> list[StreamAt] | None:
        """What all said together: of each of our channels, where every replica has it, the leader first."""
        channels = {
            channel
            for reply in self._heard.values()
            for engine in reply.engines
            if engine.engine == self._engine
            for channel in (engine.pool_channel, engine.local_channel)
            if channel >= 0
        }
        found = []
        for channel in sorted(channels):
            views: list[StreamView] = [
                view
                for reply in self._heard.values()
                for view in reply.streams
                if view.channel == channel and view.kind == "shared" and view.endpoint
            ]
            views.sort(key=lambda view: not view.live)
            if views:
                found.append(
                    StreamAt(
                        f"{self._of}/{channel}",
                        views[0].topic.encode(),
                        tuple(dict.fromkeys(view.endpoint for view in views)),
                        tuple(dict.fromkeys(view.replay for view in views if view.replay)),
                    )
                )
        return found or None
