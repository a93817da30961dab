"""Which of the two encodings a body is in and which the reply gets."""

from .errors import ApiError

JSON = b"application/json"
MSGPACK = b"application/msgpack"
PROBLEM_JSON = b"application/problem+json"

_CONTENT = {JSON: False, MSGPACK: True}
_NAMES = {JSON: False, MSGPACK: True, PROBLEM_JSON: False}


def body_is_msgpack(content_type: bytes) -> bool:
    """Whether a body of this content type is msgpack (else JSON). Raises `unsupported_media_type`."""
    known = _CONTENT.get(content_type)
    if known is not None:
        return known
    name, *parameters = content_type.lower().split(b";")
    known = _CONTENT.get(name.strip())
    for parameter in parameters:
        label, _, value = parameter.partition(b"=")
        if label.strip() == b"charset" and value.strip(b' "') not in (b"utf-8", b"utf8"):
            known = None
    if known is None:
        shown = content_type[:80].decode("latin-1") or "none"
        raise ApiError(
            "unsupported_media_type",
            f"content type is {shown}; send application/json (UTF-8) or application/msgpack",
            "content-type",
        )
    return known


def refuse_encoded(content_encoding: bytes) -> None:
    """Bodies are read as they are: a compressed one would defeat the size limit.

    Raises `unsupported_media_type`.
    """
    if content_encoding.strip().lower() not in (b"", b"identity"):
        raise ApiError(
            "unsupported_media_type", "compressed bodies are not read; send it as it is", "content-encoding"
        )


def reply_is_msgpack(accept: bytes, default: bool) -> bool:
    """Whether the reply is msgpack: by the Accept header, else `default`. Raises `not_acceptable`."""
    if not accept or accept == b"*/*":
        return default
    known = _CONTENT.get(accept)
    if known is not None:
        return known
    quality = {False: -1.0, True: -1.0}
    exact = {False: -1, True: -1}
    for entry in accept.lower().split(b",")[:32]:
        name, *parameters = (piece.strip() for piece in entry.split(b";"))
        weight = _weight(parameters)
        for media, rank in _ranked(name):
            if rank > exact[media] or (rank == exact[media] and weight > quality[media]):
                exact[media], quality[media] = rank, weight
    best = max(quality.values())
    if best <= 0:
        raise ApiError(
            "not_acceptable", "this service answers in application/json or application/msgpack", "accept"
        )
    return default if quality[default] == best else not default


def _weight(parameters: list[bytes]) -> float:
    for parameter in parameters:
        label, _, value = parameter.partition(b"=")
        if label.strip() == b"q":
            try:
                return min(1.0, max(0.0, float(value)))
            except ValueError:
                return 0.0
    return 1.0


def _ranked(name: bytes) -> list[tuple[bool, int]]:
    if name in (b"*/*", b"application/*"):
        return [(False, len(name) - 3), (True, len(name) - 3)]
    known = _NAMES.get(name)
    return [] if known is None else [(known, 100)]
