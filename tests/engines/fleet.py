"""Fake engines with our connector in them, and what must be true of all of them in the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_adapters.namespace import Namespace, Part
from engine_adapters.vllm.broker import Broker
from engine_adapters.vllm.ordering import Shape as CacheShape
from engine_adapters.vllm.rank import RankParts
from engine_adapters.vllm.scheduler import SchedulerSide
from engine_adapters.vllm.settings import Settings
from engine_adapters.vllm.spans import Spans
from engine_adapters.vllm.worker import WorkerSide
from tests.engines.cut_relay import CutRelay
from tests.engines.engine_request import Adapter, Status
from tests.engines.fake_engine import FakeEngine
from tests.engines.fake_pages import FakePages
from tests.engines.fake_scheduler import Options
from tests.engines.ground import Ground, page_of, until
from tests.engines.oracle import Shape, answer, block_keys, true_pages
from tests.engines.sides import OurScheduler, OurWorker
from tests.engines.telling import TellingMover, at_odds, untrue


def namespace_of(shape: Shape, **changes: Any) -> Namespace:
    """The namespace of the fake model."""
    fields: dict[str, Any] = {
        "engine": "fake",
        "engine_version": "0.32.0",
        "connector_version": "1.0.0",
        "model": "fake",
        "model_config": "0" * 16,
        "dtype": "bytes",
        "kv_dtype": "bytes",
        "layout": "pages",
        "kv_format": "fake",
        "block_size_tokens": shape.block_tokens,
        "hash_algorithm": "sha256",
        "key_length": 32,
        "canary": "c0ffee",
        "tp": shape.ranks,
        "kv_heads": shape.ranks,
        "layers": len(shape.windows),
        "groups": str(shape.windows),
    }
    return Namespace(**{**fields, **changes})


def parts_of(shape: Shape) -> list[list[Part]]:
    """Each rank's parts, one a KV cache group."""
    several = len(shape.windows) > 1
    return [
        [Part(f"g{group}-tp{rank}" if several else f"tp{rank}", shape.page_bytes) for group in shape.groups]
        for rank in range(shape.ranks)
    ]


@dataclass
class Asked:
    """A request as it was sent, for the comparison in the end."""

    prompt: tuple[int, ...]
    max_tokens: int
    salt: str = ""
    adapter: Adapter | None = None

    def right(self, shape: Shape) -> tuple[int, ...]:
        """The tokens that any engine must give."""
        return answer(shape, self.prompt, self.max_tokens, self.adapter.weights if self.adapter else "")


@dataclass
class UcmEngine:
    """One engine of the fleet. Its way to the service is a wire of its own."""

    ground: Ground
    group: str
    name: str
    shape: Shape
    options: Options = field(default_factory=Options)
    settings: dict[str, Any] = field(default_factory=dict)
    namespace: dict[str, Any] = field(default_factory=dict)
    lazy: Callable[[], bool] = lambda: False
    start: bool = True

    def __post_init__(self) -> None:
        self.wire = CutRelay(self.ground.port)
        quick = {
            "url": self.wire.url, "group": f"g-{self.group}", "engine": self.name, "timeout_ms": 2_000,
            "lookup_wait_ms": 3_000, "load_wait_ms": 5_000, "save_wait_ms": 2_000, "lease_ms": 3_000,
            "write_ttl_ms": 3_000,
            "start_wait_ms": 5_000, "save_buffer_bytes": 1 << 20, "load_buffer_bytes": 1 << 20,
        }  # fmt: skip
        made = Settings(**{**quick, **self.settings})
        self.made_settings = made
        parts = parts_of(self.shape)
        flat = [part for rank in parts for part in rank]
        self.broker = Broker(made, namespace_of(self.shape, **{"tenant": self.group, **self.namespace}), flat)
        if self.start:
            self.broker.start()
            self.broker.wait_ready(made.start_wait_ms)
        windows = tuple(window > 0 for window in self.shape.windows)
        cache = CacheShape(self.shape.block_tokens, windows, self.shape.ranks)
        self.side = SchedulerSide(made, cache, self.broker, Spans(), events=True)
        self.face = OurScheduler(self.side, sync=made.load == "sync")
        self.workers: list[WorkerSide] = []
        self.pages: list[FakePages] = []
        self.movers: list[TellingMover] = []
        self.counts: dict[str, Any] = {}
        self.asked: dict[str, Asked] = {}
        self.dead = False
        self.engine = FakeEngine(self.shape, self.options, self.face, lazy=self.lazy)
        for rank, memory in enumerate(self.engine.runner.memory):
            pages = FakePages(self.shape, memory, self.options.blocks)
            names = tuple(part.name for part in parts[rank])
            mover = TellingMover(made)
            side = WorkerSide(made, RankParts(rank, self.shape.ranks, names, windows), pages, mover)
            self.movers.append(mover)
            self.pages.append(pages)
            self.workers.append(side)
            self.engine.runner.workers.append(OurWorker(side))

    # ------------------------------------------------------------------------------------------- requests

    def ask(
        self,
        request: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        salt: str = "",
        adapter: Adapter | None = None,
        images: bool = False,
        embeds: bool = False,
    ) -> None:
        """Send a request; `images`: some of its tokens stand for images, `embeds`: for embeddings."""
        self.asked[request] = Asked(tuple(prompt), max_tokens, salt, adapter)
        self.engine.add(request, prompt, max_tokens, salt=salt, adapter=adapter, images=images, embeds=embeds)

    def serve(self, request: str, prompt: Sequence[int], max_tokens: int = 4, **more: Any) -> tuple[int, ...]:
        """Send a request, and step until the engine is idle. Returns its output."""
        self.ask(request, prompt, max_tokens, **more)
        self.run()
        return self.engine.outcomes[request].outputs

    def run(self, within_s: float = 20.0) -> None:
        """Step until there is nothing to do."""
        until(self._stepped_out, within_s, f"the end of {sorted(self.engine.scheduler.requests)}")

    def _stepped_out(self) -> bool:
        for _ in range(50):
            if not self.engine.busy:
                return True
            self.engine.step()
        return not self.engine.busy

    def step_until(self, check: Callable[[], object], what: str = "it") -> None:
        """Step until `check` is true, the request's end or not."""

        def stepped() -> object:
            self.engine.step()
            return check()

        until(stepped, 10.0, what)

    def settle(self, within_s: float = 10.0) -> None:
        """Until everything that was saved is at its end, and no lease is held."""
        until(
            self._rested,
            within_s,
            f"rest: {self.side.outcomes.saves.keys()}, {self.broker.leases_open()} leases",
        )

    def _rested(self) -> bool:
        """Reports come with steps: an idle engine is given empty ones, as vLLM's next request would be."""
        self.pump()
        return not self.side.outcomes.saves and not self.side.outcomes.loads and not self.broker.leases_open()

    def pump(self) -> bool:
        """One step, with or without work; whether there is any."""
        if self.engine.busy:
            self.engine.step()
        else:
            scheduler = self.engine.scheduler
            plan = scheduler.schedule()
            scheduler.update(plan, self.engine.runner.run(plan))
        return self.engine.busy

    # ------------------------------------------------------------------------------------------ its end

    def kill(self) -> None:
        """The process is gone: it says nothing more and steps no more. (Its threads may go on for a moment
        with what needs no service, as a machine that lost its network does.)"""
        self.dead = True
        self.wire.cut()

    def close(self) -> None:
        """Leave in order."""
        for side in self.workers:
            side.shutdown()
        self.broker.close()
        self.wire.close()

    # ------------------------------------------------------------------------------------- what must hold

    def counted(self) -> dict[str, Any]:
        """Everything that was counted so far, on all sides."""
        for counts in (self.side.counters(), self.broker.counters(), *(w.counters() for w in self.workers)):
            for name, value in counts.items():
                if isinstance(value, int | float):
                    self.counts[name] = self.counts.get(name, 0) + value
        return self.counts

    def untrue(self) -> list[str]:
        """What it told for routers that is not so, or not the same on every rank."""
        adapters = [asked.adapter for asked in self.asked.values() if asked.adapter is not None]
        labels = {adapter.lora_name: adapter.label for adapter in adapters}
        return untrue(self.shape, self.movers, labels) + at_odds(self.movers)

    def wrong(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Requests whose tokens differ from those of an engine without any cache; also of aborted ones as far
        as they came."""
        bad = {}
        for name, outcome in self.engine.outcomes.items():
            right = self.asked[name].right(self.shape)
            if outcome.status == Status.stopped:
                good = outcome.outputs == right
            else:
                good = outcome.outputs == right[: len(outcome.outputs)]
            if not good:
                bad[name] = (outcome.outputs, right)
        return bad


def dirty_blocks(ground: Ground, shape: Shape, engines: Sequence[UcmEngine]) -> list[str]:
    """Every block that serves and is not, byte for byte, what its tokens make. Blocks whose bytes are gone or
    refused are no danger, and are left out."""
    chains: dict[str, dict[bytes, tuple[Asked, int]]] = {}
    for each in engines:
        for name, asked in each.asked.items():
            outcome = each.engine.outcomes.get(name)
            tokens = asked.prompt + (asked.right(shape) if outcome else ())
            lora = asked.adapter.label if asked.adapter else ""
            adapter = (asked.adapter.lora_name, asked.adapter.lora_path) if asked.adapter else None
            instance = each.broker.instance_of(adapter)
            if instance is None:
                continue
            whole = Asked(tokens, 0, asked.salt, asked.adapter)
            for index, key in enumerate(block_keys(shape, tokens, asked.salt, lora)):
                chains.setdefault(instance, {}).setdefault(key, (whole, index))
    bad = []
    for instance, keys in chains.items():
        for key, refs in ground.stored(instance, keys).items():
            asked, index = keys[key]
            weights = asked.adapter.weights if asked.adapter else ""
            true = true_pages(shape, asked.prompt, weights)[index]
            for part, (ref, right) in enumerate(zip(refs, true, strict=True)):
                held = page_of(ref)
                if isinstance(held, bytes) and held != right:
                    bad.append(f"{instance} block {index} of {len(asked.prompt)} tokens, part {part}")
    return bad
