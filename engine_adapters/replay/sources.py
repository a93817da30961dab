"""Real text that every machine with Python has: the standard library's own source files, and a simple
tokeniser."""

import re
import sysconfig
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

from engine_adapters.replay.hashing import TOKEN_BYTES

PROJECTS = (
    "asyncio", "collections", "concurrent/futures", "ctypes", "email", "html", "http", "importlib", "json",
    "logging", "multiprocessing", "re", "sqlite3", "tomllib", "unittest", "urllib", "wsgiref", "xmlrpc",
    "zoneinfo",
)  # fmt: skip
"""Packages of the library that serve as projects an agent works on; those absent from this Python are left
out."""

FILE_BYTES_MIN = 1_024
FILE_BYTES_MAX = 48 * 1_024
"""Files outside these bounds are left out: next to nothing, or a prompt of their own."""


class SourcesError(Exception):
    """This Python came without readable library sources (some packagings ship compiled files only)."""


class Tokeniser:
    """Cuts text into words, digits, runs of space and signs. The id of a piece follows from the piece
    alone, so every process gives the same ids without sharing a vocabulary."""

    _PIECES = re.compile(r"[A-Za-z_]{1,12}|[0-9]{1,3}|\n[ \t]*|[ \t]+|[^\sA-Za-z_0-9]|\s")

    def __init__(self) -> None:
        self._ids: dict[str, bytes] = {}

    def encode(self, text: str) -> bytes:
        """Packed token ids (`hashing.pack_tokens`) of `text`."""
        ids = self._ids
        return b"".join([ids.get(piece) or self._learn(piece) for piece in self._PIECES.findall(text)])

    def _learn(self, piece: str) -> bytes:
        token = blake2b(piece.encode("utf-8", "surrogatepass"), digest_size=TOKEN_BYTES).digest()
        self._ids[piece] = token
        return token


class Library:
    """Projects and their files, in an order that depends on nothing but the files."""

    def __init__(self, root: Path | None = None) -> None:
        """`root`: where the sources are (default: this Python's library). Raises `SourcesError` when there
        are none."""
        self.root = root or Path(sysconfig.get_path("stdlib"))
        self.projects: dict[str, list[str]] = {}
        for project in PROJECTS:
            if names := self._usable(self.root / project):
                self.projects[project] = names
        if not self.projects:
            raise SourcesError(f"no Python source files of the standard library under {self.root}")
        self._texts: dict[str, str] = {}

    def text(self, name: str) -> str:
        """The text of the file `name`, a path relative to the library."""
        if name not in self._texts:
            self._texts[name] = (self.root / name).read_text(encoding="utf-8", errors="replace")
        return self._texts[name]

    @cached_property
    def map(self) -> str:
        """What an agent is told first about a repository: its files, each with what it says about itself."""
        lines = []
        for project, names in self.projects.items():
            lines.append(f"{project}/")
            lines += [f"  {Path(name).name}: {_headline(self.text(name))}" for name in names]
        return "\n".join(lines)

    def _usable(self, folder: Path) -> list[str]:
        return [
            path.relative_to(self.root).as_posix()
            for path in sorted(folder.glob("*.py"))
            if FILE_BYTES_MIN <= path.stat().st_size <= FILE_BYTES_MAX
        ]


def _headline(text: str) -> str:
    """The first line of a module's docstring, or what it defines first."""
    if found := re.match(r'(?:\s*#.*\n)*\s*[rR]?"""\s*(.+)', text):
        return found[1].strip().rstrip('"')
    if found := re.search(r"^(?:def|class) (\w+)", text, re.MULTILINE):
        return f"defines {found[1]}"
    return "a module"
