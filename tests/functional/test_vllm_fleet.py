"""Fleets of fake engines with the real connector on the real service: seeded histories, and planted mistakes
that they must catch."""

import logging
from collections.abc import Iterator

import pytest

from tests.engines.ground import Ground, until
from tests.engines.histories import play
from tests.engines.planted import PLANTS, caught

SEEDS = 14
PLANT_SEEDS = 12


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    logging.getLogger("ucm.vllm").setLevel(logging.ERROR)
    made = Ground(tmp_path_factory.mktemp("ground"))
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_histories_give_right_tokens_clean_blocks_and_no_leases(ground: Ground, seed: int) -> None:
    """Chunks, both load modes, ranks, windows, preemption, aborts, kills, rot, switches, slow wires."""
    play(ground, seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_histories(ground: Ground) -> None:
    for seed in range(SEEDS, 600):
        play(ground, seed)


def test_row07_no_lease_is_left_when_all_histories_are_over(ground: Ground) -> None:
    """Also those of engines that were killed: they end by their deadline."""
    until(lambda: not ground.leases_open(), 12, "the end of all leases")
    until(lambda: not ground.sessions_open(), 12, "the end of all write sessions")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mistake", PLANTS)
def test_a_planted_mistake_is_caught(ground: Ground, mistake: str) -> None:
    assert caught(ground, PLANTS[mistake], range(PLANT_SEEDS)), f"no history shows that {mistake}"
