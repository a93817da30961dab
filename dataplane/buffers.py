"""Buffers of callers, checked for every backend: plain contiguous bytes of just the promised length."""

from dataplane.port import Buffer, Place, ReadRefused, WriteFailed


def payload_of(place: Place, data: Buffer) -> memoryview:
    """`data` as plain bytes of the length that the place promises. Raises WriteFailed."""
    try:
        payload = memoryview(data).cast("B")
    except (TypeError, ValueError) as error:
        raise WriteFailed("bad_buffer", place, str(error)) from None
    if len(payload) != place.size_bytes:
        raise WriteFailed("wrong_length", place, f"{len(payload)} bytes instead of {place.size_bytes}")
    return payload


def writable(place: Place, buffer: bytearray | memoryview) -> memoryview:
    """`buffer` as plain writable bytes of the length that the place promises. Raises ReadRefused."""
    try:
        view = memoryview(buffer).cast("B")
    except (TypeError, ValueError) as error:
        raise ReadRefused("bad_buffer", place, str(error)) from None
    if view.readonly or len(view) != place.size_bytes:
        raise ReadRefused("bad_buffer", place, f"{place.size_bytes} writable bytes are needed")
    return view
