"""Requests that share blocks which one of them loads synchronously, and that load fails. On fake engines with
the real connector and service."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.ground import Ground
from tests.engines.row_house import BLOCKS, DOCUMENT, row_house, until


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    logging.getLogger("ucm.vllm").setLevel(logging.CRITICAL)
    made = Ground(tmp_path_factory.mktemp("sharing"))
    yield made
    made.close()


@pytest.mark.parametrize("ends", ["aborted", "stays"])
def test_row12_who_shares_a_load_that_failed_does_not_go_on_with_garbage(ground: Ground, ends: str) -> None:
    """vLLM counts the shared blocks as computed for all but the first, which may be aborted before it has
    computed them again. The others' tokens were wrong, and their next blocks were stored."""
    with row_house(ground) as house:
        house.filled()
        engine = house.engine("e", load="sync")
        mover = engine.workers[0]._mover
        read, fails = mover.read, [True]

        def first_fails(*args: Any) -> list[str]:
            return ["io_error"] * len(args[0]) if fails else read(*args)

        setattr(mover, "read", first_fails)  # noqa: B010
        for name in ("a", "b"):
            engine.ask(name, DOCUMENT, 12)
        until(lambda: all(engine.broker.answer(f"{name}#1") for name in ("a", "b")), what="the answers")
        engine.step_until(lambda: engine.workers[0]._failures, "the failed load")
        fails.clear()
        if ends == "aborted":
            engine.engine.abort("a")
        engine.run()
        engine.settle()
        assert not engine.wrong()


def test_who_shares_a_load_comes_a_step_later_and_has_its_blocks_locally(ground: Ground) -> None:
    with row_house(ground) as house:
        house.filled()
        engine = house.engine("e", load="sync")
        for name in ("a", "b"):
            engine.ask(name, DOCUMENT, 2)
        until(lambda: all(engine.broker.answer(f"{name}#1") for name in ("a", "b")), what="the answers")
        engine.run()
        engine.settle()
        counted = engine.counted()
        assert counted["loads"] == 1 and counted["loaded_blocks"] == BLOCKS
