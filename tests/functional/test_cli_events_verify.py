"""`ucm-meta events verify` while replicas come and go: what holds is not called broken, what does not is."""

import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
import zmq

from metaservice.cli.events_read import Desk, Place, Streams
from metaservice.cli.events_verify import Verifier
from metaservice.wire.schemas_events import EventsReply, StreamView
from tests.functional.cli_house import ucm_meta
from tests.functional.events_service import free_ports

HASH = 2**40
BEAT_MS = 30


def batch(number: int) -> list[bytes]:
    """Each batch stores a block, so that one that is missing shows."""
    event = {
        "type": "BlockStored",
        "block_hashes": [HASH + number],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
        "lora_id": None,
        "medium": "EXTERNAL",
        "lora_name": None,
    }
    return [b"kv@pool@m", struct.pack(">Q", number), msgspec.msgpack.encode([1.0, [event], 0])]


class Teller:
    """A replica: a batch every 30 ms, and replays. `skip`: never published. `behind`: its replays lack so
    many of the newest batches, as a standby's do, `mute`: it answers none from number 1 on."""

    def __init__(self, *, skip: range = range(0), behind: int = 0, mute: bool = False) -> None:
        self._skip, self._behind, self._mute = skip, behind, mute
        self._context = zmq.Context()
        self._pub, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        ports = [one.bind_to_random_port("tcp://127.0.0.1") for one in (self._pub, self._router)]
        self.endpoint, self.replay = (f"tcp://127.0.0.1:{port}" for port in ports)
        self.asked = 0
        self._open = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 1
        while self._open:
            if self._router.poll(BEAT_MS):
                self._answer(number)
            if number not in self._skip:
                self._pub.send_multipart(batch(number))
            number += 1
        self._context.destroy(linger=0)

    def _answer(self, newest: int) -> None:
        peer, _, start = self._router.recv_multipart()
        self.asked += 1
        if self._mute:
            return
        for number in range(max(int.from_bytes(start, "big"), 1), newest - self._behind):
            self._router.send_multipart([peer, b"", *batch(number)])
        self._router.send_multipart([peer, b"", b"", b"\xff" * 8, b""])

    def close(self) -> None:
        self._open = False
        self._thread.join()


@pytest.fixture
def steady() -> Iterator[Teller]:
    with closing(Teller()) as teller:
        yield teller


def place(channel: int, live: Teller, *replays: str) -> Place:
    return Place(
        channel, f"stream {channel}", "i", "", (live.endpoint,), tuple(Desk(one, one) for one in replays)
    )


def verified(*places: Place, offered: tuple[str, ...] = (), seconds: float = 2.5) -> dict[str, Any]:
    with Streams(places) as streams:
        return Verifier(streams, 1_000, lambda: offered).run(seconds)


def away() -> str:
    return f"tcp://127.0.0.1:{free_ports(1)}"


@pytest.mark.slow
def test_a_replica_that_is_away_makes_no_stream_silent(steady: Teller) -> None:
    """It is asked first, time and again, and does not answer: meanwhile the other stream is read on."""
    gone = away()
    with closing(Teller(skip=range(20, 60, 10))) as gappy:
        report = verified(place(0, gappy, gone, gappy.replay), place(1, steady, steady.replay))
    assert (report["ok"], report["faults"], report["problems"]) == (True, {}, [])
    assert report["gaps"] >= 2
    assert report["unanswered"] == [gone]
    assert report["longest_silence_ms"] < 1_000


@pytest.mark.slow
def test_a_replica_that_did_not_answer_is_asked_last() -> None:
    with closing(Teller(skip=range(20, 80, 10))) as gappy, closing(Teller(mute=True)) as mute:
        report = verified(place(0, gappy, mute.replay, gappy.replay), offered=())
    assert report["gaps"] >= 3
    assert mute.asked == 2  # to begin with, and to compare


def test_a_standby_that_is_a_moment_behind_is_not_the_last_that_is_asked() -> None:
    with closing(Teller(skip=range(30, 33))) as gappy, closing(Teller(behind=8)) as behind:
        report = verified(place(0, gappy, behind.replay, gappy.replay))
    assert (report["faults"], report["problems"]) == ({}, [])
    assert report["gaps"] >= 1


@pytest.mark.slow
def test_what_no_replica_has_is_lost() -> None:
    begun_s = time.monotonic()
    with closing(Teller(skip=range(20, 180, 20))) as gappy, closing(Teller(behind=10**6)) as behind:
        report = verified(place(0, gappy, behind.replay), seconds=6.5)
    assert not report["ok"]
    assert report["faults"]["lost"] >= 5
    assert time.monotonic() - begun_s < 12  # which was waited for once


@pytest.mark.slow
def test_replays_that_a_replica_offers_and_does_not_answer_are_a_fault(steady: Teller) -> None:
    with closing(Teller(mute=True)) as mute:
        report = verified(place(0, steady, steady.replay, mute.replay), offered=(mute.replay,), seconds=0.3)
    assert report["faults"] == {"unanswered": 1}
    assert report["unanswered"] == [mute.replay]


def test_a_stream_that_nobody_publishes_is_silent_and_no_more(steady: Teller) -> None:
    nobody = Place(0, "s", "i", "", (away(),), (Desk(steady.replay, "r"),))
    report = verified(nobody, seconds=0.5)
    assert report["faults"] == {"silent": 1}


def test_time_in_which_nobody_looked_is_no_silence(steady: Teller) -> None:
    with Streams([place(0, steady, steady.replay)]) as streams:
        while not list(streams.live(200)):
            pass
        threading.Event().wait(1.5)
        assert list(streams.live(0))
        assert streams.longest_silence_s[0] < 1.0


# --- the commands, where the replica that is asked does not lead ---------------------------------------


class Standby(BaseHTTPRequestHandler):
    """A replica that knows one stream, and leads nothing."""

    def do_GET(self) -> None:
        view = StreamView(
            channel=4,
            shard=0,
            kind="shared",
            instance="i",
            model="m",
            node="",
            rank=0,
            topic="kv@pool@m",
            endpoint=away(),
            replay=away(),
            live=False,
            number=1,
            block_size_tokens=16,
            announced=0,
        )
        body = msgspec.json.encode(EventsReply(replica="standby", streams=[view]))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def standby() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Standby)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_tail_says_at_once_which_streams_nobody_publishes(standby: str) -> None:
    ran = ucm_meta("events", "tail", "--url", standby, "--seconds", "0.5")
    assert (ran.returncode, ran.stdout) == (0, "")
    assert "channel 4 (kv@pool@m): no replica of --url publishes it" in ran.stderr


def test_an_instance_that_is_not_there_is_said(standby: str) -> None:
    ran = ucm_meta("events", "attach", "generic", "--url", standby, "--instance", "nope")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "nope has no stream and no engine" in ran.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("tail", "--url", "nonsense"),
        ("tail", "--url", ""),
        ("replay", "--endpoint", "tcp://127.0.0.1:9", "--from", str(2**64 - 1)),
        ("attach", "generic", "--url", "nonsense"),
        ("keys", "/tmp", "../x"),
    ],
)
def test_what_cannot_be_is_said_without_a_traceback(words: tuple[str, ...]) -> None:
    ran = ucm_meta("events", *words)
    assert ran.returncode == 2
    assert ran.stderr.strip()
    assert "Traceback" not in ran.stderr
