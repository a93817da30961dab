"""An engine that also says which blocks are in its block pool.

`python -m tests.vllm.pool_engine OPTIONS`, as `tests.accept.engine`; the answer to `counts` names in `keys`
the event hash of each block that vLLM's prefix cache has, in hex.
"""

import os
import sys

import msgspec
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

from tests.accept.engine import Engine
from tests.accept.messages import Answer, EngineOptions, Job


class PoolEngine(Engine):
    """Knows its own truth."""

    def _do(self, job: Job, arrived_s: float) -> None:
        if job.op != "counts":
            super()._do(job, arrived_s)
            return
        pool = self._scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        held = [maybe_convert_block_hash(get_block_hash(key)) for key in pool._cache]
        keys = [f"{one:x}" for one in held]
        self._say(Answer(job.id, [], "counts", self._counts(), 0.0, keys))


def main() -> None:
    """From a command line."""
    out = os.dup(1)
    os.dup2(2, 1)
    PoolEngine(msgspec.json.decode(sys.argv[1], type=EngineOptions), out).run()


if __name__ == "__main__":
    main()
