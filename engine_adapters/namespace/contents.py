"""Digests of what lies in folders: models and LoRA adapters.

Names say nothing: two folders called `llama-ft` may hold different weights, and one model may lie under two
paths. What is read decides.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")
SETTINGS = (
    "config.json",
    "params.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "adapter_config.json",
)
"""Files that say how weights become a model. Tokenizers are not among them: keys are made of tokens."""

WHOLE_BYTES_MAX = 8 << 20
"""A file up to here is read whole."""
SAMPLE_BYTES = 4096
SAMPLES = 512
"""Of a larger file so many samples are read, spread evenly, beside its head and its end."""
HEADER_BYTES_MAX = 64 << 20
DIGEST_LENGTH = 32

_LENGTH_BYTES = 8


class ContentsRefused(ValueError):
    """A folder cannot be described: the message says why and what to do."""


def model_path(path: Path) -> str:
    """The digest of a model's folder, or of the one file it is: 32 hex digits.

    Read are the settings, code of the model's own, and of each weights file its name, its size and samples:
    two per tensor of a safetensors file (beginning and middle), 512 of any other. So it takes a second for
    the largest models, and another fine-tune of the same model differs. It cannot see a change of a few
    weights between samples: then `weight_version` has to say so.

    Raises ContentsRefused when there is no `config.json` (or `params.json`) or no weights, OSError when they
    cannot be read.
    """
    if path.is_file():
        return _digest(path.parent, [path], sampled=True)
    chosen = [one for one in sorted(path.iterdir()) if one.is_file() and _counts(one)]
    if not any(one.name in ("config.json", "params.json") for one in chosen):
        raise ContentsRefused(f"{path}: no config.json; it is no model that can be told from others")
    if not any(one.suffix in WEIGHTS for one in chosen):
        raise ContentsRefused(f"{path}: no weights ({', '.join(WEIGHTS)}); set weight_version and revision")
    return _digest(path, chosen, sampled=True)


def adapter_folder(folder: Path) -> str:
    """The digest of a LoRA adapter's whole content: 32 hex digits.

    Every byte counts, since an adapter that is trained anew has the same names and sizes. Takes the time of
    reading it, so never from the engine's scheduler. Raises ContentsRefused when it is no adapter's, OSError.
    """
    chosen = [one for one in sorted(folder.iterdir()) if one.is_file() and _counts(one)]
    if not any(one.suffix in WEIGHTS for one in chosen):
        raise ContentsRefused(f"{folder}: no adapter's weights ({', '.join(WEIGHTS)})")
    return _digest(folder, chosen, sampled=False)


def _counts(file: Path) -> bool:
    return file.suffix in WEIGHTS or file.suffix == ".py" or file.name in SETTINGS


def _digest(folder: Path, files: list[Path], *, sampled: bool) -> str:
    whole = hashlib.sha256()
    for file in files:
        name = file.relative_to(folder).as_posix()
        if file.suffix in WEIGHTS and sampled:
            content = _sampled(file)
        else:
            with file.open("rb") as opened:
                content = hashlib.file_digest(opened, "sha256").digest()
        whole.update(msgspec.json.encode([name, file.stat().st_size, content.hex()]))
    return whole.hexdigest()[:DIGEST_LENGTH]


def _sampled(file: Path) -> bytes:
    """A digest of a weights file's header and of samples of it."""
    with file.open("rb", buffering=0) as opened:
        size = os.fstat(opened.fileno()).st_size
        if size <= WHOLE_BYTES_MAX:
            return hashlib.file_digest(opened, "sha256").digest()
        digest = hashlib.sha256()
        header, places = b"", iter(_spread(size))
        if file.suffix == ".safetensors":
            header = _header(opened, size)
            places = _tensors(header)
        digest.update(header)
        for place in places:
            digest.update(os.pread(opened.fileno(), SAMPLE_BYTES, place))
        digest.update(os.pread(opened.fileno(), SAMPLE_BYTES, size - SAMPLE_BYTES))
        return digest.digest()


def _spread(size: int) -> Iterator[int]:
    step = max(1, size // SAMPLES)
    return iter(range(0, size, step))


def _header(opened: BinaryIO, size: int) -> bytes:
    """The header of a safetensors file, with its length. Raises ContentsRefused."""
    length = int.from_bytes(os.pread(opened.fileno(), _LENGTH_BYTES, 0), "little")
    if not 2 <= length <= min(HEADER_BYTES_MAX, size - _LENGTH_BYTES):
        raise ContentsRefused(f"{opened.name}: not a safetensors file")
    return os.pread(opened.fileno(), _LENGTH_BYTES + length, 0)


def _tensors(header: bytes) -> Iterator[int]:
    """Where to sample: the beginning and the middle of each tensor."""
    try:
        entries = msgspec.json.decode(header[_LENGTH_BYTES:])
        spans = sorted(
            tuple(entry["data_offsets"]) for name, entry in entries.items() if name != "__metadata__"
        )
        for begin, end in spans:
            yield len(header) + begin
            yield len(header) + (begin + end) // 2
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ContentsRefused(f"the header of a safetensors file cannot be read: {error!r}") from None
