"""Valid requests of every hot route, and what chance makes of them."""

from random import Random
from typing import Any

import msgspec

STRANGE_NAMES = [
    "..", ".", "%2e%2e", "%2F", "%00", "a%00b", "%ff", "%E2%80%AE", "%", "", "*", "a" * 300,
    "w-0-99999999999999999999",
]  # fmt: skip
KEYS = [b"k" + number.to_bytes(15, "big") for number in range(12)]
ME = {"engine": "e1", "incarnation": "i1"}
INCARNATION = {"incarnation": "i1"}
WORKER = {"incarnation": "j1"}


def valid_requests(rng: Random) -> list[tuple[str, str, dict[str, Any]]]:
    """(method, path, body) of one good request for each hot route."""
    count = rng.randrange(1, 8)
    start = rng.randrange(4)
    keys: Any = KEYS[start : start + count]
    if rng.random() < 0.5:
        keys = b"".join(keys)
    session, lease = f"w-0-{rng.randrange(1, 40)}", f"r-0-1-{rng.randrange(1, 40)}"
    rows = rng.randrange(1, 4)
    return [
        ("POST", "/v1/instances/m1/lookup", {"keys": keys, "lease_ms": rng.choice([0, 1000])}),
        ("POST", "/v1/instances/m1/lookup", {"keys": keys, "mode": "each", "limit": rng.randrange(4)}),
        ("POST", "/v1/instances/m1/writes", {**ME, "keys": keys, "ttl_ms": rng.choice([0, 5000])}),
        ("POST", "/v1/instances/m1/writes", {
            **ME, "keys": KEYS[:2], "tokens": [[*range(16)], b"\x01" * 17], "lora": "a", "salt": "s",
        }),
        ("POST", "/v1/instances/m1/route", {"keys": keys, "top_k": rng.randrange(3)}),
        ("POST", "/v1/instances/m1/route", {"token_ids": [7] * 40, "salt": "s"}),
        ("POST", "/v1/instances/m1/restate", {}),
        ("POST", "/v1/engines/e1/cache", {
            **INCARNATION, "number": rng.randrange(9), "base": rng.choice([None, 0, 3]),
            "stored": [{"tier": "gpu", "hashes": [2**40 + start], "token_ids": [1] * 16, "parent": 2**41}],
            "removed": [{"tier": "cpu", "hashes": bytes(16)}],
        }),
        ("POST", "/v1/instances/m1/remove", {"keys": keys, "engine": "e1", "request_id": "r"}),
        ("POST", f"/v1/writes/{session}/finish", {
            **ME, "locations": [*range(64, 64 + rows)], "generations": bytes([1, 0, 0, 0]) * rows,
            "ok": bytes([1]) * 2 * rows, "checksums": [7] * 2 * rows,
        }),
        ("POST", f"/v1/writes/{session}/renew", {**ME, "ttl_ms": 2000}),
        ("POST", f"/v1/writes/{session}/abort", dict(ME)),
        ("POST", f"/v1/leases/{lease}/renew", {"ttl_ms": 500, "also": ["r-0-1-1", "r-0-1-2"]}),
        ("POST", f"/v1/leases/{lease}/release", {"also": ["r-0-1-3"]}),
        ("PUT", "/v1/engines/e2", {"incarnation": "x", "instance": "m1", "rank": 1}),
        ("PUT", "/v1/engines/e3", {
            "incarnation": "x", "instance": "m1", "endpoints": {"node": "n1", "address": "10.0.0.1:8000"},
        }),
        ("POST", "/v1/engines/e1/heartbeat", {"incarnation": "i1"}),
        ("PUT", "/v1/workers/w2", {"incarnation": "x", "storages": ["s1"]}),
        ("POST", "/v1/workers/w1/heartbeat", dict(WORKER)),
        ("POST", "/v1/workers/w1/tasks", {**WORKER, "limit": 4, "wait_ms": 0}),
        ("POST", f"/v1/workers/w1/tasks/t-0-1-{rng.randrange(9)}/confirm", {**WORKER, "ok": [True]}),
        ("POST", "/v1/workers/w1/unknown", {
            **WORKER, "storage": "s1", "locations": [1, 2], "generations": [1, 1],
        }),
    ]  # fmt: skip


def strange_value(rng: Random, depth: int = 0) -> Any:
    """Something that a field did not expect."""
    plain: list[Any] = [
        None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, 2**64 - 1, -(2**63), 0.5, float("nan"),
        float("inf"),
        "", "a" * 200, "../../etc/passwd", "a\0b", "\u202e", "%00", "e1",
        b"", b"\0" * 7, b"k" * 16, b"\xff" * 160, [], {}, [[]],
        msgspec.msgpack.Ext(rng.randrange(128), b"ext"),
    ]  # fmt: skip
    if depth < 3 and rng.random() < 0.3:
        items = [strange_value(rng, depth + 1) for _ in range(rng.randrange(4))]
        return items if rng.random() < 0.7 else {str(at): item for at, item in enumerate(items)}
    return rng.choice(plain)


def mutated_fields(rng: Random, body: dict[str, Any]) -> dict[str, Any]:
    """The body with a field changed, taken out, added or doubled in length."""
    changed = dict(body)
    for _ in range(rng.randrange(1, 3)):
        name = rng.choice([*changed, "unheard_of"]) if changed else "unheard_of"
        match rng.randrange(4):
            case 0:
                changed.pop(name, None)
            case 1 if isinstance(changed.get(name), list | bytes | str):
                changed[name] = changed[name] * 2
            case _:
                changed[name] = strange_value(rng)
    return changed


def mutated_bytes(rng: Random, data: bytes) -> bytes:
    """The bytes with some flipped, cut out, repeated or put in."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0:
                del changed[at:]
            case 1:
                changed[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 2:
                changed[at:at] = changed[at : at + rng.randrange(40)]
            case 3:
                del changed[at : at + rng.randrange(1, 9)]
            case _ if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)


def strange_path(rng: Random, path: str) -> str:
    """The path with one segment replaced by something that is no name."""
    segments = path.split("/")
    at = rng.randrange(1, len(segments))
    segments[at] = rng.choice(STRANGE_NAMES)
    return "/".join(segments)
