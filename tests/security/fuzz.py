"""Hostile requests by chance: cases from the service's own OpenAPI document, and mutated msgpack and HTTP.

`python tests/security/fuzz.py --requests 10000` starts a service of its own. With `--url` it fuzzes a running
one; then `--pid` names the process whose memory is watched and `--log` the file in which tracebacks are
looked for. The seed is printed first; the last line is one JSON object: {"requests", "status_5xx",
"tracebacks", "rss_growth_mib"}. Exit status 1 when anything was found.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis.strategies import one_of
from schemathesis import GenerationMode
from schemathesis.core.result import Ok

from tests.security.mutations import mutated_bytes, mutated_fields, strange_path, valid_requests
from tests.security.raw_http import RawClient, request_bytes
from tests.security.service_child import rss_bytes, running_service

WARM_UP_SHARE = 0.2
"""Memory is compared after this share of the requests: caches and the allocator's pools are filled by then.
"""
SCHEMA_SHARE = 0.4
RSS_GROWTH_MIB_MAX = 32


class Findings:
    """What was seen so far."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.faults: list[str] = []

    def add(self, status: int, what: str) -> None:
        """Count one answer; keep the request when it is a fault of the service."""
        self.statuses[status] += 1
        if status >= 500 and len(self.faults) < 20:
            self.faults.append(f"{status} for {what}")

    @property
    def requests(self) -> int:
        return sum(self.statuses.values())

    @property
    def status_5xx(self) -> int:
        return sum(count for status, count in self.statuses.items() if status >= 500)


def schema_cases(
    client: RawClient, findings: Findings, count: int, seed: int, operations_max: int | None = None
) -> None:
    """Cases that schemathesis makes from the document: as described, and against the description.

    `operations_max`: of so many operations only, drawn by the seed, since each costs a moment to prepare.
    """
    _, document = client.exchange(request_bytes("GET", "/openapi.json", b"", {}))
    described = schemathesis.openapi.from_dict(json.loads(document))
    operations = [each.ok() for each in described.get_all_operations() if isinstance(each, Ok)]
    if operations_max is not None:
        operations = Random(seed).sample(operations, operations_max)
    strategies = [
        operation.as_strategy(generation_mode=mode)
        for operation in operations
        for mode in GenerationMode
        if mode is GenerationMode.POSITIVE or "{" in operation.path or operation.body
    ]

    @hypothesis_seed(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(one_of(strategies))
    def send(case: Any) -> None:
        body, headers = _case_body(case)
        path = quote(case.formatted_path, safe="/%:@+-._~!$&'()*,;=")
        if case.query:
            path += "?" + urlencode(case.query, doseq=True)
        status = client.request(case.method, path, body, headers)
        findings.add(status, f"{case.method} {path} {body[:200]!r}")

    send()


def _case_body(case: Any) -> tuple[bytes, dict[str, str]]:
    headers = {str(name): str(value) for name, value in (case.headers or {}).items() if _sendable(str(value))}
    headers.pop("Content-Length", None)
    if case.media_type is None or case.body is schemathesis.core.NOT_SET:
        return b"", headers
    headers["Content-Type"] = case.media_type
    encode = msgspec.msgpack.encode if case.media_type == "application/msgpack" else json_bytes
    try:
        return encode(case.body), headers
    except (TypeError, ValueError, OverflowError):
        return repr(case.body).encode(), headers


def json_bytes(value: Any) -> bytes:
    """JSON as json writes it: huge numbers, NaN and lone surrogates are not refused here."""
    return json.dumps(value, default=repr).encode()


def _sendable(value: str) -> bool:
    return not any(character in value for character in "\r\n\0")


def mutated_cases(client: RawClient, findings: Findings, count: int, rng: Random) -> None:
    """Good requests of the hot routes, made bad by chance in fields, bytes, path, headers or HTTP itself."""
    for _ in range(count):
        method, path, body = rng.choice(valid_requests(rng))
        headers = {"Content-Type": "application/msgpack"}
        data = msgspec.msgpack.encode(body)
        raw: bytes | None = None
        match rng.randrange(8):
            case 0:
                pass
            case 1 | 2:
                data = msgspec.msgpack.encode(mutated_fields(rng, body))
            case 3 | 4:
                data = mutated_bytes(rng, data)
            case 5:
                path = strange_path(rng, path)
            case 6:
                method = rng.choice(["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE"])
                headers["Content-Type"] = rng.choice(["application/json", "text/plain", "", "a" * 99])
                headers["Accept"] = rng.choice(
                    ["*/*", "application/json", "text/html", "\x01", "a/b;q=zz,;;", "*"]
                )
            case _:
                raw = mutated_bytes(rng, request_bytes(method, path, data, headers))
        if raw is None:
            findings.add(client.request(method, path, data, headers), f"{method} {path} {data[:200]!r}")
        else:
            findings.add(client.last_request(raw), repr(raw[:300]))


def furnish(client: RawClient) -> None:
    """Register what good requests name: without it most would get no further than `instance_unknown`."""
    fingerprint = {
        **dict.fromkeys(("model", "revision", "kv_dtype", "hash_scheme", "hash_seed"), "x"),
        "block_size_tokens": 16,
        "key_length": 16,
        "parts": [{"name": name, "bytes": 1024} for name in ("tp0", "tp1")],
    }
    bodies: dict[str, Any] = {
        "/v1/tenants/acme": {},
        "/v1/storages/s1": {"kind": "posix", "options": {"root": "/s1"}},
        "/v1/groups/chat": {"tenant": "acme", "storages": ["s1"]},
        "/v1/instances/m1": {"group": "chat", "fingerprint": fingerprint, "publication": {"model": "x"}},
        "/v1/engines/e1": {"incarnation": "i1", "instance": "m1"},
        "/v1/workers/w1": {"incarnation": "j1", "storages": ["s1"]},
    }
    for path, body in bodies.items():
        client.request("PUT", path, json_bytes(body), {"Content-Type": "application/json"})


def fuzz(
    port: int, requests: int, seed: int, pid: int | None, host: str = "127.0.0.1"
) -> tuple[Findings, float]:
    """All cases against a service; gives the findings and the growth of its memory in MiB."""
    findings = Findings()
    client = RawClient(host, port)
    rng = Random(seed)
    furnish(client)
    warm_up = int(requests * WARM_UP_SHARE)
    mutated_cases(client, findings, warm_up // 2, rng)
    schema_cases(client, findings, warm_up // 2, seed)
    before = rss_bytes(pid) if pid else 0
    schema_cases(client, findings, int(requests * SCHEMA_SHARE), seed + 1000)
    mutated_cases(client, findings, max(0, requests - findings.requests), rng)
    after = rss_bytes(pid) if pid else 0
    client.close()
    return findings, (after - before) / 2**20


@contextmanager
def _target(arguments: argparse.Namespace) -> Iterator[tuple[str, int, int | None, Path | None]]:
    if arguments.url:
        parts = urlsplit(arguments.url)
        yield parts.hostname or "127.0.0.1", parts.port or 80, arguments.pid, arguments.log
        return
    with tempfile.TemporaryDirectory() as folder, running_service(Path(folder)) as child:
        yield "127.0.0.1", child.port, child.pid, child.log


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url", default="")
    parser.add_argument("--pid", type=int, default=None)
    parser.add_argument("--log", type=Path, default=None)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    with _target(arguments) as (host, port, pid, log):
        findings, growth = fuzz(port, arguments.requests, arguments.seed, pid, host)
        text = log.read_bytes() if log is not None else b""
        tracebacks = text.count(b"Traceback (most recent call last)")
        alive = RawClient(host, port).request("GET", "/livez") == 200
    print("statuses", dict(sorted(findings.statuses.items())))
    for fault in findings.faults:
        print(fault)
    if tracebacks:
        print(text[-4000:].decode("utf-8", "replace"))
    summary = {
        "requests": findings.requests,
        "status_5xx": findings.status_5xx,
        "tracebacks": tracebacks,
        "rss_growth_mib": round(growth, 1),
    }
    print(json.dumps(summary))
    clean = alive and not findings.status_5xx and not tracebacks and growth < RSS_GROWTH_MIB_MAX
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
