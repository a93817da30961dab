"""The service with cache events on, as a process, and a small fleet that writes prompts into it."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from socket import AF_INET, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, socket
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx
import msgspec

from metaservice.wire.tokens import pack_tokens
from tests.functional.events_reader import Index, Keys, Reader
from tests.torture.service_process import ServiceProcess

MSGPACK = "application/msgpack"
DECODE = msgspec.msgpack.decode
CHANNELS_MAX = 64
BLOCK_TOKENS = 16
KEY_LENGTH = 16
MODEL = "tiny-llm"
FINGERPRINT: dict[str, Any] = {
    "model": MODEL,
    "revision": "r1",
    "kv_dtype": "bf16",
    "block_size_tokens": BLOCK_TOKENS,
    "key_length": KEY_LENGTH,
    "hash_scheme": "test",
    "hash_seed": "0",
    "canary": "",
    "parts": [{"name": "tp0", "bytes": 1_000}],
}
HYBRID: dict[str, Any] = {
    **FINGERPRINT,
    "groups": [
        {"name": "full"},
        {"name": "swa", "kind": "sliding_window", "window_blocks": 2},
        {"name": "mamba", "kind": "state"},
    ],
    "parts": [
        {"name": "tp0", "bytes": 1_000},
        {"name": "swa0", "bytes": 64, "group": "swa"},
        {"name": "ssm0", "bytes": 32, "group": "mamba"},
    ],
}


class Prompt:
    """Some blocks of a text: its tokens, and the keys that its engine gives them."""

    def __init__(
        self,
        seed: int,
        blocks: int,
        *,
        lora: str = "",
        salt: str = "",
        after: "Prompt | None" = None,
        block_tokens: int = BLOCK_TOKENS,
        key_length: int = KEY_LENGTH,
        space: str = "",
    ) -> None:
        """`after`: the prompt whose last block the first of these hangs on. `space`: another way of making
        keys."""
        chance = random.Random(f"prompt {seed}")
        self.lora, self.salt = lora, salt
        self.tokens = [[chance.randrange(150_000) for _ in range(block_tokens)] for _ in range(blocks)]
        self.parent = after.keys[-1] if after is not None else None
        self.before = after
        self.keys: list[bytes] = []
        parent = self.parent or b""
        for row in self.tokens:
            text = f"{space}/{lora}/{salt}/{row}".encode()
            parent = sha256(parent + text).digest()[:key_length]
            self.keys.append(parent)

    @property
    def hashes(self) -> list[int]:
        """The engine's own event hashes of the blocks: the last eight bytes of the keys."""
        return [int.from_bytes(one[-8:], "big") for one in self.keys]

    @property
    def ids(self) -> list[int]:
        """All token ids from the beginning of the text."""
        before = self.before.ids if self.before is not None else []
        return before + [token for row in self.tokens for token in row]

    @property
    def packed(self) -> list[bytes]:
        """The token ids of each block as they are sent."""
        return [pack_tokens(row) for row in self.tokens]


class Told(NamedTuple):
    """What a router has to know of a block."""

    parent: int | None
    tokens: tuple[int, ...]


def wanted(prompt: Prompt) -> dict[int, Told]:
    """The blocks of a prompt as routers have to know them."""
    parents = [
        int.from_bytes(prompt.parent[-8:], "big") if prompt.parent is not None else None,
        *prompt.hashes[:-1],
    ]
    rows = zip(prompt.hashes, parents, prompt.tokens, strict=True)
    return {one: Told(parent, tuple(tokens)) for one, parent, tokens in rows}


def known(index: Index, medium: str) -> dict[int, Told]:
    """What a router knows in a medium."""
    return {
        one: Told(block.parent, block.tokens)
        for (one, where), block in index.blocks.items()
        if where == medium
    }


def free_ports(count: int) -> int:
    """The first of so many loopback ports that nobody listens on now."""
    chance = random.Random()
    for _ in range(200):
        first = chance.randrange(20_000, 32_000 - count)
        try:
            for port in range(first, first + count):
                with socket(AF_INET, SOCK_STREAM) as probe:
                    probe.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError(f"no {count} free ports in a row")


class Refused(AssertionError):
    """The service refused what it had to take. `code` and `field` as it said."""

    def __init__(self, status: int, code: str, field: str, text: str) -> None:
        super().__init__(f"{status} {text}")
        self.status, self.code, self.field = status, code, field


class Caller:
    """Who speaks with one replica: operator, engines and routers in one."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=20.0, trust_env=False)
        self._readers: list[Reader] = []
        self._lives: dict[str, str] = {}

    def close(self) -> None:
        """Everybody leaves."""
        for reader in self._readers:
            reader.close()
        self.http.close()

    # ------------------------------------------------------------ HTTP

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded answer, which must be a good one. Raises Refused."""
        content = b"" if body is None else msgspec.msgpack.encode(body)
        headers = {"content-type": MSGPACK, "accept": MSGPACK}
        reply = self.http.request(method, path, content=content, headers=headers)
        decode = msgspec.json.decode if "json" in reply.headers.get("content-type", "") else DECODE
        said: Any = decode(reply.content) if reply.content else {}
        if reply.status_code >= 300:
            raise Refused(reply.status_code, said.get("code", ""), said.get("field", ""), str(said))
        return said

    def refused(self, method: str, path: str, body: Any = None) -> Refused:
        """Why a request is refused, which it must be."""
        try:
            answer = self.ask(method, path, body)
        except Refused as refused:
            return refused
        raise AssertionError(f"{method} {path} was taken: {answer}")

    def furnish(
        self,
        instance: str = "m1",
        *,
        storages: Sequence[str] = ("pool",),
        publication: dict[str, Any] | None = None,
        fingerprint: dict[str, Any] | None = None,
        tenant: str = "acme",
    ) -> None:
        """A tenant, storages, a group of that tenant's, an instance that is announced and an engine `e-<id>`
        of it. Storages named `mem@NODE` are NODE's memory, `disk@NODE` its disk, others are everybody's."""
        self.ask("PUT", f"/v1/tenants/{tenant}", {})
        names = []
        for storage in storages:
            kind, _, node = storage.partition("@")
            name = storage.replace("@", "-")
            names.append(name)
            body: dict[str, Any] = {"kind": "posix", "options": {"root": f"/{name}"}, "fault_domain": node}
            if kind == "mem":
                body = {"kind": "shm", "options": {"dir": f"/dev/shm/{name}"}, "fault_domain": node}
            elif node:
                body["reach"] = "node"
            self.ask("PUT", f"/v1/storages/{name}", body)
        group = f"{tenant}-{'-'.join(names)}"
        self.ask("PUT", f"/v1/groups/{group}", {"tenant": tenant, "storages": names})
        self.put_instance(instance, group, publication or {"model": MODEL}, fingerprint or FINGERPRINT)
        self.engine(f"e-{instance}", instance)

    def put_instance(
        self, instance: str, group: str, publication: dict[str, Any] | None, fingerprint: dict[str, Any]
    ) -> None:
        """Register or change an instance; `publication` None: it is not announced."""
        body: dict[str, Any] = {"group": group, "fingerprint": fingerprint}
        if publication is not None:
            body["publication"] = publication
        self.ask("PUT", f"/v1/instances/{instance}", body)

    def engine(self, name: str, instance: str = "m1", *, life: str = "i1", **more: Any) -> None:
        """Register an engine; `node`, `address`, `events`, `replay`, `worker_id` and `dialect` are where it
        is."""
        self._lives[name] = life
        where = {key: more.pop(key) for key in list(more) if key in ENDPOINTS}
        body = {"incarnation": life, "instance": instance, "endpoints": where, **more}
        self.ask("PUT", f"/v1/engines/{name}", body)

    def _who(self, instance: str) -> dict[str, str]:
        """The instance's own engine."""
        return {"engine": f"e-{instance}", "incarnation": self._lives[f"e-{instance}"]}

    def worker(self, name: str, storages: Sequence[str], life: str = "j1") -> None:
        """Register a data-plane worker."""
        self.ask("PUT", f"/v1/workers/{name}", {"incarnation": life, "storages": list(storages)})

    def start(self, prompt: Prompt, instance: str = "m1", **more: Any) -> Any:
        """Start to write the blocks of a prompt."""
        body = {
            **self._who(instance),
            "keys": prompt.keys,
            "tokens": prompt.packed,
            "lora": prompt.lora,
            "salt": prompt.salt,
            **({} if prompt.parent is None else {"parent": prompt.parent}),
            **more,
        }
        return self.ask("POST", f"/v1/instances/{instance}/writes", body)

    def finish(self, started: Any, instance: str = "m1") -> Any:
        """Everything of it was written."""
        rows = len(started["locations"]) // 8
        body = {
            **self._who(instance),
            "locations": started["locations"],
            "generations": started["generations"],
            "checksums": bytes(8 * rows * len(started["parts"])),
        }
        return self.ask("POST", f"/v1/writes/{started['session']}/finish", body)

    def write(self, prompt: Prompt, instance: str = "m1", **more: Any) -> None:
        """Write the blocks of a prompt; all of them must be new."""
        self.finish(self.start(prompt, instance, **more), instance)

    def lookup(self, prompt: Prompt, instance: str = "m1", **more: Any) -> int:
        """How many blocks of a prompt are there."""
        body = {
            "keys": prompt.keys,
            **({} if prompt.parent is None else {"parent": prompt.parent}),
            **more,
        }
        return int(self.ask("POST", f"/v1/instances/{instance}/lookup", body)["hits"])

    def remove(self, keys: list[bytes], instance: str = "m1") -> None:
        """Take blocks out of service."""
        self.ask("POST", f"/v1/instances/{instance}/remove", {"keys": keys})

    # ------------------------------------------------------------ streams

    def streams(self, instance: str | None = None) -> list[dict[str, Any]]:
        """The streams that there are."""
        path = "/v1/events" if instance is None else f"/v1/events?instance={instance}"
        return list(self.ask("GET", path)["streams"])

    def stream(self, instance: str = "m1", node: str = "", rank: int = 0) -> dict[str, Any]:
        """One stream, once it is there."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            found[:] = [
                one
                for one in self.streams()
                if (one["instance"], one["node"], one["rank"]) == (instance, node, rank) and one["live"]
            ]
            return bool(found)

        eventually(look, f"a stream of {instance} at {node or 'the pool'}, rank {rank}: {self.streams()}")
        assert len(found) == 1, found
        return found[0]

    def reader(
        self,
        instance: str = "m1",
        node: str = "",
        rank: int = 0,
        *,
        parents: Sequence[Reader] = (),
        keys: Keys | None = None,
    ) -> Reader:
        """A router on one stream, which has seen its first batch. `parents`: on other streams of the same
        engine."""
        view = self.stream(instance, node, rank)
        index = Index(*(one.index for one in parents))
        reader = Reader(view["endpoint"], view["replay"], keys=keys, index=index)
        self._readers.append(reader)
        reader.beats(1)
        return reader

    def metric(self, name: str) -> float:
        """The sum over all labels of a metric; 0.0 when it is not there."""
        lines = self.http.get("/metrics").text.splitlines()
        rows = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rpartition(" ")[2]) for line in rows)


class EventsService(Caller):
    """One service on SQLite with events on, over all its lives; and who speaks with it."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.ports = free_ports(2 * CHANNELS_MAX)
        events: dict[str, object] = {
            "events_port_base": self.ports,
            "events_channels_max": CHANNELS_MAX,
            "expire_ms": 60_000,
            "late_write_ms": 50,
        }
        self.process = ServiceProcess(folder, **{**events, **settings})
        super().__init__(self.process.url)

    def __enter__(self) -> Self:
        self.process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(f"the service's log:\n{self.process.log()[-3_000:]}")
        self.close()
        self.process.kill()

    def restart(self) -> None:
        """SIGKILL, and start it again."""
        self.process.kill()
        self.process.start()


ENDPOINTS = ("node", "address", "worker_id", "events", "replay", "dialect")


def eventually(holds: Callable[[], object], what: str, within_s: float = 10.0) -> float:
    """Wait for what must happen by itself; after how many seconds it did."""
    began_s = time.monotonic()
    while not holds():
        assert time.monotonic() < began_s + within_s, f"it never happened: {what}"
        time.sleep(0.02)
    return time.monotonic() - began_s


@contextmanager
def running(folder: Path, **settings: object) -> Iterator[EventsService]:
    """A service that runs."""
    with EventsService(folder, **settings) as service:
        yield service
