"""What the publisher of cache events is configured with."""

import ipaddress

from msgspec import Struct

CHANNELS_MAX = 1_000
"""Streams that are served at most: two ports and two sockets each."""
PORT_MAX = 65_535


class PublishRefused(Exception):
    """Events cannot be published with these settings. The message says what to change."""


class PublishConfig(Struct, frozen=True, kw_only=True):
    """Everything that the publisher process is told at its start. `check` says what is wrong with it."""

    port_base: int
    """A stream with channel number c is published at `port_base + 2*c`; its replays are asked for at the port
    after."""
    host: str = "127.0.0.1"
    """The address to bind to, no name; `*` is every one."""
    advertise: str = ""
    """The host that consumers are told to connect to ("": `host`)."""
    shared_address: bool = False
    """Whether the replicas share one address, behind a name that follows the leader: then the ports for
    replays too are open only while this replica leads. Otherwise those are always open, since a consumer that
    reconnects only at a failover loses seconds."""
    channels_max: int = CHANNELS_MAX
    """Streams with a higher channel number are not served, and counted."""
    ring_windows: int = 10_000
    """Windows a shard that are kept for replays; what is asked for further back is told as a snapshot."""
    ring_bytes_max: int = 256 * 1024 * 1024
    """And at most so many bytes of them, all shards together."""
    subscriber_hwm: int = 1_000
    """Batches that may wait for one subscriber: one that is slower loses the next ones, and asks for a
    replay."""
    curve_secret: str = ""
    """File with the server's CURVE key pair ("": streams are neither encrypted nor restricted)."""
    curve_clients: dict[str, str] = {}
    """Who may subscribe: CURVE public key (Z85, 40 characters) -> the tenant whose instances it may see, or
    `*`."""
    allow_plain: bool = False
    """Whether to publish unencrypted where other machines reach it: a trusted network. Neither Dynamo nor
    llm-d knows encryption."""
    attachments: tuple[str, ...] = ()
    """Consumers that are attached by us: a row each, of a kind and its options."""
    ingest: bool = True
    """Whether to follow the engines' own event streams."""

    def port(self, channel: int) -> int:
        """Where a stream is published; one above is where its replays are asked for."""
        return self.port_base + 2 * channel

    @property
    def public_host(self) -> str:
        """The host that consumers are told."""
        return self.advertise or self.host

    def check(self) -> None:
        """Raises PublishRefused. What a key file says is looked at when the publisher starts."""
        if not 1 <= self.port_base <= PORT_MAX:
            raise PublishRefused(f"port_base is {self.port_base}, not in 1..{PORT_MAX}")
        if not 1 <= self.channels_max <= CHANNELS_MAX:
            raise PublishRefused(f"channels_max is {self.channels_max}, not in 1..{CHANNELS_MAX}")
        last = self.port(self.channels_max - 1) + 1
        if last > PORT_MAX:
            raise PublishRefused(
                f"{self.channels_max} channels from port {self.port_base} on would need ports up to {last}: "
                "lower port_base or channels_max"
            )
        if self.ring_windows < 1 or self.ring_bytes_max < 1 or self.subscriber_hwm < 1:
            raise PublishRefused("ring_windows, ring_bytes_max and subscriber_hwm are at least 1")
        if self.host == "*" and not self.advertise:
            raise PublishRefused(
                "with host '*' consumers have to be told a host to connect to: set advertise"
            )
        if not self.curve_secret and not self.allow_plain and not is_loopback(self.host):
            raise PublishRefused(
                f"{self.host} can be reached from other machines, and cache events say what everybody asks: "
                "set curve_secret and curve_clients, or allow_plain in a trusted network"
            )
        if self.curve_clients and not self.curve_secret:
            raise PublishRefused("curve_clients without curve_secret would let everybody in: set both")
        if self.curve_secret and not self.curve_clients:
            raise PublishRefused("curve_secret without curve_clients would let nobody in: set both")
        for key in self.curve_clients:
            if len(key) != 40 or not key.isascii():
                raise PublishRefused(f"curve_clients: {key!r} is no CURVE public key (40 characters, Z85)")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there. A name could be anything: it does not count."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
