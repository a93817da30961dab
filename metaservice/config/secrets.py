"""What of a secret may be seen: its presence, and of a URL everything but the password."""

from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

HIDDEN = "***"
SECRETS = frozenset({"postgres_dsn", "etcd_password"})
_OPEN = frozenset({
    "application_name",
    "connect_timeout",
    "host",
    "hostaddr",
    "port",
    "ssl",
    "sslmode",
    "target_session_attrs",
})  # fmt: skip
"""Parameters of a database URL that are shown; of all others only the name, since one may be a password."""


def shown(name: str, value: Any) -> Any:
    """The value of a setting as it may be printed or logged."""
    if not value or name not in SECRETS:
        return value
    return redact(value) if name == "postgres_dsn" else HIDDEN


def redact(url: str) -> str:
    """A database URL without its password; `***` alone where it cannot be told what is the password."""
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        return HIDDEN
    if not parts.scheme or parts.fragment or not url.startswith(f"{parts.scheme}://") or not _plain(parts):
        return HIDDEN
    user, given, hosts = parts.netloc.rpartition("@")
    name, has_password, _ = user.partition(":")
    who = f"{name}:{HIDDEN}" if has_password else name
    query = urlencode(
        [(key, value if key in _OPEN else HIDDEN) for key, value in pairs],
        safe="*,:/",
        quote_via=quote,
    )
    return f"{parts.scheme}://{who}{given}{hosts}{parts.path}" + (f"?{query}" if query else "")


def _plain(parts: SplitResult) -> bool:
    """Whether the pieces are where they seem: `@`, `/` or `?` as such in a password moves the borders."""
    rest = parts.path + parts.query
    return parts.netloc.count("@") <= 1 and "@" not in rest
