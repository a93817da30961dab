"""Names in paths: percent-encoding undone, then held against the one pattern for names."""

import re
from urllib.parse import unquote

from metaservice.wire.schemas import NAME_PATTERN

from .errors import NAME_RULE, ApiError

_is_name = re.compile(NAME_PATTERN).match
OPENAPI_NAME_PATTERN = f"^{NAME_PATTERN[2:-2]}$"
"""The same pattern in the dialect of OpenAPI (ECMA 262)."""


def unquoted(segment: str) -> str:
    """A path segment without percent-encoding; what is not UTF-8 becomes a character no name may have."""
    return unquote(segment, errors="replace") if "%" in segment else segment


def name(value: str, field: str) -> str:
    """`value` when it is a name. Raises `invalid_name` naming `field`."""
    if not _is_name(value):
        raise ApiError("invalid_name", f"a name is {NAME_RULE}", field)
    return value
