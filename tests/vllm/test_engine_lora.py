"""A LoRA adapter's blocks are its own: told by content, not by a name and folder that others have too.

vLLM names a block by its tokens and its adapter's name and folder. Where those are the same and the adapter's
content is not, only the instance keeps the blocks apart.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.accept.messages import EngineOptions
from tests.vllm.adapter_house import ADAPTERS_MAX, RANK, AdapterEngine, make_adapter
from tests.vllm.engine_house import CONTEXT_TOKENS, GROUP, Engines, ServiceProcess, prompts

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

BLOCKS = 6
PROMPTS = 3
TOKENS = 8
ALL = PROMPTS * BLOCKS
LOOKED_AT_S = 0.5
"""Longer than the connector trusts what it last saw of an adapter's files."""

Answers = list[list[int]]
Start = Callable[..., AdapterEngine]
ARGUMENTS: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": ADAPTERS_MAX,
    "max_lora_rank": RANK,
    "max_model_len": CONTEXT_TOKENS,
}


@pytest.fixture
def start(service: ServiceProcess, models: Callable[[str], Path], tmp_path: Path) -> Iterator[Start]:
    """Starts engines with adapters that share what they may share."""

    def started(name: str) -> AdapterEngine:
        connector = {"url": service.url, "group": GROUP, "salt": tmp_path.name}
        connector["audit_path"] = str(tmp_path / f"{name}.audit")
        options = EngineOptions(model=str(models("llama")), connector=connector, arguments=ARGUMENTS)
        return AdapterEngine(options, tmp_path / f"{name}.log")

    yield started


def plain_answers(
    models: Callable[[str], Path], asked: Answers, adapters: dict[str, Path], folder: Path
) -> dict[str, Answers]:
    """What each adapter, and the base model as "", answers without a connector: all different, or they could
    not judge anything."""
    options = EngineOptions(
        model=str(models("llama")), arguments={**ARGUMENTS, "enable_prefix_caching": False}
    )
    with AdapterEngine(options, folder / "plain.log") as engine:
        right = {name: engine.ask(asked, TOKENS, (name, path)) for name, path in adapters.items()}
        right[""] = engine.ask(asked, TOKENS)
    for row in range(len(asked)):
        assert len({tuple(answers[row]) for answers in right.values()}) == len(right)
    return right


def test_row22_an_adapters_blocks_are_for_its_content_alone(
    start: Start,
    engines: Engines,
    service: ServiceProcess,
    models: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    asked = prompts(models("llama"), PROMPTS, BLOCKS, first=300)
    other = ("other", make_adapter(tmp_path / "other", 2))
    folder = tmp_path / "poet"
    poet = ("poet", make_adapter(folder, 1))
    retrained = make_adapter(tmp_path / "retrained", 3)
    right = plain_answers(
        models, asked, {"poet": folder, "other": other[1], "retrained": retrained}, tmp_path
    )
    with start("one") as one:
        assert one.ask(asked, TOKENS, poet) == right["poet"]
        service.settle()
        assert len(engines.pages("one", "published")) >= ALL
    with start("two") as two:
        assert two.ask(asked, TOKENS, poet) == right["poet"]
        assert len(engines.pages("two", "loaded")) == ALL, "another engine has the same adapter's blocks"
        assert two.ask(asked, TOKENS) == right[""]
        assert two.ask(asked, TOKENS, other) == right["other"]
        assert len(engines.pages("two", "loaded")) == ALL, "neither the base model nor another adapter does"
        service.settle()
    make_adapter(folder, 3)
    with start("three") as three:
        assert three.ask(asked, TOKENS, poet) == right["retrained"]
        assert not engines.pages("three", "loaded"), "the name and folder are the same, the content is not"
        service.settle()
        assert three.ask(asked, TOKENS, poet) == right["retrained"]
        assert len(engines.pages("three", "loaded")) == ALL, "what was retrained has blocks of its own"
        assert three.ask(asked, TOKENS, other) == right["other"]
        assert three.ask(asked, TOKENS) == right[""]
        assert len(engines.pages("three", "loaded")) == 3 * ALL
        service.settle()
    make_adapter(folder, 1)
    with start("four") as four:
        assert four.ask(asked, TOKENS, poet) == right["poet"]
        assert len(engines.pages("four", "loaded")) == ALL, "the old content is back, and so are its blocks"
        service.settle()
    assert engines.no_dirty_reads() == 5 * ALL


def test_row22_an_adapter_whose_files_change_while_it_is_used_has_no_cache(
    start: Start,
    engines: Engines,
    service: ServiceProcess,
    models: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """The engine goes on with the weights that it has read. What it computes is nobody's any more."""
    asked = prompts(models("llama"), PROMPTS, BLOCKS, first=330)
    folder = tmp_path / "poet"
    poet = ("poet", make_adapter(folder, 1))
    retrained = make_adapter(tmp_path / "retrained", 3)
    right = plain_answers(models, asked, {"poet": folder, "retrained": retrained}, tmp_path)
    with start("one") as one:
        assert one.ask(asked[:1], TOKENS, poet) == right["poet"][:1]
        service.settle()
        make_adapter(folder, 3)
        time.sleep(LOOKED_AT_S)
        published = len(engines.pages("one", "published"))
        assert one.ask(asked, TOKENS, poet) == right["poet"]
        service.settle()
        assert len(engines.pages("one", "published")) == published
        assert not engines.pages("one", "loaded")
        assert one.ask(asked, TOKENS) == right[""]
        service.settle()
        assert one.ask(asked, TOKENS) == right[""]
        assert len(engines.pages("one", "loaded")) == ALL, "the base model goes on as before"
    with start("two") as two:
        assert two.ask(asked, TOKENS, poet) == right["retrained"]
        assert not engines.pages("two", "loaded")
        service.settle()
    assert engines.no_dirty_reads() == ALL
