"""Two tensor-parallel ranks: a block is a hit only with both ranks' parts."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine_house import ANSWER_TOKENS, Engines, ServiceProcess, loaded, prompts, tokens_of
from tests.vllm.test_engine_loads import damaged

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

BLOCKS = 12
TWO_RANKS = {"tensor_parallel_size": 2}
PATIENT = {"timeout_ms": 8_000, "lookup_wait_ms": 8_000}
"""Workers that wait for each other spin, and on a small machine leave little to the service."""
TWO_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}


@pytest.mark.parametrize("load", ["async", "sync"])
def test_row02_row03_two_ranks_cold_and_warm_and_with_one_ranks_bytes_gone(
    load: str, engines: Engines, service: ServiceProcess, models: Callable[[str], Path]
) -> None:
    model = models("llama")
    asked = prompts(model, 4, BLOCKS, first=700 if load == "async" else 750)
    bare = engines.plain("bare", model, TWO_RANKS, TWO_CORES)
    right = tokens_of(bare.ask(asked, ANSWER_TOKENS))
    bare.stop()
    named: dict[str, Any] = {
        "salt": f"ranks-{load}",
        "arguments": TWO_RANKS,
        "environment": TWO_CORES,
        **PATIENT,
    }
    one = engines.start("one", model, load=load, **named)
    cold = one.ask(asked, ANSWER_TOKENS)
    assert tokens_of(cold) == right
    service.settle()
    one.stop()
    two = engines.start("two", model, load=load, **named)
    assert tokens_of(two.ask(asked, ANSWER_TOKENS)) == right
    assert loaded(two) == 4 * BLOCKS, "another engine of two ranks finds every block"
    damaged(service, cold[1], BLOCKS // 2, "tp1")
    damaged(service, cold[2], 0, "tp0")
    service.settle()
    two.reset()
    assert tokens_of(two.ask(asked, ANSWER_TOKENS)) == right
    assert loaded(two) == 4 * BLOCKS + 2 * BLOCKS + BLOCKS // 2
    time.sleep(0.5)  # what was reported bad is removed in the background
    two.reset()
    assert tokens_of(two.ask(asked, ANSWER_TOKENS)) == right
    assert two.counts.connector["bad_blocks"] == 2, "what one rank had lost was still named for all"
    service.settle()
    two.stop()
    assert engines.no_dirty_reads() > 0
