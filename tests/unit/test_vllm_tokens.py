"""What an engine tells of its blocks for routers: the tokens of each, as they are, or nothing."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_adapters.vllm.ordering import TEXT_LENGTH_MAX
from metaservice.wire.tokens import pack_tokens
from tests.engines.engine_request import Adapter
from tests.engines.fleet import UcmEngine
from tests.engines.ground import Ground, until
from tests.engines.oracle import Shape, block_keys
from tests.engines.row_house import BLOCKS, DOCUMENT, row_house
from tests.unit.vllm_memory_service import MemoryService, key_of
from tests.unit.vllm_worker_house import Gate, eventually, ranks_of, save_order, step

PUBLISH: dict[str, Any] = {"publish": True, "publish_model": "fake"}
OTHER = tuple((11 * number + 1) % 251 for number in range(41))
SIZE = Shape().block_tokens


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    logging.getLogger("ucm.vllm").setLevel(logging.ERROR)
    made = Ground(tmp_path_factory.mktemp("tokens"))
    yield made
    made.close()


def told_of(engine: UcmEngine) -> dict[bytes, tuple[bytes, str, str]]:
    """Key -> tokens, adapter and salt as told; blocks of which nothing was told are not in it."""
    (mover,) = engine.movers
    return {one.key: (one.tokens, one.lora, one.salt) for one in mover.told if one.tokens}


def rows(prompt: tuple[int, ...]) -> list[bytes]:
    """The packed tokens of a prompt's full blocks."""
    return [pack_tokens(prompt[at : at + SIZE]) for at in range(0, len(prompt) - SIZE + 1, SIZE)]


def test_each_block_is_told_with_its_own_tokens_its_adapter_and_its_salt(
    ground: Ground, tmp_path: Path
) -> None:
    folder = tmp_path / "poet"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"poetry")
    poet = Adapter("poet", str(folder), "poetry")
    with row_house(ground) as house:
        engine = house.engine("e", **PUBLISH)
        engine.serve("plain", DOCUMENT, 1)
        engine.serve("salted", OTHER, 1, salt="sea")
        until(lambda: engine.broker.instance_of((poet.lora_name, poet.lora_path)), what="its instance")
        engine.serve("poetic", DOCUMENT, 1, adapter=poet)
        engine.settle()
        told = told_of(engine)
        for prompt, salt, adapter in ((DOCUMENT, "", None), (OTHER, "sea", None), (DOCUMENT, "", poet)):
            keys = block_keys(house.shape, prompt, salt, adapter.label if adapter else "")
            name = adapter.lora_name if adapter else ""
            assert [told[key] for key in keys] == [(row, name, salt) for row in rows(prompt)]
        assert not engine.untrue()
        instance = engine.broker.instance_of((poet.lora_name, poet.lora_path))
        view = ground.client.get_json(f"/v1/instances/{instance}")["publication"]
        assert (view["lora"], view["base"], view["model"]) == ("poet", house.instance, "fake")
        assert view["hash_of"] == "tail64"


def test_answers_are_told_as_well_as_prompts_and_each_block_once(ground: Ground) -> None:
    """Blocks of tokens that were sampled have hashes too, one step after the other."""
    with row_house(ground) as house:
        engine = house.engine("e", **PUBLISH)
        answer = engine.serve("long", DOCUMENT[:9], 24)
        engine.settle()
        whole = (*DOCUMENT[:9], *answer)
        keys = block_keys(house.shape, whole)[: (len(whole) - 1) // SIZE]
        told = told_of(engine)
        assert [told[key][0] for key in keys] == rows(whole)[: len(keys)]
        assert len(engine.movers[0].told) == len(told)


@pytest.mark.parametrize("what", ["images", "embeds"])
def test_nothing_is_told_of_tokens_that_stand_for_something_else(ground: Ground, what: str) -> None:
    with row_house(ground) as house:
        engine = house.engine("e", **PUBLISH)
        engine.serve("other", DOCUMENT, 1, **{what: True})
        engine.settle()
        assert house.stored() == BLOCKS, "they are stored all the same"
        assert engine.movers[0].told and not told_of(engine)


def test_nothing_is_told_without_being_asked_to(ground: Ground) -> None:
    with row_house(ground) as house:
        engine = house.filled("e")
        assert house.stored() == BLOCKS and not told_of(engine)
        assert ground.client.get_json(f"/v1/instances/{house.instance}")["publication"] is None


@pytest.mark.parametrize("salt", ["x" * (TEXT_LENGTH_MAX + 1), "line\nbreak"])
def test_a_salt_that_the_service_does_not_take_costs_the_telling_and_not_the_block(
    ground: Ground, salt: str
) -> None:
    with row_house(ground) as house:
        engine = house.engine("e", **PUBLISH)
        engine.serve("r", DOCUMENT, 1, salt=salt)
        engine.settle()
        keys = block_keys(house.shape, DOCUMENT, salt)
        assert len(house.ground.stored(house.instance, keys)) == BLOCKS and not told_of(engine)


def test_row_20_saves_of_several_salts_go_in_sessions_of_their_own(tmp_path: Path) -> None:
    """A session has one salt: under another's, two tenants' blocks would be told as each other's."""
    service = MemoryService(tmp_path, ["tp0"])
    with ranks_of(service) as (rank,):
        orders = [
            rank.compute(save_order(f"s{n}", [n], [n + 1], request=f"r{n}", tokens=[n] * 4, salt=salt))
            for n, salt in enumerate(["a", "b", "a", ""])
        ]
        rank.step(step(saves=tuple(orders)))
        rank.saves_over(4)
        assert service.calls.count("start") == 3
        for number, salt in enumerate(["a", "b", "a", ""]):
            assert service.tokens[key_of(number)] == (pack_tokens([number] * 4), "", salt)


def test_blocks_that_are_told_and_others_share_a_session(tmp_path: Path) -> None:
    service = MemoryService(tmp_path, ["tp0"])
    with ranks_of(service) as (rank,):
        told = rank.compute(save_order("s0", [0, 1], [1, 2], tokens=[5, 6, 7, 70_000]))
        untold = rank.compute(save_order("s1", [2], [3], request="q"))
        rank.step(step(saves=(told, untold)))
        rank.saves_over(2)
        assert service.calls.count("start") == 1
        assert [service.tokens[key_of(n)][0] for n in range(3)] == [
            pack_tokens([5, 6]), pack_tokens([7, 70_000]), b"",
        ]  # fmt: skip


def test_every_rank_tells_the_same_whatever_it_could_copy(tmp_path: Path) -> None:
    """Both start one session under one name; the service takes what comes first, and the second has to be
    the same request. (The memory service asserts that it is.)"""
    service = MemoryService(tmp_path, ["tp0", "tp1"])
    with ranks_of(service, world=2) as ranks:
        slow = Gate()
        ranks[1].pages.before_gather = slow
        first = save_order("s0", [9], [9], request="q")
        order = save_order("s", [1, 2], [1, 2], tokens=[1, 2, 3, 4], salt="sea")
        for rank in ranks:
            rank.step(step(saves=(rank.compute(first),)))
            rank.step(step(saves=(rank.compute(order),)))
        ranks[0].saves_over(2)
        assert slow.reached.wait(5)
        ranks[1].side.preempted(step(preempted=("r",)))
        slow.open()
        saved = {one.save: one for one in ranks[1].saves_over(2)}
        assert saved["s"].dropped == 2
        eventually(lambda: service.calls.count("start") == 4)
        assert service.tokens[key_of(2)] == (pack_tokens([3, 4]), "", "sea")
