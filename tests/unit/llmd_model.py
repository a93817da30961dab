"""llm-d's index of cache events, as a model: what its decoder takes, which keys it makes, how it scores.

Written by hand from the rules of its build of August 2026. It is the judge in tests/unit/test_llmd_*, so that
our bytes are held against its rules without its program; that both agree was seen with the program itself,
outside this repository, and is to be seen again with each of its releases.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

FNV_OFFSET = 0xCBF29CE484222325
FNV_PRIME = 0x100000001B3
U64 = 2**64 - 1

MAIN_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})

Frames = tuple[bytes, bytes, bytes]


class Poisoned(Exception):
    """The whole batch is dropped."""


# ---------------------------------------------------------------- keys


def fnv64a(data: bytes) -> int:
    """FNV-1a, 64 bits."""
    value = FNV_OFFSET
    for byte in data:
        value = (value ^ byte) * FNV_PRIME & U64
    return value


def cbor(value: Any) -> bytes:
    """Canonical CBOR of what a key is hashed from: whole numbers, text, lists, maps with text keys,
    nothing."""
    match value:
        case None:
            return b"\xf6"
        case int():
            return head(0, value)
        case str():
            return head(3, len(value.encode())) + value.encode()
        case list():
            return head(4, len(value)) + b"".join(map(cbor, value))
        case dict():
            return head(5, len(value)) + b"".join(cbor(name) + cbor(value[name]) for name in sorted(value))
    raise AssertionError(value)


def head(major: int, value: int) -> bytes:
    for more, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if value < 24:
            return bytes([major << 5 | value])
        if value < 1 << 8 * size:
            return bytes([major << 5 | more]) + value.to_bytes(size, "big")
    raise AssertionError(value)


def block_key(parent: int, tokens: list[int] | None, extras: Any) -> int:
    """The key of one block; `extras` None for text alone."""
    return fnv64a(cbor([parent, tokens, extras]))


def root(model: str, seed: str) -> int:
    """What the first block of a prompt hangs on: first the seed, then the model, or the adapter's name."""
    return block_key(fnv64a(seed.encode()), None, model)


# ---------------------------------------------------------------- the index


@dataclass
class Llmd:
    """One endpoint picker's index. `block_size_tokens` is its own, whatever the engines have."""

    block_size_tokens: int = 16
    seed: str = ""
    weights: dict[str, float] = field(default_factory=lambda: {"gpu": 1.0, "cpu": 0.8})
    pod_cache_size: int = 10
    replay: Callable[[int], Iterable[Frames]] | None = None
    """Where `replaySocketPort` is set: it yields what the publisher has from this number on. None: numbers
    are never looked at."""

    def __post_init__(self) -> None:
        self.pods: dict[int, OrderedDict[tuple[str, str], None]] = {}
        """By key: (pod, tier), the latest last."""
        self.engine_keys: dict[int, list[int]] = {}
        self.references: Counter[tuple[str, str, int]] = Counter()
        self.poisoned = 0
        self.skipped: Counter[str] = Counter()
        self.last: int | None = None

    # -- asked

    def keys(self, model: str, tokens: list[int], salt: str = "") -> list[int]:
        """The keys of a request, which names its adapter as the model."""
        parent, size = root(model, self.seed), self.block_size_tokens
        keys = []
        for at in range(0, len(tokens) - size + 1, size):
            extras = [{"Hash": salt}] if salt and not at else None
            parent = block_key(parent, tokens[at : at + size], extras)
            keys.append(parent)
        return keys

    def scores(self, model: str, tokens: list[int], salt: str = "") -> dict[str, float]:
        """By pod: the weights of the consecutive blocks that it has, from the first on; the best tier
        counts."""
        active: set[str] | None = None
        scores: dict[str, float] = {}
        for key in self.keys(model, tokens, salt):
            best: dict[str, float] = {}
            for pod, tier in self.pods.get(key, {}):
                best[pod] = max(best.get(pod, 0.0), self.weights.get(tier, 1.0))
            active = set(best) if active is None else active & set(best)
            if not active:
                break
            for pod in active:
                scores[pod] = scores.get(pod, 0.0) + best[pod]
        return {pod: round(score, 9) for pod, score in scores.items()}

    # -- told

    def receive(self, message: Frames) -> None:
        """A message of a subscription. With a replay port, what is missing is fetched first."""
        number = int.from_bytes(message[1], "big")
        if self.replay is not None:
            if self.last is not None and number <= self.last:
                return
            if self.last is None or number > self.last + 1:
                for missed in self.replay(0 if self.last is None else self.last + 1):
                    told = int.from_bytes(missed[1], "big")
                    if (self.last is None or told > self.last) and told < number:
                        self._process(missed)
                        self.last = told
            self.last = number
        self._process(message)

    def _process(self, message: Frames) -> None:
        topic, _, payload = message
        parts = topic.decode().split("@")
        pod, model = (parts[1], parts[2]) if len(parts) == 3 else (topic.decode(), "")
        try:
            events = list(decoded(payload))
        except (Poisoned, msgspec.DecodeError):
            self.poisoned += 1
            return
        for event in events:
            match event["type"]:
                case "BlockStored":
                    self._stored(pod, model, event)
                case "BlockRemoved":
                    self._removed(pod, event)
                case _:
                    self._cleared(pod)

    def _stored(self, pod: str, model: str, event: dict[str, Any]) -> None:
        tier = (event["medium"] or "gpu").lower()
        hashes, tokens, size = event["block_hashes"], event["token_ids"], self.block_size_tokens
        if event["group_idx"] is not None and event["kv_cache_spec_kind"] not in MAIN_ATTENTION:
            self.skipped["group"] += 1
            return
        if not tokens:
            known = [key for name in hashes for key in self.engine_keys.get(name, [])]
            for key in known:
                self._add(key, pod, tier)
            return
        parent = root(event["lora_name"] or model, self.seed)
        if event["parent_block_hash"]:
            found = self.engine_keys.get(event["parent_block_hash"])
            if not found:
                self.skipped["parent"] += 1
                return
            parent = found[-1]
        count = len(tokens) // size
        extras = realigned(event["extra_keys"], len(hashes), count)
        keys = []
        for at in range(count):
            parent = block_key(parent, tokens[at * size : (at + 1) * size], extras[at])
            keys.append(parent)
        if not keys:
            self.skipped["half"] += 1
            return
        mapped: dict[int, list[int]] = {}
        most = max(len(keys), len(hashes))
        for at in range(
            most
        ):  # one to one, or several of ours in one of the engine's, or the other way round
            mapped.setdefault(hashes[at * len(hashes) // most], []).append(keys[at * len(keys) // most])
        self.engine_keys |= mapped
        for key in keys:
            self._add(key, pod, tier)
        for name in hashes:
            self.references[pod, tier, name] += 1

    def _removed(self, pod: str, event: dict[str, Any]) -> None:
        tier = (event["medium"] or "gpu").lower()
        for name in event["block_hashes"]:
            if self.references[pod, tier, name] > 1:
                self.references[pod, tier, name] -= 1
                continue
            del self.references[pod, tier, name]
            keys = self.engine_keys.get(name, [])
            for key in keys:
                self._drop(key, pod, tier)
            if keys and not any(key in self.pods for key in keys):
                del self.engine_keys[name]

    def _cleared(self, pod: str) -> None:
        """All tiers, whatever the event says."""
        for key in list(self.pods):
            for holder, tier in list(self.pods[key]):
                if holder == pod:
                    self._drop(key, holder, tier)
        for reference in [reference for reference in self.references if reference[0] == pod]:
            del self.references[reference]

    def _add(self, key: int, pod: str, tier: str) -> None:
        """The latest come last; the first go when there are more than `pod_cache_size`."""
        holders = self.pods.setdefault(key, OrderedDict())
        holders[pod, tier] = None
        holders.move_to_end((pod, tier))
        if len(holders) > self.pod_cache_size:
            holders.popitem(last=False)

    def _drop(self, key: int, pod: str, tier: str) -> None:
        holders = self.pods.get(key)
        if holders is not None:
            holders.pop((pod, tier), None)
            if not holders:
                del self.pods[key]


# ---------------------------------------------------------------- decoding

STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
)
FIELDS = {
    "BlockStored": STORED,
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


def decoded(payload: bytes) -> Iterator[dict[str, Any]]:
    """The events of a batch with every field that is read, None where it is not there. One that is wrong
    spoils the batch."""
    batch = msgspec.msgpack.decode(payload)
    if not isinstance(batch, list) or len(batch) != 3 or not isinstance(batch[0], (int, float)):
        raise Poisoned
    for event in batch[1]:
        match event:
            case {"type": str(kind)}:
                fields = {name: event.get(name) for name in FIELDS.get(kind, ())}
            case [str(kind), *values]:
                fields = dict.fromkeys(FIELDS.get(kind, ())) | dict(
                    zip(FIELDS.get(kind, ()), values, strict=False)
                )
            case _:
                raise Poisoned
        if kind not in FIELDS:
            raise Poisoned
        yield {"type": kind} | checked(kind, fields)


def checked(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, with hashes as whole numbers of 64 bits."""
    if kind != "AllBlocksCleared":
        if not isinstance(fields["block_hashes"], list) or not isinstance(
            fields["medium"], (str, type(None))
        ):
            raise Poisoned
        fields["block_hashes"] = [hash64(name) for name in fields["block_hashes"]]
    if kind == "BlockStored":
        if fields["parent_block_hash"] is not None:
            fields["parent_block_hash"] = hash64(fields["parent_block_hash"])
        if not isinstance(fields["token_ids"], list) or not isinstance(fields["block_size"], int):
            raise Poisoned
        for keys in fields["extra_keys"] or ():
            if keys is not None and not isinstance(keys, list):
                raise Poisoned
    return fields


def hash64(name: Any) -> int:
    """msgpack spells what is below 2^32 in a type that the build of August does not take."""
    if isinstance(name, bytes) and name:
        return int.from_bytes(name[-8:], "big")
    if isinstance(name, int) and not isinstance(name, bool) and (name >= 2**32 or name < -(2**31)):
        return name & U64
    raise Poisoned


def realigned(extra_keys: list[list[Any] | None] | None, engine_blocks: int, count: int) -> list[Any]:
    """What goes in the hash of each of our `count` blocks besides its ids: the text of the engine's blocks
    that it is part of, or is made of."""
    if not extra_keys or not count:
        return [None] * count
    texts = [[key for key in keys or () if isinstance(key, str)] for keys in extra_keys]
    if engine_blocks <= count:
        own = [texts[at * engine_blocks // count] for at in range(count)]
    else:
        own = [[] for _ in range(count)]
        for at, told in enumerate(texts):
            own[at * count // engine_blocks] += told
    return [[{"Hash": text} for text in told] or None for told in own]
