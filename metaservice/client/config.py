"""How a client behaves, checked when it is made."""

from typing import Literal
from urllib.parse import urlsplit

from msgspec import Struct

Urls = str | tuple[str, ...]
"""One URL, several in a tuple, or several with commas between them."""

Keepalive = Literal["thread", "process"]
"""Who renews in the background: a daemon thread of this process, or a child process, which also goes on
while this process holds the interpreter lock for long."""


class ClientConfig(Struct, frozen=True, kw_only=True):
    """All durations in ms. Raises ValueError naming the field that cannot be.

    `timeout_ms` bounds each call as a whole. `raise_errors`: failures are raised as ClientError; engines
    leave it off.
    """

    url: Urls = "http://127.0.0.1:8600"
    """Where the service is; of several replicas any one will do, and each more is a way round those that
    are gone."""
    timeout_ms: int = 1_000
    retry_ms: int = 0
    """A write that nobody took is tried again, after pauses, until so long after the call began: writers
    then see a fail-over as a slow call. Such a call lasts at most the longer of this and its deadline. 0:
    not tried again. Lookups never are."""
    admin_timeout_ms: int = 10_000
    raise_errors: bool = False

    connections_max: int = 64
    """At most so many connections, and calls at once, to each replica; further callers wait for one within
    their own deadline."""
    idle_ms_max: int = 20_000
    """A connection that rested longer is not used again."""
    reply_size_max_bytes: int = 32 * 1024 * 1024

    breaker_failures: int = 5
    """After so many calls in a row that failed or were slow, the client stops calling for a pause."""
    breaker_slow_ms: int = 500
    """A call that took longer counts as a failure for the breaker; its result is used all the same."""
    breaker_pause_ms_min: int = 250
    breaker_pause_ms_max: int = 5_000
    """The pause doubles from min to max while probes fail; each is drawn from its upper half."""
    retry_after_ms_max: int = 10_000
    """A longer `Retry-After` of the service is cut to this, so that nobody can switch the cache off for
    a day."""

    keepalive: Keepalive = "thread"
    """Who renews leases when nothing was registered. Registrations choose for themselves."""
    keep_ms_max: int = 600_000
    """A lease or write session is renewed in the background no longer than this: what was forgotten ends
    by itself."""

    def __post_init__(self) -> None:
        if not self.urls:
            raise ValueError("url: none")
        for url in self.urls:
            address_of(url)
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if type(value) is int and value < (field != "retry_ms"):
                raise ValueError(f"{field}: {value} is not positive")
        if self.breaker_pause_ms_min > self.breaker_pause_ms_max:
            raise ValueError("breaker_pause_ms_min: larger than breaker_pause_ms_max")
        if self.keepalive not in ("thread", "process"):
            raise ValueError(f"keepalive: expected 'thread' or 'process', got {self.keepalive!r}")

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs, each once, without a slash at their end."""
        urls = self.url.split(",") if isinstance(self.url, str) else self.url
        return tuple(dict.fromkeys(url.strip().rstrip("/") for url in urls if url.strip()))


def address_of(url: str) -> tuple[str, int, str]:
    """(host, port, path before `/v1`) of a URL of the service. Raises ValueError when it is none."""
    split = urlsplit(url)
    if split.scheme != "http" or not split.hostname or split.query or split.fragment or split.username:
        raise ValueError(f"url: expected http://host[:port][/path], got {url!r}")
    if any(ord(letter) <= 32 or ord(letter) > 126 for letter in url):
        raise ValueError("url: only printable ASCII characters")
    return split.hostname, split.port or 80, split.path.rstrip("/")
