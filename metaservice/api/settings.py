"""Every bound of the HTTP side, in one place, with its unit in its name.

A bound is never absent: a connection, a byte or a request beyond its limit is refused with a typed problem,
so that a hostile or broken client costs a known amount of memory and time and no more.
"""

from msgspec import Struct


class ApiSettings(Struct, frozen=True, kw_only=True):
    """Limits of connections, requests and time.

    All are checked when the struct is made: `ValueError` names the field.
    """

    header_bytes_max: int = 16_384
    """Request line and all headers together; trailers too."""
    headers_max: int = 64
    header_timeout_ms: int = 5_000
    """From a connection's (or request's) first moment to the end of its head."""
    body_bytes_max: int = 8 * 1024 * 1024
    body_timeout_ms: int = 10_000
    """From the end of the head to the end of the body."""
    buffered_bytes_max: int = 128 * 1024 * 1024
    """Bodies of all connections that have not been answered yet."""
    idle_timeout_ms: int = 75_000
    """A kept-alive connection without a request."""
    response_timeout_ms: int = 15_000
    """How long a client may refuse to read its answer."""
    request_timeout_ms: int = 30_000
    """How long one request may be worked on (a long poll: besides its wait)."""
    linger_ms: int = 1_000
    """After a refusal the rest of what the client sends is thrown away for so long, else it might not see the
    answer.
    """
    connections_max: int = 2_048
    requests_max: int = 1_024
    """Requests being worked on at once, over all connections."""
    long_polls_max: int = 512
    """Long polls waiting at once; one more is answered at once with what there is."""
    pipelined_max: int = 8
    """Requests of one connection that wait behind the one being answered."""
    retry_after_ms: int = 1_000
    """What an overloaded service asks clients to wait, before jitter."""
    sweep_ms: int = 250
    """How often deadlines of connections are checked; also their resolution."""
    drain_delay_ms: int = 0
    """On shutdown: how long requests are still taken after readiness fell, so that balancers notice."""
    graceful_timeout_ms: int = 5_000
    """On shutdown: how long requests in progress may take before they are cut."""
    leader_wait_ms: int = 1_000
    """How long a request waits for a shard's leader to be known, before it is told to come again."""
    forward_connect_ms: int = 500
    forward_timeout_ms: int = 5_000
    """How long another replica may take for a request that was passed on (a long poll: besides its wait)."""
    forwards_max: int = 256
    """Requests passed on and not answered yet, or waiting for a leader to be known. Never more than half of
    `requests_max`, so that probes and what is led here get through.
    """
    forwarded_bytes_max: int = 64 * 1024 * 1024
    """The largest answer that is passed back."""
    staleness_ms_max: int = 5_000
    """A follower's state that is older answers nobody, whatever the caller allows: bytes may be deleted that
    it still names.
    """
    events_timeout_ms: int = 1_000
    """How long the publisher of cache events may take for an answer."""
    events_asks_max: int = 128
    """Questions to the publisher that were not answered yet: it must not hold up what does not need it."""
    backlog: int = 1_024
    page_size_max: int = 1_000
    uri_rows_per_slice: int = 1_024
    """Rows of `uris` built between two turns of the event loop, so that a large JSON answer holds nobody up.
    """

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            least = 0 if name == "drain_delay_ms" else 1
            if value < least:
                raise ValueError(f"{name} is {value}; it has to be at least {least}")
        if self.buffered_bytes_max < self.body_bytes_max:
            raise ValueError(
                f"buffered_bytes_max ({self.buffered_bytes_max}) is below body_bytes_max "
                f"({self.body_bytes_max}): the largest allowed body could never be received"
            )
