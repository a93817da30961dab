"""Models whose caches are not plain: handled right, or refused at start with the reason."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.accept.handle import EngineFailed
from tests.vllm.conftest import Plain
from tests.vllm.engine_house import ANSWER_TOKENS, Engines, ServiceProcess, loaded, prompts, tokens_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("together", [False, True], ids=["groups of their own", "one group"])
def test_row26_a_model_with_sliding_windows(
    together: bool, engines: Engines, service: ServiceProcess, models: Callable[[str], Path], plain: Plain
) -> None:
    model = models("gemma")
    asked = prompts(model, 5, 15)
    right = plain("gemma", asked, ANSWER_TOKENS)
    assert len({tuple(tokens) for tokens in right}) == len(right), "this model cannot tell prompts apart"
    arguments = {"disable_hybrid_kv_cache_manager": together}
    one = engines.start("one", model, salt=f"windows-{together}", arguments=arguments)
    assert tokens_of(one.ask(asked, ANSWER_TOKENS)) == right
    service.settle()
    one.stop()
    two = engines.start("two", model, salt=f"windows-{together}", arguments=arguments)
    assert tokens_of(two.ask(asked, ANSWER_TOKENS)) == right
    assert loaded(two) == 5 * 15
    two.stop()
    assert engines.no_dirty_reads() > 0


def test_windows_are_judged_by_tokens_that_tell(
    engines: Engines, service: ServiceProcess, models: Callable[[str], Path], plain: Plain
) -> None:
    """The oracle: with wrong pages loaded the same prompts come out otherwise."""
    model = models("gemma")
    asked = prompts(model, 5, 15)
    right = plain("gemma", asked, ANSWER_TOKENS)
    one = engines.start("one", model, salt="windows-spoiled")
    assert tokens_of(one.ask(asked, ANSWER_TOKENS)) == right
    service.settle()
    one.stop()
    spoiled = engines.start("two", model, salt="windows-spoiled", save=False, spoiled=True)
    wrong = tokens_of(spoiled.ask(asked, ANSWER_TOKENS))
    assert loaded(spoiled) == 5 * 15
    assert all(one != other for one, other in zip(wrong, right, strict=True))


def test_row25_a_hybrid_with_recurrent_states_is_refused_at_start(
    engines: Engines, models: Callable[[str], Path]
) -> None:
    engine = engines.start("one", models("hybrid"), salt="hybrid", ready=False)
    with pytest.raises(EngineFailed, match="ended with status"):
        engine.await_ready()
    log = engine.log.read_text(encoding="utf-8", errors="replace")
    assert "LayoutRefused" in log
    assert "state-space (Mamba) layers" in log
