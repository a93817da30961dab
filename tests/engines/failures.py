"""What the fake engine makes of a connector's promises, and of loads that failed, as vLLM does."""

from collections.abc import Iterable

from tests.engines.engine_request import FakeRequest
from tests.engines.kv_tables import Tables
from tests.engines.oracle import EngineBroken, Shape
from tests.engines.plans import StepPlan


def check_promise(request: FakeRequest, shape: Shape, local: int, external: int, *, load_async: bool) -> None:
    """What vLLM asserts of `external` tokens behind `local` ones, and what it relies upon without asserting
    it."""
    if external < 0 or external % shape.block_tokens:
        raise EngineBroken(f"{external} external tokens end inside a block")
    if local + external > request.num_tokens:
        raise EngineBroken("more external tokens than the request has")
    if load_async and not external:
        raise EngineBroken("an asynchronous load of nothing")
    if not load_async and local + external == request.num_tokens:
        raise EngineBroken("a synchronous load leaves no token to compute")


def truncated(
    tables: Tables, requests: Iterable[FakeRequest], blocks: set[int], plan: StepPlan
) -> tuple[set[str], set[int]]:
    """Requests that counted one of these bad blocks as computed go back to before it. Returns their names,
    and all blocks from the bad one on.

    As in vLLM a second request that shares a bad block goes on behind it, since the first computes it anew.
    """
    affected: set[str] = set()
    downstream: set[int] = set()
    marked: set[int] = set()
    size = tables.block_tokens
    for request in requests:
        name = request.request_id
        (held,) = tables.ids(name)
        share = plan.scheduled.get(name)
        computed = request.num_computed_tokens - (share.count if share else 0)
        hit = first = False
        for index, block in zip(range(-(-computed // size)), held, strict=False):
            if block not in blocks:
                continue
            hit = True
            if block in marked:
                continue
            marked.add(block)
            if not first:
                first = True
                request.num_computed_tokens = index * size
                downstream.update(held[index:])
        if hit:
            if not first:
                request.num_computed_tokens = computed
            affected.add(name)
    return affected, downstream
