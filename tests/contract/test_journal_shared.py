"""What a journal promises that replicas share: nobody locks it, the newest claim is the fence, readers find
damage, and what a follower still needs is not trimmed."""

import threading
from collections.abc import Iterator

import pytest

from metaservice.journal import frame
from metaservice.journal.errors import (
    CorruptJournal,
    CorruptSnapshot,
    FateUnknown,
    Fenced,
    JournalError,
    JournalFailed,
    JournalRegressed,
    JournalTrimmed,
    UnsupportedVersion,
)
from metaservice.journal.memory import AppendFault
from metaservice.journal.port import Journal
from metaservice.journal.records import record_crc
from tests.contract.journal_benches import DAMAGE, DIGEST, append_to, body, damage, filled, seqs
from tests.contract.postgres_bench import PostgresBench

# ---------------------------------------------------------------- the fence


def test_two_writers_may_have_it_open_and_the_last_claim_decides(postgres_bench: PostgresBench) -> None:
    old, new = postgres_bench.journal(), postgres_bench.journal()
    old.open()
    new.open()
    first = old.claim()
    append_to(old, first, 1, 2)
    second = new.claim()
    assert second == first + 1
    with pytest.raises(Fenced) as caught:
        old.append(3, 3, first, body(3))
    assert (caught.value.stored_epoch, caught.value.head_seq) == (second, 2)
    append_to(new, second, 3, 1)
    assert [batch.epoch for batch in old.read(0)] == [first, first, second]
    third = old.claim()
    append_to(old, third, 4, 1)
    with pytest.raises(Fenced):
        new.append(4, 4, second, body(4))


def test_i5_an_epoch_number_given_twice_has_one_writer(postgres_bench: PostgresBench) -> None:
    """As after a failover to a standby that never saw the first claim."""
    old, new = postgres_bench.journal(), postgres_bench.journal()
    old.open()
    new.open()
    append_to(old, old.claim(), 1, 1)
    epoch = old.claim()
    postgres_bench.set_mark("epoch", epoch - 1)
    assert new.claim() == epoch
    with pytest.raises(Fenced):
        old.append(2, 2, epoch, body(2))
    new.append(2, 2, epoch, body(2))


def test_who_claimed_can_be_read_by_people(postgres_bench: PostgresBench) -> None:
    journal = postgres_bench.journal()
    journal.open()
    journal.claim()
    assert postgres_bench.sql("SELECT holder FROM ucm.shard")[0][0] == "bench"


@pytest.mark.parametrize("shards", [2, 4])
def test_opening_at_once_makes_one_row_each(postgres_bench: PostgresBench, shards: int) -> None:
    journals = [postgres_bench.journal(number % shards) for number in range(3 * shards)]
    threads = [threading.Thread(target=journal.open) for journal in journals]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [row[0] for row in postgres_bench.sql("SELECT id FROM ucm.shard ORDER BY id")] == [*range(shards)]
    assert sorted(journal.claim() for journal in journals) == sorted([1, 2, 3] * shards)


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_found_by_whoever_reads_and_nothing_is_cut(postgres_bench: PostgresBench, how: str) -> None:
    filled(postgres_bench, 5)
    damage(postgres_bench, 3, how)
    journal = postgres_bench.journal()
    assert journal.open().last_cut is None
    for reader in (journal, postgres_bench.reader()):
        reading = reader.read(0)
        assert [next(reading).first_seq for _ in range(2)] == [1, 2]
        with pytest.raises(CorruptJournal) as caught:
            next(reading)
        assert caught.value.seq == 3
    assert journal.size().batches == 5


@pytest.mark.parametrize("lost", [1, 3])
def test_a_hole_is_found_by_whoever_reads(postgres_bench: PostgresBench, lost: int) -> None:
    filled(postgres_bench, 5)
    postgres_bench.drop_record(lost)
    with pytest.raises(CorruptJournal, match="no batch begins here") as caught:
        list(postgres_bench.reader().read(0))
    assert caught.value.seq == lost


@pytest.mark.parametrize("head_seq", [3, 7])
def test_a_head_that_is_not_the_last_batchs_stops_the_start(
    postgres_bench: PostgresBench, head_seq: int
) -> None:
    filled(postgres_bench, 5)
    postgres_bench.set_mark("head_seq", head_seq)
    with pytest.raises(CorruptJournal, match=f"the head says seq {head_seq}, the last batch ends at seq 5"):
        postgres_bench.journal().open()


def test_a_batch_of_a_newer_release_is_not_read(postgres_bench: PostgresBench) -> None:
    journal = postgres_bench.journal()
    journal.open()
    append_to(journal, journal.claim(), 1, 1)
    newer = frame.seal(b"from the future", frame.BODY_VERSION + 1)
    journal.append(2, 2, journal.claim(), newer)
    with pytest.raises(UnsupportedVersion):
        list(journal.read(0))
    assert postgres_bench.payload(2) == newer


def test_a_batch_of_another_shard_does_not_pass(postgres_bench: PostgresBench) -> None:
    filled(postgres_bench, 2)
    other = record_crc(1, 2, 2, 1, body(2))
    postgres_bench.change_record(2, crc=other)
    with pytest.raises(CorruptJournal, match="checksum"):
        list(postgres_bench.reader().read(0))


# ---------------------------------------------------------------- a head that went back


def test_an_append_to_a_journal_that_went_back_raises_the_alarm(postgres_bench: PostgresBench) -> None:
    journal = postgres_bench.journal()
    journal.open()
    epoch = journal.claim()
    append_to(journal, epoch, 1, 3)
    postgres_bench.drop_record(3)
    postgres_bench.set_mark("head_seq", 2)
    with pytest.raises(JournalRegressed) as caught:
        journal.append(4, 4, epoch, body(4))
    assert (caught.value.head_seq, caught.value.known_seq) == (2, 3)
    journal.close()
    assert journal.open().head_seq == 2
    append_to(journal, journal.claim(), 3, 1)


def test_a_follower_of_a_journal_that_went_back_is_told_once(postgres_bench: PostgresBench) -> None:
    filled(postgres_bench, 3)
    reader = postgres_bench.reader()
    assert seqs(reader.read(0)) == [1, 2, 3]
    postgres_bench.drop_record(3)
    postgres_bench.set_mark("head_seq", 2)
    with pytest.raises(JournalRegressed):
        list(reader.read(3))
    with pytest.raises(JournalRegressed):
        reader.head()
    assert reader.head() == 2
    assert seqs(reader.read(0)) == [1, 2]


def test_a_follower_notices_another_history_that_has_overtaken_it(postgres_bench: PostgresBench) -> None:
    """The head is past what it has read, and yet what it has read is gone."""
    epoch = filled(postgres_bench, 3)
    reader = postgres_bench.reader()
    assert seqs(reader.read(0)) == [1, 2, 3]
    other = frame.seal(b"another history")
    postgres_bench.change_record(3, payload=other, epoch=epoch + 1, crc=record_crc(0, 3, 3, epoch + 1, other))
    leader = postgres_bench.journal()
    leader.open()
    append_to(leader, leader.claim(), 4, 1)
    with pytest.raises(JournalRegressed, match="another batch is in the place of seq 3 to 3"):
        list(reader.read(3))
    assert seqs(reader.read(0)) == [1, 2, 3, 4]
    assert seqs(reader.read(4)) == []


# ---------------------------------------------------------------- fates


def _resolved(journal: Journal, first_seq: int, payload: bytes) -> bool:
    """Ask until it can be told: an impatient journal on a busy machine is asked more than once."""
    for _ in range(50):
        try:
            return journal.resolve(first_seq, payload)
        except FateUnknown:
            continue
    raise AssertionError("the fate was never known")


@pytest.mark.slow
def test_what_was_settled_cannot_come_in_late(postgres_bench: PostgresBench) -> None:
    journal = postgres_bench.impatient_journal()
    journal.open()
    epoch = journal.claim()
    append_to(journal, epoch, 1, 2)  # both ways of appending are prepared: what is held is the append itself
    held = postgres_bench.backends()
    postgres_bench.proxy.hold()
    with pytest.raises(FateUnknown):
        journal.append(3, 3, epoch, body(3))
    assert _resolved(journal, 3, body(3)) is False
    assert set(held) <= set(postgres_bench.backends())
    postgres_bench.proxy.let_go()
    postgres_bench.await_gone(held)
    assert journal.head() == 2
    journal.append(3, 3, epoch, body(77))
    assert [batch.payload for batch in journal.read(2)] == [body(77)]


def test_a_settling_that_was_lost_is_made_again(postgres_bench: PostgresBench) -> None:
    journal = postgres_bench.journal()
    journal.open()
    epoch = journal.claim()
    for fault in AppendFault:
        first_seq = journal.head() + 1
        postgres_bench.leave_fate_open(journal, AppendFault.LOST)
        with pytest.raises(FateUnknown):
            journal.append(first_seq, first_seq, epoch, body(first_seq))
        postgres_bench.leave_fate_open(journal, fault)
        with pytest.raises(FateUnknown, match="cannot be settled yet"):
            journal.resolve(first_seq, body(first_seq))
        with pytest.raises(FateUnknown):
            journal.append(first_seq, first_seq, epoch, body(first_seq))
        assert journal.resolve(first_seq, body(first_seq)) is False
        append_to(journal, epoch, first_seq, 2)
    assert seqs(journal.read(0)) == [1, 2, 3, 4]


def test_a_settling_by_a_deposed_writer_does_not_disturb_the_new_one(postgres_bench: PostgresBench) -> None:
    old, new = postgres_bench.journal(), postgres_bench.journal()
    old.open()
    new.open()
    epoch = old.claim()
    postgres_bench.leave_fate_open(old, AppendFault.WRITTEN)
    with pytest.raises(FateUnknown):
        old.append(1, 1, epoch, body(1))
    newer = new.claim()
    append_to(new, newer, 2, 1)
    assert old.resolve(1, body(1)) is True
    append_to(new, newer, 3, 1)
    with pytest.raises(Fenced):
        old.append(4, 4, epoch, body(4))


# ---------------------------------------------------------------- retention


def test_d5_nothing_is_trimmed_that_a_live_follower_still_needs(postgres_bench: PostgresBench) -> None:
    journal = postgres_bench.journal()
    journal.open()
    epoch = journal.claim()
    append_to(journal, epoch, 1, 10)
    for seq in (6, 8):
        journal.snapshots.save(seq, epoch, DIGEST, [b"state"])
    reader = postgres_bench.reader()
    journal.report_follower("near", 9)
    reader.report_follower("far", 2)
    assert journal.trim(10) == 2
    reader.report_follower("far", 4)
    assert reader.trim(10) == 4  # a follower that saved the snapshot trims
    assert seqs(reader.read(4)) == [5, 6, 7, 8, 9, 10]
    postgres_bench.sql("UPDATE ucm.follower SET reported_at = now() - interval '61 s' WHERE replica = 'far'")
    assert journal.trim(10) == 6
    with pytest.raises(JournalTrimmed):
        list(reader.read(4))
    info = reader.snapshots.latest()
    assert info is not None
    assert seqs(reader.read(info.seq)) == [9, 10]


def test_d5_a_long_trim_goes_in_steps(postgres_bench: PostgresBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metaservice.journal.postgres.TRIM_BATCHES", 3)
    journal = postgres_bench.journal()
    journal.open()
    epoch = journal.claim()
    append_to(journal, epoch, 1, 10)
    for seq in (9, 10):
        journal.snapshots.save(seq, epoch, DIGEST, [])
    assert journal.trim(10) == 9
    assert (journal.size().batches, seqs(journal.read(9))) == (1, [10])


def test_i5_trims_reports_and_appends_at_once_do_not_lock_each_other_up(
    postgres_bench: PostgresBench,
) -> None:
    journal = postgres_bench.journal()
    journal.open()
    epoch = journal.claim()
    append_to(journal, epoch, 1, 200)
    for seq in (190, 200):
        journal.snapshots.save(seq, epoch, DIGEST, [])
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            reader = postgres_bench.reader()
            for step in range(1, 20):
                for name in ("a", "b", "c")[:: 1 if number % 2 else -1]:
                    reader.report_follower(name, 10 * step)
                reader.trim(10 * step)
                reader.snapshots.save(200 + step, epoch, DIGEST, [b"x"])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    append_to(journal, epoch, 201, 200)
    for thread in threads:
        thread.join()
    assert errors == []
    assert journal.head() == 400
    assert len(journal.snapshots.list()) == 2
    trimmed = journal.trim(0)
    assert seqs(journal.read(trimmed)) == [*range(trimmed + 1, 401)]
    assert journal.size().batches == 400 - trimmed


# ---------------------------------------------------------------- snapshots


def test_a_saver_that_died_leaves_rows_that_a_later_save_removes(postgres_bench: PostgresBench) -> None:
    store, sql = postgres_bench.journal().snapshots, postgres_bench.sql
    saving = SteppedSave(postgres_bench, 5)
    assert store.latest() is None
    store.save(3, 1, DIGEST, [b"three"])
    assert sql("SELECT count(*) FROM ucm.snapshot")[0][0] == 2
    sql("UPDATE ucm.snapshot SET touched_at = now() - interval '601 s' WHERE NOT whole")
    store.save(4, 1, DIGEST, [b"four"])
    assert [info.seq for info in store.list()] == [4, 3]
    assert sql("SELECT count(*) FROM ucm.snapshot")[0][0] == 2
    with pytest.raises(JournalFailed, match="another save removed it"):
        saving.go_on()


def test_savers_at_once_do_not_disturb_each_other(postgres_bench: PostgresBench) -> None:
    store = postgres_bench.journal().snapshots
    slow = SteppedSave(postgres_bench, 7)
    store.save(7, 1, DIGEST, [b"quick"])
    store.save(8, 1, DIGEST, [b"newer"])
    slow.go_on()
    assert [info.seq for info in store.list()] == [8, 7]
    seven = store.list()[1]
    assert b"".join(store.load(seven)) == b"slowly"
    store.save(9, 1, DIGEST, [])
    assert postgres_bench.sql("SELECT count(*) FROM ucm.snapshot_chunk")[0][0] == 1


def test_a_snapshot_that_is_replaced_while_it_is_loaded_is_named(postgres_bench: PostgresBench) -> None:
    store = postgres_bench.journal().snapshots
    info = store.save(1, 1, DIGEST, [b"one", b"two"])
    loading = store.load(info)
    assert next(loading) == b"one"
    store.save(1, 1, DIGEST, [b"other"])
    with pytest.raises(CorruptSnapshot, match="chunk 1 is not there"):
        next(loading)


def test_a_lost_reply_to_the_last_step_of_a_save_is_asked_for(postgres_bench: PostgresBench) -> None:
    store = postgres_bench.journal().snapshots
    # three replies: the row, a chunk, and the chunk read back; the fourth makes it count
    postgres_bench.proxy.cut_after("C", 4)
    info = store.save(1, 1, DIGEST, [b"state"])
    assert store.latest() == info


class SteppedSave:
    """A save in a thread of its own that waits between its two chunks."""

    def __init__(self, bench: PostgresBench, seq: int) -> None:
        self._goes_on, self._waits = threading.Event(), threading.Event()
        self._errors: list[BaseException] = []
        self._store = bench.journal().snapshots
        self._thread = threading.Thread(target=self._save, args=(seq,), daemon=True)
        self._thread.start()
        assert self._waits.wait(10)

    def _chunks(self) -> Iterator[bytes]:
        yield b"slow"
        self._waits.set()
        self._goes_on.wait()
        yield b"ly"

    def _save(self, seq: int) -> None:
        try:
            self._store.save(seq, 1, DIGEST, self._chunks())
        except JournalError as error:
            self._errors.append(error)

    def go_on(self) -> None:
        """To the end; raises what the save raised."""
        self._goes_on.set()
        self._thread.join(10)
        for error in self._errors:
            raise error
