"""A network between a stream and its subscribers that loses frames: what is subscribed to through it comes
with holes, as chance wants it. Replays do not go through it."""

import random
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import zmq

from metaservice.cli.local.places import HOST, free_port

POLL_MS = 50


class Relay:
    """Passes the frames of one stream on, from wherever it is published. A context manager."""

    def __init__(self, sources: Sequence[str], chance: random.Random, loss: float) -> None:
        """`sources`: the endpoints at which the stream may be, one for each replica; `loss` is the
        probability with which a frame gets lost."""
        self.endpoint = f"tcp://{HOST}:{free_port()}"
        self.passed = self.lost = 0
        self.loss = loss
        self._chance = chance
        self._context = zmq.Context()
        self._upstream = self._context.socket(zmq.XSUB)
        self._upstream.setsockopt(zmq.RCVHWM, 0)
        for source in sources:
            self._upstream.connect(source)
        self._downstream = self._context.socket(zmq.XPUB)
        self._downstream.setsockopt(zmq.SNDHWM, 0)
        self._downstream.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._downstream.bind(self.endpoint)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, name="relay", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        self._stopping.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _pass_on(self) -> None:
        poller = zmq.Poller()
        poller.register(self._upstream, zmq.POLLIN)
        poller.register(self._downstream, zmq.POLLIN)
        while not self._stopping.is_set():
            ready = dict(poller.poll(POLL_MS))
            if self._downstream in ready:
                self._upstream.send_multipart(self._downstream.recv_multipart())
            if self._upstream in ready:
                frame = self._upstream.recv_multipart()
                if self._chance.random() < self.loss:
                    self.lost += 1
                else:
                    self.passed += 1
                    self._downstream.send_multipart(frame)
