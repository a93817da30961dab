"""Attachments as they are configured: one text each, `KIND name=value name=value`.

A text, so that flags, environment and file all say it alike. Several values of one option are parted by `;`.
"""

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from metaservice.publish import emitters

RANK_MAX = 2**31 - 1


class AttachmentError(ValueError):
    """A row that says something impossible; the message has the row's kind, the option, and what would be
    right."""


class Option(NamedTuple):
    """One option of a kind."""

    default: str | None
    """None: it has to be given."""
    form: str
    """`url`, `endpoint`, `endpoints`, `names`, `name`, `emitter`, `switch`, or a number's lowest value."""


class Row(NamedTuple):
    """One attachment."""

    kind: str
    options: Mapping[str, str]

    def text(self, name: str) -> str:
        return self.options[name]

    def number(self, name: str) -> int:
        return int(self.options[name])

    def switch(self, name: str) -> bool:
        return self.options[name] == "true"

    def several(self, name: str) -> tuple[str, ...]:
        return tuple(part for piece in self.options[name].split(";") if (part := piece.strip()))


KINDS: dict[str, dict[str, Option]] = {
    "dynamo-indexer": {
        "url": Option(None, "url"),
        "model": Option("", "name"),
        "instance": Option("", "name"),
        "spare_rank": Option("1000", "1"),
        "engine_streams": Option("false", "switch"),
        "poll_ms": Option("2000", "100"),
        "timeout_ms": Option("2000", "10"),
    },
    "dynamo-peer": {
        "port": Option(None, "1"),
    },
    "generic": {
        "port": Option(None, "1"),
        "instance": Option(None, "name"),
        "node": Option("", "name"),
        "rank": Option("0", "0"),
        "emitter": Option("vllm", "emitter"),
    },
    "llm-d": {
        "endpoint": Option(None, "endpoints"),
        "model": Option("", "name"),
        "instance": Option("", "name"),
        "queue": Option("10000", "100"),
    },
    "merge": {
        "engines": Option(None, "names"),
        "port_base": Option(None, "1"),
        "ring": Option("10000", "100"),
    },
}
"""Every kind with its options."""


def parse(text: str) -> Row:
    """The row that `text` is. Raises AttachmentError."""
    kind, *pairs = text.split() or [""]
    known = KINDS.get(kind)
    if known is None:
        raise AttachmentError(f"there is no attachment {kind!r}; expected one of {', '.join(KINDS)}")
    given: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise AttachmentError(f"{kind}: {pair!r} is no option; expected name=value")
        if name not in known:
            raise AttachmentError(f"{kind}: there is no option {name}; expected one of {', '.join(known)}")
        if name in given:
            raise AttachmentError(f"{kind}: {name} is given twice; several values are parted by ';'")
        given[name] = value
    options: dict[str, str] = {}
    for name, option in known.items():
        value = given.get(name, option.default or "")
        if option.default is None and not value:
            raise AttachmentError(f"{kind}: {name} has to be given")
        if value and (expected := _fault(option.form, value)):
            raise AttachmentError(f"{kind}: {name} is {value!r}; expected {expected}")
        options[name] = value
    return Row(kind, options)


def ports(row: Row) -> range:
    """The ports that an attachment binds, none for most."""
    match row.kind:
        case "dynamo-peer" | "generic":
            return range(row.number("port"), row.number("port") + 1)
        case "merge":
            base = row.number("port_base")
            return range(base, base + 2 * len(row.several("engines")))
    return range(0)


def _fault(form: str, value: str) -> str:
    """What was expected instead of `value`, "" when it is right."""
    parts = [part.strip() for part in value.split(";") if part.strip()]
    match form:
        case "url":
            return "" if _is_url(value, ("http", "https")) else "a URL such as http://host:8090"
        case "endpoints":
            fine = parts and all(_is_url(part, ("tcp",)) for part in parts)
            return "" if fine else "endpoints such as tcp://host:5557"
        case "names":
            return "" if parts and len(parts) == len(set(parts)) else "names, each once"
        case "name":
            return ""
        case "emitter":
            return _no_emitter(value)
        case "switch":
            return "" if value in ("true", "false") else "true or false"
        case least:
            fine = value.isascii() and value.isdigit() and int(least) <= int(value) <= RANK_MAX
            return "" if fine else f"an integer of {least} or more"


def _no_emitter(value: str) -> str:
    try:
        emitters.make(value.replace(";", ","))
    except ValueError as error:
        return f"a dialect ({error})"
    return ""


def _is_url(text: str, schemes: tuple[str, ...]) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    bare = not (parts.path.strip("/") or parts.query or parts.fragment or parts.username)
    named = bool(parts.hostname) and port != 0 and (port is not None or "tcp" not in schemes)
    return parts.scheme in schemes and named and bare
