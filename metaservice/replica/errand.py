"""What the leader of a data shard has to tell the catalogue's leader, carried there and back.

Budgets asked for and given back, instances that are empty, use for the operators' totals: see
`core/spread.py`. Doing an errand twice does no harm, and losing one costs time only.
"""

from collections.abc import Awaitable, Callable

import msgspec

from metaservice.core import commands as cmd
from metaservice.core.rejections import Rejection
from metaservice.core.replies import Errands, Settled

from .errors import ShardUnavailable
from .shard import Shard

Courier = Callable[[str, bytes], Awaitable[bytes]]
"""Brings errands to the replica at a URL and returns its answer. Raises ShardUnavailable."""

_encode = msgspec.msgpack.Encoder().encode
_errands = msgspec.msgpack.Decoder(Errands)
_settled = msgspec.msgpack.Decoder(Settled)


async def settle(catalogue: Shard, body: bytes) -> bytes:
    """The catalogue's side. Raises msgspec.MsgspecError for what is no errand."""
    return _encode(await _settle(catalogue, _errands.decode(body)))


async def _settle(catalogue: Shard, errands: Errands) -> Settled:
    answer = await catalogue.submit(cmd.Settle(errands=errands))
    if isinstance(answer, Rejection):
        raise ValueError(f"{answer.code}: {answer.message}")
    settled: Settled = answer
    return settled


async def run_errands(shard: Shard, catalogue: Shard, catalogue_url: str, courier: Courier) -> Settled | None:
    """Tell the catalogue what there is to tell; its answer, None when there was nothing. Raises
    ShardUnavailable."""
    errands = shard.errands()
    if errands is None:
        return None
    if catalogue.ready:
        return await _settle(catalogue, errands)
    if not catalogue_url:
        raise ShardUnavailable("not_ready", "nobody is known to lead the catalogue")
    try:
        return _settled.decode(await courier(catalogue_url, _encode(errands)))
    except msgspec.MsgspecError as error:
        raise ShardUnavailable("not_ready", f"{catalogue_url} answered something else: {error}") from error
