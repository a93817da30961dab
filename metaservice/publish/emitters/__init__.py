"""Emitters: one dialect of cache events each, over the same windows."""

from metaservice.publish.emitters.port import EVENT_BLOCKS_MAX, Emitter, Stream
from metaservice.publish.emitters.vllm import VllmEmitter

__all__ = ["EVENT_BLOCKS_MAX", "NAMES", "Emitter", "Stream", "make"]

_EMITTERS: dict[str, type[VllmEmitter]] = {"vllm": VllmEmitter}

NAMES = tuple(_EMITTERS)
"""The dialects there are. The first is the one to use where nothing else is asked for."""


def make(name: str) -> Emitter:
    """A new emitter of this dialect. ValueError when there is none of the name."""
    emitter = _EMITTERS.get(name)
    if emitter is None:
        raise ValueError(f"there is no emitter {name!r}, only {', '.join(NAMES)}")
    return emitter()
