"""Reads Mooncake-format traces: one JSON object a line, plain or gzip.

`hash_ids` name the blocks of a prompt, root first; equal ids are equal blocks with equal prefixes. The last
id may name a block that the prompt does not fill; traces count it as a block, and so does the replay.
Timestamps are checked and otherwise left aside: a replay runs as fast as its engines go."""

import gzip
import re
import zlib
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import IO, Annotated

import msgspec

from engine_adapters.replay.requests import Request

KEY_LENGTH = 32
LINE_BYTES_MAX = 64 * 1024 * 1024
BLOCK_SIZE_TOKENS_DEFAULT = 512
"""Mooncake's own files do not say; the format's block size. Also taken where a trace says 0: blocks of
varying size."""

GZIP_MAGIC = b"\x1f\x8b"


class TraceError(Exception):
    """A trace that cannot be replayed: which file, which line (0: the file as a whole), which field, and
    why."""

    def __init__(self, path: Path, line: int, field: str, reason: str) -> None:
        self.path = path
        self.line = line
        self.field = field
        self.reason = reason
        place = f"{path}:{line}" if line else str(path)
        super().__init__(f"{place}: {field + ': ' if field else ''}{reason}")


Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Row(msgspec.Struct):
    """One line of a trace. Fields that the replay does not know are ignored: variants of the format add
    some."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Natural
    hash_ids: list[Natural]
    block_size: Natural = BLOCK_SIZE_TOKENS_DEFAULT
    session_id: str | int = ""


class Trace:
    """A trace file, read once from start to end.

    The key of an id follows from the id alone, so that a cut of the trace has the same keys as the whole.
    An id that comes under another parent than the first time names another prefix, whatever the file says:
    its key is then chained over that parent, and `rechained` counts how often that was needed."""

    def __init__(self, path: Path, *, limit: int | None = None) -> None:
        """`limit`: at most that many requests. Raises `TraceError` when the first line cannot be read."""
        self.path = path
        self.rechained = 0
        self._limit = limit
        self._parents: dict[int, bytes] = {}
        first = next(self._rows(), None)
        if first is None:
            raise TraceError(path, 0, "", "holds no request")
        self._block_size = first[1].block_size
        self.block_size_tokens = first[1].block_size or BLOCK_SIZE_TOKENS_DEFAULT

    def __iter__(self) -> Iterator[Request]:
        """The requests in the order of the file. Raises `TraceError` at the first line that is not one."""
        self.rechained = 0
        self._parents = {}
        for index, (line, row) in enumerate(islice(self._rows(), self._limit)):
            if row.block_size != self._block_size:
                reason = (
                    f"is {row.block_size}, and {self._block_size} before: one instance has one block size"
                )
                raise TraceError(self.path, line, "block_size", reason)
            yield Request(
                index=index,
                session=str(row.session_id),
                tokens_count=row.input_length,
                keys=tuple(self._keys(line, row.hash_ids)),
                ids=tuple(row.hash_ids),
            )

    def _keys(self, line: int, ids: list[int]) -> Iterator[bytes]:
        if len(set(ids)) != len(ids):
            reason = "names a block twice, and no block has itself before it"
            raise TraceError(self.path, line, "hash_ids", reason)
        parent = b""
        for number in ids:
            first_parent = self._parents.setdefault(number, parent)
            if first_parent != parent:
                self.rechained += 1
                key = _digest(parent + number.to_bytes(8, "little"))
            else:
                key = _digest(number.to_bytes(8, "little"))
            yield key
            parent = key

    def _rows(self) -> Iterator[tuple[int, Row]]:
        decoder = msgspec.json.Decoder(Row)
        for line, text in self._lines():
            if not text.strip():
                continue
            try:
                yield line, decoder.decode(text)
            except msgspec.ValidationError as error:
                field, reason = _explained(error)
                raise TraceError(self.path, line, field, reason) from None
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise TraceError(self.path, line, "", f"is not one JSON object: {error}") from None

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        line = 0
        try:
            with self.path.open("rb") as plain:
                packed = plain.read(2) == GZIP_MAGIC
                plain.seek(0)
                file: IO[bytes] = gzip.GzipFile(fileobj=plain) if packed else plain  # type: ignore[assignment]
                while text := file.readline(LINE_BYTES_MAX + 1):
                    line += 1
                    if len(text) > LINE_BYTES_MAX:
                        raise TraceError(self.path, line, "", f"is longer than {LINE_BYTES_MAX} bytes")
                    yield line, text
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(self.path, line + 1, "", f"is damaged: {error}") from None
        except OSError as error:
            raise TraceError(self.path, 0, "", f"cannot be read: {error.strerror or error}") from None


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=KEY_LENGTH, person=b"ucm-trace").digest()


def _explained(error: msgspec.ValidationError) -> tuple[str, str]:
    """(field, reason) of a message such as "Expected `int`, got `str` - at `$.input_length`"."""
    text = str(error)
    if at := re.search(r" - at `\$\.?(.+?)`$", text):
        return at[1], text[: at.start()]
    if missing := re.search(r"required field `(.+?)`", text):
        return missing[1], "is missing"
    return "", text
