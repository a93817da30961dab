"""KV cache events of two engines that differ in one field: none tells what the other stored."""

import random

import pytest
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from engine_adapters.namespace import COMPARED, Namespace
from engine_adapters.vllm.events import Teller
from engine_adapters.vllm.requests import Published
from tests.unit.namespace_house import changed, make_namespace

pytestmark = pytest.mark.vllm

SIZE = 32
FIELDS = [field for field in Namespace.__struct_fields__ if field not in COMPARED]


@pytest.mark.parametrize("field", FIELDS)
def test_an_engine_tells_of_its_own_instance_only(field: str) -> None:
    """Both engines name the same tokens alike. What one published is no news of the other's, and the other's
    own publication of the same keys is told in full, not taken for known."""
    keys = [random.Random(field + str(row)).randbytes(32) for row in range(3)]
    tokens = list(range(SIZE * len(keys)))
    told = {}
    for namespace in (make_namespace(), changed(make_namespace(), field)):
        instance, teller = namespace.instance_id("vllm"), Teller(SIZE)
        assert teller.events([]) == [], "told of blocks that another instance has"
        assert teller.events([], removed=keys) == [], "took back what it never announced"
        told[instance] = teller.events([Published(instance, keys, None, tokens, None)])
    assert len(told) == 2
    for events in told.values():
        (event,) = events
        assert isinstance(event, BlockStored)
        assert event.block_hashes == [maybe_convert_block_hash(BlockHash(key)) for key in keys]
