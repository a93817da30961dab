"""One engine stores, the same or another one loads: the tokens are those of an engine without any cache."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataplane.backends.posix_layout import path_of
from dataplane.port import Place
from tests.accept.handle import EngineProcess
from tests.accept.messages import Answer, Job
from tests.vllm.conftest import Plain
from tests.vllm.engine_house import ANSWER_TOKENS, Engines, ServiceProcess, loaded, prompts, tokens_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

BLOCKS = 20
SIX = 6


def damaged(service: ServiceProcess, answer: Answer, row: int, part: str = "tp0") -> None:
    """Delete the bytes of one part of one block of a prompt, behind the service's back."""
    keys = [bytes.fromhex(key) for key in answer.keys]
    with service.operator() as client:
        (instance,) = [
            one["id"]
            for one in client.get_json("/v1/instances")["items"]
            if client.lookup(one["id"], keys[: row + 1]).hits > row
        ]
        found = client.lookup(instance, keys)
    os.unlink(path_of(str(service.disk), Place.of(found.place(row, part))))


def warm(engine: EngineProcess, service: ServiceProcess, asked: list[list[int]]) -> list[Answer]:
    """Ask again, when all is stored and the engine has nothing in its own cache."""
    service.settle()
    engine.reset()
    return engine.ask(asked, ANSWER_TOKENS)


@pytest.mark.parametrize("load", ["async", "sync"])
def test_row12_row13_lost_bytes_are_computed_again_and_right(
    load: str, engines: Engines, service: ServiceProcess, models: Callable[[str], Path], plain: Plain
) -> None:
    model = models("llama")
    asked = prompts(model, SIX, BLOCKS, first=0 if load == "async" else 45)
    right = plain("llama", asked, ANSWER_TOKENS)
    engine = engines.start("one", model, salt=f"lost-{load}", load=load)
    cold = engine.ask(asked, ANSWER_TOKENS)
    assert tokens_of(cold) == right
    assert tokens_of(warm(engine, service, asked)) == right
    assert loaded(engine) == SIX * BLOCKS
    for number, row in ((1, 0), (3, BLOCKS // 2), (5, BLOCKS - 1)):
        damaged(service, cold[number], row)
    answers = warm(engine, service, asked)
    assert tokens_of(answers) == right
    assert {answer.finish for answer in answers} == {"length"}
    assert loaded(engine) == SIX * BLOCKS + 3 * BLOCKS + BLOCKS // 2 + BLOCKS - 1
    assert engine.counts.connector["bad_blocks"] == 3
    for _ in range(3):  # the first of these may be told that a block is present which is just being removed
        before = loaded(engine)
        assert tokens_of(warm(engine, service, asked)) == right
    assert loaded(engine) - before == SIX * BLOCKS, "what was computed again was not stored again"
    engine.stop()
    assert engines.no_dirty_reads() == loaded(engine)
    service.settle()


@pytest.mark.parametrize("load", ["async", "sync"])
def test_row13_with_policy_fail_the_request_ends_in_an_error_and_the_engine_goes_on(
    load: str, engines: Engines, service: ServiceProcess, models: Callable[[str], Path], plain: Plain
) -> None:
    model = models("llama")
    asked = prompts(model, 2, BLOCKS, first=260 if load == "async" else 280)
    right = plain("llama", asked, ANSWER_TOKENS)
    engine = engines.start("one", model, salt=f"fail-{load}", policy="fail", load=load)
    cold = engine.ask(asked, ANSWER_TOKENS)
    damaged(service, _after(service, cold)[0], BLOCKS // 2)
    engine.reset()
    (failed,) = engine.ask(asked[:1], ANSWER_TOKENS)
    assert failed.finish == "error"
    engine.reset()
    assert tokens_of(engine.ask(asked, ANSWER_TOKENS)) == right
    service.settle()


def _after(service: ServiceProcess, answers: list[Answer]) -> list[Answer]:
    service.settle()
    return answers


def test_row22_other_salts_find_nothing(
    engines: Engines, service: ServiceProcess, models: Callable[[str], Path], plain: Plain
) -> None:
    model = models("llama")
    asked = prompts(model, 3, 6, first=90)
    right = plain("llama", asked, ANSWER_TOKENS)
    engine = engines.start("one", model, salt="salted")
    assert tokens_of(engine.ask(asked, ANSWER_TOKENS, salt="a")) == right
    service.settle()
    engine.reset()
    assert tokens_of(engine.ask(asked, ANSWER_TOKENS, salt="b")) == right
    assert loaded(engine) == 0
    service.settle()
    engine.reset()
    assert tokens_of(engine.ask(asked, ANSWER_TOKENS, salt="a")) == right
    assert loaded(engine) == 3 * 6


def test_row23_an_external_reset_leaves_everything_behind(
    engines: Engines, service: ServiceProcess, models: Callable[[str], Path], plain: Plain
) -> None:
    model = models("llama")
    asked = prompts(model, 3, 6, first=120)
    right = plain("llama", asked, ANSWER_TOKENS)
    engine = engines.start("one", model, salt="reset")
    engine.ask(asked, ANSWER_TOKENS)
    service.settle()
    engine.reset(external=True)
    assert tokens_of(engine.ask(asked, ANSWER_TOKENS)) == right
    assert loaded(engine) == 0
    assert tokens_of(warm(engine, service, asked)) == right
    assert loaded(engine) == 3 * 6, "after the reset it stores and loads again"


def test_row30_a_prompt_longer_than_every_batch(
    engines: Engines, service: ServiceProcess, models: Callable[[str], Path], plain: Plain
) -> None:
    model = models("llama")
    blocks = 60
    asked = prompts(model, 2, blocks, first=200)
    right = plain("llama", asked, ANSWER_TOKENS)
    settings: dict[str, Any] = {
        "load_batch_blocks": 7,
        "load_buffer_bytes": 1 << 18,
        "save_buffer_bytes": 1 << 18,
    }
    one = engines.start("one", model, salt="long", **settings)
    assert tokens_of(one.ask(asked, ANSWER_TOKENS)) == right
    service.settle()
    one.stop()
    two = engines.start("two", model, salt="long", **settings)
    assert tokens_of(two.ask(asked, ANSWER_TOKENS)) == right
    assert loaded(two) == 2 * blocks
    assert engines.no_dirty_reads() == 2 * blocks


def test_switches_are_obeyed(
    engines: Engines, service: ServiceProcess, models: Callable[[str], Path], plain: Plain
) -> None:
    model = models("llama")
    asked = prompts(model, 2, 6, first=150)
    others = prompts(model, 2, 6, first=160)
    right = plain("llama", asked, ANSWER_TOKENS)
    engine = engines.start("one", model, salt="switches")
    engine.ask(asked, ANSWER_TOKENS)
    service.settle()
    with service.operator() as operator:
        operator.set_switch("group", "test-group", "bypass")
        _heard(engine, 1)
        engine.reset()
        assert tokens_of(engine.ask(asked, ANSWER_TOKENS)) == right
        assert loaded(engine) == 0
        operator.set_switch("group", "test-group", "read_only")
        _heard(engine, 2)
        engine.reset()
        assert tokens_of(engine.ask(asked, ANSWER_TOKENS)) == right
        assert loaded(engine) == 2 * 6
        saved = len(engines.pages("one", "copied"))
        engine.ask(others, ANSWER_TOKENS)
        service.settle()
        assert len(engines.pages("one", "copied")) == saved
        operator.set_switch("group", "test-group", "normal")
        _heard(engine, 3)
    engine.reset()
    engine.ask(others, ANSWER_TOKENS)
    service.settle()
    assert len(engines.pages("one", "published")) == 4 * 6


def _heard(engine: EngineProcess, changes: int) -> None:
    """Returns when the engine has heard of so many changes: its counters come with steps."""
    until_s = time.monotonic() + 10
    while engine.counts.connector.get("switch_changes", 0) < changes:
        assert time.monotonic() < until_s, engine.counts.connector
        engine.ask([[1, 2, 3]], 1)
        assert engine.do(Job(op="counts")).finish == "counts"
        time.sleep(0.05)
