"""The coding-agent workload: the same in any process, and shaped as it says."""

from itertools import pairwise
from pathlib import Path

import pytest

from engine_adapters.replay.hashing import TOKEN_BYTES
from engine_adapters.replay.ideal import IdealCache
from engine_adapters.replay.requests import Request
from engine_adapters.replay.sources import Library, SourcesError, Tokeniser
from engine_adapters.replay.workload import SESSION_GAP, Workload

BLOCK_SIZE_TOKENS = 128


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return list(Workload(requests=150, seed=1))


def test_is_deterministic_by_seed(requests: list[Request]) -> None:
    assert list(Workload(requests=150, seed=1)) == requests
    other = list(Workload(requests=150, seed=2))
    assert [r.tokens for r in other] != [r.tokens for r in requests]


def test_a_shorter_run_is_the_beginning_of_a_longer_one(requests: list[Request]) -> None:
    assert list(Workload(requests=40, seed=1)) == requests[:40]


def test_requests_are_numbered_and_whole(requests: list[Request]) -> None:
    assert [request.index for request in requests] == list(range(150))
    for request in requests:
        assert len(request.tokens) == request.tokens_count * TOKEN_BYTES
        assert request.tokens_count <= 40_000


def test_a_session_leaves_others_time_between_its_requests(requests: list[Request]) -> None:
    turns: dict[str, list[int]] = {}
    for request in requests:
        turns.setdefault(request.session, []).append(request.index)
    assert len(turns) > 12
    assert all(later - earlier > SESSION_GAP for at in turns.values() for earlier, later in pairwise(at))


def test_prefixes_are_shared_within_and_between_sessions(requests: list[Request]) -> None:
    cache = IdealCache()
    first_of_session: dict[str, int] = {}
    for request in requests:
        contents = request.contents(BLOCK_SIZE_TOKENS)
        first_of_session.setdefault(request.session, cache.serve(contents))
    assert 0.75 < cache.hit_rate < 0.98
    starts = list(first_of_session.values())
    assert starts[0] == 0
    assert min(starts[1:]) > 10, "every session begins with the shared system prompt"
    assert len(set(starts)) > 2, "sessions on one project share more than that"


def test_sessions_take_every_kind_of_step(requests: list[Request]) -> None:
    grew = again = turned = 0
    last: dict[str, bytes] = {}
    for request in requests:
        before = last.get(request.session)
        if before is not None:
            grew += request.tokens.startswith(before) and request.tokens != before
            again += request.tokens == before
            turned += not request.tokens.startswith(before)
        last[request.session] = request.tokens
    assert grew > 80
    assert again >= 1
    assert turned >= 1


def test_token_ids_follow_from_the_piece_alone() -> None:
    text = "def f(x):\n    return x + 1  # größer\n"
    one, other = Tokeniser(), Tokeniser()
    other.encode("entirely different text first")
    assert one.encode(text) == other.encode(text)
    assert one.encode(text + text) == one.encode(text) * 2
    assert one.encode("") == b""


def test_no_character_is_lost_by_the_tokeniser() -> None:
    """Otherwise two different texts could have the same tokens, and so share blocks."""
    text = "".join(map(chr, range(1, 0x300))) + "\u2028\U0001f600\ud800"
    assert "".join(Tokeniser._PIECES.findall(text)) == text


def test_without_sources_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(SourcesError, match="no Python source files"):
        Library(tmp_path)
