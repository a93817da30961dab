"""A leader that is stopped for three leases and wakes with requests in its sockets: it must neither
acknowledge nor answer any of them in its old epoch."""

import http.client
import os
import time
from array import array
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from metaservice.cli.local.replicas import LocalReplica
from metaservice.wire import schemas as wire
from metaservice.wire import schemas_members as members_wire
from tests.torture.cluster_ground import Ground
from tests.torture.cluster_load import KEY_LENGTH, instance_of
from tests.torture.cluster_probe import PROBE, Window
from tests.torture.cluster_record import Place, Position
from tests.torture.cluster_speech import MSGPACK, Caller, Unanswered, connect, read

LEASES = 3
REQUESTS_A_SHARD = 24
SESSIONS_A_SHARD = 6
ANSWER_S = 15.0
HEADERS = {"content-type": MSGPACK, "accept": MSGPACK, "x-ucm-direct": "1"}


@dataclass(slots=True)
class Buffered:
    """A request that was sent to somebody who sleeps. `places`: what a finish among them would publish."""

    connection: http.client.HTTPConnection
    url: str
    shard: int
    sent_s: float
    places: dict[bytes, Place]


def zombie(ground: Ground) -> Window:
    """See the module."""
    victim, led = ground.leader()
    caller = Caller(ground.routes)
    name = f"zombie-{os.urandom(4).hex()}"
    sessions: dict[int, list[tuple[bytes, wire.StartWriteReply]]] = {}
    awake = [_awake(victim) for _ in range(len(led) * REQUESTS_A_SHARD // 3)]
    try:
        body = members_wire.RegisterEngineRequest(incarnation="only")
        if caller.call("PUT", f"/v1/engines/{name}", body, 0, ANSWER_S).ok:
            for shard in led:
                sessions[shard] = [
                    opened for _ in range(SESSIONS_A_SHARD) if (opened := _opened(caller, shard, name))
                ]
    except Unanswered as error:
        ground.record.wrong("faults", f"before {victim.name} is stopped: {error}")
    led = {shard: epoch for shard, epoch in ground.led(victim).items() if shard in led}
    window = Window(
        f"pause {victim.name}, leader of {sorted(led)}, for {LEASES} leases", time.time(), tuple(led)
    )
    victim.freeze()
    sent = [one for shard in led for one in _send(victim, shard, name, sessions.get(shard, []), awake)]
    ground.await_back(window.shards, window.began_s)
    time.sleep(max(0.0, window.began_s + LEASES * ground.ttl_s - time.time()))
    victim.thaw()
    served = sum(_judge(ground, one, led[one.shard]) for one in sent)
    ground.note(f"  {len(sent)} requests waited in its sockets, {served} were carried out in a new epoch")
    for connection in awake:
        connection.close()
    caller.close()
    return window


def _awake(victim: LocalReplica) -> http.client.HTTPConnection:
    """A connection that it has taken."""
    connection = connect(victim.url, ANSWER_S)
    with suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/livez")
        connection.getresponse().read()
    return connection


def _opened(caller: Caller, shard: int, name: str) -> tuple[bytes, wire.StartWriteReply] | None:
    key = PROBE + os.urandom(KEY_LENGTH - len(PROBE))
    body = wire.StartWriteRequest(engine=name, incarnation="only", keys=[key], request_id=os.urandom(8).hex())
    answer = caller.call("POST", f"/v1/instances/{instance_of(shard)}/writes", body, shard, ANSWER_S)
    if not answer.ok:
        return None
    started = msgspec.msgpack.decode(answer.body, type=wire.StartWriteReply)
    return (key, started) if started.session is not None else None


def _send(
    victim: LocalReplica,
    shard: int,
    name: str,
    sessions: list[tuple[bytes, wire.StartWriteReply]],
    awake: list[http.client.HTTPConnection],
) -> list[Buffered]:
    """Finishes of open sessions, starts, lookups with and without a lease."""
    instance = f"/v1/instances/{instance_of(shard)}"
    sent: list[Buffered] = []
    for number in range(REQUESTS_A_SHARD):
        key = PROBE + os.urandom(KEY_LENGTH - len(PROBE))
        path, places = f"{instance}/lookup", {}
        body: wire.Request = wire.LookupRequest(keys=[key], mode="each", lease_ms=1_000 * (number % 2))
        if number < len(sessions):
            key, started = sessions[number]
            path = f"/v1/writes/{started.session}/finish"
            places = {key: (array("Q", started.locations)[0], array("I", started.generations)[0])}
            body = wire.FinishRequest(
                engine=name,
                incarnation="only",
                locations=started.locations,
                generations=started.generations,
                checksums=array("Q", [1]).tobytes(),
                request_id=f"finish-{number}",
            )
        elif number % 4 == 0:
            path = f"{instance}/writes"
            body = wire.StartWriteRequest(
                engine=name, incarnation="only", keys=[key], request_id=f"{shard}-{number}"
            )
        with suppress(OSError):  # a full queue of connections
            connection = awake.pop() if awake and number % 3 == 0 else connect(victim.url, ANSWER_S)
            sent_s = time.time()
            connection.request("POST", path, msgspec.msgpack.encode(body), HEADERS)
            sent.append(Buffered(connection, victim.url, shard, sent_s, places))
    return sent


def _judge(ground: Ground, one: Buffered, epoch: int) -> bool:
    """Whether it was carried out, as it may be by who leads again, in a later epoch."""
    try:
        response = one.connection.getresponse()
        answer = read(response, response.read(), one.url, one.sent_s)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        one.connection.close()
    if not answer.ok:
        return False
    ground.record.answered(answer)
    if answer.epoch <= epoch:
        what = "acknowledged a finish" if one.places else "answered"
        ground.record.wrong("dirty", f"a leader that slept {what} in its old epoch {epoch}: {answer}")
    if one.places:
        finished = msgspec.msgpack.decode(answer.body, type=wire.FinishReply)
        if finished.status[0] == wire.FinishStatus.serving:
            instance = instance_of(one.shard)
            ground.record.committed(instance, one.places, Position.of(answer), known=False)
    return True
