"""What must be equal for two engines to read each other's blocks.

An engine's own block hash covers tokens, adapter name, salt and images, and nothing else: not the weights,
not the types, not the layout of the bytes. All that is here instead, and it names the *instance*: engines
that differ in any field have different instances, and no lookup of one ever meets a block of the other.

Two fields are compared instead of named: `canary` and `hash_seed`. Engines of one instance that disagree
there would hash the same tokens to different keys, so each would only ever miss what the others stored. That
is a mistake of who configured them, and the service refuses the second one, with the field's name.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from metaservice.wire.schemas import NAME_PATTERN

COMPARED = frozenset({"canary", "hash_seed"})
"""Fields that are not in an instance's name: two that differ there meet, and the second is refused."""

SERVICE_FIELDS = {
    "model": "model",
    "revision": "revision",
    "kv_dtype": "kv_dtype",
    "block_size_tokens": "block_size_tokens",
    "key_length": "key_length",
    "hash_algorithm": "hash_scheme",
    "hash_seed": "hash_seed",
    "canary": "canary",
}
"""Fields that the service's fingerprint has of its own -> how it calls them. All others are its `extra`."""

DIGEST_LENGTH = 32
PREFIX_LENGTH_MAX = 64
TEXT_LENGTH_MAX = 512
EXTRA_LENGTH_MAX = 4096
"""What the service takes in its fingerprint."""
_GROUP = "full"
_NAME = re.compile(NAME_PATTERN)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Part(msgspec.Struct, frozen=True):
    """What one rank holds of each block in one KV cache group, always `bytes` long."""

    name: str
    bytes: int


class Namespace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the bytes of a block, and its key, beside its tokens.

    Texts are compared, never understood. An empty text says that the engine has no such thing, not that it
    is unknown: who does not know a field must not make a namespace.
    """

    engine: str
    engine_version: str
    """Whole: engines change how they pack KV between versions."""
    connector_version: str
    """Of this connector; only `<major>.<minor>` counts."""
    tenant: str = ""
    salt: str = ""

    model: str
    """The model's id: of a folder its content's digest (`contents.model_path`), never its path alone."""
    revision: str = ""
    weight_version: str = ""
    adapter: str = ""
    """Digest of a LoRA adapter's content; empty: the base model."""
    model_config: str
    """Digest of the model's configuration as the engine runs it, overrides included."""
    dtype: str
    quantization: str = ""
    rope: str = ""
    """RoPE's kind, theta, scaling and positions."""

    kv_dtype: str
    kv_scales: str = ""
    """Where the scales of a quantised KV cache come from."""
    layout: str
    """The engine's physical order of KV dimensions."""
    kv_format: str
    """Who packs the bytes of a page, and how: attention backend and instruction set where that decides."""

    block_size_tokens: int
    hash_algorithm: str
    hash_seed: str = ""
    key_length: int
    """Bytes of a key."""
    canary: str
    """The key of a fixed probe (see `canary`)."""

    tp: int
    pp: int = 1
    cp: int = 1
    dcp: int = 1
    kv_heads: int
    """Of the whole model."""
    layers: int
    """That have a KV cache."""
    groups: str
    """The KV cache groups in the engine's order: kind, window, heads, sizes, layers."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            longest = TEXT_LENGTH_MAX if name in SERVICE_FIELDS else EXTRA_LENGTH_MAX
            if isinstance(value, str) and (len(value) > longest or _CONTROL.search(value)):
                raise ValueError(f"{name}: expected at most {longest} characters, none of them control ones")

    def digest(self, adapter: str = "") -> str:
        """Names the instance: 32 hex digits. `adapter`: of this adapter's instance instead of `self`'s."""
        fields = {
            name: value
            for name, value in msgspec.to_builtins(self._with(adapter)).items()
            if name not in COMPARED
        }
        encoded = msgspec.json.encode(fields, order="sorted")
        return hashlib.sha256(encoded).hexdigest()[:DIGEST_LENGTH]

    def instance_id(self, prefix: str, adapter: str = "") -> str:
        """`<prefix>-<digest>`. Raises ValueError for a prefix that no instance's name can begin with."""
        if len(prefix) > PREFIX_LENGTH_MAX or not _NAME.match(prefix):
            raise ValueError(
                f"instance_prefix {prefix!r}: expected 1..{PREFIX_LENGTH_MAX} letters, digits or ._:@+-"
            )
        return f"{prefix}-{self.digest(adapter)}"

    def fingerprint(self, parts: Sequence[Part], adapter: str = "") -> dict[str, Any]:
        """What `put_instance` takes: all fields, so that the service compares each of them.

        `parts` are all ranks' and groups'. They stand in one attention group, so that a block is a hit only
        with all of them.
        """
        fields = msgspec.to_builtins(self._with(adapter))
        return {
            **{name: fields[ours] for ours, name in SERVICE_FIELDS.items()},
            "parts": [{"name": part.name, "bytes": part.bytes, "group": _GROUP} for part in parts],
            "groups": [{"name": _GROUP, "kind": "full", "window_blocks": 0}],
            "extra": {
                name: str(value) for name, value in sorted(fields.items()) if name not in SERVICE_FIELDS
            },
        }

    def _with(self, adapter: str) -> "Namespace":
        """As it is compared: a salt is a secret, and stands in views of operators."""
        series = ".".join(self.connector_version.split(".")[:2])
        salt = hashlib.sha256(self.salt.encode()).hexdigest()[:DIGEST_LENGTH] if self.salt else ""
        changes: dict[str, Any] = {"connector_version": series, "salt": salt}
        if adapter:
            changes["adapter"] = adapter
        return msgspec.structs.replace(self, **changes)


def our_name(service_field: str) -> str:
    """How a field of the service's fingerprint is called here, as `canary`, `extra.tp`, `parts[0].bytes`."""
    name = service_field.removeprefix("fingerprint.")
    if name.startswith("extra."):
        return name.removeprefix("extra.")
    ours = {theirs: mine for mine, theirs in SERVICE_FIELDS.items()}
    return ours.get(name, name)
