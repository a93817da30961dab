"""What vLLM's configuration becomes in the namespace: alike in all of an engine's processes, and nothing that
decides bytes is left out."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import KVCacheConfig, KVQuantMode

from engine_adapters.namespace import Namespace
from engine_adapters.vllm import describe as module
from engine_adapters.vllm.describe import agreed, describe, kv_format
from engine_adapters.vllm.layout import LayoutRefused, layout_of
from engine_adapters.vllm.settings import Settings
from tests.vllm.config_house import BLOCK, cache_configs, engine_config, full, gemma_specs, llama_specs

pytestmark = pytest.mark.vllm

SETTINGS = Settings(group="g")


def described(
    change: Callable[[Any], None] = lambda config: None, settings: Settings = SETTINGS, **more: Any
) -> Namespace:
    """The namespace of the tiny Llama after a change of its engine's configuration."""
    config = engine_config()
    scheduler, _ = cache_configs(config, llama_specs())
    change(config)
    return describe(config, scheduler, settings, **more)


@pytest.fixture(scope="module")
def plain() -> Namespace:
    return described()


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_scheduler_and_workers_say_the_same(kind: str) -> None:
    config = engine_config(kind)
    config.parallel_config.tensor_parallel_size = 2
    scheduler, workers = cache_configs(config, gemma_specs() if kind == "gemma" else llama_specs(), 2)
    ours, *theirs = (describe(config, one, SETTINGS) for one in (scheduler, *workers))
    assert all(one == ours for one in theirs)
    assert (ours.tp, ours.layout, ours.kv_heads) == (2, "LBHNC", 2)
    assert ours.layers == len(gemma_specs() if kind == "gemma" else llama_specs())


def test_another_process_says_the_same(plain: Namespace) -> None:
    """Nothing hangs on the order of sets, on addresses or on the moment."""
    program = (
        "from tests.vllm.test_describe import described\n"
        "import msgspec; print('SAID', msgspec.json.encode(described()).decode())"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    said = next(line for line in run.stdout.splitlines() if line.startswith("SAID "))
    # each process made its tiny model anew, from one seed, in another folder
    assert json.loads(said.removeprefix("SAID ")) == msgspec.to_builtins(plain)


def put(path: str, value: Any) -> Callable[[Any], None]:
    *way, last = path.split(".")

    def change(config: Any) -> None:
        for name in way:
            config = getattr(config, name)
        object.__setattr__(config, last, value)

    return change


def rope(**values: Any) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        text = config.model_config.hf_text_config
        for name, value in values.items():
            setattr(text, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (put("model_config.dtype", torch.float16), {"dtype"}),
        (put("model_config.quantization", "awq"), {"quantization"}),
        (put("model_config.quantization_config", {"bits": 4}), {"model_config"}),
        (put("model_config.hf_config.rms_norm_eps", 0.5), {"model_config"}),
        (put("model_config.disable_sliding_window", True), {"model_config"}),
        (put("model_config.model_class_overrides", {"Llama": "mine:Llama"}), {"model_config"}),
        (put("model_config.code_revision", "abc"), {"model_config"}),
        (put("additional_config", {"plugin": 1}), {"model_config"}),
        (rope(rope_parameters={"rope_type": "default", "rope_theta": 1.0}), {"model_config", "rope"}),
        (rope(max_position_embeddings=77), {"model_config", "rope"}),
        (put("cache_config.prefix_caching_hash_algo", "sha256_cbor"), {"hash_algorithm", "canary"}),
        (put("load_config.load_format", "dummy"), {"model"}),
        (put("parallel_config.tensor_parallel_size", 2), {"tp"}),
        (put("cache_config.num_gpu_blocks", 9), set()),
        (put("model_config.max_model_len", 99), set()),
        (put("model_config.served_model_name", "other"), set()),
        (put("parallel_config.data_parallel_rank", 3), set()),
    ],
)
def test_a_change_is_in_its_field(plain: Namespace, change: Callable[[Any], None], fields: set[str]) -> None:
    other = described(change)
    assert {
        name for name in Namespace.__struct_fields__ if getattr(other, name) != getattr(plain, name)
    } == fields


def test_settings_are_in_their_fields(plain: Namespace) -> None:
    other = described(
        settings=Settings(group="h", tenant="t", salt="s", revision="r", engine="e", timeout_ms=7),
        weight_version="7",
    )
    differ = {name for name in Namespace.__struct_fields__ if getattr(other, name) != getattr(plain, name)}
    assert differ == {"tenant", "salt", "revision", "weight_version"}


def test_positions_that_stretch_with_the_engines_length_name_it() -> None:
    scaled = {"rope_type": "longrope", "rope_theta": 1.0, "short_factor": [1.0], "long_factor": [2.0]}

    def change(length: int) -> Callable[[Any], None]:
        def both(config: Any) -> None:
            rope(rope_parameters=scaled)(config)
            config.model_config.max_model_len = length

        return both

    assert described(change(256)).rope != described(change(512)).rope


def cache_of(**changes: Any) -> KVCacheConfig:
    specs = {name: full(**changes) for name in llama_specs()}
    return cache_configs(engine_config(), specs)[0]


def test_eight_bit_pages_name_their_kind_and_scales(plain: Namespace) -> None:
    config = engine_config()
    config.cache_config.cache_dtype = "fp8_e4m3"
    eight = cache_of(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    one = describe(config, eight, SETTINGS)
    assert (one.kv_dtype, one.kv_scales, plain.kv_scales) == ("fp8_e4m3:uint8", "checkpoint", "")
    config.cache_config.cache_dtype = "fp8_e5m2"
    assert describe(config, eight, SETTINGS).digest() != one.digest() != plain.digest()


@pytest.mark.parametrize("changes", [{"num_kv_heads": 1}, {"head_size": 64}, {"dtype": torch.float16}])
def test_specs_are_in_the_groups(plain: Namespace, changes: dict[str, Any]) -> None:
    other = describe(engine_config(), cache_of(**changes), SETTINGS)
    assert other.groups != plain.groups and other.digest() != plain.digest()


def test_blocks_of_another_size_are_others(plain: Namespace) -> None:
    config = engine_config()
    config.cache_config.block_size = 2 * BLOCK
    other = describe(
        config,
        cache_configs(config, {name: full(block_size=2 * BLOCK) for name in llama_specs()})[0],
        SETTINGS,
    )
    assert (plain.block_size_tokens, other.block_size_tokens) == (BLOCK, 2 * BLOCK)


def hub(commit: str | None, revision: str | None = None) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        config.model_config.model = "nobody/no-such-model"
        config.model_config.model_weights = ""
        config.model_config.revision = revision
        config.model_config.hf_config._commit_hash = commit

    return change


def test_a_model_of_a_hub_is_named_with_its_commit() -> None:
    one = described(hub("c0ffee", "main"))
    assert (one.model, one.revision) == ("nobody/no-such-model", "main@c0ffee")
    assert described(hub("beef", "main")).digest() != one.digest()
    assert described(hub(None), Settings(group="g", revision="mine")).revision == "mine"
    assert described(hub(None), weight_version="3").weight_version == "3"


def test_a_branch_that_moves_is_no_name() -> None:
    with pytest.raises(LayoutRefused, match="set revision or weight_version"):
        described(hub(None, "main"))


def test_a_folder_that_cannot_be_told_apart_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LayoutRefused, match="no weights"):
        described(put("model_config.model", str(tmp_path)))


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(LayoutRefused, match="cannot be compared"):
        described(put("additional_config", {"plugin": object()}))


def test_what_the_service_would_not_take_is_refused_at_start() -> None:
    with pytest.raises(LayoutRefused, match="tenant: expected at most"):
        described(settings=Settings(group="g", tenant="a\nb"))


class Layer(AttentionLayerBase):
    """A layer as the model has it, as far as it is asked."""

    def __init__(self, backend: str = "CPU_ATTN") -> None:
        self.backend = backend
        self.head_size = 32
        self.kv_cache_dtype = "auto"

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: self.backend)

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return None


def with_layers(*backends: str) -> Any:
    config = engine_config()
    context = config.compilation_config.static_forward_context
    for name, backend in zip(llama_specs(), backends, strict=False):
        context[name] = Layer(backend)
    return config


def test_row24_who_packs_the_pages_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CPUs with other instruction sets order the same values otherwise."""
    config = with_layers("CPU_ATTN", "CPU_ATTN")
    scheduler, _ = cache_configs(config, llama_specs())
    layout = layout_of(config, scheduler)
    here = kv_format(config, layout)
    assert here.startswith("cpu:CPU_ATTN/")
    monkeypatch.setattr(
        "vllm.v1.attention.backends.cpu_attn._get_attn_isa", lambda *asked: "elsewhere" if asked[1] else ""
    )
    there = kv_format(config, layout)
    assert there == "cpu:CPU_ATTN/elsewhere" != here
    assert kv_format(with_layers("FLASH_ATTN", "FLASH_ATTN"), layout) == "cpu:FLASH_ATTN"
    with pytest.raises(LayoutRefused, match="CPU_ATTN, FLASH_ATTN"):
        kv_format(with_layers("CPU_ATTN", "FLASH_ATTN"), layout)
    assert kv_format(engine_config(), layout) == ""


def test_the_workers_complete_what_the_scheduler_knows(plain: Namespace) -> None:
    own = msgspec.structs.replace(plain, tp=2)
    told = msgspec.structs.replace(own, kv_format="cpu:CPU_ATTN/amx")
    # workers hash no block and may read the version a moment later
    late = msgspec.structs.replace(told, canary="", hash_seed="", weight_version="x")
    whole = agreed(own, {0: told, 1: late})
    assert whole == msgspec.structs.replace(own, kv_format=told.kv_format)
    for name in set(Namespace.__struct_fields__) - module.NOT_SHARED:
        value = getattr(told, name)
        other = msgspec.structs.replace(told, **{name: value + 1 if isinstance(value, int) else value + "x"})
        with pytest.raises(LayoutRefused, match=f"^{name} is .* in rank 1"):
            agreed(own, {0: told, 1: other})
    with pytest.raises(LayoutRefused, match="2 ranks"):
        agreed(own, {0: told})
    with pytest.raises(LayoutRefused, match="no attention layers"):
        agreed(own, {0: own, 1: own})
