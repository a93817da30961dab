"""What engines tell the service of their blocks for routers: noted as it goes out, and held against the
keys."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine_adapters.vllm.mover import Mover
from metaservice.client import WriteResult
from metaservice.wire.tokens import unpack_tokens
from tests.engines.oracle import Shape, block_keys


@dataclass(frozen=True)
class Told:
    """One block as its writer told it."""

    request: str
    key: bytes
    parent: bytes | None
    tokens: bytes
    lora: str
    salt: str


class TellingMover(Mover):
    """Notes what goes out with each write."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.told: list[Told] = []
        self.starts: dict[str, tuple[Any, ...]] = {}

    def start(
        self,
        instance: str,
        keys: list[bytes],
        parents: list[bytes | None],
        *,
        ttl_ms: int,
        request_id: str,
        traceparent: str = "",
        tokens: Sequence[bytes] | None = None,
        lora: str = "",
        salt: str = "",
    ) -> WriteResult:
        rows = tokens or [b""] * len(keys)
        self.told += [Told(request_id, *row, lora, salt) for row in zip(keys, parents, rows, strict=True)]
        self.starts[request_id] = (instance, tuple(keys), tuple(parents), tuple(rows), lora, salt)
        return super().start(
            instance, keys, parents,
            ttl_ms=ttl_ms, request_id=request_id, traceparent=traceparent,
            tokens=tokens, lora=lora, salt=salt,
        )  # fmt: skip


def untrue(shape: Shape, movers: Iterable[TellingMover], labels: dict[str, str]) -> list[str]:
    """What was told that is not so: each key has to follow from its parent's and from what was told with it.
    `labels`: what an adapter of this name puts into keys."""
    bad = []
    size = shape.block_tokens
    for told in {told for mover in movers for told in mover.told if told.tokens}:
        tokens = list(unpack_tokens(told.tokens))
        root = told.parent is None
        before = [] if root else [0] * size
        right = block_keys(
            shape,
            before + tokens,
            told.salt,
            labels.get(told.lora, told.lora),
            len(before),
            told.parent or b"",
        )
        if right != [told.key]:
            bad.append(f"{told.request}: {tokens} are not the tokens of {told.key.hex()}")
    return bad


def at_odds(ranks: Sequence[TellingMover]) -> list[str]:
    """Requests of which one rank told something else than another."""
    bad = []
    for name in {name for rank in ranks for name in rank.starts}:
        if len({rank.starts[name] for rank in ranks if name in rank.starts}) > 1:
            bad.append(name)
    return bad
