"""Cases in which nothing breaks: what is stored, removed, computed and forgotten is what is scored."""

import random
from time import sleep

from metaservice.client import ClientError
from tests.compat.fleet import Engine, Fleet, fingerprint
from tests.compat.judge import CaseFailed, Judge
from tests.compat.reference import DEVICE, Document
from tests.compat.site import STORAGE, TENANT
from tests.compat.stage import Stage
from tests.compat.streams import cleared

OPERATIONS = 20_000
"""Blocks stored and removed."""
SETTLE_S = 15.0
LEAD_BLOCKS = 8


class Traffic:
    """Prompts that come, are computed, stored, forgotten and removed, as chance wants it."""

    def __init__(self, fleet: Fleet, chance: random.Random) -> None:
        self.fleet = fleet
        self.documents: list[Document] = []
        self.operations = 0
        self._chance = chance
        self._families: list[list[Document]] = []
        self._on_device: dict[tuple[bytes, ...], Engine] = {}
        self._removed: list[Document] = []

    def step(self) -> None:
        """One thing happens."""
        luck = self._chance.random()
        if luck < 0.5 or not self.documents:
            self._store_new()
        elif luck < 0.6 and self._removed:
            self.operations += self.fleet.write(self._removed.pop(self._chance.randrange(len(self._removed))))
        elif luck < 0.78:
            self._compute()
        elif luck < 0.83:
            self._forget()
        elif luck < 0.97:
            self._remove_end()
        else:
            self._remove_family()

    def _store_new(self) -> None:
        author = self.fleet.author
        if self._families and self._chance.random() < 0.6:
            family = self._chance.choice(self._families)
            document = author.write(self._chance.randrange(4, 40), family[0].upto(LEAD_BLOCKS))
        else:
            family = []
            self._families.append(family)
            document = author.write(LEAD_BLOCKS + self._chance.randrange(4, 40))
        family.append(document)
        self.documents.append(document)
        self.operations += self.fleet.write(document)

    def _compute(self) -> None:
        """Only what is stored within the engine's reach, and is not stored anew elsewhere afterwards: what a
        router makes of a block whose parent it may know from the device or not is a matter of moments."""
        document = self._chance.choice(self.documents)
        engine = self._chance.choice(self.fleet.engines)
        if document.keys not in self._on_device and self.fleet.within_reach(engine, document):
            self.fleet.compute(engine, document, self._chance.randrange(1, len(document.keys) + 1))
            self._on_device[document.keys] = engine

    def _forget(self) -> None:
        if self._on_device:
            keys = self._chance.choice(list(self._on_device))
            document = next(one for one in self.documents if one.keys == keys)
            self.fleet.forget(
                self._on_device[keys], document, self._chance.randrange(LEAD_BLOCKS, len(keys) + 1)
            )

    def _remove_end(self) -> None:
        document = self._chance.choice(self.documents)
        keys = document.keys[self._chance.randrange(LEAD_BLOCKS, len(document.keys)) :]
        self._remove(keys, document)

    def _remove_family(self) -> None:
        family = self._chance.choice(self._families)
        for blocks in (LEAD_BLOCKS, 0):  # others of the family hang on its beginning
            for document in family:
                if document.keys in self._on_device:
                    self.fleet.forget(self._on_device[document.keys], document, blocks)
        for document in family:
            self._on_device.pop(document.keys, None)
        keys = {key: None for document in family for key in document.keys}
        self._remove(tuple(keys), *family)

    def _remove(self, keys: tuple[bytes, ...], *documents: Document) -> None:
        held = [key for key in keys if self.fleet.truth.stored(key)]
        if held:
            self.fleet.remove(held)
            self.operations += len(held)
        self._removed += [one for one in documents if one.keys not in self._on_device]


def stores_and_removes(stage: Stage) -> str:
    """20,000 stores and removes, four workers, a shared storage and memory of two nodes."""
    with Fleet(stage.site, nodes=("a", "b"), node_blocks=1_500) as fleet:
        for node in ("a", "a", "b", ""):
            fleet.join(node)
        fleet.register_streams(stage.site.attached)
        judge = Judge(fleet, stage.site.attached)
        judge.await_attached()
        traffic = Traffic(fleet, stage.chance)
        looked = 0
        while traffic.operations < OPERATIONS:
            for _ in range(100):
                traffic.step()
            judge.settle(stage.chance.sample(traffic.documents, 10), SETTLE_S)
            looked += 10
        took_s = judge.settle(traffic.documents, SETTLE_S)
        looked += judge.hold(traffic.documents, stage.chance, 1.5)
        return (
            f"{traffic.operations} blocks stored or removed, {len(traffic.documents)} prompts; exact "
            f"{took_s:.2f} s after the last, {looked} looks on the way"
        )


def row_10_duplicates(stage: Stage) -> str:
    """A block that was stored, told and told again many times is gone with one removal."""
    with Fleet(stage.site) as fleet:
        fleet.join()
        judge = Judge(fleet, stage.site.attached)
        judge.await_attached()
        documents = [fleet.author.write(12) for _ in range(5)]
        for document in documents:
            fleet.write(document)
        judge.settle(documents, SETTLE_S)
        for _ in range(3):
            for document in documents:
                if fleet.write(document):
                    raise CaseFailed("a block that is stored was to be written again")
            stage.site.operator.post(f"/v1/instances/{fleet.instance}/restate", {})
            sleep(0.5)
            judge.settle(documents, SETTLE_S)
        for document in documents:
            fleet.remove(document.keys)
        took_s = judge.settle(documents, SETTLE_S)
        return f"told four times, removed once, gone after {took_s:.2f} s"


def row_18_ranks(stage: Stage) -> str:
    """Two ranks of one worker: what is shared is there under both ranks, and under no other."""
    with Fleet(stage.site) as fleet:
        first = fleet.join()
        fleet.join(worker=first.worker, rank=1)
        judge = Judge(fleet, stage.site.attached)
        judge.await_attached()
        documents = [fleet.author.write(10) for _ in range(4)]
        for document in documents:
            fleet.write(document)
        judge.settle(documents, SETTLE_S)
        sleep(1.0)
        ranks = stage.site.attached.blocks_by_rank(fleet.model, first.worker)
        if ranks != {0: 40, 1: 40}:
            raise CaseFailed(f"40 blocks under ranks 0 and 1 each were expected, not {ranks}")
        return "40 blocks under rank 0 and the same under rank 1"


def rows_19_20_adapters_and_salts(stage: Stage) -> str:
    """The same tokens of the base model, of three adapters (one has an instance of its own), and under a salt
    are prompts of their own."""
    with Fleet(stage.site) as fleet:
        fleet.join()
        judge = Judge(fleet, stage.site.attached)
        judge.await_attached()
        base = fleet.author.write(8)
        variants = [
            base,
            fleet.author.retold(base, lora="adapter-a"),
            fleet.author.retold(base, lora="adapter-b"),
            fleet.author.retold(base, salt="tenant-1"),
            fleet.author.retold(base, lora="adapter-a", salt="tenant-1"),
        ]
        stranger = fleet.author.retold(base, salt="tenant-2")
        untold = fleet.author.write(8)
        fleet.write(untold, tokens=False)
        for number, variant in enumerate(variants):
            fleet.write(variant.upto(4 + number % 4))
            judge.settle([*variants, stranger, untold], SETTLE_S)
        own = fleet.author.retold(base, lora="adapter-c")
        fleet.write(own, instance=fleet.adapter("adapter-c"))
        variants.append(own)
        judge.settle([*variants, stranger, untold], SETTLE_S)
        judge.hold([*variants, stranger, untold], stage.chance, 1.0)
        for variant in variants[:-1]:
            fleet.remove([key for key in variant.keys if fleet.truth.stored(key)])
            judge.settle([*variants, stranger, untold], SETTLE_S)
        return f"{len(variants)} prompts of the same tokens kept apart, one without tokens told to nobody"


def rows_6_27_mixed_hashes(stage: Stage) -> str:
    """Engines that name blocks otherwise are refused where routers could not tell them apart."""
    with Fleet(stage.site) as fleet:
        other = fleet.instance + "-other"
        stage.site.operator.put_group(other, TENANT, [STORAGE])
        refused = []
        for changes in ({"hash_seed": "1"}, {"hash_scheme": "sha256"}, {"block_size_tokens": 32}):
            try:
                stage.site.operator.put_instance(
                    other, other, fingerprint(fleet.model, **changes), publication=fleet.publication
                )
            except ClientError as error:
                refused.append(str(error))
            else:
                raise CaseFailed(f"an instance with {changes} was let into the same routing group")
        if not all("hash_space_mixed" in text for text in refused):
            raise CaseFailed(f"refused, but not as hash_space_mixed: {refused}")
        stranger = stage.site.client(retry_ms=0).register_engine(
            f"{fleet.instance}.stranger", instance=fleet.instance, keepalive=None, canary="another"
        )
        if stranger.failure is None or "canary_mismatch" not in stranger.failure:
            raise CaseFailed(f"an engine that hashes otherwise was answered {stranger.failure}")
        return "another seed, scheme, block size and canary are refused in the same routing group"


def row_12_cleared(stage: Stage) -> str:
    """An engine clears its cache: its router forgets what is shared too, and is told again."""
    with Fleet(stage.site) as fleet:
        engines = [fleet.join(told=True), fleet.join(told=True)]
        fleet.register_streams(stage.site.attached)
        judge = Judge(fleet, stage.site.attached)
        judge.await_attached()
        documents = [fleet.author.write(20) for _ in range(30)]
        for document in documents:
            fleet.write(document)
            fleet.compute(stage.chance.choice(engines), document, 10)
        judge.settle(documents, SETTLE_S)
        took_s = []
        for engine in engines:
            engine.stream.publish([cleared()])
            fleet.truth.workers[engine.worker].keys(DEVICE).clear()
            took_s.append(judge.settle(documents, SETTLE_S))
        judge.hold(documents, stage.chance, 1.0)
        return f"all that is shared is back {max(took_s):.2f} s after an engine cleared its cache"
