"""Which of a request's blocks are saved in a step, and what goes along for the routers that the service
tells."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile

from msgspec import Struct

from engine_adapters.vllm.broker import Broker
from engine_adapters.vllm.known import KnownKeys
from engine_adapters.vllm.orders import SaveOrder
from engine_adapters.vllm.outcomes import Outcomes
from engine_adapters.vllm.requests import EngineRequest, Saving, Tracked
from engine_adapters.vllm.spans import Spans

NULL_BLOCK = 0
"""vLLM's block that stands for none, outside a sliding window."""
TEXT_LENGTH_MAX = 512
"""Of an adapter's name or a salt that the service takes with a write."""


class Shape(Struct, frozen=True):
    """What the scheduler's side has to know of the KV cache: tokens a block, which KV cache groups are
    sliding windows, and how many ranks hold a piece of each block."""

    block_size_tokens: int
    windows: tuple[bool, ...]
    ranks: int


class Step(Struct, frozen=True):
    """One step as the scheduler has decided it. `scheduled`: request -> tokens; `blocks_of` gives a request's
    blocks, a list for each KV cache group."""

    scheduled: Mapping[str, int]
    preempted: Collection[str]
    blocks_of: Callable[[str], tuple[list[int], ...]]


class Ordering:
    """One engine's; used from the scheduler's thread."""

    def __init__(
        self,
        shape: Shape,
        broker: Broker,
        spans: Spans,
        known: KnownKeys,
        outcomes: Outcomes,
        *,
        events: bool,
        publish: bool,
    ) -> None:
        """`events`: remember the tokens of what is saved, for the engine's own KV cache events; `publish`:
        send them along with the writes, for the service's."""
        self._shape = shape
        self._broker = broker
        self._spans = spans
        self._known = known
        self._outcomes = outcomes
        self._events = events
        self._publish = publish
        self._numbers = 0

    def order(self, tracked: Tracked, tokens: int, step: Step) -> SaveOrder | None:
        """Save what is complete after this step: blocks whose tokens are all known and computed by then. The
        tokens of a block that has a hash are confirmed; what is speculative or sampled later has none."""
        request = tracked.request
        full = min(
            (request.num_computed_tokens + tokens) // self._shape.block_size_tokens, len(request.block_hashes)
        )
        if full <= tracked.stored:
            return None
        instance = tracked.instance or self._broker.instance_of(tracked.adapter) or ""
        if not instance or instance != self._broker.instance_of(tracked.adapter):
            return None  # no cache for its adapter, or one of weights that are no longer the engine's
        start, tracked.stored = tracked.stored, full
        start += self._known.leading(instance, request.block_hashes[start:full], time.time_ns())
        if start == full:
            return None
        blocks = step.blocks_of(request.request_id)
        # A window that has moved on has given its blocks back: what is behind that cannot be saved whole.
        while start < full and any(column[start] == NULL_BLOCK for column in blocks):
            start += 1
        if start == full:
            return None
        columns = tuple(tuple(column[start:full]) for column in blocks)
        rows = min(len(list(takewhile(NULL_BLOCK.__ne__, column))) for column in columns)
        return self._ordered(tracked, instance, start, tuple(column[:rows] for column in columns))

    def _ordered(
        self, tracked: Tracked, instance: str, start: int, columns: tuple[tuple[int, ...], ...]
    ) -> SaveOrder:
        request = tracked.request
        rows = len(columns[0])
        keys = list(request.block_hashes[start : start + rows])
        parent = bytes(request.block_hashes[start - 1]) if start else None
        tokens = self._tokens(request, start, start + rows)
        lora = "" if tracked.adapter is None else tracked.adapter[0]
        salt = request.cache_salt or ""
        told = self._publish and tokens is not None and tellable(lora) and tellable(salt)
        self._numbers += 1
        order = SaveOrder(
            f"s{self._numbers}",
            request.request_id,
            instance,
            keys,
            parent,
            columns,
            any(self._shape.windows),
            self._spans.open(request.request_id, "ucm.dump"),
            tokens if told else None,
            lora if told else "",
            salt if told else "",
        )
        self._outcomes.saves[order.save] = Saving(
            request.request_id,
            instance,
            start,
            keys,
            parent,
            # An event of vLLM's says nothing of a salt: whoever follows would take it for everybody's.
            tokens if self._events and tokens is not None and not salt else (),
            tracked.adapter,
            order.traceparent,
        )
        tracked.saves.add(order.save)
        self._known.saving(instance, keys)
        self._outcomes.counts.add("save_orders")
        self._outcomes.counts.add("save_blocks", rows)
        return order

    def _tokens(self, request: EngineRequest, start: int, end: int) -> Sequence[int] | None:
        """The tokens of blocks, as they are: a copy of what this step saves, of which nothing is made here.
        None where nobody wants them, and where tokens alone do not say what a block is: whoever hashes them
        would take it for that of another image."""
        if not (self._events or self._publish) or request.mm_features or request.prompt_embeds is not None:
            return None
        size = self._shape.block_size_tokens
        return request.all_token_ids[start * size : end * size]


def tellable(text: str) -> bool:
    """Whether the service takes it for an adapter's name or a salt. Of a block with another one no router is
    told."""
    return len(text) <= TEXT_LENGTH_MAX and (not text or text.isprintable())
