"""What an engine says of its sparse attention, and what it says that is no such thing."""

from typing import Any

import pytest

from engine_adapters.vllm.sparse import Sparse, sparse_of


def test_an_engine_says_which_algorithm_and_when() -> None:
    told = {"ucm_sparse": {"algo": "esa", "began_ns": 5, "ended_ns": 9}, "do_remote_prefill": True}
    assert sparse_of(told) == Sparse("esa", 5, 9)
    assert sparse_of({"ucm_sparse": {"algo": "gsa"}}) == Sparse("gsa", 0, 0)


@pytest.mark.parametrize(
    "params", [None, {}, {"ucm_sparse": None}, {"ucm_sparse": "esa"}, {"ucm_sparse": {"algo": 7}}, {"x": 1}]
)
def test_anything_else_says_nothing_and_fails_nothing(params: dict[str, Any] | None) -> None:
    assert sparse_of(params) == Sparse("none")


@pytest.mark.parametrize("wrong", [{"algo": "x" * 65}, {"began_ns": -1}, {"ended_ns": 1 << 63}])
def test_what_would_spoil_a_batch_of_spans_is_not_taken_from_a_request(wrong: dict[str, object]) -> None:
    assert sparse_of({"ucm_sparse": {"algo": "esa", **wrong}}) == Sparse("none")
