"""Bodies of the admin routes.

Unknown fields are refused, nothing is coerced, names keep to the one pattern.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from metaservice.core import model as core
from metaservice.core.ids import KEY_LENGTH_MAX, KEY_LENGTH_MIN, SHARDS_MAX

from .errors import NAME_RULE, ApiError
from .names import OPENAPI_NAME_PATTERN
from .names import name as checked_name

NUMBER_MAX = 2**53 - 1
"""A JSON reader with doubles keeps integers up to here exact."""


def _name(value: str) -> str:
    try:
        return checked_name(value, "")
    except ApiError:
        raise PydanticCustomError("invalid_name", "a name is {rule}", {"rule": NAME_RULE}) from None


def _clean(value: str) -> str:
    if any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise PydanticCustomError("invalid_text", "a text may have no control characters")
    return value


Name = Annotated[
    str, AfterValidator(_name), WithJsonSchema({"type": "string", "pattern": OPENAPI_NAME_PATTERN})
]
Text = Annotated[str, Field(max_length=512), AfterValidator(_clean)]
Amount = Annotated[int, Field(ge=0, le=NUMBER_MAX)]
OptionName = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_clean)]
OptionValue = Annotated[str, Field(max_length=4096), AfterValidator(_clean)]
Options = Annotated[dict[OptionName, OptionValue], Field(max_length=64)]


class Body(BaseModel):
    """Base of all admin bodies."""

    model_config = ConfigDict(extra="forbid", strict=True)


class QuotaBody(Body):
    """A hard limit on what is being written or serves; null is no limit."""

    bytes: Amount | None = None
    blocks: Amount | None = None

    def core(self) -> core.Quota:
        return core.Quota(bytes=self.bytes, blocks=self.blocks)


class TenantBody(Body):
    """`PUT /v1/tenants/{tenant}`."""

    quota: QuotaBody = QuotaBody()


class StorageBody(Body):
    """`PUT /v1/storages/{storage}`. `capacity_bytes` null: unlimited."""

    kind: Name
    options: Options = {}
    capacity_bytes: Amount | None = None
    fault_domain: Text = ""
    reach: Literal["", "pool", "node"] = ""
    """Which engines reach it: all, or those whose node is its `fault_domain`. Empty: as is usual for its
    kind, which of `shm` are the node's."""


class GroupBody(Body):
    """`PUT /v1/groups/{group}`.

    `storages` in order of preference; watermarks in parts per 1000 of the quotas.
    """

    tenant: Name
    storages: Annotated[list[Name], Field(max_length=64)]
    quota: QuotaBody = QuotaBody()
    high_permille: Annotated[int, Field(ge=1, le=1000)] = 950
    low_permille: Annotated[int, Field(ge=0, le=1000)] = 900
    eviction: Literal["lru", "reject"] = "lru"


class AttentionGroupBody(Body):
    """Layers that are cached alike; `window_blocks` for a sliding window only."""

    name: Name
    kind: Literal["full", "sliding_window", "state"] = "full"
    window_blocks: Annotated[int, Field(ge=0, le=1_000_000)] = 0


class PartBody(Body):
    """The piece of a block that one rank holds in one attention group."""

    name: Name
    bytes: Annotated[int, Field(ge=1, le=NUMBER_MAX)]
    group: Name = "full"


class FingerprintBody(Body):
    """Everything that must be equal for two engines to share blocks."""

    model: Text
    revision: Text = ""
    kv_dtype: Text
    block_size_tokens: Annotated[int, Field(ge=1, le=1_000_000)]
    key_length: Annotated[int, Field(ge=KEY_LENGTH_MIN, le=KEY_LENGTH_MAX)]
    hash_scheme: Text
    hash_seed: Text = ""
    parts: Annotated[list[PartBody], Field(min_length=1, max_length=1024)]
    groups: Annotated[list[AttentionGroupBody], Field(min_length=1, max_length=64)] = [
        AttentionGroupBody(name="full")
    ]
    canary: Text = ""
    extra: Options = {}

    def core(self) -> core.Fingerprint:
        return core.Fingerprint(
            model=self.model,
            revision=self.revision,
            kv_dtype=self.kv_dtype,
            block_size_tokens=self.block_size_tokens,
            key_length=self.key_length,
            hash_scheme=self.hash_scheme,
            hash_seed=self.hash_seed,
            parts=tuple(core.Part(part.name, part.bytes, part.group) for part in self.parts),
            groups=tuple(
                core.AttentionGroup(group.name, core.GroupKind[group.kind], group.window_blocks)
                for group in self.groups
            ),
            canary=self.canary,
            extra=self.extra,
        )


class PublicationBody(Body):
    """How blocks are announced to routers. `model`: the name that routers know the model by. Instances of one
    `routing_group` ("": the model) are told apart by no router, so they must hash alike. `lora`: the adapter
    that all blocks are for. `hash_of`: which 8 bytes of a key, big-endian, are the engine's own event hash
    (`tail64`: vLLM; `head64`: SGLang). `entries_max`: at most so many blocks at a time, those used last.
    `base`: the instance whose engines use this one's blocks (an adapter's are those of its base model).
    """

    model: Annotated[Text, Field(min_length=1)]
    routing_group: Text = ""
    lora: Text = ""
    hash_of: Literal["tail64", "head64"] = "tail64"
    entries_max: Annotated[int, Field(ge=1, le=10_000_000)] = 50_000
    base: Text = ""

    def core(self) -> core.Publication:
        return core.Publication(
            model=self.model,
            routing_group=self.routing_group,
            lora=self.lora,
            hash_of=self.hash_of,
            entries_max=self.entries_max,
            base=self.base,
        )


class InstanceBody(Body):
    """`PUT /v1/instances/{instance}`. The fingerprint can never change under one id.

    `shard` names where a new instance lives; without it the one with the fewest instances is taken.
    `publication` null: no router is told of its blocks.
    """

    group: Name
    fingerprint: FingerprintBody
    quota: QuotaBody = QuotaBody()
    shard: Annotated[int, Field(ge=0, le=SHARDS_MAX - 1)] | None = None
    publication: PublicationBody | None = None


class SwitchBody(Body):
    """`PUT /v1/switches/...`."""

    mode: Literal["normal", "read_only", "bypass"]
    reason: Text = ""


class HandoverBody(Body):
    """`POST /v1/cluster/shards/{shard}/handover`. `to` empty: the leader chooses."""

    to: Annotated[str, Field(max_length=128), AfterValidator(_clean)] = ""
