"""Encryption of our sockets, and who is let in.

Each socket belongs to a tenant, which is its ZAP domain; a client's public key says which tenant's instances
it may see. Who is not let in hears nothing and can ask for nothing.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import zmq
import zmq.auth

from .settings import PublishConfig, PublishRefused
from .sockets import Socket, Watched

EVERY_TENANT: Final = "*"
_ZAP = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


def load_keys(path: str) -> tuple[bytes, bytes]:
    """The public and the secret key in a CURVE certificate file. Raises PublishRefused."""
    try:
        mode = os.stat(path).st_mode
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise PublishRefused(f"curve_secret {path}: {error}") from None
    if secret is None:
        raise PublishRefused(f"curve_secret {path} has no secret key")
    if mode & 0o077:
        raise PublishRefused(f"curve_secret {path} can be read by others than its owner: chmod 600 {path}")
    return public, secret


def make_keys(folder: Path, name: str) -> tuple[Path, str]:
    """A new key pair: the file of its secret key, which only its owner can read, and its public key (Z85).
    Raises ValueError where `name` is none for a file in `folder`, and FileExistsError where there is a pair
    of the name: all who know the old one would be locked out."""
    if name != Path(name).name or name in ("", ".", "..") or not name.isprintable():
        raise ValueError(f"{name!r} is no name of a key pair: a file's name, without a folder")
    for kept in (folder / f"{name}.key", folder / f"{name}.key_secret"):
        if kept.is_symlink() or kept.exists():
            raise FileExistsError(f"{kept} is there already; move it away first")
    before = os.umask(0o077)
    try:
        _, secret = zmq.auth.create_certificates(folder, name)
    finally:
        os.umask(before)
    return Path(secret), zmq.auth.load_certificate(secret)[0].decode()


class CurveServer:
    """Our key pair, and the answer to whoever knocks (a Curve). Made before any socket is bound, closed after
    all of them."""

    def __init__(
        self, context: "zmq.Context[Any]", public: bytes, secret: bytes, clients: Mapping[str, str]
    ) -> None:
        """`clients`: public key (Z85) -> tenant, or `*`."""
        self._public = public
        self._secret = secret
        self._clients = {zmq.utils.z85.decode(key.encode()): tenant for key, tenant in clients.items()}
        self.admitted = 0
        self.refused = 0
        socket: Socket = zmq.Context.socket(context, zmq.ROUTER, socket_class=zmq.Socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(_ZAP)
        self._door = Watched(socket, self._knock)

    @classmethod
    def of(cls, context: "zmq.Context[Any]", config: PublishConfig) -> "CurveServer | None":
        """As configured, None without keys. Raises PublishRefused."""
        if not config.curve_secret:
            return None
        return cls(context, *load_keys(config.curve_secret), config.curve_clients)

    def serve(self, socket: "zmq.Socket[Any]", tenant: str) -> None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, tenant.encode() or b"-")

    def dial(self, socket: "zmq.Socket[Any]", server_key: str) -> None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)

    def close(self) -> None:
        self._door.close()

    def _knock(self, frames: Sequence[bytes]) -> None:
        """One request of libzmq's: [route, "", version, id, domain, address, identity, mechanism, key]."""
        if len(frames) != 9 or frames[2] != _VERSION:
            return
        route, _, version, number, domain, _, _, mechanism, key = frames
        allowed = self._clients.get(key) if mechanism == b"CURVE" else None
        if allowed is not None and allowed in (EVERY_TENANT, domain.decode(errors="replace")):
            self.admitted += 1
            verdict = [b"200", b"OK", b"", b""]
        else:
            self.refused += 1
            verdict = [b"400", b"no access", b"", b""]
        self._door.socket.send_multipart([route, b"", version, number, *verdict], zmq.NOBLOCK)
        self._door.look()
