"""Case I2: behind a transaction-pooling PgBouncer, where a session's state is gone with its transaction. The
contract suite runs over it too (`-m slow`)."""

import threading
from dataclasses import replace

import pytest

from metaservice.journal.errors import JournalFailed
from metaservice.journal.postgres import PostgresJournal
from metaservice.journal.postgres_migrate import check_cluster, durability_warning, migrate
from tests.contract.journal_benches import DIGEST, append_to, seqs
from tests.contract.postgres_bench import PostgresBench


def test_i2_several_journals_work_through_a_transaction_pooler(pooler_bench: PostgresBench) -> None:
    migrate(pooler_bench.settings)
    assert check_cluster(pooler_bench.settings, 4) == check_cluster(pooler_bench.settings, 4)
    assert "synchronous" in durability_warning(pooler_bench.settings)
    errors: list[BaseException] = []

    def work(shard: int) -> None:
        try:
            journal = pooler_bench.journal(shard)
            journal.open()
            epoch = journal.claim()
            for step in range(10):
                append_to(journal, epoch, step * 5 + 1, 5)
                journal.snapshots.save(step * 5 + 5, epoch, DIGEST, [b"state"])
                journal.report_follower("r2", step * 5)
            assert seqs(pooler_bench.reader(shard).read(0)) == [*range(1, 51)]
            assert journal.trim(50) == 45
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(shard,)) for shard in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_i2_without_the_setting_the_start_fails_and_names_it(pooler_bench: PostgresBench) -> None:
    settings = replace(pooler_bench.settings, pooler=False)
    with pytest.raises(JournalFailed, match="PgBouncer, say so in the settings"):
        PostgresJournal(settings, 0, "bench").open()
    with pytest.raises(JournalFailed, match="PgBouncer, say so in the settings"):
        migrate(settings)
