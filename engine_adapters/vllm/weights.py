"""The version of an engine's weights, as an operator or a trainer says it."""

import os
from pathlib import Path

from .layout import LayoutRefused
from .settings import Settings

VERSION_LENGTH_MAX = 400
_PRIVATE = "+reset-"


def weight_version(settings: Settings) -> str:
    """What the settings say now; the file is read anew. Raises LayoutRefused when it cannot be."""
    if not settings.weight_version_file:
        return _checked(settings.weight_version, "weight_version")
    path = Path(settings.weight_version_file)
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise LayoutRefused(f"weight_version_file: {error}") from None
    if not text:
        raise LayoutRefused(f"weight_version_file: {path} is empty")
    prefix = f"{settings.weight_version}:" if settings.weight_version else ""
    return _checked(prefix + text, "weight_version_file")


def private_version(version: str) -> str:
    """A version that no other engine has: of weights that changed and nobody said to what."""
    return f"{version.partition(_PRIVATE)[0]}{_PRIVATE}{os.urandom(8).hex()}"


def _checked(text: str, setting: str) -> str:
    if len(text) > VERSION_LENGTH_MAX or not (text.isprintable()):
        raise LayoutRefused(
            f"{setting}: expected one line of at most {VERSION_LENGTH_MAX} printable characters"
        )
    return text
