"""What every journal promises, the same tests over every store."""

import pytest

from metaservice.journal import frame
from metaservice.journal.errors import (
    CorruptJournal,
    FateUnknown,
    Fenced,
    JournalClosed,
    JournalError,
    JournalFull,
    JournalLocked,
    JournalMissing,
    JournalRegressed,
    UnsupportedVersion,
)
from metaservice.journal.memory import AppendFault
from metaservice.journal.port import Batch, Journal
from metaservice.journal.records import record_crc
from tests.contract.journal_benches import DAMAGE, DIGEST, JournalBench, append_to, body, damage, filled, seqs

# ---------------------------------------------------------------- append and read


def test_an_empty_journal_opens_at_head_zero(bench: JournalBench) -> None:
    journal = bench.journal()
    report = journal.open()
    assert (report.head_seq, report.epoch, report.last_cut, report.snapshot_faults) == (0, 0, None, ())
    assert list(journal.read(0)) == []
    assert (journal.size().batches, journal.size().bytes) == (0, 0)
    journal.close()


def test_what_was_appended_is_read_in_order_also_after_a_restart(bench: JournalBench) -> None:
    epoch = filled(bench, 5, width=3)
    journal = bench.journal()
    report = journal.open()
    assert (report.head_seq, report.epoch, report.last_cut) == (15, epoch, None)
    expected = [Batch(first, first + 2, epoch, body(first)) for first in (1, 4, 7, 10, 13)]
    assert list(journal.read(0)) == expected
    assert list(journal.read(6)) == expected[2:]
    assert list(journal.read(15)) == []
    assert journal.size().batches == 5
    assert journal.size().bytes == sum(len(batch.payload) for batch in expected)
    journal.append(16, 16, journal.claim(), body(16))
    assert journal.head() == 16
    journal.close()


def test_a_read_goes_on_while_appends_do(journal: Journal) -> None:
    epoch = journal.claim()
    append_to(journal, epoch, 1, 3)
    reading = journal.read(0)
    assert next(reading).first_seq == 1
    append_to(journal, epoch, 4, 2)
    assert seqs(reading) == [2, 3, 4, 5]


def test_a_reader_beside_the_writer_sees_what_is_durable(bench: JournalBench, journal: Journal) -> None:
    epoch = journal.claim()
    append_to(journal, epoch, 1, 3)
    reader = bench.reader()
    assert reader.head() == 3
    assert seqs(reader.read(1)) == [2, 3]
    append_to(journal, epoch, 4, 1)
    assert seqs(reader.read(3)) == [4]
    assert reader.size() == journal.size()
    reader.close()
    with pytest.raises(JournalClosed):
        reader.head()


def test_a_read_that_begins_inside_a_batch_is_a_callers_error(journal: Journal) -> None:
    append_to(journal, journal.claim(), 1, 2, width=3)
    with pytest.raises(ValueError, match="inside a batch"):
        list(journal.read(4))
    with pytest.raises(ValueError, match="seq"):
        list(journal.read(-1))


def test_a_reader_ahead_of_the_journal_is_told(journal: Journal) -> None:
    append_to(journal, journal.claim(), 1, 2)
    with pytest.raises(JournalRegressed) as caught:
        list(journal.read(5))
    assert (caught.value.known_seq, caught.value.head_seq) == (5, 2)


def test_a_reader_of_a_journal_that_nobody_made_is_told(bench: JournalBench) -> None:
    with pytest.raises(JournalMissing):
        bench.reader()


@pytest.mark.parametrize("payload", [b"", b"no frame", frame.seal(b"x")[:-1], frame.seal(b"x") + b"y"])
def test_a_payload_that_could_not_be_read_again_is_refused(journal: Journal, payload: bytes) -> None:
    epoch = journal.claim()
    with pytest.raises(ValueError, match="sealed batch"):
        journal.append(1, 1, epoch, payload)
    with pytest.raises(ValueError, match="holds nothing"):
        journal.append(1, 0, epoch, body(1))
    journal.append(1, 1, epoch, body(1))


def test_a_closed_journal_says_so(bench: JournalBench) -> None:
    journal = bench.journal()
    for _ in range(2):
        with pytest.raises(JournalClosed):
            journal.append(1, 1, 1, body(1))
        with pytest.raises(JournalClosed):
            journal.claim()
        with pytest.raises(JournalClosed):
            journal.trim(1)
        with pytest.raises(JournalClosed):
            journal.resolve(1, body(1))
        with pytest.raises(JournalClosed):
            list(journal.read(0))
        with pytest.raises(JournalClosed):
            journal.size()
        journal.open()
        journal.close()
        journal.close()


# ---------------------------------------------------------------- fence


def test_an_append_of_an_old_epoch_is_fenced_and_changes_nothing(journal: Journal) -> None:
    old = journal.claim()
    append_to(journal, old, 1, 1)
    new = journal.claim()
    with pytest.raises(Fenced) as caught:
        journal.append(2, 2, old, body(2))
    assert (caught.value.epoch, caught.value.stored_epoch, caught.value.head_seq) == (old, new, 1)
    assert seqs(journal.read(0)) == [1]
    journal.append(2, 2, new, body(2))
    assert [batch.epoch for batch in journal.read(0)] == [old, new]


@pytest.mark.parametrize("first_seq", [1, 2, 3, 5, 100])
def test_an_append_that_does_not_continue_the_head_is_fenced(journal: Journal, first_seq: int) -> None:
    epoch = journal.claim()
    append_to(journal, epoch, 1, 3)
    with pytest.raises(Fenced):
        journal.append(first_seq, first_seq + 1, epoch, body(first_seq))
    assert journal.head() == 3
    assert seqs(journal.read(0)) == [1, 2, 3]


def test_an_epoch_that_nobody_claimed_is_fenced(journal: Journal) -> None:
    with pytest.raises(Fenced):
        journal.append(1, 1, 1, body(1))
    epoch = journal.claim()
    with pytest.raises(Fenced):
        journal.append(1, 1, epoch + 1, body(1))


def test_d10_an_epoch_after_a_restart_is_larger_than_any_before(bench: JournalBench) -> None:
    seen: list[int] = []
    for _ in range(4):
        journal = bench.journal()
        assert journal.open().epoch == max(seen, default=0)
        seen += [journal.claim(), journal.claim()]
        journal.close()
    assert seen == sorted(set(seen))


def test_d10_an_epoch_is_larger_than_any_that_a_batch_or_a_snapshot_names(bench: JournalBench) -> None:
    epoch = filled(bench, 1)
    bench.set_mark("epoch", 0)
    journal = bench.journal()
    assert journal.open().epoch == epoch
    assert journal.claim() > epoch
    journal.snapshots.save(1, 70, DIGEST, [])
    journal.close()
    assert journal.open().epoch == 70
    assert journal.claim() == 71
    journal.close()


def test_shards_of_one_store_do_not_see_each_other(bench: JournalBench, journal: Journal) -> None:
    other = bench.journal(shard=1)
    other.open()
    append_to(journal, journal.claim(), 1, 3)
    epoch = [other.claim(), other.claim()][-1]
    other.append(1, 2, epoch, body(1))
    other.snapshots.save(2, epoch, DIGEST, [])
    assert (journal.head(), other.head()) == (3, 2)
    assert seqs(other.read(0)) == [1]
    assert journal.snapshots.latest() is None
    assert (journal.size().batches, other.size().batches) == (3, 1)
    other.close()


# ---------------------------------------------------------------- two openers


def test_a_second_writer_is_refused_until_the_first_closes(embedded_bench: JournalBench) -> None:
    journal, second = embedded_bench.journal(), embedded_bench.journal()
    journal.open()
    with pytest.raises(JournalLocked) as caught:
        second.open()
    assert caught.value.holder_pid is not None
    assert str(caught.value.holder_pid) in str(caught.value)
    with pytest.raises(JournalError):
        journal.open()
    append_to(journal, journal.claim(), 1, 1)
    journal.close()
    assert second.open().head_seq == 1
    with pytest.raises(JournalLocked):
        journal.open()
    second.close()


def test_a_start_that_failed_leaves_no_lock(embedded_bench: JournalBench) -> None:
    filled(embedded_bench, 3)
    embedded_bench.drop_record(2)
    journal = embedded_bench.journal()
    for _ in range(2):
        with pytest.raises(CorruptJournal):
            journal.open()
    with pytest.raises(JournalClosed):
        journal.claim()


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("broken", [1, 2, 5])
def test_a_damaged_tail_is_cut_and_reported(embedded_bench: JournalBench, how: str, broken: int) -> None:
    epoch = filled(embedded_bench, 5)
    for first_seq in range(6 - broken, 6):
        damage(embedded_bench, first_seq, how)
    journal = embedded_bench.journal()
    report = journal.open()
    whole = 5 - broken
    assert report.head_seq == whole
    assert report.last_cut is not None
    assert (report.last_cut.first_seq_cut, report.last_cut.batches_cut) == (whole + 1, broken)
    assert report.last_cut.reason
    assert seqs(journal.read(0)) == list(range(1, whole + 1))
    assert journal.size().batches == whole
    new = journal.claim()
    assert new > epoch
    append_to(journal, new, whole + 1, 2)
    journal.close()
    report = journal.open()
    assert (report.head_seq, report.last_cut) == (whole + 2, None)
    journal.close()


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_before_a_whole_batch_stops_the_start(embedded_bench: JournalBench, how: str) -> None:
    filled(embedded_bench, 5)
    damage(embedded_bench, 3, how)
    for _ in range(2):
        journal = embedded_bench.journal()
        with pytest.raises(CorruptJournal) as caught:
            journal.open()
        assert caught.value.seq == 3
        assert "shard 0" in str(caught.value)
        assert "seq 3" in str(caught.value)


def test_damage_met_while_reading_names_its_seq(bench: JournalBench, journal: Journal) -> None:
    append_to(journal, journal.claim(), 1, 5)
    damage(bench, 4, "payload")
    reading = journal.read(0)
    assert [next(reading).first_seq for _ in range(3)] == [1, 2, 3]
    with pytest.raises(CorruptJournal) as caught:
        next(reading)
    assert caught.value.seq == 4


def test_an_epoch_that_falls_is_no_history(bench: JournalBench, journal: Journal) -> None:
    append_to(journal, journal.claim(), 1, 2)
    append_to(journal, journal.claim(), 3, 1)
    first = body(1)
    bench.change_record(1, epoch=9, crc=record_crc(0, 1, 1, 9, first))
    with pytest.raises(CorruptJournal, match="fell from 9 to 1"):
        list(journal.read(0))
    journal.close()
    if bench.scans_at_open:
        with pytest.raises(CorruptJournal, match="fell from 9 to 1") as caught:
            journal.open()
        assert caught.value.seq == 2


@pytest.mark.parametrize("lost", [1, 3])
def test_a_hole_stops_the_start(embedded_bench: JournalBench, lost: int) -> None:
    filled(embedded_bench, 5)
    embedded_bench.drop_record(lost)
    with pytest.raises(CorruptJournal) as caught:
        embedded_bench.journal().open()
    assert caught.value.seq == lost


def test_batches_that_the_head_promised_and_are_not_there_are_reported(embedded_bench: JournalBench) -> None:
    filled(embedded_bench, 5)
    embedded_bench.drop_record(5)
    journal = embedded_bench.journal()
    report = journal.open()
    assert report.head_seq == 4
    assert report.last_cut is not None
    assert (report.last_cut.first_seq_cut, report.last_cut.batches_cut) == (5, 0)
    append_to(journal, journal.claim(), 5, 1)
    journal.close()


def test_a_head_behind_the_last_whole_batch_moves_up_and_is_reported(embedded_bench: JournalBench) -> None:
    filled(embedded_bench, 5)
    embedded_bench.set_mark("head_seq", 3)
    journal = embedded_bench.journal()
    report = journal.open()
    assert report.head_seq == 5
    assert report.last_cut is not None
    assert report.last_cut.batches_cut == 0
    assert seqs(journal.read(0)) == [1, 2, 3, 4, 5]
    journal.close()


def test_a_batch_of_a_newer_release_is_neither_cut_nor_read(embedded_bench: JournalBench) -> None:
    journal = embedded_bench.journal()
    journal.open()
    append_to(journal, journal.claim(), 1, 2)
    newer = frame.seal(b"from the future", frame.BODY_VERSION + 1)
    journal.append(3, 3, journal.claim(), newer)
    journal.close()
    for _ in range(2):
        with pytest.raises(UnsupportedVersion):
            journal.open()
    assert embedded_bench.payload(3) == newer


def test_a_batch_of_another_shard_does_not_pass(embedded_bench: JournalBench) -> None:
    filled(embedded_bench, 2)
    other = embedded_bench.journal(shard=1)
    other.open()
    other.append(1, 1, other.claim(), body(1))
    other.append(2, 2, 1, frame.seal(b"the other shard's"))
    other.close()
    embedded_bench.change_record(2, payload=frame.seal(b"the other shard's"))
    report = embedded_bench.journal().open()
    assert report.head_seq == 1
    assert report.last_cut is not None


# ---------------------------------------------------------------- no space, fate unknown


def test_a_full_store_refuses_and_recovers_unaided(bench: JournalBench, journal: Journal) -> None:
    epoch = journal.claim()
    append_to(journal, epoch, 1, 2)
    bench.fill(journal)
    large = frame.seal(b"x" * 50_000)
    for _ in range(3):
        with pytest.raises(JournalFull, match="free space"):
            journal.append(3, 3, epoch, large)
        assert journal.head() == 2
        assert seqs(journal.read(0)) == [1, 2]
    bench.make_room(journal)
    journal.append(3, 3, epoch, large)
    journal.close()
    assert journal.open().head_seq == 3
    assert journal.size().batches == 3


@pytest.mark.parametrize("fault", AppendFault)
def test_an_open_fate_is_settled_by_looking(
    bench: JournalBench, journal: Journal, fault: AppendFault
) -> None:
    epoch = journal.claim()
    append_to(journal, epoch, 1, 1)
    bench.leave_fate_open(journal, fault)
    with pytest.raises(FateUnknown) as caught:
        journal.append(2, 2, epoch, body(2))
    assert caught.value.first_seq == 2
    with pytest.raises(FateUnknown):  # nothing is appended over an open fate
        journal.append(2, 2, epoch, body(2))
    written = journal.resolve(2, body(2))
    assert written is (fault is AppendFault.WRITTEN)
    assert journal.resolve(2, body(2)) is written
    assert journal.head() == (2 if written else 1)
    append_to(journal, epoch, journal.head() + 1, 1)
    journal.close()
    assert journal.open().last_cut is None
    assert seqs(journal.read(0)) == list(range(1, 4 if written else 3))


def test_another_batch_at_the_same_seq_is_not_the_one_asked_for(
    bench: JournalBench, journal: Journal
) -> None:
    epoch = journal.claim()
    bench.leave_fate_open(journal, AppendFault.WRITTEN)
    with pytest.raises(FateUnknown):
        journal.append(1, 1, epoch, body(1))
    assert journal.resolve(1, body(77)) is False
    assert journal.resolve(1, body(1)) is True
    assert journal.resolve(5, body(5)) is False


def test_an_open_fate_is_also_settled_by_a_restart(bench: JournalBench, journal: Journal) -> None:
    epoch = journal.claim()
    bench.leave_fate_open(journal, AppendFault.LOST)
    with pytest.raises(FateUnknown):
        journal.append(1, 1, epoch, body(1))
    journal.close()
    assert journal.open().head_seq == 0
    journal.append(1, 1, journal.claim(), body(1))


def test_a_trimmed_batch_cannot_be_asked_for(journal: Journal) -> None:
    epoch = journal.claim()
    append_to(journal, epoch, 1, 4)
    for seq in (2, 4):
        journal.snapshots.save(seq, epoch, DIGEST, [])
    assert journal.trim(4) == 2
    with pytest.raises(FateUnknown, match="trimmed"):
        journal.resolve(1, body(1))
