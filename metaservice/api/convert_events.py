"""From wire requests about cache events to what the publisher is asked: columns checked, and packed once."""

from array import array

from metaservice.core.model import Limits
from metaservice.wire import schemas_events as wire
from metaservice.wire.columns import ColumnError, keys_of, numbers_of, packed, u64

from .convert import BlockRule


def route(instance: str, info: BlockRule, body: wire.RouteRequest, limits: Limits) -> wire.RouteAsk:
    """Raises ColumnError for keys or token ids that are none, both or neither."""
    keys: list[bytes] = []
    token_ids = b""
    if (body.keys is None) == (body.token_ids is None):
        raise ColumnError("invalid_field", "keys", "give either keys or token_ids")
    if body.keys is not None:
        keys = keys_of(body.keys, info.key_length, "keys", limits.keys_per_request_max)
    else:
        block_size = info.fingerprint.block_size_tokens
        ids = numbers_of(body.token_ids, "I", "token_ids", limits.keys_per_request_max * block_size)
        token_ids = packed("I", ids[: len(ids) - len(ids) % block_size])
    if not keys and not token_ids:
        raise ColumnError("empty_batch", "keys", "the prompt has not one whole block")
    return wire.RouteAsk(instance, keys, token_ids, body.lora, body.salt, body.top_k)


def report(engine: str, body: wire.ReportRequest) -> wire.ReportAsk:
    """Raises ColumnError for columns that are none, a base that is not before the number, or more than one
    report may have."""
    items = len(body.stored) + len(body.removed)
    if body.base is not None and body.base + bool(items or body.cleared) > body.number:
        raise ColumnError("invalid_field", "base", "a report goes on from one with a smaller number")
    if items > wire.REPORT_ITEMS_MAX:
        raise ColumnError(
            "too_many_keys", "stored", f"{items} items; at most {wire.REPORT_ITEMS_MAX} in one report"
        )
    blocks = 0
    stored: list[wire.StoredAsk] = []
    removed: list[wire.RemovedAsk] = []
    for at, told in enumerate(body.stored):
        hashes = _hashes(told.hashes, f"stored[{at}].hashes")
        blocks += len(hashes)
        ids = numbers_of(told.token_ids, "I", f"stored[{at}].token_ids", wire.REPORT_TOKENS_MAX)
        parent = None if told.parent is None else u64(told.parent, f"stored[{at}].parent")
        stored.append(
            wire.StoredAsk(told.tier, parent, packed("Q", hashes), packed("I", ids), told.lora, told.salt)
        )
    for at, gone in enumerate(body.removed):
        hashes = _hashes(gone.hashes, f"removed[{at}].hashes")
        blocks += len(hashes)
        removed.append(wire.RemovedAsk(gone.tier, packed("Q", hashes)))
    if blocks > wire.REPORT_BLOCKS_MAX:
        raise ColumnError(
            "too_many_keys", "stored", f"{blocks} blocks; at most {wire.REPORT_BLOCKS_MAX} in one report"
        )
    return wire.ReportAsk(engine, body.incarnation, body.number, body.base, body.cleared, stored, removed)


def _hashes(value: object, field: str) -> "array[int]":
    return numbers_of(value, "Q", field, wire.REPORT_BLOCKS_MAX)
