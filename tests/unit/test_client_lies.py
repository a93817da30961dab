"""Nothing the service says is believed unchecked: each spoiled answer is a miss or a write that was not
taken."""

import random
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from metaservice.client import Client, ClientConfig
from metaservice.wire.schemas import StorageRef
from tests.unit.client_peers import Request, answer_to, http, looked, peer, problem, started

KEYS = [bytes([n]) * 16 for n in range(1, 9)]
N = len(KEYS)
BAD_STORAGE = msgspec.to_builtins(StorageRef(name="../etc", kind="posix", options={}))


def spoiled(verb: str, spoil: Callable[[dict[str, Any]], object]) -> Callable[[Request], None]:
    """Good answers everywhere but at `verb`: there `spoil` changes the fields or returns other ones."""

    def behave(request: Request) -> None:
        fields: object = answer_to(request)
        if request.verb == verb:
            assert isinstance(fields, dict)
            other = spoil(fields)
            fields = fields if other is None else other
        request.send(http(msgspec.msgpack.encode(fields)))

    return behave


def client_of(url: str) -> Client:
    return Client(ClientConfig(url=url, timeout_ms=2_000, breaker_failures=1_000))


def u64(*values: int) -> bytes:
    return array("Q", values).tobytes()


def u32(*values: int) -> bytes:
    return array("I", values).tobytes()


def changed(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields.update(changes)


def without(*names: str) -> Callable[[dict[str, Any]], None]:
    def drop(fields: dict[str, Any]) -> None:
        for name in names:
            del fields[name]

    return drop


LOOKUP_LIES = {
    "more hits than asked": lambda _: looked(N, N + 1, cut="none"),
    "asked for others": changed(asked=N + 1),
    "another mode": changed(mode="each"),
    "negative hits": changed(hits=-1),
    "fewer rows than hits": changed(hits=N - 1, cut="miss"),
    "not all, but not cut": lambda _: {**looked(N, N - 1), "cut": "none"},
    "a cut that is none of ours": changed(cut="eviction"),
    "starts in the middle": changed(start=1),
    "cut_at far away": changed(cut_at=N + 1),
    "locations too short": changed(locations=u64(*range(1, N))),
    "locations too long": changed(locations=u64(*range(1, N + 2))),
    "locations not packed": changed(locations=list(range(1, N + 1))),
    "locations as text": changed(locations="x" * 8 * N),
    "location of 53 bits": changed(locations=u64(*range(1, N), 1 << 52)),
    "location of 64 bits": changed(locations=u64(*range(1, N), (1 << 64) - 1)),
    "generation 0": changed(generations=u32(*[1] * (N - 1), 0)),
    "generations too short": changed(generations=u32(*[1] * (N - 1))),
    "storage outside the table": changed(storages=array("H", [0] * (N - 1) + [1]).tobytes()),
    "no storages": changed(storage_table=[]),
    "storages too short": changed(storages=b"\0"),
    "storage with a path for a name": changed(storage_table=[BAD_STORAGE]),
    "no parts": changed(parts=[], checksums=b""),
    "part with a path for a name": changed(parts=[{"name": "../tp0", "bytes": 1}] * 2),
    "part without bytes": changed(parts=[{"name": "tp0", "bytes": 0}] * 2),
    "checksums of half the parts": changed(checksums=bytes(8 * N)),
    "cluster with a path": changed(cluster="../../etc"),
    "no cluster": changed(cluster=""),
    "a lease for nothing": changed(lease=None),
    "lease that is no id": changed(lease="r/../../x"),
    "lease that ends at once": changed(lease_ms=0),
    "lease in the past": changed(lease_ms=-5),
    "text for a number": changed(hits="8"),
    "no hits at all": without("hits"),
    "an answer of another route": lambda _: started(N),
    "a list": lambda _: [1, 2, 3],
    "a number": lambda _: 7,
    "nothing": lambda _: {},
}


@pytest.mark.parametrize("lie", LOOKUP_LIES.values(), ids=LOOKUP_LIES.keys())
def test_h1_spoiled_lookup_is_a_miss(lie: Callable[[dict[str, Any]], object]) -> None:
    with peer(spoiled("lookup", lie)) as one, client_of(one.url) as client:
        result = client.lookup("i", KEYS, lease_ms=1_000)
    assert result.failure == "protocol", result.detail
    assert (result.hits, result.lease, len(result.locations)) == (0, None, 0)
    with pytest.raises(IndexError):
        result.place(0)


def test_lookup_with_more_than_the_limit_is_a_miss() -> None:
    with peer(spoiled("lookup", lambda _: None)) as one, client_of(one.url) as client:
        assert client.lookup("i", KEYS, limit=N - 1).failure == "protocol"
        assert client.lookup("i", KEYS, limit=N).hits == N


def test_lease_that_nobody_asked_for_is_a_lie() -> None:
    with peer(spoiled("lookup", changed(lease="r-0-1-1", lease_ms=5))) as one, client_of(one.url) as client:
        assert client.lookup("i", KEYS).failure == "protocol"


def test_lease_longer_than_asked_counts_as_asked() -> None:
    with peer(spoiled("lookup", changed(lease_ms=60_000))) as one, client_of(one.url) as client:
        result = client.lookup("i", KEYS, lease_ms=1_000)
    assert result.lease_ms == 1_000
    assert 0 < result.lease_left_ms() <= 1_000


def test_good_lookup_gives_places() -> None:
    with peer(spoiled("lookup", lambda _: None)) as one, client_of(one.url) as client:
        result = client.lookup("i", KEYS, lease_ms=1_000)
    assert (result.failure, result.hits, result.cut, result.lease) == (None, N, "none", "r-0-1-1")
    place = result.place(3, "tp1")
    assert (place.cluster, place.location, place.generation, place.part) == ("c", 4, 1, "tp1")
    assert (place.size_bytes, place.key, place.checksum, place.storage.name) == (50, KEYS[3], 7, "s")
    assert [place.key for place in result.places(1)] == KEYS
    assert result.place(0, 0).part == "tp0"
    with pytest.raises(IndexError):
        result.place(N)
    with pytest.raises(IndexError):
        result.place(-1)
    with pytest.raises(KeyError):
        result.place(0, "tp9")
    with pytest.raises(IndexError):
        result.place(0, 2)


def each(hit: bytes, **changes: Any) -> dict[str, Any]:
    hits = hit.count(1)
    return looked(N, hits, mode="each", hit=hit, cut="miss" if hits < N else "none", **changes)


def test_each_gives_the_rows_that_hit() -> None:
    with peer(spoiled("lookup", lambda _: each(b"\0\1\0\1\0\0\0\1"))) as one, client_of(one.url) as client:
        result = client.lookup("i", KEYS, mode="each")
    assert (result.failure, result.hits) == (None, 3)
    assert [result.place(row).key for row in range(3)] == [KEYS[1], KEYS[3], KEYS[7]]


@pytest.mark.parametrize(
    "reply",
    [
        {**each(b"\0\1\0\1\0\0\0\1"), "hit": b"\1\1\0\1\0\0\0\1"},
        {**each(b"\0\1\0\1\0\0\0\1"), "hit": b"\0\1\0\1\0\0\0"},
        {**each(b"\0\1\0\1\0\0\0\1"), "hit": b"\0\1\0\1\0\2\0\1"},
        {**each(b"\0\1\0\1\0\0\0\1"), "hit": [0, 1, 0, 1, 0, 0, 0, 1]},
    ],
)
def test_each_with_other_flags_than_hits_is_a_miss(reply: dict[str, Any]) -> None:
    with peer(spoiled("lookup", lambda _: reply)) as one, client_of(one.url) as client:
        assert client.lookup("i", KEYS, mode="each").failure == "protocol"


def test_window_names_the_keys_of_its_run() -> None:
    reply = looked(N, 3, mode="window", start=4, cut="miss", cut_at=7)
    with peer(spoiled("lookup", lambda _: reply)) as one, client_of(one.url) as client:
        result = client.lookup("i", KEYS, mode="window", window_blocks=3)
    assert (result.failure, result.start, result.hits) == (None, 4, 3)
    assert [place.key for place in result.places()] == KEYS[4:7]


@pytest.mark.parametrize("start", [6, -1, 2**40])
def test_window_outside_what_was_asked_is_a_miss(start: int) -> None:
    reply = looked(N, 3, mode="window", start=start, cut="miss")
    with peer(spoiled("lookup", lambda _: reply)) as one, client_of(one.url) as client:
        assert client.lookup("i", KEYS, mode="window", window_blocks=3).failure == "protocol"


def located(rows: int, **changes: Any) -> dict[str, Any]:
    names = ("locations", "generations", "storages", "checksums", "storage_table", "parts", "cluster")
    fields = looked(rows)
    return {**{name: fields[name] for name in names}, **changes}


@pytest.mark.parametrize(
    ("state", "failure"),
    [
        (located(1), None),
        (None, "protocol"),
        (located(2), "protocol"),
        (located(1, generations=u32(0)), "protocol"),
        (located(0), "protocol"),
    ],
    ids=["one", "none", "two", "generation 0", "empty"],
)
def test_state_lookup_needs_exactly_one_state_block(state: object, failure: str | None) -> None:
    reply = looked(N, 4, mode="state", state=state)
    with peer(spoiled("lookup", lambda _: reply)) as one, client_of(one.url) as client:
        result = client.lookup("i", KEYS, mode="state")
    assert result.failure == failure
    assert result.hits == (0 if failure else 4)
    if not failure:
        assert result.state is not None and result.state.place(0).key == KEYS[3]


WRITE_LIES = {
    "outcomes too short": changed(outcomes=bytes(N - 1)),
    "outcome that is none": changed(outcomes=bytes([9]) * N),
    "reason that is none": changed(reasons=bytes([200]) * N),
    "place for a row that is present": changed(outcomes=b"\1" + bytes(N - 1)),
    "no place for a row to write": changed(generations=u32(0, *[1] * (N - 1))),
    "places swapped": changed(outcomes=b"\1" + bytes(N - 1), generations=u32(1, 0, *[1] * (N - 2))),
    "no session": changed(session=None),
    "session that is no id": changed(session="w/../../x"),
    "session without time": changed(ttl_ms=0),
    "nothing to write, but a session": changed(
        outcomes=b"\1" * N, generations=bytes(4 * N), locations=bytes(8 * N)
    ),
    "location of 64 bits": changed(locations=u64(*range(1, N), (1 << 64) - 1)),
    "no parts": changed(parts=[]),
    "storage outside the table": changed(storages=array("H", [1] * N).tobytes()),
    "wait_ms too short": changed(wait_ms=bytes(4)),
    "cluster with a path": changed(cluster="a/b"),
    "an answer of another route": lambda _: looked(N),
}


@pytest.mark.parametrize("lie", WRITE_LIES.values(), ids=WRITE_LIES.keys())
def test_h1_spoiled_start_write_is_not_taken(lie: Callable[[dict[str, Any]], object]) -> None:
    with peer(spoiled("writes", lie)) as one, client_of(one.url) as client:
        client.register_engine("e", keepalive=None)
        result = client.start_write("i", KEYS)
    assert result.failure == "protocol", result.detail
    assert (result.session, result.writable) == (None, [])
    assert list(result.places()) == []


def test_good_start_write_gives_places_for_its_rows_only() -> None:
    reply = started(
        N,
        outcomes=bytes([0, 1, 2, 3, 0, 0, 0, 0]),
        reasons=bytes([0, 0, 0, 3, 0, 0, 0, 0]),
        wait_ms=u32(0, 0, 500, 0, 0, 0, 0, 0),
        locations=u64(1, 0, 0, 0, 2, 3, 4, 1),
        generations=u32(1, 0, 0, 0, 1, 1, 1, 1),
    )
    with peer(spoiled("writes", lambda _: reply)) as one, client_of(one.url) as client:
        client.register_engine("e", keepalive=None)
        result = client.start_write("i", [*KEYS[:7], KEYS[0]])
    assert result.failure is None
    assert result.writable == [0, 4, 5, 6], "the last row is the first one's block"
    assert (result.reason(3), result.wait_ms[2]) == ("quota_instance", 500)
    assert (result.place(4, 1).location, result.place(4, 1).checksum) == (2, None)
    with pytest.raises(IndexError):
        result.place(1)


OTHER_LIES: dict[str, tuple[str, Callable[[dict[str, Any]], object], Callable[[Client], Any]]] = {
    "finish of fewer": (
        "finish",
        changed(status=bytes(1)),
        lambda client: client.finish("w-0-1", [1, 2], [1, 1], checksums=[0] * 4),
    ),
    "finish that publishes more than serve": (
        "finish",
        changed(status=b"\1\1", published=1),
        lambda client: client.finish("w-0-1", [1, 2], [1, 1], checksums=[0] * 4),
    ),
    "finish with a negative rest": (
        "finish",
        changed(open=-1),
        lambda client: client.finish("w-0-1", [1, 2], [1, 1], checksums=[0] * 4),
    ),
    "write renewed for no time": ("renew", changed(ttl_ms=0), lambda client: client.renew_write("w-0-1")),
    "abort of less than none": ("abort", changed(freed=-1), lambda client: client.abort("w-0-1")),
    "remove of others": (
        "remove",
        changed(outcomes=b"\1"),
        lambda client: client.remove("i", KEYS),
    ),
    "heartbeat never again": ("heartbeat", changed(heartbeat_ms=0), lambda client: client.heartbeat()),
    "another engine registered": (
        "f",
        changed(id="e"),
        lambda client: client.register_engine("f", keepalive=None),
    ),
    "heartbeats slower than expiry": (
        "f",
        changed(heartbeat_ms=500, expire_ms=600),
        lambda client: client.register_engine("f", keepalive=None),
    ),
}


@pytest.mark.parametrize(("verb", "lie", "call"), OTHER_LIES.values(), ids=OTHER_LIES.keys())
def test_h1_spoiled_answers_of_other_calls(
    verb: str, lie: Callable[[dict[str, Any]], object], call: Callable[[Client], Any]
) -> None:
    with peer(spoiled(verb, lie)) as one, client_of(one.url) as client:
        client.register_engine("e", keepalive=None)
        result = call(client)
    assert result.failure == "protocol", result.detail


def test_failed_finish_says_pending_and_nothing_published() -> None:
    with peer(spoiled("finish", lambda _: {})) as one, client_of(one.url) as client:
        client.register_engine("e", keepalive=None)
        result = client.finish("w-0-1", [1, 2], [1, 1], checksums=[0] * 4)
    assert (result.status, result.published, result.open) == (b"\1\1", 0, 2)
    assert not result.serving(0)


@pytest.mark.parametrize(
    "lie",
    [
        changed(leases=["r-0-1-9"]),
        changed(outcomes=b""),
        changed(outcomes=b"\x07"),
        changed(changed=b""),
        without("outcomes"),
    ],
    ids=["another lease", "no outcome", "an outcome that is none", "changed missing", "field missing"],
)
@pytest.mark.parametrize("verb", ["renew", "release"])
def test_b1_spoiled_lease_answers_hold_nothing(verb: str, lie: Callable[[dict[str, Any]], object]) -> None:
    with peer(spoiled(verb, lie)) as one, client_of(one.url) as client:
        call = client.renew_leases if verb == "renew" else client.release
        result = call(["r-0-1-1"])
    assert result.failure == "protocol"
    assert not result.held(0)


def test_b1_expired_and_changed_lease_is_told_as_such() -> None:
    spoil = changed(outcomes=b"\2", changed=u32(3))
    with peer(spoiled("release", spoil)) as one, client_of(one.url) as client:
        result = client.release("r-0-1-1")
    assert (result.failure, result.held(0), result.changed[0]) == (None, False, 3)


def task(**changes: Any) -> dict[str, Any]:
    fields = {
        "task": "t-0-1-1",
        "storage": {"name": "s", "kind": "posix", "options": {}},
        "parts": ["tp0"],
        "locations": u64(1, 2),
        "generations": u32(1, 1),
        "ttl_ms": 5_000,
    }
    return {**fields, **changes}


@pytest.mark.parametrize(
    "tasks",
    [
        [task(generations=u32(1))],
        [task(generations=u32(1, 0))],
        [task(parts=[])],
        [task(parts=["../x"])],
        [task(task="t/../x")],
        [task(locations=u64(1, 1 << 60))],
        [task(ttl_ms=0)],
        [task(), task(locations=b"", generations=b"", parts=["tp0"], ttl_ms=-1)],
        [task(locations=u64(*range(1, 2000)), generations=u32(*[1] * 1999))],
    ],
)
def test_spoiled_task_deletes_nothing(tasks: list[dict[str, Any]]) -> None:
    with peer(spoiled("tasks", changed(tasks=tasks))) as one, client_of(one.url) as client:
        client.register_worker("w", ["s"], keepalive=None)
        result = client.take_tasks(limit=1024)
    assert (result.failure, result.tasks) == ("protocol", [])


@pytest.mark.parametrize("unknown", [b"\1", b"\1\1\1", b"\2\1", [True, True], None])
def test_spoiled_sweep_finds_no_orphan(unknown: object) -> None:
    with peer(spoiled("unknown", changed(unknown=unknown))) as one, client_of(one.url) as client:
        client.register_worker("w", ["s"], keepalive=None)
        result = client.unknown_places("s", [1, 2], [1, 1])
    assert (result.failure, result.unknown) == ("protocol", b"\0\0")


@pytest.mark.parametrize(
    ("reply", "failure"),
    [
        (http(b"", 302, "text/plain", {"Location": "http://elsewhere/"}), "protocol"),
        (http(b"", 204), "protocol"),
        (http(b"gone", 502, "text/html"), "protocol"),
        (http(b"", 503, "text/html"), "overloaded"),
        (http(b"{}", 200, "application/json"), "protocol"),
        (http(b"\xc1", 200), "protocol"),
        (http(b"\x81" * 100_000, 200), "protocol"),
        (http(b"", 200), "protocol"),
        (problem(404, "instance_unknown"), "rejected:instance_unknown"),
        (problem(404, "new_code_of_tomorrow"), "rejected:new_code_of_tomorrow"),
        (problem(404, "a b\r\nc"), "protocol"),
        (problem(503, "not_ready"), "rejected:not_ready"),
        (problem(500, "internal"), "rejected:internal"),
        (http(b"[" * 100_000, 400, "application/problem+json"), "protocol"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxy", "protocol"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "protocol"),
        (b"\x00" * 64, "protocol"),
    ],
)
def test_h1_every_other_answer_is_a_miss(reply: bytes, failure: str) -> None:
    with peer(lambda request: request.send(reply)) as one, client_of(one.url) as client:
        result = client.lookup("i", KEYS)
    assert (result.failure, result.hits) == (failure, 0)


def test_h1_mutated_answers_never_raise_and_never_mislead(seed: int) -> None:
    """Bytes of good answers changed at random: either refused, or a result that keeps every promise of
    its type."""
    chance = random.Random(seed)
    bodies: list[bytes] = []

    def behave(request: Request) -> None:
        body = bytearray(msgspec.msgpack.encode(answer_to(request)))
        for _ in range(chance.randrange(1, 4)):
            body[chance.randrange(len(body))] = chance.randrange(256)
        if chance.random() < 0.2:
            del body[chance.randrange(len(body)) :]
        bodies.append(bytes(body))
        request.send(http(bytes(body)))

    believed = 0
    with peer(behave) as one, client_of(one.url) as client:
        for turn in range(600):
            result = client.lookup("i", KEYS, lease_ms=1_000)
            if result.failure is not None:
                assert result.failure == "protocol", (turn, result.failure, bodies[-1])
                assert (result.hits, result.lease) == (0, None)
                continue
            believed += 1
            assert 0 <= result.hits <= N
            places = [place for part in range(len(result.parts)) for place in result.places(part)]
            assert len(places) == result.hits * len(result.parts), (turn, bodies[-1])
            for place in places:
                assert place.generation >= 1
                assert 0 <= place.location < 1 << 52
                assert place.size_bytes >= 1
            assert result.lease is not None or not result.hits
    assert 0 < believed < 600, "some changes are harmless, most are not"
