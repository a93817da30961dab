"""What lets this engine's sockets in where the service's streams are encrypted (CURVE)."""

from collections.abc import Callable
from typing import Any

import zmq.auth

from engine_adapters.vllm.settings import Settings, SettingsRefused

KEY_LENGTH = 40
"""Characters of a CURVE key (Z85)."""


def opener(settings: Settings) -> Callable[[Any], None]:
    """Gives a socket the keys of the settings, before it connects. Raises SettingsRefused when they cannot be
    used."""
    if not settings.curve_secret and not settings.curve_server:
        return lambda socket: None
    if not settings.curve_secret or len(settings.curve_server) != KEY_LENGTH:
        raise SettingsRefused(
            "kv_connector_extra_config: curve_secret (a file with this engine's key pair) and curve_server "
            f"(the service's public key, {KEY_LENGTH} characters) go together"
        )
    try:
        public, secret = zmq.auth.load_certificate(settings.curve_secret)
    except (OSError, ValueError) as error:
        raise SettingsRefused(
            f"kv_connector_extra_config.curve_secret: {settings.curve_secret}: {error}"
        ) from None
    if secret is None:
        raise SettingsRefused(
            f"kv_connector_extra_config.curve_secret: {settings.curve_secret} has no secret key"
        )
    keys = {
        zmq.CURVE_PUBLICKEY: public,
        zmq.CURVE_SECRETKEY: secret,
        zmq.CURVE_SERVERKEY: settings.curve_server.encode(),
    }

    def let_in(socket: Any) -> None:
        for option, key in keys.items():
            socket.setsockopt(option, key)

    return let_in
