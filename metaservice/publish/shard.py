"""How one shard stands, as the publisher knows it."""

from .ring import Ring


class ShardState:
    """What was told of it, and what of that was sent."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.number = -1
        """Of the newest window; -1: it has not begun."""
        self.now_ms = 0
        """Its clock."""
        self.heard_s = 0.0
        """When the newest window came."""
        self.stands = False
        """Whether all that is announced is known."""
        self.leads = False
        self.epoch = 0
        self.due = 0
        """The next window to send, while this replica leads."""
        self.beat_s = 0.0
        self.beat_due = False
