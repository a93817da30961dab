"""What the scheduler's side remembers of a request, and of a save or load that is under way."""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

from msgspec import Struct

from engine_adapters.vllm.broker import Answer


class EngineRequest(Protocol):
    """What is read of vLLM's `Request`. `block_hashes` has an entry for each full block whose tokens are
    known."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the engine's memory before the step that is being built."""

    @property
    def block_hashes(self) -> Sequence[bytes]: ...

    @property
    def all_token_ids(self) -> Sequence[int]: ...

    @property
    def lora_request(self) -> Any:
        """None, or something with `lora_name` and `lora_path`."""

    @property
    def cache_salt(self) -> str | None: ...

    @property
    def mm_features(self) -> Sequence[Any]:
        """Images and the like among the tokens."""

    @property
    def prompt_embeds(self) -> Any:
        """None, or embeddings that stand for tokens."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """What came with the request for connectors; read for spans only (see `sparse`)."""

    @property
    def trace_headers(self) -> Mapping[str, str] | None: ...


class Phase(Enum):
    """Where a request is on its way to its blocks.

    `fresh`: nothing asked. `unplaced`: its adapter's instance is not known yet. `asked`: a lookup is under
    way. `answered`: its answer holds a lease, and vLLM may be promised its blocks. `loading`: the workers
    load them. `settled`: nothing is held or awaited any more.
    """

    fresh = 0
    unplaced = 1
    asked = 2
    answered = 3
    loading = 4
    settled = 5


class Tracked:
    """One request of the engine."""

    __slots__ = (
        "adapter", "answer", "asked_ns", "computed_ns", "hit_blocks", "instance", "local_blocks", "lookups",
        "phase", "request", "saves", "stored", "ticket", "tier", "traceparent",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, traceparent: str) -> None:
        lora = request.lora_request
        self.request = request
        self.adapter: tuple[str, str] | None = None if lora is None else (lora.lora_name, lora.lora_path)
        self.phase = Phase.fresh
        self.instance = ""
        self.ticket = ""
        self.lookups = 0
        self.answer: Answer | None = None
        self.asked_ns = 0
        """When the scheduler first had to be told to ask again."""
        self.local_blocks = 0
        self.stored = 0
        """Blocks from the first on that need no saving: they were hits, or have been ordered to be saved."""
        self.saves: set[str] = set()
        """Saves whose pages may not be copied yet on every rank."""
        self.hit_blocks = 0
        self.tier = ""
        self.traceparent = traceparent
        self.computed_ns = 0


class Loading(Struct):
    """A load that not every rank has reported."""

    request: str
    instance: str
    asked: int
    ranks: int = 0
    blocks: int = 0
    size_bytes: int = 0
    reason: str = ""
    traceparent: str = ""
    leased: bool = True
    began_ns: int = 0
    ended_ns: int = 0


class Saving(Struct):
    """A save that not every rank has reported. `tokens` are kept only where events are wanted."""

    request: str
    instance: str
    start: int
    keys: list[bytes]
    parent: bytes | None
    tokens: Sequence[int]
    adapter: tuple[str, str] | None
    traceparent: str = ""
    copied: int = 0
    ranks: int = 0
    size_bytes: int = 0
    reason: str = ""
    began_ns: int = 0
    ended_ns: int = 0


class Published(Struct, frozen=True):
    """Blocks that this engine stored and that serve now, for KV cache events: a chain below `parent`."""

    instance: str
    keys: list[bytes]
    parent: bytes | None
    tokens: Sequence[int]
    adapter: tuple[str, str] | None
    tier: str = ""
