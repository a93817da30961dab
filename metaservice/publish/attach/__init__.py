"""Attachments: how consumers that do not find the streams by themselves get them."""

from metaservice.publish.attach.dynamo_indexer import DynamoIndexer
from metaservice.publish.attach.llm_d import LlmD
from metaservice.publish.attach.port import Attachment
from metaservice.publish.attach.rows import AttachmentError, parse
from metaservice.publish.view import View

__all__ = ["Attachment", "AttachmentError", "make", "parse"]


def make(text: str, view: View) -> Attachment:
    """The attachment that a configured row names (`rows`). Raises AttachmentError. Nothing is opened yet."""
    row = parse(text)
    if row.kind == "dynamo-indexer":
        return DynamoIndexer(row, view)
    return LlmD(row, view)
