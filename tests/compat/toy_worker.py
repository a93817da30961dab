"""One toy worker of Dynamo, a program of its own for the environment that Dynamo is installed in: it answers
each completion with one token and writes down the prompts that it got. What it has cached is what it hears on
the stream that it relays.

It prints one JSON object a line: `{"ready": worker id}` once it serves, then `{"served": [token ids]}` each.
"""

import argparse
import asyncio
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

from dynamo.llm import (
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)
from dynamo.runtime import DistributedRuntime

ANSWER_TOKEN = 5
TOTAL_BLOCKS = 100_000


async def generate(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """One token, at once."""
    print(json.dumps({"served": request["token_ids"]}), flush=True)
    yield {"token_ids": [ANSWER_TOKEN], "finish_reason": "stop"}


async def serve(options: argparse.Namespace) -> None:
    """Register and serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "file", "tcp", event_plane="zmq")
    loop.add_signal_handler(signal.SIGTERM, runtime.shutdown)
    endpoint = runtime.endpoint("compat.backend.generate")
    publisher = KvEventPublisher(
        endpoint=endpoint,
        kv_block_size=options.block_size,
        zmq_endpoint=options.stream,
        zmq_topic="",
        enable_local_indexer=True,
    )
    config = ModelRuntimeConfig()
    config.total_kv_blocks = TOTAL_BLOCKS
    config.max_num_seqs = 64
    config.max_num_batched_tokens = 65_536
    config.enable_local_indexer = True
    config.kv_event_publishing_enabled = True

    async def announce() -> None:
        await register_model(
            ModelInput.Tokens,
            ModelType.Completions,
            endpoint,
            options.model_path,
            options.model,
            worker_type=WorkerType.Aggregated,
            kv_cache_block_size=options.block_size,
            runtime_config=config,
        )
        print(json.dumps({"ready": endpoint.connection_id()}), flush=True)

    await asyncio.gather(endpoint.serve_endpoint(generate), announce())
    del publisher


def main() -> None:
    """From a command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stream", required=True, help="endpoint of the stream of events that it relays")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--block-size", type=int, required=True)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
