"""The figures of the demo, and what it says of them."""

import io
import json

import msgspec

from engine_adapters.replay.ledger import (
    ClusterFigures,
    Ledger,
    ServiceFigures,
    cluster_verdicts,
    verdicts,
)
from engine_adapters.replay.messages import Done
from engine_adapters.replay.report import (
    MEANINGS,
    EventTeller,
    Note,
    Progress,
    Result,
    Table,
    TextTeller,
    Verdict,
    engines_table,
    figures_table,
    table_text,
)

KEYS = [
    "requests", "blocks_asked", "blocks_hit", "hit_rate", "ideal_hit_rate", "dirty_reads",
    "hit_rate_before_kill", "hit_rate_after_kill", "hit_rate_drop", "orphans_left", "seconds",
]  # fmt: skip

CLUSTER_KEYS = [
    "requests", "blocks_asked", "blocks_hit", "hit_rate", "ideal_hit_rate", "dirty_reads",
    "hit_rate_drop_engine", "hit_rate_drop_leader", "hit_rate_drop", "unavailable_ms", "orphans", "seconds",
]  # fmt: skip


def ledger_of(*rows: tuple[str, int, int, int], killed_after: int | None = None) -> Ledger:
    """Rows of (engine, asked, hits, ideal hits)."""
    ledger = Ledger()
    for index, (engine, asked, hits, ideal) in enumerate(rows):
        ledger.add(engine, ideal, Done(index=index, asked=asked, hits=hits, written=asked - hits))
    ledger.engine_killed_at = killed_after
    return ledger


def good(**changes: object) -> ServiceFigures:
    figures = ServiceFigures(
        requests=10, blocks_asked=100, blocks_hit=80, hit_rate=0.80, ideal_hit_rate=0.81, dirty_reads=0,
        hit_rate_before_kill=0.99, hit_rate_after_kill=0.97, hit_rate_drop=0.02, orphans_left=0, seconds=1.0,
    )  # fmt: skip
    return msgspec.structs.replace(figures, **changes)


def failed(figures: ServiceFigures, **changes: object) -> list[str]:
    """The texts of the verdicts that did not pass."""
    facts = {"requests": 10, "engine_killed": True, "service_killed": True, "absent_files": 0} | changes
    return [text for passed, text in verdicts(figures, **facts) if not passed]  # type: ignore[arg-type]


def test_figures_have_exactly_the_promised_keys_in_order() -> None:
    figures = ledger_of(("e", 4, 2, 2)).figures(0.5, 0, 1.23)
    assert list(json.loads(msgspec.json.encode(figures))) == KEYS
    assert set(MEANINGS) == {*KEYS, *CLUSTER_KEYS}
    assert [row[0] for row in figures_table(figures).rows] == KEYS
    assert figures.seconds == 1.2


def test_hit_rate_is_of_all_blocks() -> None:
    figures = ledger_of(("a", 10, 0, 0), ("b", 30, 20, 20), ("a", 60, 55, 60)).figures(0.8, 3, 2.0)
    assert (figures.requests, figures.blocks_asked, figures.blocks_hit) == (3, 100, 75)
    assert figures.hit_rate == 0.75
    assert figures.orphans_left == 3


def test_the_drop_is_measured_against_what_was_possible_in_each_phase() -> None:
    """The plain hit rate rises from 10% to 45%, and half of what was possible is lost after the kill."""
    rows = [("a", 100, 10, 10), ("b", 100, 10, 10), ("a", 100, 45, 90), ("b", 100, 45, 90)]
    figures = ledger_of(*rows, killed_after=2).figures(0.5, 0, 1.0)
    assert (figures.hit_rate_before_kill, figures.hit_rate_after_kill, figures.hit_rate_drop) == (
        1.0,
        0.5,
        0.5,
    )


def test_where_nothing_was_possible_nothing_was_missed() -> None:
    figures = ledger_of(("a", 100, 0, 0), ("b", 100, 0, 0), killed_after=1).figures(0.0, 0, 1.0)
    assert (figures.hit_rate_before_kill, figures.hit_rate_after_kill, figures.hit_rate_drop) == (
        1.0,
        1.0,
        0.0,
    )
    assert Ledger().figures(0.0, 0, 0.0).hit_rate == 0.0


def test_more_than_possible_counts_as_all_that_was_possible() -> None:
    """Engines overlap: a request may find what one handed out after it had already written."""
    figures = ledger_of(("a", 100, 52, 50), ("b", 100, 40, 50), killed_after=1).figures(0.5, 0, 1.0)
    assert (figures.hit_rate_before_kill, figures.hit_rate_after_kill) == (1.0, 0.8)
    assert figures.hit_rate_drop == 0.2


def test_without_a_kill_all_is_before_it() -> None:
    figures = ledger_of(("a", 10, 4, 8)).figures(0.8, 0, 1.0)
    assert (figures.hit_rate_before_kill, figures.hit_rate_after_kill) == (0.5, 1.0)


def test_good_figures_pass() -> None:
    assert failed(good()) == []


def test_each_bound_can_fail() -> None:
    assert failed(good(dirty_reads=1)) == ["1 dirty reads (0 allowed)"]
    assert failed(good(orphans_left=2)) == ["2 orphans left (0 allowed)"]
    assert len(failed(good(hit_rate=0.789))) == 1
    assert len(failed(good(hit_rate=0.831))) == 1, "better than ideal is a mistake too"
    assert failed(good(hit_rate=0.7901)) == []
    assert len(failed(good(hit_rate_drop=0.15))) == 1
    assert failed(good(hit_rate_drop=-0.3)) == []
    assert len(failed(good(requests=9))) == 1
    assert len(failed(good(), engine_killed=False)) == 1
    assert len(failed(good(), service_killed=False)) == 1
    assert len(failed(good(), absent_files=1)) == 1


def test_each_kill_in_a_cluster_is_measured_up_to_the_next() -> None:
    """All that was possible before the first kill, half of it between them, a quarter after the second."""
    rows = [("a", 100, 80, 80), ("b", 100, 40, 80), ("a", 100, 40, 80), ("b", 100, 20, 80)]
    ledger = ledger_of(*rows, killed_after=1)
    ledger.service_killed_at = 3
    figures = ledger.cluster_figures(0.8, 2, 3.25, 4_321)
    assert list(json.loads(msgspec.json.encode(figures))) == CLUSTER_KEYS
    assert figures.hit_rate_drop_engine == 0.5
    assert figures.hit_rate_drop_leader == round(160 / 240 - 0.25, 4)
    assert figures.hit_rate_drop == 0.5
    assert (figures.unavailable_ms, figures.orphans) == (4_321, 2)
    meanings = {name: meaning for name, _, meaning in figures_table(figures).rows}
    assert list(meanings) == CLUSTER_KEYS
    assert meanings["hit_rate_drop"] == "the larger of these two"


def test_a_cluster_of_which_no_replica_was_killed_fell_by_nothing_after_it() -> None:
    figures = ledger_of(("a", 10, 8, 8), ("b", 10, 4, 8), killed_after=1).cluster_figures(0.8, 0, 1.0, 0)
    assert (figures.hit_rate_drop_engine, figures.hit_rate_drop_leader) == (0.5, 0.0)


def test_each_bound_in_a_cluster_can_fail() -> None:
    def failed_of(leader_killed: bool | None = True, **changes: object) -> list[str]:
        figures = ClusterFigures(
            requests=10, blocks_asked=100, blocks_hit=80, hit_rate=0.8, ideal_hit_rate=0.8, dirty_reads=0,
            hit_rate_drop_engine=0.0, hit_rate_drop_leader=0.1, hit_rate_drop=0.1, unavailable_ms=5_000,
            orphans=0, seconds=1.0,
        )  # fmt: skip
        changed = msgspec.structs.replace(figures, **changes)
        shown = cluster_verdicts(
            changed, requests=10, engine_killed=True, leader_killed=leader_killed, absent_files=0
        )
        return [text for passed, text in shown if not passed]

    assert failed_of() == failed_of(None) == []
    assert len(failed_of(False)) == 1
    assert len(failed_of(dirty_reads=1)) == 1
    assert len(failed_of(orphans=1)) == 1
    assert len(failed_of(hit_rate_drop_engine=0.15)) == 1
    assert len(failed_of(hit_rate_drop_leader=0.15)) == 1
    assert len(failed_of(requests=9)) == 1


def test_engines_table_adds_up() -> None:
    table = engines_table(ledger_of(("a", 1000, 500, 600), ("b", 3000, 2500, 2400)), ["a", "b"])
    assert [row[:6] for row in table.rows] == [
        ["a", "1", "1,000", "500", "50.0%", "83.3%"],
        ["b", "1", "3,000", "2,500", "83.3%", "104.2%"],
        ["all", "2", "4,000", "3,000", "75.0%", "100.0%"],
    ]


def test_tables_are_aligned_text() -> None:
    table = Table("T", ["name", "n"], ["left", "right"], [["x", "1"], ["longer", "12,345"]])
    assert table_text(table).splitlines() == [
        "T",
        "name         n",
        "------  ------",
        "x            1",
        "longer  12,345",
    ]


def told(*what: object) -> tuple[str, str, list[dict[str, object]]]:
    """The text, the errors and the JSON lines of the same things told."""
    text, errors, events = io.StringIO(), io.StringIO(), io.StringIO()
    for one in what:
        TextTeller(text, errors).tell(one)  # type: ignore[arg-type]
        EventTeller(events).tell(one)  # type: ignore[arg-type]
    return text.getvalue(), errors.getvalue(), [json.loads(line) for line in events.getvalue().splitlines()]


def test_text_and_events_end_with_the_figures() -> None:
    figures = good()
    text, errors, events = told(
        Note("began"),
        Progress(1, 2, 3, 4),
        figures_table(figures),
        Verdict(False, "a thing"),
        Result(figures),
    )
    assert list(json.loads(text.splitlines()[-1])) == KEYS
    assert "FAILED  a thing" in text
    assert "began" in text
    assert errors == ""
    assert [event["type"] for event in events] == ["note", "progress", "table", "verdict", "result"]
    assert list(events[-1]["figures"]) == KEYS  # type: ignore[call-overload]
