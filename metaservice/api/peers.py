"""Requests to other replicas: a pool of kept connections, a deadline for each request, a bounded answer."""

import asyncio
import ssl
from urllib.parse import urlsplit

import httpx

from metaservice.replica.errors import ShardUnavailable

from .http import Header, Headers
from .media import MSGPACK
from .settings import ApiSettings

HOP = b"x-ucm-hop"
ERRANDS_PATH = "/v1/cluster/errands"
KEPT_S = 20.0
"""How long a connection may rest: well below the idle timeout of the other side, which would close it under a
request.
"""
CONNECTIONS_MAX = 1_024


class PeerFailed(Exception):
    """No answer. `sent`: the request may have arrived, and may have been carried out."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class PeerReply:
    """What another replica answered. Header names are in lower case."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body


class Peers:
    """Sends requests to the other replicas of the cluster. `replica_id` says from whom they come."""

    def __init__(self, replica_id: str, settings: ApiSettings) -> None:
        self._hop: Header = (HOP, replica_id.encode("ascii", "replace"))
        self._settings = settings
        # Plain HTTP only, as clients of the service speak it: a context that trusts nobody is never used, and
        # spares the start the reading of all certificates there are.
        self._transport = httpx.AsyncHTTPTransport(
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            limits=httpx.Limits(
                max_connections=CONNECTIONS_MAX, max_keepalive_connections=64, keepalive_expiry=KEPT_S
            ),
        )

    async def send(
        self, url: str, method: str, target: str, headers: Headers, body: bytes, timeout_ms: int
    ) -> PeerReply:
        """One request, sent once. `target`: path and query as they go on the wire. Raises PeerFailed."""
        split = urlsplit(url)
        if split.scheme != "http" or not split.hostname:
            raise PeerFailed(f"{url!r} is no http address", sent=False)
        path = split.path.rstrip("/") + target
        request = httpx.Request(
            method,
            httpx.URL(scheme="http", host=split.hostname, port=split.port),
            headers=[(b"host", split.netloc.encode("ascii", "replace")), self._hop, *headers],
            content=body,
            extensions={
                "target": path.encode("latin-1", "replace"),
                "timeout": {"connect": self._settings.forward_connect_ms / 1000, "pool": 0.0},
            },
        )
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await self._received(await self._transport.handle_async_request(request))
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise PeerFailed(f"{url} cannot be reached: {_said(error)}", sent=False) from None
        except httpx.LocalProtocolError as error:
            raise PeerFailed(f"this request cannot be passed on: {_said(error)}", sent=False) from None
        except httpx.HTTPError as error:
            raise PeerFailed(f"{url} did not answer: {_said(error)}", sent=True) from None
        except TimeoutError:
            raise PeerFailed(f"{url} did not answer within {timeout_ms} ms", sent=True) from None
        except PeerFailed:
            raise
        except Exception as error:
            # A connection that is reset as it is made comes out of the layers below as an AttributeError.
            raise PeerFailed(f"{url} did not answer: {error!r}", sent=True) from error

    async def _received(self, response: httpx.Response) -> PeerReply:
        assert isinstance(response.stream, httpx.AsyncByteStream)
        body = bytearray()
        try:
            async for piece in response.stream:
                body += piece
                if len(body) > self._settings.forwarded_bytes_max:
                    raise PeerFailed("the answer is larger than what is passed back", sent=True)
        finally:
            await response.aclose()
        headers = [(name.lower(), value) for name, value in response.headers.raw]
        return PeerReply(response.status_code, headers, bytes(body))

    async def errand(self, url: str, errands: bytes) -> bytes:
        """Bring errands to the catalogue's leader; its answer. Raises ShardUnavailable."""
        headers: Headers = [(b"content-type", MSGPACK), (b"accept", MSGPACK)]
        try:
            reply = await self.send(
                url, "POST", ERRANDS_PATH, headers, errands, self._settings.forward_timeout_ms
            )
        except PeerFailed as failure:
            raise ShardUnavailable("not_ready", str(failure)) from None
        if reply.status != 200:
            raise ShardUnavailable("not_ready", f"{url} answered errands with status {reply.status}")
        return reply.body

    async def close(self) -> None:
        """Close all connections; what is in progress fails."""
        await self._transport.aclose()


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
