"""What snapshots and the journal behind them promise together, the same tests over every store."""

from collections.abc import Iterator

import pytest

from metaservice.journal.errors import CorruptJournal, CorruptSnapshot, JournalTrimmed
from metaservice.journal.port import Journal, JournalReader
from tests.contract.journal_benches import DIGEST, JournalBench, append_to, damage, filled, seqs


def test_d6_a_snapshot_of_an_empty_state_works(bench: JournalBench, journal: Journal) -> None:
    assert journal.snapshots.latest() is None
    info = journal.snapshots.save(0, 0, b"", [])
    assert journal.snapshots.latest() == info
    assert (info.seq, info.chunks, info.size_bytes) == (0, 0, 0)
    assert list(journal.snapshots.load(info)) == []
    assert journal.trim(0) == 0
    journal.close()
    assert journal.open().head_seq == 0


def test_a_snapshot_and_the_tail_behind_it_are_all_that_a_restart_needs(bench: JournalBench) -> None:
    journal = bench.journal()
    journal.open()
    epoch = journal.claim()
    append_to(journal, epoch, 1, 4)
    journal.snapshots.save(4, epoch, DIGEST, [b"state of ", b"", b"4"])
    append_to(journal, epoch, 5, 4)
    info = journal.snapshots.save(8, epoch, DIGEST, iter([b"state of ", b"8"]))
    append_to(journal, epoch, 9, 3)
    assert journal.trim(8) == 4
    journal.close()
    report = journal.open()
    assert (report.head_seq, report.last_cut, report.snapshot_faults) == (11, None, ())
    latest = journal.snapshots.latest()
    assert latest == info
    assert latest is not None
    assert (latest.epoch, latest.digest, latest.size_bytes) == (epoch, DIGEST, 10)
    assert b"".join(journal.snapshots.load(latest)) == b"state of 8"
    assert seqs(journal.read(latest.seq)) == [9, 10, 11]
    assert journal.size().batches == 7
    append_to(journal, epoch, 12, 1)
    journal.close()


def test_trim_never_passes_what_two_snapshots_cover(journal: Journal) -> None:
    epoch = journal.claim()
    append_to(journal, epoch, 1, 10)
    assert journal.trim(10) == 0
    journal.snapshots.save(4, epoch, DIGEST, [b"4"])
    assert journal.trim(10) == 0  # with one snapshot, only the journal could replace it
    journal.snapshots.save(8, epoch, DIGEST, [b"8"])
    assert journal.trim(2) == 2
    assert journal.trim(10) == 4
    assert journal.trim(1) == 4
    assert seqs(journal.read(4)) == [5, 6, 7, 8, 9, 10]
    assert journal.size().batches == 6


def test_trim_keeps_a_batch_that_is_only_partly_covered(journal: Journal) -> None:
    epoch = journal.claim()
    append_to(journal, epoch, 1, 3, width=4)
    journal.snapshots.save(8, epoch, DIGEST, [])
    journal.snapshots.save(12, epoch, DIGEST, [])
    assert journal.trim(7) == 4
    assert journal.trim(12) == 8
    assert seqs(journal.read(8)) == [9]


def test_a_fully_trimmed_journal_goes_on(bench: JournalBench, journal: Journal) -> None:
    epoch = journal.claim()
    append_to(journal, epoch, 1, 4)
    journal.snapshots.save(4, epoch, DIGEST, [b"a"])
    append_to(journal, epoch, 5, 1)
    journal.snapshots.save(5, epoch, DIGEST, [b"b"])
    assert journal.trim(5) == 4
    journal.close()
    assert journal.open().head_seq == 5
    append_to(journal, epoch, 6, 1)
    assert seqs(journal.read(4)) == [5, 6]


def test_d5_a_reader_behind_the_trim_point_is_sent_to_the_snapshot(
    bench: JournalBench, journal: Journal
) -> None:
    epoch = journal.claim()
    append_to(journal, epoch, 1, 6)
    reader: JournalReader = bench.reader()
    started = reader.read(0)
    assert next(started).first_seq == 1
    for seq in (4, 6):
        journal.snapshots.save(seq, epoch, DIGEST, [b"%d" % seq])
    journal.trim(6)
    if bench.reads_ahead:
        assert seqs(started) == [2, 3, 4, 5, 6]
    else:
        with pytest.raises(JournalTrimmed):
            list(started)
    with pytest.raises(JournalTrimmed) as caught:
        list(reader.read(0))
    assert caught.value.trimmed_seq == 4
    info = reader.snapshots.latest()
    assert info is not None
    assert b"".join(reader.snapshots.load(info)) == b"6"
    assert seqs(reader.read(info.seq)) == []
    reader.close()


def test_d5_storage_stays_bounded_over_many_rounds(journal: Journal) -> None:
    epoch = journal.claim()
    for round_ in range(20):
        append_to(journal, epoch, round_ * 10 + 1, 10)
        journal.snapshots.save(round_ * 10 + 10, epoch, DIGEST, [b"x"])
        journal.trim(journal.head())
        assert journal.size().batches <= 20
        assert len(journal.snapshots.list()) <= 2
    assert [info.seq for info in journal.snapshots.list()] == [200, 190]


def test_a_damaged_newest_snapshot_is_passed_over_reported_and_still_recovered_from(
    bench: JournalBench, journal: Journal
) -> None:
    epoch = journal.claim()
    append_to(journal, epoch, 1, 9)
    for seq in (4, 8):
        journal.snapshots.save(seq, epoch, DIGEST, [b"state", b"%d" % seq])
    journal.trim(9)
    journal.close()
    bench.damage_snapshot(8)
    report = journal.open()
    latest = journal.snapshots.latest()
    assert latest is not None
    assert latest.seq == 4
    assert len(journal.snapshots.faults) == 1
    assert "checksum" in journal.snapshots.faults[0].reason
    assert report.snapshot_faults == (journal.snapshots.faults if bench.scans_at_open else ())
    assert b"".join(journal.snapshots.load(latest)) == b"state4"
    assert seqs(journal.read(4)) == [5, 6, 7, 8, 9]
    assert journal.trim(9) == 4  # the damaged one covers nothing
    journal.snapshots.save(9, epoch, DIGEST, [b"state9"])
    assert [info.seq for info in journal.snapshots.list()] == [9, 4]


def test_damage_met_while_loading_is_named(bench: JournalBench, journal: Journal) -> None:
    info = journal.snapshots.save(0, 1, DIGEST, [b"first", b"second"])
    bench.damage_snapshot(0)
    loading = journal.snapshots.load(info)
    with pytest.raises(CorruptSnapshot, match="chunk 1"):
        list(loading)


def test_a_snapshot_that_is_gone_is_named(bench: JournalBench, journal: Journal) -> None:
    info = journal.snapshots.save(0, 1, DIGEST, [b"first"])
    bench.lose_snapshot(0)
    with pytest.raises(CorruptSnapshot, match="latest"):
        list(journal.snapshots.load(info))
    assert journal.snapshots.latest() is None


def test_a_save_that_its_source_breaks_off_leaves_the_old_one(journal: Journal) -> None:
    epoch = journal.claim()
    append_to(journal, epoch, 1, 2)
    old = journal.snapshots.save(1, epoch, DIGEST, [b"old"])

    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise OSError(28, "the source's own error")

    with pytest.raises(OSError, match="the source's own error"):
        journal.snapshots.save(2, epoch, DIGEST, chunks())
    assert journal.snapshots.list() == (old,)
    journal.snapshots.save(2, epoch, DIGEST, [b"new"])
    assert [info.seq for info in journal.snapshots.list()] == [2, 1]


def test_a_snapshot_saved_again_replaces_itself(journal: Journal) -> None:
    first = journal.snapshots.save(0, 1, DIGEST, [b"one"])
    second = journal.snapshots.save(0, 2, DIGEST, [b"other"])
    assert journal.snapshots.list() == (second,)
    assert b"".join(journal.snapshots.load(second)) == b"other"
    with pytest.raises(CorruptSnapshot):
        list(journal.snapshots.load(first))


@pytest.mark.parametrize(("seq", "epoch", "digest"), [(-1, 0, b""), (0, -1, b""), (0, 0, b"x" * 65)])
def test_a_snapshot_that_could_not_be_read_again_is_refused(
    journal: Journal, seq: int, epoch: int, digest: bytes
) -> None:
    with pytest.raises(ValueError, match=r"a (snapshot|digest) has"):
        journal.snapshots.save(seq, epoch, digest, [])
    assert journal.snapshots.latest() is None


def test_a_journal_older_than_its_snapshots_stops_the_start(bench: JournalBench) -> None:
    epoch = filled(bench, 3)
    bench.journal().snapshots.save(9, epoch, DIGEST, [b"state"])
    with pytest.raises(CorruptJournal, match="older copy") as caught:
        bench.journal().open()
    assert caught.value.seq == 4


def test_a_trimmed_journal_without_its_snapshot_stops_the_start(embedded_bench: JournalBench) -> None:
    journal = embedded_bench.journal()
    journal.open()
    epoch = journal.claim()
    append_to(journal, epoch, 1, 6)
    for seq in (2, 4):
        journal.snapshots.save(seq, epoch, DIGEST, [b"state"])
    assert journal.trim(6) == 2
    journal.close()
    embedded_bench.damage_snapshot(2)
    embedded_bench.damage_snapshot(4)
    with pytest.raises(CorruptJournal, match="no whole snapshot"):
        journal.open()


def test_a_tail_cut_below_the_snapshot_goes_on_from_the_snapshot(embedded_bench: JournalBench) -> None:
    epoch = filled(embedded_bench, 6)
    embedded_bench.journal().snapshots.save(5, epoch, DIGEST, [b"state"])
    for first_seq in (4, 5, 6):
        damage(embedded_bench, first_seq, "payload")
    journal = embedded_bench.journal()
    report = journal.open()
    assert report.head_seq == 5
    assert report.last_cut is not None
    assert (report.last_cut.first_seq_cut, report.last_cut.batches_cut) == (6, 3)
    assert "snapshot of seq 5" in report.last_cut.reason
    assert list(journal.read(5)) == []
    with pytest.raises(JournalTrimmed):
        list(journal.read(0))
    append_to(journal, journal.claim(), 6, 1)
    journal.close()
    assert journal.open().head_seq == 6
    assert seqs(journal.read(5)) == [6]
    journal.close()
