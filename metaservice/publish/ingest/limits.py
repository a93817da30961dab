"""Every bound of what is taken in from engines."""

from msgspec import Struct


class IngestLimits(Struct, frozen=True, kw_only=True):
    """An engine may be broken, old, or hostile: nothing that it sends costs more than these."""

    entries_per_engine_max: int = 1_000_000
    entries_max: int = 4_000_000
    """Blocks that are remembered, one for each tier that holds it; about 200 bytes each. More are counted and
    left out, which is a miss and no mistake."""
    orphans_per_engine_max: int = 65_536
    """Blocks that wait, with their tokens, for a parent that was not told of."""
    engines_max: int = 10_000
    streams_max: int = 500
    """Event streams that are followed at a time; three sockets each."""
    message_bytes_max: int = 8 * 1024 * 1024
    """A longer message ends the connection; it is made again."""
    event_blocks_max: int = 65_536
    inbox_frames_max: int = 1_000
    inbox_bytes_max: int = 128 * 1024 * 1024
    """Frames that were read and wait for their turn: so many of one engine, so many bytes of all together.
    Beyond them nothing is read: the publisher then drops, and a replay brings what it dropped."""
    queue_frames_max: int = 10_000
    queue_bytes_max: int = 16 * 1024 * 1024
    """Of one engine: live frames that wait for the end of a replay."""
    socket_frames_max: int = 4_096
    slice_blocks: int = 1_024
    """After so many the loop is given back: it sends to routers, too."""
    replay_idle_ms: int = 2_000
    """A replay that brought nothing for so long is asked for again, so many times."""
    replay_tries: int = 3
    probe_ms: int = 15_000
    """An engine that is silent for so long is asked for its last batch again: is it idle, or gone?"""
    silent_ms: int = 30_000
    """One that was never heard in this time is probably configured wrongly."""
    visible_ms: int = 15_000
    """Reported blocks are hidden when the next report or heartbeat does not come within this time, ..."""
    expire_ms: int = 60_000
    """... and dropped after this one."""
