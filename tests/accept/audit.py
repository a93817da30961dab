"""Was any page read that nobody had written? The engines' own records of pages say."""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from engine_adapters.vllm.audit import PageEntry


class Found(Struct, frozen=True):
    """`pages` that were loaded, and a sentence for each of them that was dirty."""

    pages: int
    dirty: list[str]


def read(paths: Iterable[Path]) -> Iterator[PageEntry]:
    """All entries; the last line of an engine that was killed may be cut off."""
    for path in paths:
        if path.exists():
            *lines, _ = path.read_bytes().split(b"\n")
            yield from parsed(lines)


def parsed(lines: Iterable[bytes]) -> Iterator[PageEntry]:
    """Whole lines as entries."""
    for line in lines:
        yield msgspec.json.decode(line, type=PageEntry)


def judge(entries: Iterable[PageEntry], killed: Collection[str] = ()) -> Found:
    """A page that was loaded is clean when some engine had copied just these bytes out of its memory, under
    the same key and part, and had written them to that very place, and that write was finished.

    An engine writes down that a write is finished after the service has said so, in the rank whose finish
    was the last; of the incarnations in `killed` that line may be missing, and the service's answer counts:
    it names no place before.
    """
    copied: dict[tuple[str, str, int], int] = {}
    written: dict[tuple[int, int, str], tuple[int, str]] = {}
    published: set[tuple[int, int]] = set()
    loaded: list[PageEntry] = []
    for entry in entries:
        place = (entry.location, entry.generation, entry.part)
        match entry.what:
            case "copied":
                page = (entry.key, entry.part, entry.checksum)
                copied[page] = min(entry.time_ns, copied.get(page, entry.time_ns))
            case "written":
                written[place] = (entry.checksum, entry.incarnation)
            case "published":
                published.add((entry.location, entry.generation))
            case "loaded":
                loaded.append(entry)
    dirty = []
    for entry in loaded:
        place = (entry.location, entry.generation, entry.part)
        checksum, writer = written.get(place, (0, ""))
        copied_ns = copied.get((entry.key, entry.part, entry.checksum))
        if copied_ns is None:
            why = "nobody copied these bytes out of an engine's memory for this key"
        elif copied_ns > entry.time_ns:
            why = "its bytes were copied out of an engine's memory later only"
        elif not writer:
            why = "nobody wrote to that place"
        elif checksum != entry.checksum:
            why = "other bytes were written to that place"
        elif (entry.location, entry.generation) not in published and writer not in killed:
            why = "its write was never finished"
        else:
            continue
        dirty.append(
            f"{entry.engine}, request {entry.request}, block {entry.key[:16]} part {entry.part} at"
            f" {entry.location}-{entry.generation}: {why}"
        )
    return Found(len(loaded), dirty)
