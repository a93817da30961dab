"""What an engine says of its sparse attention, for spans: which algorithm chose the blocks that a request
attends to, and when it was at it.

vLLM itself has none. An engine that has (a patched one, or one with a plug-in) says so in the request's
`kv_transfer_params`:

    {"ucm_sparse": {"algo": "esa", "began_ns": 1764450000000000000, "ended_ns": 1764450000002000000}}

with times of `time.time_ns`, or without times when only the name is known.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

KEY = "ucm_sparse"
NONE = "none"
_Name = Annotated[str, msgspec.Meta(max_length=64)]
_Time = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Whoever sends requests can say these: nothing that would spoil the other spans of a batch."""


class Sparse(msgspec.Struct, frozen=True):
    """`algo` is the algorithm's name, `none` where the engine reports none; the times are 0 when unknown."""

    algo: _Name = NONE
    began_ns: _Time = 0
    ended_ns: _Time = 0


def sparse_of(params: Mapping[str, Any] | None) -> Sparse:
    """What a request's `kv_transfer_params` say. What is no such thing says nothing: a span must not fail a
    request."""
    told = (params or {}).get(KEY)
    if told is None:
        return Sparse()
    try:
        return msgspec.convert(told, Sparse)
    except msgspec.ValidationError:
        return Sparse()
