"""Seeded histories of a fleet: engines that come, work, preempt, abort and die, storages that rot, switches
that flip. In the end every token has to be right and every block that serves has to be what its tokens make.

What happens follows from the seed; when exactly, from the threads. A seed that failed is run again a few
times (`play(ground, seed)`).
"""

import os
import random
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_adapters.vllm.worker import WorkerSide
from tests.engines.engine_request import Status
from tests.engines.fake_engine import often
from tests.engines.fake_scheduler import Options
from tests.engines.fleet import UcmEngine, dirty_blocks
from tests.engines.ground import Ground, files_of
from tests.engines.oracle import Shape, block_keys

SHAPES = (Shape(), Shape(ranks=2), Shape(windows=(0, 8)), Shape(windows=(0, 7), ranks=2), Shape(windows=(9,)))


class HistoryFailed(AssertionError):
    """A history broke a rule; the text names seed and rule."""


@dataclass
class Setting:
    """What a seed makes of a history."""

    shape: Shape
    options: Options
    settings: dict[str, Any]
    engines: int
    turns: int
    storage: str = "posix"
    copy_ms: float = 0.0
    """Copying a page takes up to so long: blocks are taken back while they wait to be copied."""
    kills: bool = False
    aborts: float = 0.0
    faults: float = 0.0
    switches: bool = False
    hiccups: bool = False
    read_ms: float = 0.0
    """Reading from the storage takes up to so long: requests end while their blocks are on the way."""
    asks: float = 0.5
    """How often a turn brings a request, and how many tokens it may want."""
    outputs: tuple[int, ...] = (1, 2, 5, 12)
    pace_ms: float = 0.0
    """A step takes up to so long: what was ordered in it is copied before the next."""
    wire_ms: float = 0.0
    """Every answer of the service takes so long."""
    patience_s: float = 15.0
    """Longer than this nothing may take that has to end."""


def setting_of(seed: int) -> Setting:
    """The setting of a seed."""
    chance = random.Random(seed)
    shape = chance.choice(SHAPES)
    plain = len(shape.windows) == 1 and not shape.windows[0]
    sync = plain and chance.random() < 0.3
    depth = 1 if sync else chance.choice([1, 2])
    tight = chance.random() < 0.5
    recompute = chance.random() < 0.8
    faults = chance.choice([0.0, 0.1, 0.2])
    aborts = chance.choice([0.0, 0.1, 0.3])
    return Setting(
        shape,
        Options(
            blocks=(26 if tight else 120) * len(shape.windows),
            budget_tokens=chance.choice([12, 16, 32]),
            running_max=chance.choice([3, 6]),
            depth=depth,
            recompute=recompute,
            reserve_whole=chance.random() < 0.5,
            chunk_tokens=0 if sync else chance.choice([0, 8]),
        ),
        {
            "load": "sync" if sync else "async",
            "save_threads": chance.choice([1, 2]),
            "load_batch_blocks": chance.choice([1, 3, 32]),
            "min_load_blocks": chance.choice([1, 1, 2]),
            "lookup_wait_ms": chance.choice([3_000, 3_000, 3]),
            "publish": seed % 2 == 0,
            "publish_model": "fake",
        },
        engines=chance.choice([1, 2, 3]),
        turns=chance.choice([30, 50]),
        copy_ms=chance.choice([0.0, 0.5, 2.0]),
        kills=chance.random() < 0.4,
        aborts=aborts,
        faults=faults,
        switches=chance.random() < 0.3,
        hiccups=chance.random() < 0.3,
        read_ms=chance.choice([0.0, 0.0, 3.0]),
        pace_ms=chance.choice([0.0, 0.0, 1.0]),
        storage=chance.choice(["posix", "posix", "posix", "shm"]),
    )


@dataclass
class Played:
    """What a history came to."""

    seed: int
    requests: int = 0
    loaded_blocks: int = 0
    saved_blocks: int = 0
    preemptions: int = 0
    failed_loads: int = 0
    errors: int = 0
    lookups: int = 0
    counts: dict[str, float] = field(default_factory=dict)


def _slow_reads(side: WorkerSide, pause: random.Random, read_ms: float) -> None:
    mover = side._mover
    read = mover.read

    def slowly(*args: Any) -> list[str]:
        time.sleep(pause.random() * read_ms / 1_000)
        return read(*args)

    setattr(mover, "read", slowly)  # noqa: B010


class History:
    """One run of a seed."""

    def __init__(self, ground: Ground, seed: int, setting: Setting | None = None) -> None:
        self.ground = ground
        self.seed = seed
        self.setting = setting or setting_of(seed)
        self.chance = random.Random(seed * 7919 + 1)
        self.group = f"h{seed}-{time.monotonic_ns() % 1_000_000_007}"
        self.root: Path = ground.group(self.group, kind=self.setting.storage)
        self.documents = [[self.chance.randrange(251) for _ in range(40)] for _ in range(3)]
        self.all: list[UcmEngine] = []
        self.requests = 0
        self.mode = "normal"

    @property
    def live(self) -> list[UcmEngine]:
        return [each for each in self.all if not each.dead]

    # ------------------------------------------------------------------------------------------- what may be

    def join(self, name: str) -> UcmEngine:
        """An engine starts."""
        setting = self.setting
        seed = self.chance.randrange(1 << 30)
        made = UcmEngine(
            self.ground, self.group, name, setting.shape, setting.options, setting.settings,
            lazy=often(seed, 0.5),
        )  # fmt: skip
        pause = random.Random(seed)
        if setting.copy_ms:
            for pages in made.pages:
                pages.before_copy = lambda: time.sleep(pause.random() * setting.copy_ms / 1_000)
        made.wire.delay_s = setting.wire_ms / 1_000
        if setting.read_ms:
            for side in made.workers:
                _slow_reads(side, pause, setting.read_ms)
        self.all.append(made)
        return made

    def ask(self, engine: UcmEngine) -> None:
        """A request over one of the documents."""
        chance = self.chance
        document = chance.choice(self.documents)
        prompt = document[: chance.randrange(6, 40)] + [
            chance.randrange(251) for _ in range(chance.randrange(1, 6))
        ]
        self.requests += 1
        engine.ask(f"r{self.requests}", prompt, chance.choice(self.setting.outputs))

    def abort(self, engine: UcmEngine) -> None:
        """Somebody hangs up."""
        requests = engine.engine.scheduler.requests
        loading = [name for name, one in requests.items() if one.status == Status.waiting_for_remote]
        names = loading if loading and self.chance.random() < 0.5 else list(requests)
        if names:
            engine.engine.abort(self.chance.choice(names), within_step=self.chance.random() < 0.5)

    def rot(self) -> None:
        """Bytes of the storage are lost, cut short or changed, or a block is removed for everybody."""
        files = [path for path in files_of(self.root) if "tp" in path.suffix]
        if not files:
            return
        victim = self.chance.choice(sorted(files))
        kinds = (
            ["lost", "short", "flip", "removed"] if self.setting.storage == "posix" else ["flip", "removed"]
        )
        kind = self.chance.choice(kinds)
        with suppress(FileNotFoundError):
            if kind == "lost":
                victim.unlink()
            elif kind == "short":
                victim.write_bytes(victim.read_bytes()[:-7])
            elif kind == "flip":
                with victim.open("r+b") as opened:
                    opened.seek(-1 - self.chance.randrange(self.setting.shape.page_bytes), os.SEEK_END)
                    opened.write(bytes((self.chance.randrange(256),)))
            else:
                engine = self.chance.choice(self.live)
                instance = engine.broker.instance_of(None)
                keys = [key for asked in engine.asked.values() for key in self._keys(asked.prompt)]
                if instance is not None and keys:
                    self.ground.client.remove(instance, self.chance.sample(keys, min(4, len(keys))))

    def _keys(self, prompt: tuple[int, ...]) -> list[bytes]:
        return block_keys(self.setting.shape, prompt)

    def flip(self) -> None:
        """An operator moves the group's switch."""
        self.mode = self.chance.choice(["normal", "normal", "bypass", "read_only"])
        self.ground.client.set_switch("group", f"g-{self.group}", self.mode)

    def kill(self) -> None:
        """An engine dies as it stands; another takes its place, often under its name."""
        victim = self.chance.choice(self.live)
        victim.kill()
        name = victim.name if self.chance.random() < 0.7 else f"{victim.name}x"
        self.join(name)

    def pace(self) -> None:
        """A step takes its time."""
        if self.setting.pace_ms:
            time.sleep(self.chance.random() * self.setting.pace_ms / 1_000)

    # ---------------------------------------------------------------------------------------------- the run

    def play(self) -> Played:
        """Run it, and check what must be true. Raises HistoryFailed."""
        try:
            return self._play()
        except HistoryFailed:
            raise
        except Exception as error:
            raise HistoryFailed(f"seed {self.seed}: {type(error).__name__}: {error}") from error
        finally:
            for each in self.all:
                self.ground.later(each.close)

    def _play(self) -> Played:
        setting, chance = self.setting, self.chance
        for number in range(setting.engines):
            self.join(f"{self.group}-e{number}")
        for _ in range(setting.turns):
            engine = chance.choice(self.live)
            if chance.random() < setting.asks:
                self.ask(engine)
            if chance.random() < setting.aborts:
                self.abort(engine)
            if chance.random() < setting.faults:
                self.rot()
            if setting.switches and chance.random() < 0.1:
                self.flip()
            if setting.hiccups and chance.random() < 0.1:
                engine.wire.delay_s = chance.choice([setting.wire_ms / 1_000, 0.02])
            if setting.kills and chance.random() < 0.05:
                self.kill()
            if chance.random() < 0.4:
                engine.engine.scheduler.tables.pool.forget_free()
            for each in self.live:
                for _ in range(chance.randrange(5)):
                    if each.engine.busy:
                        each.engine.step()
                        self.pace()
            if chance.random() < 0.5:
                time.sleep(chance.choice([0.001, 0.003]))
        if self.mode != "normal":
            self.ground.client.set_switch("group", f"g-{self.group}", "normal")
        for each in self.live:
            each.wire.delay_s = 0.0
            each.run(setting.patience_s)
        for each in self.live:
            each.settle(setting.patience_s)
            each.engine.check_idle()
        return self._judge()

    def _judge(self) -> Played:
        setting = self.setting
        played = Played(self.seed, self.requests)
        for each in self.all:
            if wrong := each.wrong():
                self._fail(f"wrong tokens of {each.name}: {wrong}")
            if untrue := each.untrue():
                self._fail(f"routers are told wrong of {each.name}: {untrue[:3]}")
            errors = sum(one.status == Status.error for one in each.engine.outcomes.values())
            played.errors += errors
            if errors and setting.options.recompute:
                self._fail(f"{errors} requests of {each.name} ended in an error")
            lookups = each.wire.count(b"/lookup")
            asked = len(each.asked) + each.engine.scheduler.preemptions
            if lookups > asked:
                self._fail(f"{lookups} lookups for {asked} requests and preemptions")
            counts = each.counted()
            played.lookups += lookups
            played.preemptions += each.engine.scheduler.preemptions
            played.loaded_blocks += int(counts.get("loaded_blocks", 0))
            played.saved_blocks += int(counts.get("saved_blocks", 0))
            played.failed_loads += int(counts.get("failed_blocks", 0))
            for name, value in counts.items():
                played.counts[name] = played.counts.get(name, 0) + value
        if dirty := dirty_blocks(self.ground, setting.shape, self.all):
            self._fail(f"dirty blocks serve: {dirty[:5]}")
        for each in self.live:
            if each.broker.leases_open():
                self._fail(f"{each.name} holds leases")
        return played

    def _fail(self, why: str) -> None:
        raise HistoryFailed(f"seed {self.seed}: {why}")


def play(ground: Ground, seed: int, setting: Setting | None = None) -> Played:
    """Run a seed's history on a service that others may use."""
    return History(ground, seed, setting).play()
