"""Names of files and what they mean: `<root>/<cluster>/<2 hex>/<location hex>-<generation>.<part>`.

Pure text. A path is made from checked integers and plain names only; a name is read back strictly, so that a
file which this project did not name is never taken for one of its own.
"""

import re

from dataplane.integrity import BadPlace, check_names
from dataplane.port import GENERATION_MAX, Place

FANOUT = 256
"""Folders per cluster. Slots are numbered densely from 0, so the low byte of the location spreads files
evenly."""

_TEMPORARY_PREFIX = ".tmp-"
_NUMBERS = r"(?P<location>[0-9a-f]{16})-(?P<generation>[1-9][0-9]{0,9})"
_PUBLISHED_NAME = re.compile(rf"\A{_NUMBERS}\.(?P<part>.+)\Z", re.DOTALL)
_TEMPORARY_NAME = re.compile(rf"\A\.tmp-{_NUMBERS}-[0-9a-f]{{16}}-[0-9]+-[0-9]+\Z")
_FOLDER = re.compile(r"\A[0-9a-f]{2}\Z")


def folder_of(root: str, place: Place) -> str:
    """The folder of the file of a checked place."""
    return f"{root}/{place.cluster}/{place.location % FANOUT:02x}"


def path_of(root: str, place: Place) -> str:
    """The file of a checked place."""
    return f"{folder_of(root, place)}/{place.location:016x}-{place.generation}.{place.part}"


def temporary_of(root: str, place: Place, token: str, pid: int, number: int) -> str:
    """The file that a write of a checked place fills before it is published.

    `token` is 16 hex digits that no other process has: process ids are the same on several machines that
    share a storage. The name begins with a dot, so that no part name can make a published file look like one.
    """
    name = f"{_TEMPORARY_PREFIX}{place.location:016x}-{place.generation}-{token}-{pid}-{number}"
    return f"{folder_of(root, place)}/{name}"


def is_folder(name: str) -> bool:
    """Whether a folder of this name, inside a cluster's, can hold files of places."""
    return _FOLDER.match(name) is not None


def is_cluster(name: str) -> bool:
    """Whether a folder of this name, inside the root, can be a cluster's."""
    try:
        check_names(name, "any")
    except BadPlace:
        return False
    return True


def is_temporary(name: str) -> bool:
    """Whether a file that `parse` knows is an unpublished one."""
    return name.startswith(_TEMPORARY_PREFIX)


def parse(cluster: str, folder: str, name: str) -> Place | None:
    """The place that a file is named after (part "" for a temporary one), or None for a foreign name or
    folder."""
    match = (_TEMPORARY_NAME if is_temporary(name) else _PUBLISHED_NAME).match(name)
    if match is None:
        return None
    location, generation = int(match["location"], 16), int(match["generation"])
    if generation > GENERATION_MAX or folder != f"{location % FANOUT:02x}":
        return None
    part = match["part"] if "part" in match.re.groupindex else ""
    if part and not is_part(cluster, part):
        return None
    return Place(cluster, location, generation, part)


def is_part(cluster: str, part: str) -> bool:
    """Whether this can be the name of a part in a checked cluster."""
    try:
        check_names(cluster, part)
    except BadPlace:
        return False
    return True
