"""One model and its engines, as the harness plays them: what engines would tell the service and their
routers, and what is true because of it."""

import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from time import monotonic
from types import TracebackType
from typing import Any, Self

from metaservice.cli.local.process import until
from metaservice.cli.local.replicas import LocalReplica
from metaservice.client import Client, ClientError, FinishResult, WriteResult
from metaservice.wire.schemas import WriteOutcome
from metaservice.wire.tokens import pack_tokens
from tests.compat.indexer import Indexer
from tests.compat.reference import DEVICE, HOST, SHARED, Author, Document, Truth
from tests.compat.site import STORAGE, TENANT, Site
from tests.compat.streams import EngineStream, removed, stored

BLOCK_SIZE = 16
KEY_LENGTH = 32
PART_BYTES = 1_000
KNOWN_TIMEOUT_S = 20.0
CANARY = "canary-0"
SHELF = "shm"
"""Kind of the storages that are one node's memory."""
_workers = count(1)
_models = count(1)


class WriteFailed(Exception):
    """The service did not take a write although the client tried for long."""


@dataclass(slots=True)
class Engine:
    """One engine, one rank of a worker: registered at the service, and publishing what its device has."""

    name: str
    worker: int
    node: str
    rank: int
    client: Client
    stream: EngineStream


class Fleet:
    """A model that is published, with its instance, storages and engines. A context manager.

    `truth` follows what is done through it.
    """

    def __init__(
        self,
        site: Site,
        *,
        nodes: Sequence[str] = (),
        node_blocks: int = 0,
        model: str = "",
        name: str = "",
        publication: dict[str, Any] | None = None,
    ) -> None:
        """`nodes` with memory of their own for `node_blocks` blocks each; what does not fit goes to the
        storage that every engine reaches. `name`: of the instance, where a model has several."""
        self.site = site
        self.model = model or f"model-{next(_models)}"
        self.instance = name or self.model
        self.truth = Truth(BLOCK_SIZE)
        self.engines: list[Engine] = []
        self.author = Author(random.Random(site.chance.getrandbits(64)), BLOCK_SIZE, KEY_LENGTH)
        self._stack = ExitStack()
        self._shelf_nodes = {f"{self.instance}.{node}": node for node in nodes}
        self.publication = {"model": self.model, **(publication or {})}
        self.found(node_blocks)
        self.writer = next(_workers)
        """The number of the engine that stores: a worker as others, with nothing on its device."""
        self._writer_name = f"{self.instance}.writer"
        self._writer = self.register(self._writer_name, 0, worker_id=self.writer)
        self.truth.join(self.writer)

    def found(self, node_blocks: int = 0) -> None:
        """Set up what an operator does; again, where the service has forgotten it. Raises ClientError."""
        operator = self.site.operator
        for shelf, node in self._shelf_nodes.items():
            room = node_blocks * PART_BYTES
            options = {"slot_bytes": str(PART_BYTES)}
            operator.put_storage(shelf, SHELF, options, capacity_bytes=room, fault_domain=node, reach="node")
            keeper = self.site.client()
            keeper.register_worker(f"keeper-{shelf}", [shelf])
            self._stack.callback(keeper.close, cut=True)
        storages = [*self._shelf_nodes, STORAGE]
        operator.put_group(self.instance, TENANT, storages, high_permille=1000, low_permille=990)
        operator.put_instance(
            self.instance, self.instance, fingerprint(self.model), publication=self.publication
        )
        self._instances = [self.instance]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except ClientError:
            if kind is None:
                raise  # else it is known already that something went wrong

    def close(self) -> None:
        """End the engines, in order, and delete what was set up. Raises ClientError."""
        for engine in list(self.engines):
            self.leave(engine)
        self._writer.deregister()
        self._stack.close()
        for instance in reversed(self._instances):
            self.site.operator.delete(f"/v1/instances/{instance}")

    # -- engines

    def register(self, name: str, rank: int, **endpoints: Any) -> Client:
        """A client that speaks for a registered engine. Raises WriteFailed."""
        client = self.site.client()
        answer = client.register_engine(name, instance=self.instance, rank=rank, endpoints=endpoints)
        if answer.failure is not None:
            raise WriteFailed(f"register {name}: {answer.failure}: {answer.detail}")
        return client

    def join(
        self,
        node: str = "",
        *,
        worker: int = 0,
        rank: int = 0,
        told: bool = False,
        engine: str = "",
        number: int = 0,
    ) -> Engine:
        """A new engine, `engine` by name. `worker`: another rank of that one; `number`: its number as a
        worker of its own (0: a new one). `told`: the service is told where its own events are published."""
        first = worker or number or next(_workers)
        stream = EngineStream(f"kv@10.0.0.{first}:8000@{self.model}", rank)
        name = engine or f"{self.instance}.{first}.{rank}"
        endpoints: dict[str, Any] = {"node": node, "worker_id": first}
        if told:
            endpoints |= {"events": stream.endpoint, "replay": stream.replay}
        client = self.register(name, rank, **endpoints)
        joined = Engine(name, first, node, rank, client, stream)
        self.engines.append(joined)
        if not worker:
            self.truth.join(first, node)
        return joined

    def leave(self, engine: Engine) -> None:
        """It ends in order."""
        self.engines.remove(engine)
        engine.client.deregister()
        engine.client.close(cut=True)
        engine.stream.close()
        self.truth.workers.pop(engine.worker, None)

    def die(self, engine: Engine) -> None:
        """It ends without a word: no more heartbeats, no more events."""
        self.engines.remove(engine)
        engine.client.close(cut=True)
        engine.stream.close()
        self.truth.workers.pop(engine.worker, None)

    def rejoin(self, engine: Engine) -> Engine:
        """An engine that died comes back under its name: another process, with an empty device."""
        return self.join(engine.node, engine=engine.name, number=engine.worker)

    def await_known(self) -> None:
        """Returns once the service knows the engines again that it forgot: they notice with a heartbeat.
        Raises WriteFailed."""
        names = set(self.workers.values())
        for _ in until(monotonic() + KNOWN_TIMEOUT_S):
            said = self.site.events(self.site.leader, self.instance)
            if names <= {row["engine"] for row in said["engines"]}:
                return
        raise WriteFailed(f"the service does not know all of {sorted(names)} again")

    def register_streams(self, indexer: Indexer) -> None:
        """Have an indexer follow the engines' own streams, as an operator does."""
        for engine in self.engines:
            self.register_stream(indexer, engine)

    def register_stream(self, indexer: Indexer, engine: Engine) -> None:
        """Of one engine. Raises LocalFailed when it is refused."""
        indexer.register(
            engine.worker,
            engine.stream.endpoint,
            self.model,
            BLOCK_SIZE,
            replay=engine.stream.replay,
            rank=engine.rank,
        )

    # -- what engines do

    def compute(self, engine: Engine, document: Document, blocks: int | None = None) -> None:
        """It has the first blocks of a prompt on its device now, and says so."""
        held = self.truth.workers[engine.worker].keys(DEVICE)
        upto = len(document.keys) if blocks is None else blocks
        first = next((at for at in range(upto) if document.keys[at] not in held), upto)
        if first == upto:
            return
        hashes = document.hashes
        parent = hashes[first - 1] if first else None
        tokens = [token for block in document.tokens[first:upto] for token in block]
        event = stored(hashes[first:upto], parent, tokens, BLOCK_SIZE, lora=document.lora, salt=document.salt)
        engine.stream.publish([event])
        held.update(document.keys[first:upto])

    def forget(self, engine: Engine, document: Document, keep: int) -> None:
        """Its device needs the room: of a prompt only the first blocks stay. No other prompt may hang on the
        rest."""
        held = self.truth.workers[engine.worker].keys(DEVICE)
        gone = [at for at in range(keep, len(document.keys)) if document.keys[at] in held]
        hashes = document.hashes
        if gone:
            engine.stream.publish([removed([hashes[at] for at in reversed(gone)])])
            held.difference_update(document.keys[at] for at in gone)

    def adapter(self, name: str) -> str:
        """An instance of its own for an adapter that the engines load; its id. Raises ClientError."""
        instance = f"{self.instance}.{name}"
        told = {**self.publication, "lora": name, "base": self.instance}
        own = fingerprint(self.model, extra={"lora": name})
        self.site.operator.put_instance(instance, self.instance, own, publication=told)
        self._instances.append(instance)
        return instance

    def write(self, document: Document, *, tokens: bool = True, instance: str = "") -> int:
        """Store what is not stored of a prompt, in another instance than the base model's where one is
        named; how many blocks that were. Raises WriteFailed."""
        started = self._writer.start_write(
            instance or self.instance,
            list(document.keys),
            tokens=[pack_tokens(block) for block in document.tokens] if tokens else None,
            lora=document.lora,
            salt=document.salt,
        )
        if started.failure is not None:
            raise WriteFailed(f"start: {started.failure}: {started.detail}")
        rows = [row for row, code in enumerate(started.outcomes) if code == WriteOutcome.write]
        if any(code not in (WriteOutcome.write, WriteOutcome.present) for code in started.outcomes):
            raise WriteFailed(f"start: {bytes(started.outcomes).hex()}: {list(started.reasons)}")
        if rows:
            finished = self._finish(started, rows)
            if finished.failure is not None:
                raise WriteFailed(f"finish: {finished.failure}: {finished.detail}")
            if tokens:
                for row in rows:
                    storage = started.storage_table[started.storages[row]].name
                    self._shelf(storage).add(document.keys[row])
        return len(rows)

    def _finish(self, started: WriteResult, rows: list[int]) -> FinishResult:
        return self._writer.finish(
            started,
            [started.locations[row] for row in rows],
            [started.generations[row] for row in rows],
            checksums=rows,
        )

    def _shelf(self, storage: str) -> set[bytes]:
        node = self._shelf_nodes.get(storage)
        return self.truth.shared if node is None else self.truth.at_node(node, HOST)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove blocks from all storages. Raises WriteFailed."""
        answer = self._writer.remove(self.instance, list(keys))
        if answer.failure is not None:
            raise WriteFailed(f"remove: {answer.failure}: {answer.detail}")
        self.truth.drop(keys)

    def within_reach(self, engine: Engine, document: Document) -> bool:
        """Whether all that is stored of a prompt is where this engine reaches it."""
        reach = self.truth.workers[engine.worker]
        tiers = [reach.keys(tier) for tier in (HOST, SHARED)]
        return all(any(key in tier for tier in tiers) for key in document.keys if self.truth.stored(key))

    @property
    def workers(self) -> dict[int, str]:
        """The name of an engine of each worker."""
        return {self.writer: self._writer_name, **{one.worker: one.name for one in self.engines}}

    def streams(self, engine: str, replica: LocalReplica) -> list[dict[str, Any]]:
        """What a replica says of the streams that are for an engine, that of all engines first. Raises
        WriteFailed when it knows of none."""
        for _ in until(monotonic() + KNOWN_TIMEOUT_S):
            said = self.site.events(replica, self.instance)
            rows = {row["engine"]: row for row in said["engines"]}
            if engine in rows:
                channels = (rows[engine]["pool_channel"], rows[engine]["local_channel"])
                found = {stream["channel"]: stream for stream in said["streams"]}
                if all(channel in found for channel in channels if channel >= 0):
                    return [found[channel] for channel in channels if channel >= 0]
        raise WriteFailed(f"{replica.name} knows of no streams for {engine}")


def fingerprint(model: str, **changes: Any) -> dict[str, Any]:
    """Of an instance of a model."""
    return {
        "model": model,
        "revision": "r",
        "kv_dtype": "bf16",
        "block_size_tokens": BLOCK_SIZE,
        "key_length": KEY_LENGTH,
        "hash_scheme": "sha256_cbor",
        "hash_seed": "0",
        "canary": CANARY,
        "groups": [{"name": "full", "kind": "full"}],
        "parts": [{"name": "kv", "bytes": PART_BYTES, "group": "full"}],
        **changes,
    }
