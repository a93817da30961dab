"""Reading traces: what is right becomes requests, what is wrong is named by line and field."""

import gzip
import json
from pathlib import Path

import pytest

from engine_adapters.replay.ideal import IdealCache
from engine_adapters.replay.trace import Trace, TraceError


def row(*ids: int, **changes: object) -> dict[str, object]:
    return {
        "timestamp": 0,
        "input_length": 512 * len(ids),
        "output_length": 5,
        "block_size": 512,
        "session_id": "",
        "hash_ids": list(ids),
    } | changes


def trace_of(folder: Path, *lines: object) -> Path:
    """A trace file of these rows; text goes in as it is."""
    path = folder / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def error_of(path: Path) -> TraceError:
    with pytest.raises(TraceError) as caught:
        list(Trace(path))
    return caught.value


def test_equal_ids_are_equal_keys_plain_and_gzip(tmp_path: Path) -> None:
    plain = trace_of(tmp_path, row(0, 1, 2), row(0, 1, 5), row(7))
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    requests = list(Trace(plain))
    assert list(Trace(packed)) == requests
    assert [request.index for request in requests] == [0, 1, 2]
    one, two, three = (request.keys for request in requests)
    assert one[:2] == two[:2]
    assert len({*one, *two, *three}) == 5
    assert {len(key) for key in one} == {32}
    assert requests[1].contents(512) == (0, 1, 5)


def test_it_can_be_read_again_and_cut(tmp_path: Path) -> None:
    trace = Trace(trace_of(tmp_path, row(1, 2), row(1, 3), row(4)), limit=2)
    assert len(list(trace)) == 2
    assert list(trace) == list(trace)


def test_an_id_under_another_parent_is_another_block(tmp_path: Path) -> None:
    """Otherwise one key would have two parents, which no prefix cache can hold: the service refuses it."""
    trace = Trace(trace_of(tmp_path, row(1, 2, 3), row(9, 2, 3), row(9, 2, 3, 4), row(1, 2, 3)))
    one, two, three, four = (request.keys for request in trace)
    assert trace.rechained == 4
    assert one == four
    assert two == three[:3]
    assert not set(one) & set(two)
    cache = IdealCache()
    assert [cache.serve(request.contents(512)) for request in trace] == [0, 0, 3, 3]


def test_mooncake_rows_without_our_additions_are_read(tmp_path: Path) -> None:
    bare = {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47], "extra": [1]}
    trace = Trace(trace_of(tmp_path, bare, "", bare))
    assert trace.block_size_tokens == 512
    assert len(list(trace)) == 2


def test_sessions_are_kept(tmp_path: Path) -> None:
    trace = Trace(trace_of(tmp_path, row(1, session_id="a"), row(2, session_id=17)))
    assert [request.session for request in trace] == ["a", "17"]


def test_block_size_zero_means_blocks_of_varying_size(tmp_path: Path) -> None:
    assert Trace(trace_of(tmp_path, row(1, block_size=0))).block_size_tokens == 512


@pytest.mark.parametrize(
    ("bad", "field", "says"),
    [
        (row(1, input_length="many"), "input_length", "Expected `int`"),
        (row(1, input_length=-1), "input_length", ">= 0"),
        (row(1, timestamp=-5), "timestamp", ">= 0"),
        (row(1, timestamp=None), "timestamp", "Expected"),
        (row(1, hash_ids=[1, -2]), "hash_ids[1]", ">= 0"),
        (row(1, hash_ids=[1, 2**70]), "hash_ids[1]", ""),
        (row(1, hash_ids="1 2"), "hash_ids", "Expected `array`"),
        (row(1, block_size=64), "block_size", "one instance has one block size"),
        (row(1, 2, 1), "hash_ids", "names a block twice"),
        ({"timestamp": 0, "input_length": 5}, "hash_ids", "missing"),
        ("[1, 2]", "", "Expected `object`"),
        ('{"timestamp": 0,', "", "not one JSON object"),
        ("\x00\x01", "", "not one JSON object"),
        ("[" * 100_000, "", ""),
    ],
)
def test_bad_rows_are_named_by_line_and_field(tmp_path: Path, bad: object, field: str, says: str) -> None:
    path = trace_of(tmp_path, row(1), "", bad)
    error = error_of(path)
    assert (error.path, error.line, error.field) == (path, 3, field)
    assert says in error.reason
    assert str(error).startswith(f"{path}:3: ")


def test_a_bad_first_row_is_found_at_once(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r":1: input_length: "):
        Trace(trace_of(tmp_path, row(1, input_length=None)))


def test_invalid_utf8_is_an_error_and_not_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"timestamp": 0, "input_length": 5, "hash_ids": [], "session_id": "\xff\xfe"}\n')
    assert error_of(path).line == 1


def test_a_damaged_archive_names_the_line_it_broke_in(tmp_path: Path) -> None:
    content = gzip.compress(b"".join(json.dumps(row(i, 10_000 + i)).encode() + b"\n" for i in range(2_000)))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(content[: len(content) // 2])
    error = error_of(cut)
    assert error.line > 100
    assert "damaged" in error.reason
    flipped = tmp_path / "flipped.jsonl.gz"
    flipped.write_bytes(content[:200] + bytes([content[200] ^ 0xFF]) + content[201:])
    assert error_of(flipped).line >= 1


def test_an_absent_or_empty_file_or_a_folder_is_an_error(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "absent", "cannot be read"), (tmp_path, "cannot be read")):
        assert says in error_of(path).reason
    assert "no request" in error_of(trace_of(tmp_path, "", "")).reason


@pytest.mark.parametrize(
    ("name", "asked", "hits"),
    [
        ("mooncake_conversation", 288_500, 105_710),
        ("lmcache_agent_text64", 61_828, 55_585),
        ("ragpulse_component_prefix", 71_583, 12_856),
    ],
)
def test_recorded_traces_have_the_ideal_that_others_computed(
    traces_dir: Path, name: str, asked: int, hits: int
) -> None:
    """36.6%, 89.9% and 18.0%: the ceilings that two other simulators found for these traces."""
    path = traces_dir / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"no {path}")
    trace, cache = Trace(path), IdealCache()
    for request in trace:
        assert len(set(request.keys)) == len(request.ids)
        cache.serve(request.contents(trace.block_size_tokens))
    assert (cache.asked, cache.hits, trace.rechained) == (asked, hits, 0)
