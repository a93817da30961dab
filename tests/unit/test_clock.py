"""The shard's clock: never backwards, and never faster than the service itself runs."""

import pytest

from metaservice import clock
from metaservice.clock import ShardClock, monotonic_s, new_cluster_id
from metaservice.core.model import Limits


class HandTime:
    """The two clocks of the machine, moved by the test."""

    def __init__(self) -> None:
        self.wall_ms = 1_700_000_000_000
        self.monotonic_ms = 5_000

    def time_ns(self) -> int:
        return self.wall_ms * 1_000_000

    def monotonic_ns(self) -> int:
        return self.monotonic_ms * 1_000_000

    def pass_ms(self, passed_ms: int) -> None:
        """Both clocks go on."""
        self.wall_ms += passed_ms
        self.monotonic_ms += passed_ms


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> HandTime:
    hand = HandTime()
    monkeypatch.setattr(clock, "time", hand)
    return hand


def test_starts_at_the_wall_clock(hand: HandTime) -> None:
    shard_clock = ShardClock()
    shard_clock.start(0)
    assert shard_clock.now_ms() == hand.wall_ms


def test_follows_the_monotonic_clock_and_not_the_wall(hand: HandTime) -> None:
    shard_clock = ShardClock()
    shard_clock.start(0)
    began_ms = shard_clock.now_ms()
    hand.pass_ms(70)
    hand.wall_ms -= 3_600_000  # somebody sets the wall clock back
    assert shard_clock.now_ms() == began_ms + 70
    hand.wall_ms += 7_200_000  # and forward
    hand.monotonic_ms += 30
    assert shard_clock.now_ms() == began_ms + 100


def test_restart_with_the_wall_clock_set_back_goes_on_after_the_journal(hand: HandTime) -> None:
    """A deadline that passed must not come back to life."""
    journaled_ms = hand.wall_ms
    hand.wall_ms -= 86_400_000
    shard_clock = ShardClock()
    shard_clock.start(journaled_ms)
    assert shard_clock.now_ms() == journaled_ms + 1
    hand.pass_ms(200)
    assert shard_clock.now_ms() == journaled_ms + 201


def test_a_second_start_never_goes_back(hand: HandTime) -> None:
    """A rebuild starts the clock anew while wall and journal are both behind it."""
    shard_clock = ShardClock()
    shard_clock.start(hand.wall_ms + 1_000_000)
    before_ms = shard_clock.now_ms()
    shard_clock.start(0)
    assert shard_clock.now_ms() >= before_ms


@pytest.mark.parametrize("stall_ms", [301, 10_000, 3_600_000])
def test_c5_a_stall_advances_it_by_the_step_at_most(hand: HandTime, stall_ms: int) -> None:
    shard_clock = ShardClock(step_ms_max=300)
    shard_clock.start(0)
    began_ms = shard_clock.now_ms()
    hand.pass_ms(stall_ms)
    assert shard_clock.now_ms() == began_ms + 300
    assert shard_clock.stalled_ms == stall_ms - 300
    hand.pass_ms(10)
    assert shard_clock.now_ms() == began_ms + 310


def test_a_stall_costs_a_small_part_of_the_shortest_deadline(hand: HandTime) -> None:
    """Whoever renews at a third of its time has more than half of it left: a stall must not take that."""
    shard_clock = ShardClock()
    shard_clock.start(0)
    began_ms = shard_clock.now_ms()
    hand.pass_ms(10_000)
    assert shard_clock.now_ms() - began_ms <= Limits().write_ttl_ms_min // 4


def test_time_read_often_enough_is_not_a_stall(hand: HandTime) -> None:
    shard_clock = ShardClock()
    shard_clock.start(0)
    began_ms = shard_clock.now_ms()
    for _ in range(100):
        hand.pass_ms(100)
        shard_clock.now_ms()
    assert (shard_clock.now_ms() - began_ms, shard_clock.stalled_ms) == (10_000, 0)


def test_what_passed_before_the_start_is_no_stall(hand: HandTime) -> None:
    shard_clock = ShardClock()
    hand.pass_ms(60_000)  # a long replay
    shard_clock.start(0)
    assert shard_clock.now_ms() == hand.wall_ms
    assert shard_clock.stalled_ms == 0


def test_the_real_one_goes_on() -> None:
    shard_clock = ShardClock()
    shard_clock.start(0)
    readings = [shard_clock.now_ms() for _ in range(1_000)]
    assert readings == sorted(readings)
    assert readings[0] > 1_600_000_000_000
    began_s = monotonic_s()
    assert 0 <= monotonic_s() - began_s < 60


def test_each_new_journal_has_a_name_of_its_own() -> None:
    names = {new_cluster_id() for _ in range(1_000)}
    assert len(names) == 1_000
    assert all(name.isalnum() and len(name) == 16 for name in names)
