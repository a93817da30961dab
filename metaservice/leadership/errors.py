"""What can go wrong in electing. A lost lease is no error: the view then does not name this replica."""


class LeadershipError(Exception):
    """Base of all errors of this room. Whoever gets one has renewed nothing."""


class LeadershipUnavailable(LeadershipError):
    """Nobody answered within the deadline. What was asked for may have happened or not: a later view tells.

    Keep what is held until its own validity ends, and ask again. Treating this as a lost lease would turn
    every hiccup of the elector into a change of leaders.
    """

    def __init__(self, where: str, doing: str, reason: str) -> None:
        super().__init__(f"{where} did not answer ({doing}): {reason}; it is asked again")
        self.reason = reason


class LeadershipRefused(LeadershipError):
    """The elector answered, and will give the same answer again: wrong password, no permission, tables that
    are not there. Nothing changes until an operator does something."""

    def __init__(self, where: str, doing: str, reason: str) -> None:
        super().__init__(f"{where} refused ({doing}): {reason}")
        self.reason = reason


class ReplicaSuperseded(LeadershipError):
    """Another process started later under this replica's name. This one is no longer renewed and must stop.

    If both went on, each would take the other's leadership for its own.
    """

    def __init__(self, replica: str) -> None:
        super().__init__(
            f"another process runs as replica {replica!r} and started later: stop one of them, "
            "or give each a name of its own"
        )
        self.replica = replica
