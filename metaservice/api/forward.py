"""What becomes of a request for a shard that is led elsewhere: passed on once, or answered with the leader's
address.

A client that sends `x-ucm-direct` goes to leaders by itself: it is told where (421), or that nobody is
known to lead (503). For everybody else the request is passed on, marked with `x-ucm-hop`, and a marked
request never travels further: two replicas that each take the other for the leader end in a 503, not in a
loop. A request is carried out once at most: it is sent again only to a new leader and only when the one
before certainly did nothing with it. Whether one whose answer did not come was carried out is not known
here, so it is never repeated here; the caller may, with its request id.
"""

import asyncio
from typing import NamedTuple

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
AGAIN_S = 0.03
"""How long to wait for the next leader to be known, when the last one is no longer."""
MISDIRECTED = PROBLEMS["not_leader"].status
_problem = msgspec.msgpack.Decoder(ProblemBody)


class Sending(NamedTuple):
    """A request as it is passed on. `wait_ms`: how long it may be waited with on purpose."""

    method: str
    target: str
    headers: Headers
    body: bytes
    wait_ms: int = 0


class _NothingDone(Exception):
    """A request was certainly not carried out where it was sent."""


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
        self._in_flight_max = min(settings.forwards_max, max(1, settings.requests_max // 2))

    async def elsewhere(self, request: HttpRequest, shard: int, wait_ms: int = 0) -> HttpResponse | None:
        """The leader's answer to a request about `shard`; None when this replica leads it by now.
        `wait_ms`: how long the leader may wait on purpose. Raises ApiError.
        """
        if request.direct or request.hop:
            url = self._replica.leader_url(shard)
            if url == self._replica.url:
                return None
            raise self._told(request, shard, url)
        target = request.path
        if request.query:
            target += f"?{request.query.decode('latin-1')}"
        headers = [header for header in request.headers if header[0] in _PASSED_ON]
        # A HEAD is asked as a GET: how long the body would be is told too, and it is left out on the way.
        method = "GET" if request.method == "HEAD" else request.method
        sending = Sending(method, target, headers, request.body, wait_ms)
        answer = await self._asked(request, shard, sending)
        if answer is None:
            return None
        url, reply = answer
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
        if request.hop:
            raise ApiError(
                "not_ready", f"shard {shard} is led elsewhere, and this is a part of a call already"
            )
        headers: Headers = [(b"content-type", MSGPACK), (b"accept", MSGPACK)]
        answer = await self._asked(request, shard, Sending("POST", target, headers, body))
        if answer is None:
            raise ApiError(
                "not_ready", f"the leadership of shard {shard} came here in the middle of this call"
            )
        reply = answer[1]
        if reply.status == 200:
            return reply.body
        try:
            problem = _problem.decode(reply.body)
            known = PROBLEMS[problem.code]
        except (msgspec.MsgspecError, LookupError):
            raise nonsense(shard) from None
        raise ApiError(known.code, problem.detail, problem.field, retry_after_ms=problem.retry_after_ms)

    def given_up(self, request: HttpRequest, failure: Exception) -> Exception:
        """What to raise for a call that could be answered neither here nor elsewhere: a replica hears
        that nothing was done here.
        """
        if isinstance(failure, NotLeader) and request.hop:
            return self._told(request, failure.shard, "")
        return failure

    def _told(self, request: HttpRequest, shard: int, url: str) -> ApiError:
        """What somebody is told who does not want the request to be passed on. A replica always hears that
        nothing was done here, so that it may ask another; a client is told to come again where nobody leads.
        """
        if not url and not request.hop:
            self._metrics.forwarded.add(("no_leader",))
            return ApiError("not_ready", f"nobody is known to lead shard {shard} now")
        self._metrics.forwarded.add(("told",))
        return ApiError(
            "not_leader",
            f"shard {shard} is led by {url or 'nobody that is known here'}",
            facts={"shard": shard, "leader": url},
            headers=((LEADER, _shown(shard, url)),),
        )

    async def _asked(
        self, request: HttpRequest, shard: int, sending: Sending
    ) -> tuple[str, PeerReply] | None:
        """A leader's URL and its answer; None when this replica leads the shard by now. Raises ApiError.

        Who cannot be reached, or says that it does not lead, has certainly done nothing: then another is
        waited for, `leader_wait_ms` in all.
        """
        # Those who wait are fewer than all requests there may be: probes and what is led here get through.
        if self._in_flight >= self._in_flight_max:
            self._metrics.forwarded.add(("refused",))
            raise ApiError("overloaded", f"{self._in_flight_max} requests wait for other replicas already")
        self._in_flight += 1
        try:
            return await self._asked_until(request, shard, sending)
        finally:
            self._in_flight -= 1

    async def _asked_until(
        self, request: HttpRequest, shard: int, sending: Sending
    ) -> tuple[str, PeerReply] | None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._settings.leader_wait_ms / 1000
        while True:
            left_ms = max(0, int((deadline_s - loop.time()) * 1000))
            url = self._replica.leader_url(shard) or await self._replica.await_leader(shard, left_ms)
            if not url:
                self._metrics.forwarded.add(("no_leader",))
                raise ApiError("not_ready", f"nobody is known to lead shard {shard} now")
            if url == self._replica.url:
                return None
            try:
                return url, await self._sent(request, shard, url, sending)
            except _NothingDone as failure:
                if loop.time() >= deadline_s:
                    raise ApiError("not_ready", str(failure)) from None
            await asyncio.sleep(AGAIN_S)

    async def _sent(self, request: HttpRequest, shard: int, url: str, sending: Sending) -> PeerReply:
        """The answer of the replica at `url`, sent to once. Raises ApiError, or _NothingDone."""
        timeout_ms = self._settings.forward_timeout_ms + sending.wait_ms
        asking = self._peers.send(
            url, sending.method, sending.target, sending.headers, sending.body, timeout_ms
        )
        try:
            if sending.wait_ms:
                request.wait_ms = sending.wait_ms
                reply = await self._until_stopped(request, asyncio.ensure_future(asking))
            else:
                reply = await asking
        except PeerFailed as failure:
            if not failure.sent:
                self._metrics.forwarded.add(("unreachable",))
                raise _NothingDone(
                    f"the leader of shard {shard}: {failure}; nothing was carried out"
                ) from None
            self._metrics.forwarded.add(("unanswered",))
            known = "whether it was carried out is not known, and it was not sent again"
            raise ApiError("not_ready", f"the leader of shard {shard}: {failure}; {known}") from None
        if reply.status == MISDIRECTED:
            self._metrics.forwarded.add(("moved",))
            raise _NothingDone(f"the leadership of shard {shard} is moving: {url} does not hold it")
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
