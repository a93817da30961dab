"""Engines that serve a model with LoRA adapters, and adapters of random weights for its attention.

`python -m tests.vllm.adapter_house OPTIONS` is such an engine: rounds come in as JSON lines on stdin, answers
go out on stdout.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Self

import msgspec

from metaservice.cli.local.process import launch_command, tail
from tests.accept.handle import ENVIRONMENT, STOP_TIMEOUT_S
from tests.accept.messages import EngineOptions

RANK = 8
RANGE = 0.3
"""Standard deviation of an adapter's weights: as large as the model's own, so that every token tells."""
ADAPTERS_MAX = 4


class Round(msgspec.Struct, frozen=True):
    """Prompts that are asked together: with an adapter, by name and folder, or of the base model. Before it
    the engine forgets its own prefix cache."""

    prompts: list[list[int]]
    max_tokens: int
    adapter: tuple[str, str] | None


class AdapterEngine:
    """One engine in a process of its own. Leaving its context lets it end in order."""

    def __init__(self, options: EngineOptions, log: Path) -> None:
        """`options` as for other engines."""
        self._log = log
        program = [sys.executable, "-m", "tests.vllm.adapter_house", msgspec.json.encode(options).decode()]
        with log.open("ab") as said:
            self._process = subprocess.Popen(
                launch_command(program),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait()

    def ask(
        self, prompts: list[list[int]], max_tokens: int, adapter: tuple[str, Path] | None = None
    ) -> list[list[int]]:
        """The greedy tokens behind each prompt."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        named = None if adapter is None else (adapter[0], str(adapter[1]))
        self._process.stdin.write(msgspec.json.encode(Round(prompts, max_tokens, named)) + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the engine ended; its log ends with:\n{tail(self._log)}"
        return msgspec.json.decode(line, type=list[list[int]])


def make_adapter(
    folder: Path, seed: int, *, layers: int = 2, hidden: int = 128, heads: int = 4, kv_heads: int = 2
) -> Path:
    """An adapter in PEFT's format for the queries and values of a Llama of this shape; its folder. What was
    there before is replaced."""
    import torch
    from safetensors.torch import save_file  # type: ignore[import-not-found]

    folder.mkdir(parents=True, exist_ok=True)
    chance = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(layers):
        for name, width in (("q_proj", hidden), ("v_proj", kv_heads * hidden // heads)):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = RANGE * torch.randn(RANK, hidden, generator=chance)
            weights[f"{module}.lora_B.weight"] = RANGE * torch.randn(width, RANK, generator=chance)
    save_file(weights, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_bytes(msgspec.json.encode(described))
    return folder


def _serve(options: EngineOptions, out: int) -> None:
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    from tests.accept.engine import arguments

    engine = LLMEngine.from_engine_args(arguments(options))
    numbers: dict[tuple[str, str], int] = {}
    for line in sys.stdin.buffer:
        asked = msgspec.json.decode(line, type=Round)
        assert engine.reset_prefix_cache()
        lora = None
        if asked.adapter is not None:
            number = numbers.setdefault(asked.adapter, len(numbers) + 1)
            lora = LoRARequest(asked.adapter[0], number, asked.adapter[1])
        params = SamplingParams(temperature=0.0, max_tokens=asked.max_tokens, ignore_eos=True)
        for row, prompt in enumerate(asked.prompts):
            engine.add_request(str(row), {"prompt_token_ids": prompt}, params, lora_request=lora)
        found: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    found[output.request_id] = list(output.outputs[0].token_ids)
        answers = [found[str(row)] for row in range(len(asked.prompts))]
        os.write(out, msgspec.json.encode(answers) + b"\n")
    engine.engine_core.shutdown()


if __name__ == "__main__":
    stdout = os.dup(1)
    os.dup2(2, 1)  # whoever prints: nothing but answers may reach stdout
    _serve(msgspec.json.decode(sys.argv[1], type=EngineOptions), stdout)
