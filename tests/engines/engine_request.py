"""A request of the fake engine, with the names that vLLM's has."""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from tests.engines.oracle import Shape, block_keys


class Status(IntEnum):
    """Where a request is; from `stopped` on it is finished."""

    waiting = 0
    waiting_for_remote = 1
    running = 2
    preempted = 3
    stopped = 4
    aborted = 5
    error = 6


class Adapter(NamedTuple):
    """A LoRA adapter as vLLM names it; `weights` is what its files held when the engine loaded it."""

    lora_name: str
    lora_path: str
    weights: str
    lora_int_id: int = 1

    @property
    def label(self) -> str:
        """What vLLM puts into the keys of its blocks: not the weights."""
        return f"{self.lora_name}@{self.lora_path}"


class FakeRequest:
    """One request; `max_tokens` outputs are wanted."""

    def __init__(
        self,
        shape: Shape,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        salt: str = "",
        adapter: Adapter | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> None:
        self._shape = shape
        self.request_id = request_id
        self.prompt = tuple(prompt)
        self.all_token_ids = list(prompt)
        self.max_tokens = max_tokens
        self.cache_salt = salt
        self.lora_request = adapter
        self.trace_headers = trace_headers
        self.kv_transfer_params: dict[str, object] | None = None
        self.mm_features: tuple[object, ...] = ()
        self.prompt_embeds: object = None
        self.block_hashes: list[bytes] = []
        self.status = Status.waiting
        self.num_prompt_tokens = len(prompt)
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_output_placeholders = 0
        self.num_stale_output_tokens = 0
        self.num_preemptions = 0
        self.last_step = 0
        self._hash()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def outputs(self) -> tuple[int, ...]:
        return tuple(self.all_token_ids[self.num_prompt_tokens :])

    @property
    def finished(self) -> bool:
        return self.status >= Status.stopped

    @property
    def holds_blocks(self) -> bool:
        """While it waits: whether it has engine blocks."""
        return self.num_computed_tokens > 0 or self.status == Status.waiting_for_remote

    def append(self, token: int) -> None:
        self.all_token_ids.append(token)
        self._hash()

    def _hash(self) -> None:
        start = len(self.block_hashes) * self._shape.block_tokens
        parent = self.block_hashes[-1] if self.block_hashes else b""
        name = self.lora_request.label if self.lora_request else ""
        self.block_hashes += block_keys(self._shape, self.all_token_ids, self.cache_salt, name, start, parent)
