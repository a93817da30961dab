"""The canonical dialect: vLLM's tagged maps, which Dynamo, llm-d and their like decode.

`[now in seconds, [events...], rank]`. Only what all of them treat alike is ever sent: hashes that are whole
numbers of 64 bits, token ids with every block, one of four media, and no field that one of them drops an
event for (locality, ownership, group_idx).

A salted block says so twice. Dynamo reads `cache_salt` of the event it is in, so each event has it; llm-d
takes `extra_keys` into the hash of the block they stand at, as vLLM does with the prompt's first, so they are
in the event that has this block and in no other. An adapter is `lora_name` alone: in `extra_keys` llm-d would
take it for an image.
"""

from msgspec import Struct

from metaservice.publish.emitters.base import EngineEmitter
from metaservice.publish.emitters.port import Stream
from metaservice.publish.emitters.spans import Span, token_ids
from metaservice.publish.hashes import cache_namespace


class BlockStored(Struct, frozen=True, tag_field="type", tag="BlockStored", omit_defaults=True):
    """The fields without a default are always there, in this order."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: str | None
    cache_salt: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(Struct, frozen=True, tag_field="type", tag="BlockRemoved"):
    block_hashes: tuple[int, ...]
    medium: str


class VllmEmitter(EngineEmitter):
    """Maps, for every consumer that reads vLLM's events of 2026."""

    name = "vllm"

    def stored_event(self, stream: Stream, span: Span) -> BlockStored:
        run = span.run
        salted = bool(run.salt) and span.parent is None
        return BlockStored(
            block_hashes=span.hashes,
            parent_block_hash=span.parent,
            token_ids=token_ids(span.tokens, stream.block_size_tokens),
            block_size=stream.block_size_tokens,
            lora_id=None,
            medium=run.medium,
            lora_name=run.lora or stream.lora or None,
            cache_salt=cache_namespace(run.salt) or None,
            extra_keys=[(run.salt,), *[None] * (len(span.hashes) - 1)] if salted else None,
        )

    def removed_event(self, hashes: tuple[int, ...], medium: str) -> BlockRemoved:
        return BlockRemoved(hashes, medium)
