"""The ideal hit rate against a definition so plain that it cannot be wrong."""

from collections.abc import Sequence
from random import Random

import pytest

from engine_adapters.replay.ideal import IdealCache


def by_definition(requests: Sequence[Sequence[int]]) -> list[int]:
    """For each request the length of the longest prefix that it has in common with an earlier one."""
    hits = []
    for index, request in enumerate(requests):
        longest = 0
        for earlier in requests[:index]:
            for length in range(min(len(earlier), len(request)), 0, -1):
                if list(earlier[:length]) == list(request[:length]):
                    longest = max(longest, length)
                    break
        hits.append(longest)
    return hits


@pytest.mark.parametrize("case", range(20))
def test_equals_the_definition(seed: int, case: int) -> None:
    chance = Random(f"{seed}/{case}")
    alphabet = chance.choice([2, 3, 10])
    requests = [
        [chance.randrange(alphabet) for _ in range(chance.randrange(12))] for _ in range(chance.randrange(40))
    ]
    cache = IdealCache()
    assert [cache.serve(request) for request in requests] == by_definition(requests)
    assert cache.asked == sum(map(len, requests))
    assert cache.hits == sum(by_definition(requests))


def test_known_figures() -> None:
    cache = IdealCache()
    assert cache.hit_rate == 0.0
    assert [cache.serve(ids) for ids in ([1, 2, 3], [1, 2, 4], [2, 3], [], [1, 2, 4, 5])] == [0, 2, 0, 0, 3]
    assert cache.blocks == 7
    assert cache.hit_rate == 5 / 12


def test_a_block_is_no_hit_behind_another_prefix() -> None:
    cache = IdealCache()
    cache.serve([1, 2, 3])
    assert cache.serve([9, 2, 3]) == 0
    assert cache.serve([9, 2, 3]) == 3
