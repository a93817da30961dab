"""Engines short of memory, requests that go away, a service that is slow or gone: tokens stay right."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.accept.messages import Job
from tests.vllm.conftest import Plain
from tests.vllm.engine_house import ANSWER_TOKENS, Engines, ServiceProcess, loaded, prompts, tokens_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

FEW_BLOCKS = 40
MANY_TOKENS = 200
LOOKUP_WAIT_MS = 500


@pytest.mark.parametrize("load", ["async", "sync"])
def test_row17_row19_a_preemption_storm(
    load: str, engines: Engines, service: ServiceProcess, models: Callable[[str], Path], plain: Plain
) -> None:
    model = models("llama")
    asked = prompts(model, 6, 4, first=300)
    right = plain("llama", asked, MANY_TOKENS)
    short = {"num_gpu_blocks_override": FEW_BLOCKS, "max_model_len": 512}
    engine = engines.start("one", model, salt=f"storm-{load}", load=load, arguments=short)
    assert tokens_of(engine.ask(asked, MANY_TOKENS)) == right
    assert engine.counts.preempted > 0, "it was to be short of memory"
    for _ in range(2):
        service.settle()
        engine.reset()
        assert tokens_of(engine.ask(asked, MANY_TOKENS)) == right
    assert loaded(engine) > 0
    counters = engine.counts.connector
    assert counters["lookups"] <= counters["requests"] + counters["preemptions"]
    engine.stop()
    assert engines.no_dirty_reads() > 0
    service.settle()


def test_row07_row18_aborts_at_any_moment_of_a_load(
    engines: Engines, service: ServiceProcess, models: Callable[[str], Path], plain: Plain, seed: int
) -> None:
    model = models("llama")
    asked = prompts(model, 6, 50, first=400)
    right = plain("llama", asked, ANSWER_TOKENS)
    engine = engines.start("one", model, salt="aborts", load_threads=1, load_batch_blocks=1)
    assert tokens_of(engine.ask(asked, ANSWER_TOKENS)) == right
    chance = random.Random(seed)
    for round_number in range(8):
        service.settle()
        engine.reset()
        for number, prompt in enumerate(asked):
            engine.send(Job(op="ask", id=f"a{number}", tokens=prompt, max_tokens=ANSWER_TOKENS))
        gone = set(chance.sample(range(len(asked)), 4))
        for number in gone:
            time.sleep(chance.uniform(0, 0.02))
            engine.send(Job(op="abort", id=f"a{number}"))
        answers = {answer.id: answer for answer in engine.answers(len(asked))}
        for number, tokens in enumerate(right):
            answer = answers[f"a{number}"]
            assert answer.finish in (("abort", "length") if number in gone else ("length",)), round_number
            assert answer.finish == "abort" or answer.tokens == tokens, round_number
    service.settle()
    engine.reset()
    assert tokens_of(engine.ask(asked, ANSWER_TOKENS)) == right
    service.settle()
    engine.stop()
    assert engines.no_dirty_reads() > 0


def test_row10_row11_a_service_that_is_slow_and_then_gone(
    engines: Engines, service: ServiceProcess, models: Callable[[str], Path], plain: Plain
) -> None:
    """An answer that is late is waited for a while ("ask me later"), one that does not come is a miss."""
    model = models("llama")
    asked = prompts(model, 4, 10, first=500)
    right = plain("llama", asked, ANSWER_TOKENS)
    engine = engines.start("one", model, salt="slow", lookup_wait_ms=LOOKUP_WAIT_MS, lease_ms=2_000)
    assert tokens_of(engine.ask(asked, ANSWER_TOKENS)) == right
    service.settle()
    engine.reset()
    service.process.freeze()
    for number, prompt in enumerate(asked):
        engine.send(Job(op="ask", id=f"{number}", tokens=prompt, max_tokens=ANSWER_TOKENS))
    time.sleep(LOOKUP_WAIT_MS / 3_000)
    service.process.thaw()
    answers = sorted(engine.answers(len(asked)), key=lambda answer: int(answer.id))
    assert tokens_of(answers) == right
    assert loaded(engine) == 4 * 10, "late answers were not waited for"
    service.settle()
    engine.reset()
    service.process.freeze()
    began_s = time.monotonic()
    assert tokens_of(engine.ask(asked, ANSWER_TOKENS)) == right
    took_s = time.monotonic() - began_s
    service.process.thaw()
    assert loaded(engine) == 4 * 10
    assert LOOKUP_WAIT_MS / 1_000 <= took_s < 5 * LOOKUP_WAIT_MS / 1_000
    counts = engine.do(Job(op="counts")).counts
    assert max(counts.step_ms + counts.idle_ms) < LOOKUP_WAIT_MS / 5, "the scheduler's thread waited"
    service.process.kill()
    engine.reset()
    assert tokens_of(engine.ask(asked, ANSWER_TOKENS)) == right
    service.start_again()
    until_s = time.monotonic() + 20
    while loaded(engine) == 4 * 10 and time.monotonic() < until_s:
        engine.reset()
        assert tokens_of(engine.ask(asked, ANSWER_TOKENS)) == right
        time.sleep(0.3)
    assert loaded(engine) > 4 * 10, "it did not find back to the service"


def test_an_engine_starts_without_the_service_and_joins_later(
    engines: Engines, service: ServiceProcess, models: Callable[[str], Path], plain: Plain
) -> None:
    model = models("llama")
    asked = prompts(model, 2, 6, first=550)
    right = plain("llama", asked, ANSWER_TOKENS)
    service.process.kill()
    engine = engines.start("one", model, salt="late", start_wait_ms=200)
    assert tokens_of(engine.ask(asked, ANSWER_TOKENS)) == right
    service.start_again()
    until_s = time.monotonic() + 30
    while loaded(engine) == 0 and time.monotonic() < until_s:
        engine.reset()
        assert tokens_of(engine.ask(asked, ANSWER_TOKENS)) == right
        time.sleep(0.3)
    assert loaded(engine) > 0


def test_compiled(
    engines: Engines,
    service: ServiceProcess,
    models: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """vLLM calls the connector from between the compiled pieces; a compiled model is compared with itself,
    since it may round otherwise than one that is not."""
    model = models("llama")
    asked = prompts(model, 4, 10, first=600)
    compiled = {"enforce_eager": False, "max_num_seqs": 4}
    cache = {"VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("compiled"))}
    bare = engines.plain("bare", model, compiled, cache)
    right = tokens_of(bare.ask(asked, ANSWER_TOKENS))
    bare.stop()
    engine = engines.start("one", model, salt="compiled", arguments=compiled, environment=cache)
    assert tokens_of(engine.ask(asked, ANSWER_TOKENS)) == right
    service.settle()
    engine.reset()
    assert tokens_of(engine.ask(asked, ANSWER_TOKENS)) == right
    assert loaded(engine) == 4 * 10
