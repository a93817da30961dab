"""Attachments: how consumers that do not find the streams by themselves get them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from metaservice.publish.attach.port import Attachment
from metaservice.publish.attach.rows import AttachmentError, Row, parse

if TYPE_CHECKING:  # who only checks rows needs no sockets
    from metaservice.publish.view import View

__all__ = ["Attachment", "AttachmentError", "make", "parse"]


def make(text: str, view: "View") -> Attachment:
    """The attachment that a configured row names (`rows`). Raises AttachmentError. Nothing is opened yet."""
    # Here, for the same reason.
    from metaservice.publish.attach.dynamo_indexer import DynamoIndexer  # noqa: PLC0415
    from metaservice.publish.attach.dynamo_peer import DynamoPeer  # noqa: PLC0415
    from metaservice.publish.attach.generic import Generic  # noqa: PLC0415
    from metaservice.publish.attach.llm_d import LlmD  # noqa: PLC0415
    from metaservice.publish.attach.merge import Merge  # noqa: PLC0415

    row = parse(text)
    kinds: dict[str, Callable[[Row, View], Attachment]] = {
        "dynamo-indexer": DynamoIndexer,
        "dynamo-peer": DynamoPeer,
        "generic": Generic,
        "llm-d": LlmD,
        "merge": Merge,
    }
    return kinds[row.kind](row, view)
