"""An engine process: takes requests from its stdin, tells its steps on its stdout, until its stdin is closed.

`python -m engine_adapters.replay.engine --help` lists its options. Its log goes to stderr.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

import msgspec

from engine_adapters.replay.connector import Connector, ModelShape
from engine_adapters.replay.messages import EngineMessage, Job, Phase, Ready, Step
from metaservice.client import Client, ClientConfig
from metaservice.client.errors import REJECTED

TIMEOUT_MS = 3_000
BREAKER_PAUSE_MS_MAX = 500
"""The longest that an engine stays away from a service that failed it, before it asks again."""
log = logging.getLogger("engine")


def arguments() -> argparse.ArgumentParser:
    """The command line of an engine process."""
    parser = argparse.ArgumentParser(prog="engine", description=__doc__, allow_abbrev=False)
    parser.add_argument("--url", required=True, help="where the service is; several with commas between")
    parser.add_argument("--engine", required=True, help="the engine's id, kept over restarts")
    parser.add_argument("--instance", required=True)
    parser.add_argument("--part", required=True, help="the one part that a block has")
    parser.add_argument("--part-bytes", required=True, type=int)
    parser.add_argument("--block-size-tokens", required=True, type=int)
    parser.add_argument("--hash-seed", required=True)
    parser.add_argument("--key-length", required=True, type=int)
    parser.add_argument("--lease-ms", required=True, type=int)
    parser.add_argument("--write-ttl-ms", required=True, type=int)
    parser.add_argument(
        "--start-patience-ms",
        type=int,
        default=10_000,
        help="how long to wait for a service that is away before beginning without it (%(default)s)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one engine. Exit status 0 when its stdin was closed, 1 when the service refused it."""
    options = arguments().parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    # What any library prints must not get between the messages: stdout is the pipe to the demo alone.
    pipe = os.dup(1)
    os.dup2(2, 1)

    def tell(message: EngineMessage) -> None:
        line = msgspec.json.encode(message) + b"\n"
        while line:
            line = line[os.write(pipe, line) :]

    client = Client(
        ClientConfig(
            url=options.url,
            timeout_ms=TIMEOUT_MS,
            breaker_slow_ms=TIMEOUT_MS,
            breaker_pause_ms_max=BREAKER_PAUSE_MS_MAX,
        )
    )
    registration = client.register_engine(options.engine, instance=options.instance)
    if not registration.active and (registration.failure or "").startswith(REJECTED):
        log.error("cannot register: %s %s", registration.failure, registration.detail)
        return 1
    if not registration.wait_active(options.start_patience_ms):
        # It computes until then, and is registered when it can be.
        log.warning("begins without the service: %s", registration.failure)
    shape = ModelShape(
        instance=options.instance,
        part=options.part,
        part_bytes=options.part_bytes,
        block_size_tokens=options.block_size_tokens,
        hash_seed=options.hash_seed,
        key_length=options.key_length,
    )
    connector = Connector(client, shape, lease_ms=options.lease_ms, write_ttl_ms=options.write_ttl_ms)
    tell(Ready(incarnation=registration.incarnation))
    decoder = msgspec.json.Decoder(Job)
    for line in sys.stdin.buffer:
        job = decoder.decode(line)

        def step_to(step: Step, blocks: int, index: int = job.index) -> None:
            tell(Phase(index=index, step=step, blocks=blocks))

        answer = connector.serve(job, step_to)
        if answer.failures:
            log.info("request %d: %s", job.index, ", ".join(sorted(set(answer.failures))))
        tell(answer)
    client.deregister()
    connector.close()
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
