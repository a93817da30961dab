"""What becomes of a request for a shard that is led elsewhere: passed on once, or answered with the leader's
address.

A client that sends `x-ucm-direct` goes to leaders by itself: it is told where (421), or that nobody is
known to lead (503). For everybody else the request is passed on, marked with `x-ucm-hop`, and a marked
request never travels further: two replicas that each take the other for the leader end in a 503, not in a
loop. A request is sent once. Whether one whose answer did not come was carried out is not known here, so
it is never repeated here; the caller may, with its request id.
"""

import asyncio

import msgspec

from metaservice.replica.errors import NotLeader
from metaservice.telemetry.metrics import Metrics
from metaservice.wire.columns import ColumnError
from metaservice.wire.problems import PROBLEMS

from .call import NOWHERE
from .errors import ApiError, ProblemBody
from .http import Header, Headers, HttpRequest, HttpResponse
from .media import MSGPACK
from .peers import PeerFailed, PeerReply, Peers
from .port import ReplicaPort
from .settings import ApiSettings

LEADER = b"x-ucm-leader"
_PASSED_ON = frozenset(
    {b"content-type", b"content-encoding", b"accept", b"x-request-id", b"traceparent", b"tracestate"}
)
_PASSED_BACK = frozenset(
    {b"cache-control", b"retry-after", b"allow", b"location", b"x-ucm-seq", b"x-ucm-staleness-ms"}
)
MISDIRECTED = PROBLEMS["not_leader"].status
_problem = msgspec.msgpack.Decoder(ProblemBody)


class Forwarder:
    """Passes requests on to leaders, a bounded number at a time."""

    def __init__(self, replica: ReplicaPort, peers: Peers, metrics: Metrics, settings: ApiSettings) -> None:
        self.stopping = asyncio.Event()
        """Set when the service stops: long polls that were passed on are not waited for."""
        self._replica = replica
        self._peers = peers
        self._metrics = metrics
        self._settings = settings
        self._in_flight = 0

    async def elsewhere(self, request: HttpRequest, shard: int, wait_ms: int = 0) -> HttpResponse | None:
        """The leader's answer to a request about `shard`; None when this replica leads it by now.
        `wait_ms`: how long the leader may wait on purpose. Raises ApiError.
        """
        url = await self._leader(shard, wait=not (request.direct or request.hop))
        if url == self._replica.url:
            return None
        if request.direct or request.hop:
            self._metrics.forwarded.add(("told",))
            raise ApiError(
                "not_leader",
                f"shard {shard} is led by {url}",
                facts={"shard": shard, "leader": url},
                headers=((LEADER, _shown(shard, url)),),
            )
        target = request.path
        if request.query:
            target += f"?{request.query.decode('latin-1')}"
        headers = [header for header in request.headers if header[0] in _PASSED_ON]
        reply = await self._passed_on(
            request, shard, url, request.method, target, headers, request.body, wait_ms
        )
        content_type = b""
        back: list[Header] = []
        for name, value in reply.headers:
            if name == b"content-type":
                content_type = value
            elif name in _PASSED_BACK:
                back.append((name, value))
        back.append((LEADER, _shown(shard, url)))
        return HttpResponse(reply.status, content_type, reply.body, tuple(back))

    async def on_behalf(self, request: HttpRequest, shard: int, target: str, body: bytes) -> bytes:
        """The leader's answer to one `POST` (msgpack both ways) that is part of `request`, also for a
        client that goes to leaders by itself: no single replica could answer the whole. Raises ApiError.
        """
        url = await self._leader(shard, wait=not request.hop)
        if request.hop or url == self._replica.url:
            raise ApiError("not_ready", f"the leadership of shard {shard} is moving")
        headers: Headers = [(b"content-type", MSGPACK), (b"accept", MSGPACK)]
        reply = await self._passed_on(request, shard, url, "POST", target, headers, body)
        if reply.status == 200:
            return reply.body
        try:
            problem = _problem.decode(reply.body)
            known = PROBLEMS[problem.code]
        except (msgspec.MsgspecError, LookupError):
            raise nonsense(shard) from None
        raise ApiError(known.code, problem.detail, problem.field, retry_after_ms=problem.retry_after_ms)

    async def _leader(self, shard: int, *, wait: bool) -> str:
        url = self._replica.leader_url(shard)
        if not url and wait:
            url = await self._replica.await_leader(shard, self._settings.leader_wait_ms)
        if not url:
            self._metrics.forwarded.add(("no_leader",))
            raise ApiError("not_ready", f"nobody is known to lead shard {shard} now")
        return url

    async def _passed_on(
        self,
        request: HttpRequest,
        shard: int,
        url: str,
        method: str,
        target: str,
        headers: Headers,
        body: bytes,
        wait_ms: int = 0,
    ) -> PeerReply:
        """Sent once to the replica at `url`. Raises ApiError when it gives no answer, or does not lead
        the shard either.
        """
        if self._in_flight >= self._settings.forwards_max:
            self._metrics.forwarded.add(("refused",))
            raise ApiError("overloaded", f"{self._settings.forwards_max} requests are passed on already")
        timeout_ms = self._settings.forward_timeout_ms + wait_ms
        sending = self._peers.send(url, method, target, headers, body, timeout_ms)
        self._in_flight += 1
        try:
            if wait_ms:
                request.wait_ms = wait_ms
                reply = await self._until_stopped(request, asyncio.ensure_future(sending))
            else:
                reply = await sending
        except PeerFailed as failure:
            self._metrics.forwarded.add(("unanswered" if failure.sent else "unreachable",))
            known = (
                "whether it was carried out is not known, and it was not sent again"
                if failure.sent
                else "nothing was carried out"
            )
            raise ApiError("not_ready", f"the leader of shard {shard}: {failure}; {known}") from None
        finally:
            self._in_flight -= 1
        if reply.status == MISDIRECTED:
            self._metrics.forwarded.add(("moved",))
            raise ApiError(
                "not_ready", f"the leadership of shard {shard} is moving: {url} does not hold it (any more)"
            )
        self._metrics.forwarded.add(("answered",))
        return reply

    async def _until_stopped(self, request: HttpRequest, work: "asyncio.Task[PeerReply]") -> PeerReply:
        """A long poll elsewhere ends with our own service, and with a caller that hung up."""
        gone = asyncio.Event()
        request.on_gone = gone.set
        ends = [asyncio.ensure_future(event.wait()) for event in (self.stopping, gone)]
        try:
            await asyncio.wait([work, *ends], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ApiError("not_ready", "the service is stopping")
            return work.result()
        finally:
            request.on_gone = None
            for task in (work, *ends):
                task.cancel()
            await asyncio.gather(work, *ends, return_exceptions=True)


def led_elsewhere(failure: Exception, shard: int, replica: ReplicaPort) -> int:
    """The shard whose leader has to answer a call that failed here with `failure`, NOWHERE when it is ours to
    answer. Only a leader refuses anything: a follower's state may be behind what the caller knows.
    """
    if isinstance(failure, NotLeader):
        return failure.shard
    if isinstance(failure, ApiError | ColumnError) and shard >= 0 and not replica.leads(shard):
        return shard
    return NOWHERE


def nonsense(shard: int) -> ApiError:
    """The error for an answer from another replica that is none."""
    return ApiError("not_ready", f"the leader of shard {shard} answered something else")


def _shown(shard: int, url: str) -> bytes:
    shown = "".join(letter if " " < letter <= "~" else "?" for letter in url)
    return f"{shard} {shown}".encode("ascii")
