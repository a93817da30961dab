"""llm-d's endpoint picker binds and waits: who leads connects, and tells each pod under its own topic."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from queue import Queue
from typing import Any

import msgspec
import pytest
import zmq

from metaservice.core.windows import Gone
from metaservice.publish.attach import Attachment, make
from metaservice.publish.attach.llm_d import AGAIN_S, ALONE_S
from tests.functional.events_service import free_ports
from tests.unit.attach_house import FIRST, House, key, run

POD = "10.0.0.1:8000"


class Picker:
    """A subscriber that binds, with the filter that llm-d has. It reads in a thread of its own, as any does:
    a subscription is only sent by one that looks at its socket."""

    def __init__(self, port: int = 0) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.subscribe(b"kv@")
        endpoint = "tcp://127.0.0.1"
        self.port = port or self.socket.bind_to_random_port(endpoint)
        if port:
            self.socket.bind(f"{endpoint}:{port}")
        self.endpoint = f"{endpoint}:{self.port}"
        self.told: Queue[list[bytes]] = Queue()
        self.reading = threading.Event()
        self.reading.set()
        self._open = True
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while self._open:
            if self.socket.poll(20) and self.reading.is_set():
                self.told.put(self.socket.recv_multipart())
            self.reading.wait(0.05)

    def close(self) -> None:
        self._open = False
        self._thread.join()
        self._context.destroy(linger=0)

    async def next(self) -> tuple[str, int, list[dict[str, Any]], int]:
        topic, seq, payload = await asyncio.to_thread(self.told.get, True, 5)
        _, events, rank = msgspec.msgpack.decode(payload)
        return topic.decode(), int.from_bytes(seq, "big"), events, rank

    async def silent(self) -> bool:
        await asyncio.sleep(0.2)
        return self.told.empty()


@pytest.fixture
async def picker() -> AsyncIterator[Picker]:
    picker = Picker()
    yield picker
    picker.close()


@pytest.fixture
async def house() -> AsyncIterator[House]:
    with House() as house:
        house.add_instance()
        yield house


Attach = Callable[[str], Attachment]


@pytest.fixture
async def attach(house: House) -> AsyncIterator[Attach]:
    made: list[Attachment] = []

    def attached(row: str) -> Attachment:
        made.append(make(row, house))
        return made[-1]

    yield attached
    for attachment in made:
        await attachment.close()


async def subscribed(attachment: Attachment) -> None:
    for _ in range(250):
        if attachment.status().ok:
            return
        await asyncio.sleep(0.02)
    pytest.fail("nobody subscribed within 5 s")


async def test_each_pod_is_told_under_its_own_topic(house: House, picker: Picker, attach: Attach) -> None:
    attachment = attach(f"llm-d endpoint={picker.endpoint}")
    house.add_engine("a", address=POD)
    house.add_engine("b", address="10.0.0.2:8000")
    house.add_engine("none")
    await attachment.start()
    attachment.leads(0, True)
    await subscribed(attachment)
    attachment.window(0, house.window(run(1, 2)))
    told = [await picker.next(), await picker.next()]
    assert {topic for topic, *_ in told} == {f"kv@{POD}@m", "kv@10.0.0.2:8000@m"}
    for _, number, events, rank in told:
        assert (number, rank) == (FIRST + 1, 0)
        event = events[-1]
        assert event["medium"] == "EXTERNAL"
        assert event["block_hashes"] == [2**40 + 1, 2**40 + 2]
        assert event["token_ids"] == list(range(4, 12))
    attachment.window(0, house.window())
    assert (await picker.next())[2] == []  # a heartbeat
    assert attachment.status().engines == 2


async def test_pool_and_node_are_told_in_one_batch(house: House, picker: Picker, attach: Attach) -> None:
    house.add_instance(channel=1, node="n")
    attachment = attach(f"llm-d endpoint={picker.endpoint}")
    house.add_engine("a", address=POD, local_channel=1, node="n")
    house.add_engine("b", address="10.0.0.2:8000")
    attachment.leads(0, True)
    await subscribed(attachment)
    attachment.window(0, house.window(run(1), run(2, parent=1, node="n")))
    told = dict([(await picker.next())[::2], (await picker.next())[::2]])
    assert {event["medium"] for event in told[f"kv@{POD}@m"]} == {"EXTERNAL", "CPU"}
    assert {event["medium"] for event in told["kv@10.0.0.2:8000@m"]} == {"EXTERNAL"}


async def test_row_10_ranks_of_one_pod_are_told_once(house: House, picker: Picker, attach: Attach) -> None:
    """A picker counts copies by pod, tier and hash: told for each rank, a block would outlive its removal."""
    house.add_instance(channel=1, rank=1)
    attachment = attach(f"llm-d endpoint={picker.endpoint}")
    house.add_engine("a0", address=POD)
    house.add_engine("a1", address=POD, channel=1, rank=1)
    attachment.leads(0, True)
    await subscribed(attachment)
    attachment.window(0, house.window(run(1)))
    await picker.next()
    assert await picker.silent()


async def test_only_the_leader_sends_by_its_lease_each_time(
    house: House, picker: Picker, attach: Attach
) -> None:
    attachment = attach(f"llm-d endpoint={picker.endpoint}")
    house.add_engine("a", address=POD)
    attachment.window(0, house.window(run(1)))
    attachment.leads(0, True)
    await subscribed(attachment)
    house.leading = False
    attachment.window(0, house.window(run(2)))
    house.leading = True
    attachment.leads(0, False)
    attachment.window(0, house.window(run(3)))
    assert await picker.silent()


async def test_a_picker_that_starts_anew_is_told_everything_again(
    house: House, picker: Picker, attach: Attach
) -> None:
    """It keeps nothing and asks for nothing: its subscription is all that is seen of its start."""
    attachment = attach(f"llm-d endpoint={picker.endpoint}")
    house.add_engine("a", address=POD)
    attachment.leads(0, True)
    await subscribed(attachment)
    attachment.window(0, house.window())
    assert house.restated == [(0, "i", "joined")]
    picker.close()
    await asyncio.sleep(0.1)
    again = Picker(picker.port)
    house.clock_s += AGAIN_S
    for _ in range(100):
        attachment.window(0, house.window())
        if len(house.restated) == 2:
            break
        await asyncio.sleep(0.05)
    assert house.restated == [(0, "i", "joined")] * 2
    again.close()


async def test_a_pod_that_is_new_is_told_everything(house: House, picker: Picker, attach: Attach) -> None:
    attachment = attach(f"llm-d endpoint={picker.endpoint}")
    attachment.leads(0, True)
    await subscribed(attachment)
    attachment.window(0, house.window())
    assert house.restated == []
    house.add_engine("a", address=POD)
    attachment.changed()
    house.clock_s += AGAIN_S
    attachment.window(0, house.window())
    assert house.restated == [(0, "i", "joined")]


async def test_row_11_a_pod_that_is_gone_is_taken_back(house: House, picker: Picker, attach: Attach) -> None:
    attachment = attach(f"llm-d endpoint={picker.endpoint}")
    house.add_engine("a", address=POD)
    house.add_engine("b", address="10.0.0.2:8000")
    house.announced[0] = [run(1, 2), run(3)]
    attachment.leads(0, True)
    await subscribed(attachment)
    del house.engines["a"]
    attachment.changed()
    told = [await picker.next(), await picker.next()]
    assert all(topic == f"kv@{POD}@m" for topic, *_ in told)
    events = [event for *_, events, _ in told for event in events]
    assert {event["type"] for event in events} == {"BlockRemoved"}
    assert sorted(hash for event in events for hash in event["block_hashes"]) == [
        2**40 + n for n in (1, 2, 3)
    ]
    attachment.window(0, house.window(removed=[Gone("i", "EXTERNAL", "", 16, key(1))]))
    assert (await picker.next())[0] == "kv@10.0.0.2:8000@m"
    assert await picker.silent()


async def test_row_22_a_picker_that_was_too_slow_is_told_again(
    house: House, picker: Picker, attach: Attach
) -> None:
    """What does not fit is dropped and counted, and as soon as something fits again, all is told anew."""
    picker.reading.clear()
    attachment = attach(f"llm-d endpoint={picker.endpoint} queue=100")
    house.add_engine("a", address=POD)
    attachment.leads(0, True)
    await subscribed(attachment)
    attachment.window(0, house.window())
    house.restated.clear()
    house.clock_s += AGAIN_S
    big = [run(*range(64 * n, 64 * n + 64)) for n in range(1, 9)]

    def dropped() -> float:
        return next(value for name, value in attachment.stats().items() if "dropped_total" in name)

    for _ in range(5_000):
        attachment.window(0, house.window(*big))
        if dropped():
            break
    assert dropped() > 0
    assert house.restated == []
    picker.reading.set()
    for _ in range(250):
        await asyncio.sleep(0.02)
        attachment.window(0, house.window())
        if house.restated:
            break
    assert house.restated == [(0, "i", "joined")]


async def test_nobody_at_the_endpoint_is_a_problem(house: House, picker: Picker, attach: Attach) -> None:
    attachment = attach("llm-d endpoint=tcp://127.0.0.1:9")
    assert attachment.status().ok
    attachment.leads(0, True)
    assert not attachment.status().ok
    assert "tcp://127.0.0.1:9" in attachment.status().detail


async def test_a_port_that_something_else_had_for_a_moment_is_tried_again(
    house: House, attach: Attach
) -> None:
    """One that shakes hands in another way ends the connection for good, as ZeroMQ sees it."""
    port = free_ports(1)

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = b"\xff" + bytes(7) + b"\x01\x7f\x03\x00" + b"OTHER".ljust(20, b"\0") + bytes(32)
        writer.write(greeting)
        await writer.drain()
        writer.close()

    attachment = attach(f"llm-d endpoint=tcp://127.0.0.1:{port}")
    house.add_engine("a", address=POD)
    async with await asyncio.start_server(other, "127.0.0.1", port):
        attachment.leads(0, True)
        await asyncio.sleep(0.3)
    picker = Picker(port)
    house.clock_s += ALONE_S + 1
    attachment.window(0, house.window())
    await subscribed(attachment)
    attachment.window(0, house.window(run(1)))
    assert (await picker.next())[0] == f"kv@{POD}@m"
    picker.close()
