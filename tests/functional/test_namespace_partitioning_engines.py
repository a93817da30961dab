"""Whole engines, without vLLM, that differ in one field: neither loads, counts nor tells what others have."""

from collections.abc import Iterator

import pytest

from engine_adapters.namespace import COMPARED, Namespace
from engine_adapters.vllm.requests import Published
from tests.engines.fleet import UcmEngine, namespace_of
from tests.engines.ground import Ground
from tests.engines.oracle import Shape
from tests.unit.namespace_house import changed

SHAPE = Shape()
PROMPT = tuple(range(1, 42))
BLOCKS = 10
"""Whole blocks of the prompt."""
FIELDS = [field for field in Namespace.__struct_fields__ if field not in COMPARED]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    one = Ground(tmp_path_factory.mktemp("ground"))
    one.group("all")
    yield one
    one.close()


@pytest.fixture(scope="module")
def first(ground: Ground) -> Iterator[list[Published]]:
    """What an engine told that served the prompt first."""
    engine = UcmEngine(ground, "all", "first", SHAPE)
    engine.serve("r", PROMPT)
    engine.settle()
    yield engine.side.outcomes.take_published()
    engine.close()


def told(published: list[Published]) -> dict[bytes, str]:
    return {key: one.instance for one in published for key in one.keys}


def test_engines_of_one_namespace_share(ground: Ground, first: list[Published]) -> None:
    """Without this the others would prove nothing."""
    assert len(told(first)) >= BLOCKS
    engine = UcmEngine(ground, "all", "second", SHAPE)
    engine.serve("r", PROMPT)
    engine.settle()
    assert engine.counted().get("loaded_blocks", 0) >= BLOCKS - 1
    assert not told(engine.side.outcomes.take_published()), (
        "what another engine had stored is its news, not ours"
    )
    engine.close()


@pytest.mark.parametrize("field", FIELDS)
def test_an_engine_that_differs_in_one_field_has_nothing_of_it(
    ground: Ground, first: list[Published], field: str
) -> None:
    other = changed(namespace_of(SHAPE, tenant="all"), field)
    engine = UcmEngine(ground, "all", f"other-{field}", SHAPE, namespace={field: getattr(other, field)})
    identity = engine.broker.identity
    assert identity is not None and identity.instance not in set(told(first).values())
    engine.serve("r", PROMPT)
    engine.settle()
    counts, ours = engine.counted(), told(engine.side.outcomes.take_published())
    assert counts.get("loaded_blocks", 0) == 0 and not engine.wrong()
    if field == "key_length":
        assert not ours, "keys that its instance cannot have were stored"
    else:
        # it had to store the very same keys itself, and tells of them as its own
        assert set(ours) == set(told(first)) and set(ours.values()) == {identity.instance}
    engine.close()
