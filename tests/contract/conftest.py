"""Fixtures of the contract suites: one store a parameter."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from metaservice.journal.port import Journal
from tests.contract.journal_benches import JournalBench, MemoryBench, SqliteBench


@pytest.fixture(params=["memory", "sqlite"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> JournalBench:
    """Every store that keeps the journal contract."""
    return MemoryBench() if request.param == "memory" else SqliteBench(tmp_path)


@pytest.fixture
def journal(bench: JournalBench) -> Iterator[Journal]:
    """An open, empty journal."""
    journal = bench.journal()
    journal.open()
    yield journal
    journal.close()
