"""The old dialect: vLLM's events as arrays, each field by its place, for routers that cannot read maps
(AIBrix).

`[now in seconds, [[name, fields...]...], rank]`. AIBrix knows a block by its token ids alone, whatever else
its event says. So blocks of an adapter or with a salt are not told (`adapter` and `salt` in `invalid`): it
would send there whoever has the same text. Nor does it tell one medium from another.
"""

from collections.abc import Iterator

from metaservice.core.windows import Run
from metaservice.publish.emitters.base import EngineEmitter, Events
from metaservice.publish.emitters.port import Stream
from metaservice.publish.emitters.spans import Span, token_ids


class ArrayEmitter(EngineEmitter):
    """Arrays as vLLM had them: no field that stands elsewhere in another engine's."""

    name = "array"

    def stored(self, stream: Stream, run: Run) -> Iterator[Events]:
        if self._alone(stream, run):
            yield from super().stored(stream, run)

    def stored_event(self, stream: Stream, span: Span) -> object:
        return (
            "BlockStored",
            span.hashes,
            span.parent,
            token_ids(span.tokens, stream.block_size_tokens),
            stream.block_size_tokens,
            None,
            span.run.medium,
        )

    def removed_event(self, hashes: tuple[int, ...], medium: str) -> object:
        return "BlockRemoved", hashes, medium

    def _alone(self, stream: Stream, run: Run) -> bool:
        """Whether the ids say all there is to the blocks."""
        wrong = "salt" if run.salt else "adapter" if run.lora or stream.lora else ""
        if wrong:
            self.invalid[wrong] += len(run.tokens)
        return not wrong
