"""What must hold of the settings of cache events, and the publisher's own form of them."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from metaservice.config.settings import Config
from metaservice.publish.attach.rows import AttachmentError, Row, parse, ports
from metaservice.publish.settings import PORT_MAX, PublishConfig, PublishRefused, is_loopback

KEY_CHARACTERS = 40
"""Of a CURVE public key in Z85."""
USELESS_WHEN_OFF = ("events_attachments", "events_curve_secret", "events_curve_clients", "events_allow_plain")

Fault = tuple[str, str]
"""(setting, what is wrong with it and what would be right); `{name}` is the flag of the setting `name`."""


def publish_config(config: Config) -> PublishConfig | None:
    """What the publisher process is started with; None: routers are told nothing. The settings have been
    checked."""
    if not config.events_port_base:
        return None
    return PublishConfig(
        port_base=config.events_port_base,
        host=config.events_host,
        advertise=config.events_advertise,
        shared_address=config.events_shared_address,
        channels_max=config.events_channels_max,
        ring_windows=config.events_ring_windows,
        ring_bytes_max=config.events_ring_bytes_max,
        subscriber_hwm=config.events_subscriber_hwm,
        curve_secret=str(config.events_curve_secret or ""),
        curve_clients=dict(map(_client, config.events_curve_clients)),
        allow_plain=config.events_allow_plain,
        attachments=config.events_attachments,
        ingest=config.events_ingest,
    )


def faults(config: Config) -> Iterator[Fault]:
    """What cannot work, one at a time."""
    if not config.events_port_base:
        for name in USELESS_WHEN_OFF:
            if getattr(config, name):
                yield name, "but {events_port_base} is not set: routers would be told nothing"
        return
    yield from _ports(config)
    yield from _reach(config)
    yield from _curve(config)
    yield from _attachments(config)


def file_faults(config: Config) -> Iterator[Fault]:
    """What cannot work of the files that are named, as they are now."""
    from metaservice.publish.curve import load_keys  # noqa: PLC0415 - only for who has keys

    if config.events_port_base and config.events_curve_secret:
        try:
            load_keys(str(config.events_curve_secret))
        except PublishRefused as error:
            yield "events_curve_secret", _literal(f"which cannot be used: {error}")


def _ports(config: Config) -> Iterator[Fault]:
    taken = _range(config)
    if taken[-1] > PORT_MAX:
        yield (
            "events_port_base",
            f"and {config.events_channels_max} streams ({{events_channels_max}}) would need ports up to "
            f"{taken[-1]}: expected {PORT_MAX + 1 - len(taken)} or less, or fewer streams",
        )
    if config.port in taken:
        yield (
            "port",
            f"but ports {taken[0]} to {taken[-1]} are the streams': set {{events_port_base}} elsewhere",
        )


def _reach(config: Config) -> Iterator[Fault]:
    if config.events_host == "*" and not config.events_advertise:
        yield "events_host", "and {events_advertise} has to say what consumers connect to"
    if config.events_shared_address and not config.events_advertise:
        yield "events_shared_address", "and {events_advertise} has to be the address that leads to the leader"
    if is_loopback(config.events_host) or config.events_curve_secret or config.events_allow_plain:
        return
    yield (
        "events_host",
        "which other machines can reach, and events say what everybody asks: set {events_curve_secret} and "
        "{events_curve_clients}, or {events_allow_plain} in a network that you trust",
    )


def _curve(config: Config) -> Iterator[Fault]:
    if config.events_curve_secret and not config.events_curve_clients:
        yield "events_curve_secret", "and {events_curve_clients} has to say who may subscribe"
    if config.events_curve_clients and not config.events_curve_secret:
        yield "events_curve_clients", "but without {events_curve_secret} everybody may subscribe"
    for row in config.events_curve_clients:
        key, tenant = _client(row)
        if (
            len(key) != KEY_CHARACTERS
            or not key.isascii()
            or row[len(key) : len(key) + 1] != "="
            or not tenant
        ):
            yield "events_curve_clients", f"expected KEY=TENANT with a key of {KEY_CHARACTERS} characters"


def _client(row: str) -> tuple[str, str]:
    """The key may have any character of Z85 in it, `=` too: so it is told by its length."""
    return row[:KEY_CHARACTERS], row[KEY_CHARACTERS + 1 :].strip()


def _attachments(config: Config) -> Iterator[Fault]:
    taken = {"the streams": _range(config), "the API": range(config.port, config.port + 1)}
    seen: list[Row] = []
    for text in config.events_attachments:
        try:
            row = parse(text)
        except AttachmentError as error:
            yield "events_attachments", _literal(str(error))
            continue
        if row in seen:
            yield "events_attachments", f"{row.kind} is attached twice to the same: once is enough"
        seen.append(row)
        yield from _plain(config, row)
        bound = ports(row)
        if bound and bound[-1] > PORT_MAX:
            yield (
                "events_attachments",
                f"{row.kind} would need ports up to {bound[-1]}, and the last is {PORT_MAX}",
            )
        for whose, others in taken.items():
            if bound and set(bound) & set(others):
                yield (
                    "events_attachments",
                    f"{row.kind} needs ports {bound[0]} to {bound[-1]}, which are {whose}'s",
                )
        if bound:
            taken[f"another {row.kind}"] = bound


def _plain(config: Config, row: Row) -> Iterator[Fault]:
    """Kinds whose consumers know no encryption."""
    if row.kind in ("dynamo-indexer", "dynamo-peer") and config.events_curve_secret:
        yield "events_attachments", f"{row.kind}: it knows no encryption, but {{events_curve_secret}} is set"
    if row.kind != "llm-d" or config.events_allow_plain:
        return
    for endpoint in row.several("endpoint"):
        if not is_loopback(urlsplit(endpoint).hostname or ""):
            yield (
                "events_attachments",
                f"llm-d: {_literal(endpoint)} is another machine's, and it knows no encryption: set "
                "{events_allow_plain} in a network that you trust",
            )


def _literal(text: str) -> str:
    """What a user wrote has no settings' names in braces in it."""
    return text.replace("{", "{{").replace("}", "}}")


def _range(config: Config) -> range:
    return range(config.events_port_base, config.events_port_base + 2 * config.events_channels_max)
