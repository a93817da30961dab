"""Opening a storage: what is wrong is named, together with what would be right."""

from pathlib import Path

import pytest

from dataplane import OpenFailed, open_backend


@pytest.mark.parametrize(
    ("kind", "options", "field", "says"),
    [
        ("s3", {}, "kind", "posix"),
        ("", {}, "kind", "posix"),
        ("posix", {}, "options.root", "absolute"),
        ("posix", {"root": "relative/path"}, "options.root", "absolute"),
        ("posix", {"root": "/with\0nul"}, "options.root", "absolute"),
        ("posix", {"root": "{tmp}/absent"}, "options.root", "mounted"),
        ("posix", {"root": "{tmp}/file"}, "options.root", "mounted"),
        ("posix", {"root": "{tmp}", "fsink": "data"}, "options.fsink", "root, fsync, threads"),
        ("posix", {"root": "{tmp}", "fsync": "always"}, "options.fsync", "none, data, full"),
        ("posix", {"root": "{tmp}", "threads": "0"}, "options.threads", "1..64"),
        ("posix", {"root": "{tmp}", "threads": "65"}, "options.threads", "1..64"),
        ("posix", {"root": "{tmp}", "threads": "-1"}, "options.threads", "1..64"),
        ("posix", {"root": "{tmp}", "threads": "9" * 5_000}, "options.threads", "1..64"),
        ("posix", {"root": "{tmp}", "threads": "٣"}, "options.threads", "1..64"),
        ("posix", {"root": "{tmp}", "threads": 4}, "options.threads", "text"),
    ],
)
def test_what_cannot_be_opened_says_why(
    tmp_path: Path, kind: str, options: dict[str, object], field: str, says: str
) -> None:
    (tmp_path / "file").touch()
    filled = {
        name: value.format(tmp=tmp_path) if isinstance(value, str) else value
        for name, value in options.items()
    }
    with pytest.raises(OpenFailed) as failed:
        open_backend(kind, filled)  # type: ignore[arg-type]
    assert failed.value.field == field
    assert says in failed.value.detail
    assert not (tmp_path / "absent").exists(), "a root is never created"


@pytest.mark.parametrize(("fsync", "survives"), [("none", "process"), ("data", "power"), ("full", "power")])
def test_capabilities_say_what_an_acknowledged_write_survives(
    tmp_path: Path, fsync: str, survives: str
) -> None:
    backend = open_backend("posix", {"root": str(tmp_path), "fsync": fsync})
    assert backend.capabilities.kind == "posix"
    assert backend.capabilities.survives == survives
    backend.close()
