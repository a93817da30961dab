"""Emitters: one dialect of cache events each, over the same windows."""

from metaservice.publish.emitters.arrays import ArrayEmitter
from metaservice.publish.emitters.mooncake import MooncakeEmitter
from metaservice.publish.emitters.port import EVENT_BLOCKS_MAX, Emitter, Stream
from metaservice.publish.emitters.vllm import VllmEmitter

__all__ = ["EVENT_BLOCKS_MAX", "NAMES", "Emitter", "Stream", "make"]

NAMES = ("vllm", "array", "mooncake")
"""The dialects there are. The first is the canonical one."""


def make(name: str) -> Emitter:
    """A new emitter of this dialect. ValueError when there is none of the name, or not with these options.

    Only `mooncake` has options: `mooncake:tp=4,prefix=pool_org-model` for keys of 4 ranks with this prefix,
    `tp=0` for MLA.
    """
    dialect, _, rest = name.partition(":")
    options = dict(option.partition("=")[::2] for option in rest.split(",") if option)
    match dialect:
        case "vllm" if not options:
            return VllmEmitter()
        case "array" if not options:
            return ArrayEmitter()
        case "mooncake" if options.keys() <= {"tp", "prefix"} and options.get("tp", "1").isdecimal():
            return MooncakeEmitter(int(options.get("tp", "1")), options.get("prefix", ""))
    known = f"{', '.join(NAMES)} (mooncake also with :tp=<ranks>,prefix=<text>)"
    raise ValueError(f"there is no emitter {name!r}, only {known}")
