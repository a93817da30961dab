"""Which blocks an engine does not offer again just now."""

from engine_adapters.vllm.known import KEYS_MAX, KnownKeys

KEYS = [bytes([number]) * 32 for number in range(6)]
SECOND = 1_000_000_000


def test_what_is_being_saved_is_not_offered_again_until_it_came_to_nothing() -> None:
    known = KnownKeys()
    known.saving("i", KEYS[:4])
    assert known.leading("i", KEYS, SECOND) == 4
    assert known.leading("other", KEYS, SECOND) == 0, "another instance's keys are other blocks"
    known.discard("i", KEYS[2:3])
    assert known.leading("i", KEYS, SECOND) == 2


def test_row29_what_is_gone_again_is_offered_again() -> None:
    known = KnownKeys()
    known.saving("i", KEYS)
    known.saved("i", KEYS[:5], 10 * SECOND)
    known.missed("i", KEYS[1:], 9 * SECOND)
    assert known.leading("i", KEYS, 11 * SECOND) == 6, "that lookup went out before they were stored"
    known.missed("i", KEYS[1:], 11 * SECOND)
    assert known.leading("i", KEYS, 11 * SECOND) == 1
    assert known.leading("i", KEYS[5:], 11 * SECOND) == 1, "its save is still under way"


def test_it_is_forgotten_by_age_and_bounded() -> None:
    known = KnownKeys()
    known.saving("i", KEYS)
    known.saved("i", KEYS, SECOND)
    assert known.leading("i", KEYS, 30 * SECOND) == 6
    assert known.leading("i", KEYS, 32 * SECOND) == 0
    known.saving("i", (number.to_bytes(8, "big") for number in range(KEYS_MAX + 10)))
    assert known.leading("i", [(9).to_bytes(8, "big")], 0) == 0
    assert known.leading("i", [(10).to_bytes(8, "big")], 0) == 1
