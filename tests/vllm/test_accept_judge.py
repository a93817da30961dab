"""The acceptance's own judgement: what is wrong on purpose is found."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from engine_adapters.vllm.audit import PageEntry
from tests.accept import audit, ledger
from tests.accept.documents import Ideal, Request
from tests.accept.fleet import Row
from tests.accept.ledger import Figures
from tests.accept.messages import BLOCK_SIZE_TOKENS, Answer, Counts

pytestmark = pytest.mark.vllm


def entry(what: Any, at_ns: int, **changes: Any) -> PageEntry:
    clean = PageEntry(what, "aa", "tp0", 7, "one", "i1", "r", at_ns, 5, 1)
    return msgspec.structs.replace(clean, **changes)


CLEAN = [
    entry("copied", 1, location=0, generation=0),
    entry("written", 2),
    entry("published", 3),
    entry("loaded", 4, engine="two", incarnation="i2"),
]


def test_a_page_that_was_copied_written_and_finished_is_clean() -> None:
    assert audit.judge(CLEAN) == audit.Found(1, [])


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda log: [*log[:3], msgspec.structs.replace(log[3], checksum=8)], "nobody copied"),
        (lambda log: [*log[:3], msgspec.structs.replace(log[3], key="bb")], "nobody copied"),
        (lambda log: [*log[:3], msgspec.structs.replace(log[3], part="tp1")], "nobody copied"),
        (lambda log: [*log[:3], msgspec.structs.replace(log[3], time_ns=0)], "later only"),
        (lambda log: [*log[:3], msgspec.structs.replace(log[3], generation=2)], "nobody wrote"),
        (lambda log: [log[0], msgspec.structs.replace(log[1], checksum=8), *log[2:]], "other bytes"),
        (lambda log: [*log[:2], log[3]], "never finished"),
    ],
)
def test_a_dirty_page_is_found(spoil: Callable[[list[PageEntry]], list[PageEntry]], why: str) -> None:
    found = audit.judge(spoil(CLEAN))
    assert found.pages == 1
    assert len(found.dirty) == 1
    assert why in found.dirty[0]


def test_a_killed_engine_may_not_have_noted_that_its_write_was_finished() -> None:
    log = [*CLEAN[:2], CLEAN[3]]
    assert audit.judge(log, {"i1"}).dirty == []
    assert audit.judge(log, {"i2"}).dirty != []


GOOD = Figures(
    requests=200,
    wrong_outputs=0,
    hit_rate_steady=0.9,
    hit_rate_after_engine_kill=0.9,
    hit_rate_after_leader_kill=0.8,
    hit_rate_drop_max=0.1,
    dirty_reads=0,
    engine_errors=0,
    oracle_sensitive=True,
    added_step_p99_ms=0.3,
    ttft_cold_p50_ms=100.0,
    ttft_hit_p50_ms=30.0,
    lookups_per_request=1.0,
    leases_left=0,
)


def test_good_figures_pass() -> None:
    assert all(passed for passed, _ in ledger.verdicts(GOOD))


@pytest.mark.parametrize(
    "bad",
    [
        {"requests": 149},
        {"wrong_outputs": 1},
        {"hit_rate_steady": 0.1},
        {"hit_rate_drop_max": 0.15},
        {"dirty_reads": 1},
        {"engine_errors": 1},
        {"oracle_sensitive": False},
        {"added_step_p99_ms": 1.0},
        {"ttft_hit_p50_ms": 100.0},
        {"ttft_hit_p50_ms": 0.0},
        {"lookups_per_request": 2.1},
        {"leases_left": 1},
    ],
    ids=str,
)
def test_each_bad_figure_fails(bad: dict[str, Any]) -> None:
    failed = [what for passed, what in ledger.verdicts(msgspec.structs.replace(GOOD, **bad)) if not passed]
    assert len(failed) == 1


def row(tokens: list[int], possible: int, local: int, loaded: int) -> Row:
    answer = Answer("q", tokens, "length", Counts())
    return Row("steady", Request("q", 0, []), "one", answer, possible, local, loaded, 0.0)


def test_the_hit_rate_is_of_what_was_possible_beyond_the_engines_own_cache() -> None:
    rows = [row([], 10, 4, 6), row([], 10, 0, 0), row([], 0, 0, 0)]
    assert ledger.hit_rate(rows) == 6 / 16
    assert ledger.hit_rate([row([], 0, 0, 0)]) == 0.0, "nothing that could be hit shows nothing"


def test_other_tokens_are_wrong() -> None:
    rows = [row([1, 2], 0, 0, 0), row([1, 3], 0, 0, 0), row([1], 0, 0, 0)]
    assert ledger.wrong(rows, {"q": [1, 2]}) == rows[1:]


def test_an_ideal_cache_has_whole_blocks_of_earlier_prompts() -> None:
    ideal = Ideal()
    first = list(range(3 * BLOCK_SIZE_TOKENS))
    assert ideal.possible_blocks(first) == 0
    assert ideal.possible_blocks(first) == 2, "the last token is computed in any case"
    assert ideal.possible_blocks([*first, 1]) == 3
    assert ideal.possible_blocks([*first[:BLOCK_SIZE_TOKENS], *first]) == 1
    assert ideal.possible_blocks(first[1:]) == 0
