"""Who gets in at the publisher's sockets, and what strangers may say there."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import zmq
import zmq.asyncio

from metaservice.publish.curve import load_keys, make_keys
from metaservice.publish.settings import PublishRefused
from tests.functional.publish_house import House, Model, Subscriber, engine_up, instance_up, open_house


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    made.linger = 0
    yield made
    made.destroy(linger=0)


async def flooded(house: House, name: str, count: float, timeout_s: float = 10.0) -> None:
    """Once a counter is there."""
    async with asyncio.timeout(timeout_s):
        while house.publisher.stats.get(name, 0) < count:
            await asyncio.sleep(0.05)


async def test_hostile_requests_are_counted_and_change_nothing(
    context: zmq.asyncio.Context, seed: int
) -> None:
    chance = Random(seed)
    async with open_house() as house:
        model = Model(seed)
        house.tell_standing(model)
        for _ in range(20):
            house.publisher.tell(model.step())
        await house.settled()
        stranger = Subscriber(context, house)
        bad: list[list[bytes]] = [
            [b""],
            [b"", b""],
            [b"", b"1234567"],
            [b"", b"123456789"],
            [b"x", b"12345678"],
            [b"", b"", b"12345678", b""],
            [b"", b"0" * 900],
            [b""] * 50,
        ]
        bad += [
            [chance.randbytes(chance.randrange(30)) for _ in range(chance.randrange(4, 9))] for _ in range(50)
        ]
        for frames in bad:
            await stranger.dealer.send_multipart(frames)
        await flooded(house, "malformed_total", len(bad))
        told = await stranger.replay(model.number)
        assert [number for number, _ in told] == [model.number]
        assert await stranger.replay(2**64 - 1) == []
        assert await stranger.replay(2**63) == []


async def test_messages_that_are_too_long_end_the_connection(context: zmq.asyncio.Context, seed: int) -> None:
    async with open_house() as house:
        model = Model(seed)
        house.tell_standing(model)
        await house.settled()
        shouter = context.socket(zmq.DEALER)
        shouter.connect(house.replay_endpoint())
        for _ in range(20):
            await shouter.send_multipart([b"", b"x" * 1_000_000])
        subscriber = context.socket(zmq.SUB)
        subscriber.connect(house.endpoint())
        subscriber.setsockopt(zmq.SUBSCRIBE, b"y" * 100_000)
        await asyncio.sleep(0.3)
        honest = Subscriber(context, house)
        await house.joined()
        house.publisher.tell(model.step())
        await honest.follow(model.number)
        assert await honest.replay(model.number + 1) == []


async def test_what_is_no_zmtp_at_all_changes_nothing(context: zmq.asyncio.Context, seed: int) -> None:
    chance = Random(seed)
    async with open_house() as house:
        model = Model(seed)
        house.tell_standing(model)
        await house.settled()
        for _ in range(40):
            with socket.create_connection(("127.0.0.1", house.config.port(0) + chance.randrange(2))) as raw:
                raw.sendall(chance.randbytes(chance.randrange(1, 4_000)))
        idle = [socket.create_connection(("127.0.0.1", house.config.port(0))) for _ in range(50)]
        consumer = Subscriber(context, house)
        await house.joined()
        house.publisher.tell(model.step())
        await consumer.follow(model.number)
        for raw in idle:
            raw.close()


async def test_endless_subscriptions_end_with_a_new_socket(context: zmq.asyncio.Context, seed: int) -> None:
    async with open_house() as house:
        model = Model(seed)
        house.tell_standing(model)
        await house.settled()
        greedy = context.socket(zmq.XSUB)
        greedy.setsockopt(zmq.SNDHWM, 0)
        greedy.setsockopt(zmq.LINGER, 0)
        greedy.connect(house.endpoint())
        for number in range(12_000):
            await greedy.send(b"\x01" + number.to_bytes(4, "big"))
        await flooded(house, "floods_total", 1)
        greedy.close()
        consumer = Subscriber(context, house)
        await house.joined()
        house.publisher.tell(model.step())
        await consumer.follow(model.number)


async def test_what_subscribers_send_that_is_no_subscription_is_counted(
    context: zmq.asyncio.Context, seed: int
) -> None:
    async with open_house() as house:
        model = Model(seed)
        house.tell_standing(model)
        await house.settled()
        chatty = context.socket(zmq.XSUB)
        chatty.connect(house.endpoint())
        for text in (b"hello", b"\x02", b""):
            await chatty.send(text)
        await flooded(house, "malformed_total", 3)


async def test_subscribers_come_and_go(context: zmq.asyncio.Context, seed: int) -> None:
    async with open_house() as house:
        house.tell_standing(Model(seed))
        await house.settled()
        consumers = [Subscriber(context, house) for _ in range(5)]
        await house.joined(count=5)
        for consumer in consumers[:3]:
            consumer.close()
        await house.joined(count=2)
        other = context.socket(zmq.SUB)
        other.connect(house.endpoint())
        other.setsockopt(zmq.SUBSCRIBE, b"kv@someone@else")
        third = Subscriber(context, house)
        await house.joined(count=3)
        third.close()
        await house.joined(count=2)


class Dial:
    """A consumer with a key pair."""

    def __init__(self, context: zmq.asyncio.Context, folder: Path, name: str) -> None:
        self.context = context
        path, self.public = make_keys(folder, name)
        self.keys = load_keys(str(path))

    def subscribe(self, endpoint: str, server: str) -> zmq.asyncio.Socket:
        made = self.context.socket(zmq.SUB)
        self._dress(made, server)
        made.setsockopt(zmq.SUBSCRIBE, b"")
        made.connect(endpoint)
        return made

    def ask(self, endpoint: str, server: str) -> zmq.asyncio.Socket:
        made = self.context.socket(zmq.DEALER)
        self._dress(made, server)
        made.connect(endpoint)
        return made

    def _dress(self, made: zmq.asyncio.Socket, server: str) -> None:
        made.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
        made.setsockopt(zmq.CURVE_PUBLICKEY, self.keys[0])
        made.setsockopt(zmq.CURVE_SECRETKEY, self.keys[1])


async def test_tenants_see_only_their_instances(
    context: zmq.asyncio.Context, seed: int, tmp_path: Path
) -> None:
    path, server = make_keys(tmp_path, "server")
    one, other, all_of_them, stranger = (
        Dial(context, tmp_path, name) for name in ("one", "other", "all", "stranger")
    )
    clients = {one.public: "t", other.public: "u", all_of_them.public: "*"}
    async with open_house(curve_secret=str(path), curve_clients=clients) as house:
        first, second = Model(seed), Model(seed, shard=1, instance="j")
        house.tell_standing(first)
        house.tell_standing(
            second,
            instances=[instance_up("j", shard=1, tenant="u")],
            engines=[engine_up("f", shard=1, instance="j", pool=2, local=3)],
        )
        await house.settled()
        asked = (0).to_bytes(8, "big")
        for channel, names in ((0, {"one", "all"}), (2, {"other", "all"})):
            subs, dealers = {}, {}
            for name, dial in (("one", one), ("other", other), ("all", all_of_them), ("stranger", stranger)):
                subs[name] = dial.subscribe(house.endpoint(channel), server)
                dealers[name] = dial.ask(house.replay_endpoint(channel), server)
                await dealers[name].send_multipart([b"", asked])
            plain = context.socket(zmq.SUB)
            plain.setsockopt(zmq.SUBSCRIBE, b"")
            plain.connect(house.endpoint(channel))
            subs["plain"] = plain
            await house.joined(channel, 2)
            await asyncio.sleep(0.3)
            house.publisher.tell((first if channel == 0 else second).step())
            await asyncio.sleep(0.3)
            assert {name for name, sub in subs.items() if await sub.poll(50)} == names
            assert {name for name, dealer in dealers.items() if await dealer.poll(50)} == names
        assert house.publisher.stats["denied_total"] > 0


async def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path, public = make_keys(tmp_path, "server")
    os.chmod(path, 0o644)
    with pytest.raises(PublishRefused, match="chmod 600"):
        async with open_house(curve_secret=str(path), curve_clients={public: "*"}):
            pass
    with pytest.raises(PublishRefused, match="no secret key"):
        load_keys(str(tmp_path / "server.key"))
