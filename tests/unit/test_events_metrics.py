"""Metrics of cache events: what the publisher said, as Prometheus reads it, and never more than a bound."""

import re
from pathlib import Path

from metaservice.telemetry.events import HELP, parsed
from metaservice.telemetry.metrics import Metrics

ROOT = Path(__file__).resolve().parent.parent.parent


def exposed(stats: dict[str, float]) -> str:
    metrics = Metrics(lambda: 0.0)
    metrics.watch_events(lambda: stats)
    return metrics.expose("")[1].decode()


def test_counters_and_gauges_with_their_labels() -> None:
    text = exposed({
        "batches_total": 7.0,
        'subscribers{stream="3"}': 2.0,
        'attachment_reached{attachment="llm-d tcp://e:1",endpoint="tcp://e:1"}': 1.0,
    })  # fmt: skip
    assert "ucm_meta_events_batches_total 7.0" in text
    assert "# TYPE ucm_meta_events_batches_total counter" in text
    assert 'ucm_meta_events_subscribers{stream="3"} 2.0' in text
    assert 'attachment_reached{attachment="llm-d tcp://e:1",endpoint="tcp://e:1"} 1.0' in text
    assert "ucm_meta_telemetry_failures_total 0.0" in text


def test_a_label_may_have_anything_in_it() -> None:
    assert parsed(r'a{b="x\"}{",c="\\"}') == ("a", (("b", 'x"}{'), ("c", "\\")))
    assert parsed("A b") == ("", ())


def test_what_no_publisher_says_hides_nothing_else() -> None:
    text = exposed({"batches_total": 1.0, "not a name": 2.0, 'subscribers{odd="1"}': 3.0, "subscribers": 4.0})
    assert "ucm_meta_events_batches_total 1.0" in text
    assert 'subscribers{odd="1"} 3.0' in text
    assert "ucm_meta_telemetry_failures_total 0.0" in text


def test_streams_beyond_a_bound_are_summed_up() -> None:
    text = exposed({f'subscribers{{stream="{number}"}}': float(number) for number in range(300)})
    rows = re.findall(r'^ucm_meta_events_subscribers\{stream="(\w+)"\} (\S+)$', text, re.MULTILINE)
    assert len(rows) == 201
    assert ("_other", str(float(sum(range(100))))) in rows


def test_row_23_every_alarm_of_the_documentation_is_on_a_metric_that_there_is() -> None:
    """Among them the one that no request ever shows: an engine said where it publishes, and nothing comes."""
    text = (ROOT / "docs" / "operations.md").read_text()
    table = text[text.index("all of these begin with") : text.index("Two alarms are worth more")]
    names = {
        name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in row.split("`")[1::2]
    }
    assert names <= HELP.keys()
    assert "ingest_silent" in names


def test_nothing_is_said_when_events_are_off() -> None:
    assert "ucm_meta_events" not in exposed({})
