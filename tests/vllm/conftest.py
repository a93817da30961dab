"""What the tests with real engines share: one service, tiny models, and what they say without a cache."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from metaservice.cli.local.places import free_port
from tests.accept.handle import EngineProcess
from tests.vllm.engine_house import ANSWER_TOKENS, Engines, ServiceProcess, tokens_of

Plain = Callable[[str, list[list[int]], int], list[list[int]]]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model by its kind, made when it is first asked for."""
    from tests.accept.model import make_gemma, make_hybrid, make_llama

    makers: dict[str, Callable[[Path], Path]] = {
        "llama": make_llama,
        "gemma": make_gemma,
        "hybrid": make_hybrid,
    }
    folder = tmp_path_factory.mktemp("models")

    def model(kind: str) -> Path:
        path = folder / kind
        return path if path.exists() else makers[kind](path)

    return model


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service for the tests of a module."""
    process = ServiceProcess(tmp_path_factory.mktemp("service"), free_port())
    try:
        process.await_ready()
        process.set_up()
        yield process
    finally:
        process.process.kill()


@pytest.fixture
def engines(service: ServiceProcess, tmp_path: Path) -> Iterator[Engines]:
    """Engines of one test."""
    found = Engines(service, tmp_path)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(scope="session")
def plain(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    """What a model of a kind answers to prompts without a connector: its greedy tokens. One engine of each
    kind answers for all tests."""
    known: dict[tuple[str, tuple[int, ...], int], list[int]] = {}
    house = Engines(None, tmp_path_factory.mktemp("plain"))
    running: dict[str, EngineProcess] = {}

    def answers(kind: str, asked: list[list[int]], count: int = ANSWER_TOKENS) -> list[list[int]]:
        new = [prompt for prompt in asked if (kind, tuple(prompt), count) not in known]
        if new:
            if kind not in running:
                running[kind] = house.plain(kind, models(kind))
            for prompt, tokens in zip(new, tokens_of(running[kind].ask(new, count)), strict=True):
                known[kind, tuple(prompt), count] = tokens
        return [known[kind, tuple(prompt), count] for prompt in asked]

    try:
        yield answers
    finally:
        house.close()
