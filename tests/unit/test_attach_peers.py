"""Consumers that read something else: other dialects at a port of their own, and Dynamo's dump over HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from socket import create_server
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from metaservice.config import ConfigError, parse
from metaservice.publish.attach import Attachment, AttachmentError, make
from metaservice.publish.attach.generic import AGAIN_S
from tests.functional.events_service import free_ports
from tests.unit.attach_house import FIRST, House, run


@pytest.fixture
async def house() -> AsyncIterator[House]:
    with House() as house:
        house.add_instance()
        house.add_engine("a", 7)
        yield house


Attach = Callable[[str], Attachment]


@pytest.fixture
async def attach(house: House) -> AsyncIterator[Attach]:
    made: list[Attachment] = []

    def attached(row: str) -> Attachment:
        made.append(make(row, house))
        return made[-1]

    yield attached
    for one in made:
        await one.close()


class Subscriber:
    def __init__(self, house: House, port: int) -> None:
        self.socket = house.context.socket(zmq.SUB)
        self.socket.subscribe(b"")
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    async def next(self) -> tuple[bytes, int, Any]:
        async with asyncio.timeout(5):
            topic, seq, payload = await self.socket.recv_multipart()
        return topic, int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload)


async def joined(attachment: Attachment) -> None:
    for _ in range(250):
        if attachment.status().engines:
            return
        await asyncio.sleep(0.02)
    pytest.fail("nobody subscribed")


async def test_row_02_arrays_at_a_port_of_their_own(house: House, attach: Attach) -> None:
    port = free_ports(1)
    attachment = attach(f"generic port={port} instance=i emitter=array")
    attachment.leads(0, True)
    subscriber = Subscriber(house, port)
    await joined(attachment)
    attachment.window(0, house.window(run(1, 2)))
    topic, seq, (ts, events, rank) = await subscriber.next()
    assert (topic, seq, rank) == (b"kv@pool@m", FIRST + 1, 0)
    assert isinstance(ts, float)
    assert events[-1][:4] == ["BlockStored", [2**40 + 1, 2**40 + 2], None, list(range(4, 12))]
    attachment.window(0, house.window())
    assert (await subscriber.next())[2][1] == []
    # who joins cannot ask for what was before: it is told again, by everybody's leave
    assert house.restated == [(0, "i", "joined")]
    house.clock_s += AGAIN_S
    attachment.window(0, house.window())
    assert len(house.restated) == 1


async def test_object_keys_for_dynamo_beside_sglang(house: House, attach: Attach) -> None:
    port = free_ports(1)
    attachment = attach(f"generic port={port} instance=i emitter=mooncake:tp=2;prefix=pool_m")
    attachment.leads(0, True)
    subscriber = Subscriber(house, port)
    await joined(attachment)
    attachment.window(0, house.window(run(1)))
    _, seq, (ts_ms, events, _) = await subscriber.next()
    assert isinstance(ts_ms, int)
    assert seq == FIRST + 1
    assert events == []  # named otherwise than SGLang names its pages: nobody would ever ask for it
    assert sum(value for name, value in attachment.stats().items() if "invalid" in name) == 1


async def test_only_the_leader_publishes_it(house: House, attach: Attach) -> None:
    port = free_ports(1)
    attachment = attach(f"generic port={port} instance=i")
    attachment.changed()
    with create_server(("127.0.0.1", port)):
        pass  # nobody has it
    attachment.leads(0, True)
    with pytest.raises(OSError, match="in use"):
        create_server(("127.0.0.1", port))
    attachment.leads(0, False)
    assert not attachment.status().engines


async def test_an_instance_that_is_not_there_is_a_problem(house: House, attach: Attach) -> None:
    attachment = attach(f"generic port={free_ports(1)} instance=x")
    attachment.leads(0, True)
    assert "no instance x" in attachment.status().detail


def test_a_dialect_that_there_is_not_is_refused(house: House) -> None:
    with pytest.raises(ConfigError, match="vllm, array, mooncake"):
        parse(
            ["--events-port-base", "20000", "--events-attachments", "generic port=1 instance=i emitter=x"], {}
        )
    with pytest.raises(AttachmentError, match="mooncake:size=3"):
        make("generic port=1 instance=i emitter=mooncake:size=3", house)


async def test_dynamos_indexer_may_begin_with_a_dump(house: House, attach: Attach) -> None:
    port = free_ports(1)
    house.add_instance(channel=1, node="n")
    house.add_engine("b", 8, local_channel=1, node="n")
    house.announced = {0: [run(1, 2)], 1: [run(3, node="n", parent=2)]}
    attachment = attach(f"dynamo-peer port={port}")
    await attachment.start()
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        for _ in range(100):
            if attachment.status().ok:
                break
            await asyncio.sleep(0.02)
        told = json.loads((await http.get("/dump")).text)
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/workers")).status_code == 404
        assert (await http.post("/dump")).status_code == 404
    events = told["m:default"]["events"]
    assert told["m:default"]["block_size"] == 4
    held = {
        (one["worker_id"], one["storage_tier"], block["block_hash"] - 2**40)
        for one in events
        for block in one["event"]["data"]["stored"]["blocks"]
    }
    assert held == {
        (7, "external", 1), (7, "external", 2), (8, "external", 1), (8, "external", 2), (8, "host_pinned", 3),
    }  # fmt: skip
    assert sum(value for name, value in attachment.stats().items() if "dumps" in name) == 1


async def test_a_port_that_is_taken_is_tried_again(house: House, attach: Attach) -> None:
    port = free_ports(1)
    with create_server(("127.0.0.1", port)):
        attachment = attach(f"dynamo-peer port={port}")
        await attachment.start()
        await asyncio.sleep(0.1)
        assert "cannot listen" in attachment.status().detail
    for _ in range(100):
        await asyncio.sleep(0.05)
        if attachment.status().ok:
            return
    pytest.fail("the port is free, and nobody listens")
