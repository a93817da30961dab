"""A request as the replay sees it, whatever it was made from."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from engine_adapters.replay.hashing import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. It has either `tokens` (text: the engine hashes them) or `keys` and `ids` (trace: already
    hashed).

    `index` counts from 0 in the order of the workload. `session` is empty where nothing says which requests
    belong together; a session's next request is only made once the one before it was answered."""

    index: int
    session: str
    tokens_count: int
    tokens: bytes = b""
    keys: tuple[bytes, ...] = ()
    ids: tuple[int, ...] = ()

    def contents(self, block_size_tokens: int) -> Sequence[Hashable]:
        """What each whole block holds, without its prefix and without any hashing: packed tokens, or the
        trace's id."""
        if self.ids:
            return self.ids
        step = block_size_tokens * TOKEN_BYTES
        return [self.tokens[at : at + step] for at in range(0, len(self.tokens) - step + 1, step)]
