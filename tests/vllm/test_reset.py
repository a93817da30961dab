"""When the connector may take vLLM's word that its caches are empty."""

import pytest
from vllm.v1.core.block_pool import BlockPool

from engine_adapters.vllm.connector import emptied

pytestmark = pytest.mark.vllm


def test_row23_a_pool_is_emptied_just_where_vllm_resets_it() -> None:
    """vLLM calls the connector's reset whether or not it could reset its own prefix cache."""
    pool = BlockPool(num_gpu_blocks=4, enable_caching=True, hash_block_size=16)
    assert emptied(pool) and pool.reset_prefix_cache()
    held = pool.get_new_blocks(2)
    assert not emptied(pool) and not pool.reset_prefix_cache()
    pool.free_blocks(held[:1])
    assert not emptied(pool) and not pool.reset_prefix_cache()
    pool.free_blocks(held[1:])
    assert emptied(pool) and pool.reset_prefix_cache()
