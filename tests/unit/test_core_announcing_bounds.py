"""What announcing may cost and keep: nothing where nobody announces, no more than was asked in a step, and
nothing that stays for ever."""

import pytest
from msgspec.structs import replace

from metaservice.core import capture, capture_told
from metaservice.core import told as told_steps
from metaservice.core.commands import Announce, DeleteInstance, PutInstance, PutStorage, Tick
from metaservice.core.events import Announced
from metaservice.core.index import unpacked_slots
from metaservice.core.machine import Machine
from metaservice.core.state import Told as Removed
from metaservice.core.told import gone_rows
from tests.sim.fleet import FINGERPRINT, chain, key
from tests.unit.core_told import PUBLICATION, TOKENS, TOLD, Told, rows


def announce(told: Told) -> Announced:
    """One step, which has something to say."""
    told.now_ms += 5
    told.done(Announce())
    event = told.events[-1]
    assert isinstance(event, Announced)
    return event


def test_where_nobody_announces_nothing_is_gathered_for_it() -> None:
    told = Told()
    for row in range(20):
        told.write(chain(20, f"a{row}-"))
    telling = told.machine.memory.telling
    assert not telling.leading and not telling.pressing
    told.tell()
    assert len(told.router.keys()) == 400, "who asks later finds it all"


def test_a_replica_with_other_settings_makes_the_same_windows() -> None:
    told = Told()
    told.write(chain(40))
    told.tell()
    told.flush()
    chunks = list(capture.capture(told.machine.state))
    other = Machine.restore(chunks, 0, replace(TOLD, window_removed_max=3, window_blocks_max=2))
    other.collect_windows()
    seq = len(told.events)
    told.publish(None)
    windows = told.tell()
    assert [sum(len(rows(gone)) for gone in window.removed) for window in windows] == [16, 16, 8]
    for event in told.events[seq:]:
        other.apply(event)
    other.mark_durable(other.seq)
    assert other.take_windows() == windows and other.digest() == told.machine.digest()


def test_candidates_do_not_pile_up_on_who_never_needs_them() -> None:
    told = Told()
    for row in range(400):
        keys = chain(24, f"c{row}-")
        told.write(keys)
        told.tell()
        told.remove(keys)
        told.tell()
    follower = told.replayed()
    for machine in (told.machine, follower):
        assert len(machine.state.instances["i"].primary.hot) <= 1_025
    told.write(chain(4))
    told.tell()
    told.publish(replace(PUBLICATION, entries_max=2))
    told.tell()
    assert told.router.keys() == set(chain(2)), "those that count are still there"


def test_a_much_lower_limit_goes_step_by_step_whatever_else_is_new() -> None:
    told = Told()
    for row in range(10):
        told.write(chain(20, f"d{row}-"))
        told.tell()
    told.publish(replace(PUBLICATION, entries_max=10))
    told.write(chain(3, "new"))
    dropped = [len(unpacked_slots(announce(told).dropped)) for _ in range(5)]
    assert dropped == [TOLD.window_blocks_max] * 5
    for window in told.machine.take_windows():
        told.router.take(window)
    told.tell()
    assert len(told.router.known) == 10 and set(chain(3, "new")) <= told.router.keys()
    told.sound()


def test_a_limit_lowered_under_the_leader_before_is_kept_by_the_next() -> None:
    told = Told()
    told.write(chain(30))
    told.tell()
    told.publish(replace(PUBLICATION, entries_max=5))
    told.take_over()
    told.tell()
    assert told.router.keys() == set(chain(5))


def test_orphans_that_went_are_not_remembered() -> None:
    told = Told(replace(TOLD, restate_ms=10_000))
    for row in range(30):
        keys = chain(3, f"o{row}-")
        told.write(keys, parent=key(f"missing{row}"))
        told.tell()
        told.remove(keys)
        told.tell()
    assert told.machine.memory.telling.waiting
    told.now_ms += 10_000
    told.tell()
    assert told.machine.memory.telling.waiting == 0


def test_what_was_passed_over_is_found_with_time_also_when_nothing_is_announced() -> None:
    told = Told(replace(TOLD, restate_ms=10_000))
    told.tell()
    told.write(chain(3))
    told.machine.memory.telling._fresh.clear()  # as if it had not been looked at for want of room
    told.tell()
    assert not told.router.known
    told.now_ms += 10_000
    told.tell()
    assert told.router.keys() == set(chain(3))


def test_who_asks_again_and_again_does_not_keep_others_from_the_rest() -> None:
    told = Told()
    for row in range(10):
        told.write(chain(4, f"r{row}-"))
    told.tell()
    index = told.machine.state.index
    heard: set[bytes] = set()
    for _ in range(12):
        told.machine.memory.telling.restate(told.machine.state.instances["i"])
        heard |= {index.key[slot] for slot in unpacked_slots(announce(told).restated)}
    assert heard == told.router.keys()


def test_after_a_long_silence_no_step_is_a_long_one() -> None:
    told = Told(replace(TOLD, restate_ms=10_000, window_removed_max=16))
    told.write(chain(200))
    told.tell()
    told.remove(chain(200)[50:])
    told.tell()
    told.now_ms += 60_000
    for _ in range(5):
        event = announce(told)
        assert event.again <= 16 and len(unpacked_slots(event.restated)) <= 8


def test_a_chain_over_two_places_is_told_again_once_each_block() -> None:
    told = Told()
    told.write(chain(1))
    for row in range(1, 8):
        told.prefer(*(("mem", "s") if row % 2 else ("s",)))
        told.write([key(f"k{row}")], parent=key(f"k{row - 1}"))
    told.tell()
    told.now_ms += 3_000
    again = [one for window in told.tell() for run in window.restated for one in rows(run)]
    assert again == chain(8)[1:]


def test_blocks_in_two_storages_that_all_reach_cross_nothing() -> None:
    told = Told()
    told.write(chain(1))
    told.done(PutStorage(storage="s2", kind="posix", options={"path": "/s2"}))
    told.prefer("s2", "s")
    told.write([key("k1")], parent=key("k0"))
    told.tell()
    assert told.router.keys() == set(chain(2))
    told.now_ms += 3_000
    assert not any(window.restated for window in told.tell())


def test_an_instance_of_a_name_that_was_used_before_with_longer_keys() -> None:
    told = [Removed("i", "EXTERNAL", "", b"a" * 16), Removed("i", "EXTERNAL", "", b"b" * 32)]
    gone = gone_rows(told)
    assert [(one.key_length, one.keys) for one in gone] == [(16, b"a" * 16), (32, b"b" * 32)]


def test_what_is_owed_is_counted_by_instance() -> None:
    told = Told()
    told.publish(PUBLICATION, "j", FINGERPRINT)
    told.write(chain(20))
    told.tell()
    told.done(DeleteInstance(instance="i"))
    told.done(Tick())
    assert told.machine.untold("i") and not told.machine.untold("j")
    told.flush()
    restored = Machine.restore(list(capture.capture(told.machine.state)), 0, TOLD)
    assert restored.untold("i") and restored.state.announced == told.machine.state.announced
    told.tell()
    assert not told.machine.untold("i")


@pytest.mark.parametrize("change", [{"hash_of": "head64"}, {"base": "b", "lora": "l"}])
def test_what_was_told_under_one_hash_in_one_stream_is_taken_back_there(change: dict[str, str]) -> None:
    told = Told()
    told.publish(replace(PUBLICATION, routing_group="other"), "b")
    told.write(chain(3))
    told.tell()
    changed = replace(PUBLICATION, **change)
    put = PutInstance(instance="i", group="g", fingerprint=FINGERPRINT, publication=changed)
    refusal = told.send(put)
    assert (refusal.code, refusal.field) == ("invalid_field", f"publication.{next(iter(change))}")
    told.publish(None)
    told.tell()
    told.done(put)
    told.tell()
    assert told.router.keys() == set(chain(3))
    told.sound()


def test_all_that_hangs_on_one_block_goes_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_steps, "WITHDRAWN_AT_ONCE", 5)
    told = Told()
    told.write([key("root")])
    for row in range(8):
        told.write(chain(6, f"b{row}-"), parent=key("root"))
    told.tell()
    assert len(told.router.known) == 49
    told.remove([key("root")])
    assert len(told.machine.state.untold) == 5, "as many at once as one step may take"
    told.capture()
    windows = told.tell()
    assert max(sum(len(rows(gone)) for gone in one.removed) for one in windows) <= 16
    assert not told.router.known and not told.machine.state.doomed
    assert all(len(event.stored) == 0 for event in told.events[-2:] if isinstance(event, Announced))
    told.write([key("root")])
    told.tell()
    assert len(told.router.known) == 49, "all of it comes back with the block"
    restored = told.restored()
    assert restored is not None and restored.digest() == told.machine.digest()
    told.sound()


def test_an_instance_is_announced_no_more_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_steps, "WITHDRAWN_AT_ONCE", 5)
    told = Told()
    told.write(chain(40))
    told.tell()
    told.publish(None)
    assert told.machine.state.announced == 35 and told.machine.untold("i")
    told.remove(chain(40)[30:])
    told.publish(PUBLICATION)
    told.tell()
    assert told.router.keys() == set(chain(30)) and not told.machine.state.doomed
    told.publish(None)
    told.tell()
    assert not told.router.known and not told.machine.untold("i")
    told.sound()


def test_a_snapshot_of_large_blocks_has_no_large_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_told, "CHUNK_BYTES", 4 * len(TOKENS))
    told = Told()
    told.write(chain(30))
    told.tell()
    told.remove(chain(30)[20:])
    chunks = list(capture_told.capture(told.machine.state, 7))
    assert len(chunks) == 1 + 2 + 8 and max(map(len, chunks[3:])) < 7 * len(TOKENS)
    told.capture()
    restored = told.restored()
    assert restored is not None and list(restored.state.untold) == list(told.machine.state.untold)
    told.sound()
