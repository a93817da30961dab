"""Loads and saves that are under way on the workers, and what came of them: counts, spans, events.

A load or save is over when every rank has reported it. The scheduler's side adds them, and hears of their
end.
"""

from engine_adapters.vllm.broker import Broker
from engine_adapters.vllm.counts import Counts
from engine_adapters.vllm.known import KnownKeys
from engine_adapters.vllm.orders import Loaded, Saved
from engine_adapters.vllm.requests import Loading, Published, Saving
from engine_adapters.vllm.spans import Spans

TAINTED = "tainted"
"""Why a save was dropped whose pages were computed from a load that failed."""
UNTOLD_MAX = 4_096
"""Entries for KV cache events that nobody has taken yet."""


class Outcomes:
    """One engine's; used from the scheduler's thread."""

    def __init__(
        self,
        block_size_tokens: int,
        ranks: int,
        broker: Broker,
        spans: Spans,
        known: KnownKeys,
        events: bool,
    ) -> None:
        self._block_size = block_size_tokens
        self._ranks = ranks
        self._broker = broker
        self._spans = spans
        self._known = known
        self._events = events
        self.counts = Counts()
        self.loads: dict[str, Loading] = {}
        """Those that not every rank has reported, by ticket."""
        self.saves: dict[str, Saving] = {}
        """Those that not every rank has reported, by save."""
        self._published: list[Published] = []
        self._gone: list[bytes] = []

    # --------------------------------------------------------------------------------------------- loads

    def loaded(self, loaded: Loaded) -> Loading | None:
        """One rank's report. The load, when this was the last."""
        loading = self.loads.get(loaded.ticket)
        if loading is None:
            return None
        loading.ranks += 1
        loading.blocks = min(loading.blocks, loaded.blocks)
        loading.size_bytes += loaded.size_bytes
        loading.reason = loading.reason or loaded.reason
        loading.began_ns = min(loading.began_ns or loaded.began_ns, loaded.began_ns)
        loading.ended_ns = max(loading.ended_ns, loaded.ended_ns)
        if loaded.bad:
            if loading.leased:  # what a follower named may have gone in all honesty
                self._broker.bad(loading.instance, list(loaded.bad))
            self._known.discard(loading.instance, loaded.bad)
            self.counts.add("bad_blocks", len(loaded.bad))
            if self._events and len(self._gone) < UNTOLD_MAX:
                self._gone += loaded.bad
        if loading.ranks < self._ranks:
            return None
        del self.loads[loaded.ticket]
        self._broker.release(loaded.ticket)
        self._count_load(loading)
        self._spans.close(
            loading.request,
            "ucm.load",
            {"ucm.blocks": loading.blocks, "ucm.bytes": loading.size_bytes, "ucm.failure": loading.reason},
            loading.began_ns,
            loading.ended_ns,
            loading.traceparent,
        )
        return loading

    def _count_load(self, loading: Loading) -> None:
        counts = self.counts
        counts.add("loads")
        counts.add("loaded_blocks", loading.blocks)
        counts.add("loaded_bytes", loading.size_bytes)
        counts.add("loaded_tokens", loading.blocks * self._block_size)
        counts.add("load_us", max(0, loading.ended_ns - loading.began_ns) // 1_000)
        if loading.blocks < loading.asked:
            counts.add("failed_blocks", loading.asked - loading.blocks)
            counts.add(f"load_failures_{loading.reason or 'unknown'}")

    # --------------------------------------------------------------------------------------------- saves

    def copied(self, save: str, ranks: int) -> str:
        """So many ranks have copied a save's pages, or never will. The request whose blocks are no longer
        needed for it once all have; empty before, and for a save that is over."""
        saving = self.saves.get(save)
        if saving is None:
            return ""
        saving.copied += ranks
        return saving.request if saving.copied >= self._ranks else ""

    def saved(self, saved: Saved) -> Saving | None:
        """One rank's report. The save that it is of."""
        saving = self.saves.get(saved.save)
        if saving is None:
            return None
        saving.ranks += 1
        saving.size_bytes += saved.size_bytes
        saving.reason = saving.reason or saved.reason
        saving.began_ns = min(saving.began_ns or saved.began_ns, saved.began_ns)
        saving.ended_ns = max(saving.ended_ns, saved.ended_ns)
        self.counts.add("saved_blocks", len(saved.published))
        if saved.published and saving.tokens:
            self._publish(saving, frozenset(saved.published), saved.tier)
        stored = {*saved.published, *saved.present}
        self._known.saved(saving.instance, stored, saved.ended_ns)
        if saved.dropped:
            self._known.discard(saving.instance, set(saving.keys) - stored)
        if saving.ranks >= self._ranks:
            del self.saves[saved.save]
            self._count_save(saving, saved)
        return saving

    def _count_save(self, saving: Saving, last: Saved) -> None:
        self.counts.add("saves")
        self.counts.add("saved_bytes", saving.size_bytes)
        self.counts.add("present_blocks", len(last.present))
        self.counts.add("dropped_blocks", last.dropped)
        if last.dropped:
            self.counts.add(f"save_drops_{saving.reason or 'unknown'}", last.dropped)
        self._spans.close(
            saving.request,
            "ucm.dump",
            {"ucm.blocks": len(saving.keys), "ucm.bytes": saving.size_bytes, "ucm.failure": saving.reason},
            saving.began_ns,
            saving.ended_ns,
            saving.traceparent,
        )

    # -------------------------------------------------------------------------------------------- events

    def _publish(self, saving: Saving, serving: frozenset[bytes], tier: str) -> None:
        """Runs of a save that serve, each with its parent and tokens."""
        size = self._block_size
        row = 0
        while row < len(saving.keys):
            end = row
            while end < len(saving.keys) and saving.keys[end] in serving:
                end += 1
            if end > row and len(self._published) < UNTOLD_MAX:
                self._published.append(
                    Published(
                        saving.instance,
                        saving.keys[row:end],
                        saving.keys[row - 1] if row else saving.parent,
                        saving.tokens[row * size : end * size],
                        saving.adapter,
                        tier,
                    )
                )
            row = max(end, row + 1)

    def take_published(self) -> list[Published]:
        """What began to serve since the last call."""
        published, self._published = self._published, []
        return published

    def take_gone(self) -> list[bytes]:
        """Keys that could not be read and were removed since the last call."""
        gone, self._gone = self._gone, []
        return gone
