"""Case I6: a request of 7,400 keys does not hold the event loop up, in either encoding."""

import asyncio
from time import thread_time

import pytest

from tests.functional.api_house import JSON, MSGPACK, Speech, keys, open_house
from tests.security.raw_http import request_bytes

COUNT = 7_400
TURN_S_MAX = 0.020


class Probe:
    """Takes every turn of the loop, and notes how much work the turns before had done.

    Work is the thread's own processor time: what other programs on this machine do is not held against the
    service.
    """

    def __init__(self) -> None:
        self.turns: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Probe":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()

    async def _run(self) -> None:
        before = thread_time()
        while True:
            await asyncio.sleep(0)
            now = thread_time()
            self.turns.append(now - before)
            before = now


@pytest.mark.parametrize("speech", [JSON, MSGPACK], ids=["json", "msgpack"])
async def test_i6_a_lookup_of_7400_keys_does_not_hold_the_loop(speech: Speech) -> None:
    """The bound is the case's own; a machine that is busy with others gets several tries, and the best of
    them counts.
    """
    async with open_house() as house:
        await house.furnish()
        house.speech = speech
        for start in range(0, COUNT, 1_850):
            await house.fill(1_850, start)
        wanted = keys(COUNT)
        path = "/v1/instances/m1/lookup"
        body = speech.encode({"keys": speech.keys(wanted)})
        worst = []
        for _ in range(8):
            async with Probe() as probe:
                reader, writer = await asyncio.open_connection("127.0.0.1", house.port, limit=2**24)
                headers = {"Content-Type": speech.media, "Connection": "close"}
                writer.write(request_bytes("POST", path, body, headers))
                answer = await reader.read()
                while not reader.at_eof():
                    answer += await reader.read()
            reply = speech.decode(answer.partition(b"\r\n\r\n")[2])
            assert reply["hits"] == COUNT
            writer.close()
            worst.append(max(probe.turns))
            if worst[-1] < TURN_S_MAX:
                break
        assert min(worst) < TURN_S_MAX, f"one turn took {[round(turn * 1000) for turn in worst]} ms"
