"""Which weights an engine says it has, over resets of its caches."""

from pathlib import Path

import pytest

from engine_adapters.vllm.settings import Settings, SettingsRefused, settings_of
from engine_adapters.vllm.weights import Weights


def test_row23_a_new_version_in_the_file_is_taken_with_a_reset(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text("step-100\n")
    weights = Weights(Settings(group="g", weight_version_file=str(file)))
    assert weights.version() == "step-100"
    file.write_text("step-200\n")
    assert weights.version() == "step-100", "what is in memory changes with a reset, not with a file"
    assert weights.renewed() == "step-200"
    assert weights.version() == "step-200"


@pytest.mark.parametrize("settings", [Settings(group="g"), Settings(group="g", weight_version="7")])
def test_row23_a_reset_without_a_new_version_shares_with_nobody(settings: Settings) -> None:
    one, other = Weights(settings), Weights(settings)
    before = one.version()
    assert before == other.version()
    after = {one.renewed(), other.renewed(), one.renewed()}
    assert len(after) == 3
    assert before not in after


def test_row23_a_file_that_cannot_be_read_any_more_counts_as_a_change(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text("a")
    weights = Weights(Settings(group="g", weight_version_file=str(file)))
    file.unlink()
    assert weights.renewed().startswith("a+reset-")
    file.write_bytes(b"\xff\xfe")
    assert "+reset-" in weights.renewed()
    file.write_text("b")
    assert weights.renewed() == "b"


@pytest.mark.parametrize("content", [None, b"\xff", b"x" * 300, b"a\x00b"])
def test_a_version_file_that_cannot_be_is_refused_at_the_start(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "version"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsRefused, match="weight_version_file"):
        Weights(Settings(group="g", weight_version_file=str(file)))


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "group"),
        ({"group": "g", "urll": "x"}, "urll"),
        ({"group": "g", "timeout_ms": 0}, "timeout_ms"),
        ({"group": "g", "timeout_ms": "5"}, "timeout_ms"),
        ({"group": "g", "url": "https://x"}, "url"),
        ({"group": "g", "load": "layerwise"}, "load"),
        ({"group": ""}, "group"),
        ({"group": "g", "instance_prefix": "no name"}, "instance_prefix"),
        ({"group": "g", "instance_prefix": "x" * 65}, "instance_prefix"),
        ({"group": "g", "engine": "a/b"}, "engine"),
    ],
)
def test_a_setting_that_cannot_be_is_named(extra: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsRefused, match=words):
        settings_of(extra)
