"""Digests of models and adapters: what they contain, wherever they lie."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_adapters.namespace import contents
from engine_adapters.namespace.contents import ContentsRefused, adapter_folder, model_path

CONFIG = json.dumps({"model_type": "llama"})


def safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    """A file as the library writes it."""
    header, at = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    encoded = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(tensors.values()))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose weights count as large."""
    monkeypatch.setattr(contents, "WHOLE_BYTES_MAX", 1024)
    monkeypatch.setattr(contents, "SAMPLE_BYTES", 16)
    folder = tmp_path / "a" / "llama-ft"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(CONFIG)
    (folder / "tokenizer.json").write_text("{}")
    draw = random.Random(1)
    safetensors(
        folder / "model.safetensors",
        {"embed": draw.randbytes(4000), "layer": draw.randbytes(4000), "scale": b"\1\2\3\4"},
    )
    return folder


def test_a_model_is_the_same_under_two_paths(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "named-otherwise"
    shutil.copytree(model, copy)
    assert model_path(copy) == model_path(model)
    (copy / "tokenizer.json").write_text("another")
    (copy / "README.md").write_text("more")
    assert model_path(copy) == model_path(model), "keys are made of tokens, not of texts"


def flip(place: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[place] ^= 1
        file.write_bytes(data)

    return change


def new_weights(folder: Path) -> None:
    draw = random.Random(2)
    safetensors(
        folder / "model.safetensors",
        {"embed": draw.randbytes(4000), "layer": draw.randbytes(4000), "scale": b"\1\2\3\4"},
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "config.json").write_text(CONFIG + " "),
        lambda folder: (folder / "modeling.py").write_text("x = 1"),
        lambda folder: (folder / "hf_quant_config.json").write_text("{}"),
        lambda folder: (folder / "more.safetensors").write_bytes(b"1"),
        lambda folder: (folder / "model.safetensors").rename(folder / "other.safetensors"),
        new_weights,
        flip(-1),
        flip(-4 - 4000),
        flip(-4 - 2000),
        flip(-4 - 8000),
    ],
)
def test_another_model_of_the_same_name_differs(
    model: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    other = tmp_path / "b" / model.name
    shutil.copytree(model, other)
    change(other)
    assert model_path(other) != model_path(model)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.gguf"])
def test_weights_of_other_kinds_are_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(contents, "WHOLE_BYTES_MAX", 100)
    monkeypatch.setattr(contents, "SAMPLE_BYTES", 1)
    file = tmp_path / name
    file.write_bytes(random.Random(3).randbytes(1000))
    first = model_path(file)
    file.write_bytes(random.Random(4).randbytes(1000))
    assert model_path(file) != first


def test_what_cannot_be_told_apart_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ContentsRefused, match=r"no config\.json"):
        model_path(tmp_path)
    (model / "model.safetensors").write_bytes(b"\xff" * 2000)
    with pytest.raises(ContentsRefused, match="not a safetensors file"):
        model_path(model)
    encoded = b'{"a": {"data_offsets": "?"}}'
    (model / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(2000))
    with pytest.raises(ContentsRefused, match="cannot be read"):
        model_path(model)
    (model / "model.safetensors").unlink()
    with pytest.raises(ContentsRefused, match="no weights"):
        model_path(model)
    with pytest.raises(ContentsRefused, match="no adapter's weights"):
        adapter_folder(model)


def test_every_byte_of_an_adapter_counts(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    weights = tmp_path / "adapter_model.safetensors"
    data = bytearray(random.Random(5).randbytes(contents.WHOLE_BYTES_MAX + 100_000))
    weights.write_bytes(data)
    first = adapter_folder(tmp_path)
    data[contents.WHOLE_BYTES_MAX // 3 + 1] ^= 1
    weights.write_bytes(data)
    second = adapter_folder(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"r": 16}')
    assert len({first, second, adapter_folder(tmp_path)}) == 3
