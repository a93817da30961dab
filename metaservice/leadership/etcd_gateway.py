"""A client of etcd's JSON gateway: as much of it as an elector needs, with a deadline on everything.

One client per member, so that nothing of a call to one that hangs is left behind for the next: on any failure
the member's connections are thrown away. There is no watch: whoever wants news asks again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from metaservice.leadership.addresses import Addresses, Lookup
from metaservice.leadership.errors import LeadershipRefused
from metaservice.leadership.etcd_messages import (
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    NOT_FOUND,
    PERMISSION_DENIED,
    UNAUTHENTICATED,
    ErrorReply,
    EtcdRefusal,
    TokenReply,
)
from metaservice.leadership.rota import PlaceFailed, Rota
from metaservice.leadership.tls import ClientTls

T = TypeVar("T")

ANSWERS = {INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED, FAILED_PRECONDITION, UNAUTHENTICATED}
"""The codes that are the cluster's answer. All others (no leader, too busy, no space) are the state of one
member, or of all, and may pass."""
REPLY_SIZE_MAX_BYTES = 4 * 1024 * 1024
STALE_LOGIN = "revision of auth store is old"


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """How to reach etcd, and where in it to work."""

    endpoints: tuple[str, ...]
    """One URL per member, `http://` or `https://`."""
    prefix: str = "/ucm"
    """Two clusters that share an etcd need different ones: under one prefix they would elect each other."""
    ca: str = ""
    """PEM file with the authorities that may sign the members' certificates; '' takes the system's."""
    cert: str = ""
    """PEM file with this replica's certificate, when the members ask for one. It opens the connection only:
    etcd takes no user from a certificate that comes through its JSON gateway."""
    key: str = field(default="", repr=False)
    """PEM file with the key of `cert`."""
    username: str = ""
    password: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ValueError("etcd needs one endpoint at least")
        for endpoint in self.endpoints:
            url = urlsplit(endpoint)
            if url.scheme not in ("http", "https") or not url.hostname or url.path.strip("/"):
                raise ValueError(f"the etcd endpoint {endpoint!r} is not of the form http(s)://host:port")
        if not self.prefix.strip("/"):
            raise ValueError("the etcd prefix is empty: the keys of others would be taken for ours")
        if bool(self.cert) != bool(self.key):
            raise ValueError("an etcd client certificate needs both its certificate file and its key file")


class Member:
    """One member of the etcd cluster, asked by one request at a time. Calls of a unit share it."""

    def __init__(self, endpoint: str, tls: ClientTls | None, gateway: "EtcdGateway") -> None:
        url = urlsplit(endpoint)
        assert url.hostname is not None
        self._scheme = url.scheme
        self._host = url.hostname
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls = tls
        self._gateway = gateway
        self._addresses = Addresses(self._host, gateway.lookup)
        self._client: httpx.AsyncClient | None = None

    async def ask(self, path: str, body: dict[str, Any], reply: type[T]) -> T:
        """One call. Raises EtcdRefusal for an answer that is an error, PlaceFailed for no answer."""
        username, password = self._gateway.user
        if not username:
            return await self._post(path, body, reply)
        if not self._gateway.token:
            await self._log_in(username, password)
        try:
            return await self._post(path, body, reply)
        except EtcdRefusal as refusal:
            # Tokens run out, and are void once anybody changes users, roles or permissions.
            if refusal.code != UNAUTHENTICATED and STALE_LOGIN not in refusal.message:
                raise
        await self._log_in(username, password)
        return await self._post(path, body, reply)

    async def drop(self) -> None:
        """Throws the connections away."""
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):
                await client.aclose()

    async def close(self) -> None:
        """Lets go of everything."""
        self._addresses.close()
        await self.drop()

    async def _log_in(self, username: str, password: str) -> None:
        self._gateway.token = ""
        body = {"name": username, "password": password}
        self._gateway.token = (await self._post("/v3/auth/authenticate", body, TokenReply)).token

    async def _post(self, path: str, body: dict[str, Any], reply: type[T]) -> T:
        address = await self._address()
        try:
            status, content = await self._exchange(address, path, msgspec.json.encode(body))
        except Exception as error:
            # Not only httpx's own errors: a connection that is reset as it is made comes out of the layers
            # below as an AttributeError. Whatever it is, this member did not answer.
            self._addresses.failed(address)
            raise PlaceFailed(f"{type(error).__name__} {error}".rstrip()) from error
        except asyncio.CancelledError:
            self._addresses.failed(address)  # the deadline: perhaps the host has moved
            raise
        return _decoded(status, content, reply)

    async def _address(self) -> str:
        try:
            return await self._addresses.first()
        except OSError as error:
            raise PlaceFailed(f"{self._host} has no address ({error})") from error

    async def _exchange(self, address: str, path: str, body: bytes) -> tuple[int, bytes]:
        if self._client is None:
            self._client = httpx.AsyncClient(
                verify=self._tls.context() if self._tls else False,
                trust_env=False,  # proxies and authorities of the environment are not meant for this
                timeout=httpx.Timeout(None),  # the caller's deadline is one for the whole exchange
                limits=httpx.Limits(max_connections=1, keepalive_expiry=None),
            )
        literal = f"[{address}]" if ":" in address else address
        headers = {"host": f"{self._host}:{self._port}", "content-type": "application/json"}
        if self._gateway.token and not path.startswith("/v3/auth/"):
            headers["authorization"] = self._gateway.token
        extensions = {"sni_hostname": self._host} if self._scheme == "https" else {}
        url = f"{self._scheme}://{literal}:{self._port}{path}"
        content = bytearray()
        async with self._client.stream(
            "POST", url, content=body, headers=headers, extensions=extensions
        ) as response:
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > REPLY_SIZE_MAX_BYTES:
                    raise PlaceFailed(f"answered with more than {REPLY_SIZE_MAX_BYTES} bytes")
        return response.status_code, bytes(content)


class EtcdGateway:
    """The members of one etcd cluster, one of which does each piece of work."""

    def __init__(
        self,
        settings: EtcdSettings,
        timeout_ms: int,
        now_s: Callable[[], float],
        chance: Callable[[], float],
        lookup: Lookup | None = None,
    ) -> None:
        """Connects to nothing yet. Raises OSError when a certificate file cannot be read."""
        self.user = (settings.username, settings.password)
        self.token = ""
        self.lookup = lookup
        encrypted = any(endpoint.startswith("https:") for endpoint in settings.endpoints)
        tls = ClientTls(settings.ca, settings.cert, settings.key) if encrypted else None
        self._rota = Rota(
            f"etcd ({', '.join(settings.endpoints)})", settings.endpoints, timeout_ms, now_s, chance
        )
        self._members = [Member(endpoint, tls, self) for endpoint in settings.endpoints]

    async def run(self, doing: str, unit: Callable[[Member], Awaitable[T]]) -> T:
        """Does `unit` at one member, from its start again at the next one when the member fails. It must be
        repeatable: what a failed try did may have happened.

        Ends within two timeouts. Raises LeadershipUnavailable, and LeadershipRefused for an error of etcd
        that `unit` did not expect.
        """

        async def attempt(index: int) -> T:
            member = self._members[index]
            try:
                return await unit(member)
            except (PlaceFailed, asyncio.CancelledError):
                await member.drop()
                raise

        try:
            return await self._rota.ask(doing, attempt)
        except EtcdRefusal as refusal:
            raise LeadershipRefused(self._rota.where, doing, refusal.message) from refusal

    async def close(self) -> None:
        """Closes all connections."""
        for member in self._members:
            await member.close()


def _decoded(status: int, content: bytes, reply: type[T]) -> T:
    """A streamed call answers one line of JSON an item; one item is all that was asked for."""
    first = content.lstrip().partition(b"\n")[0]
    try:
        if status == 200 and b'"error"' not in first[:16]:
            return msgspec.json.decode(first, type=reply, strict=False)
        refusal = msgspec.json.decode(first, type=ErrorReply, strict=False).refusal()
    except msgspec.DecodeError as error:
        raise PlaceFailed(f"answered status {status} with what is not JSON of etcd") from error
    if refusal.code in ANSWERS:
        raise refusal
    raise PlaceFailed(refusal.message or f"answered status {status}")
