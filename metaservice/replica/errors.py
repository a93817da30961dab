"""Why a shard could not take a call."""


class ShardUnavailable(Exception):
    """Not now: `code` is a problem code (`not_ready`, `overloaded`, `journal_unavailable`). Whether the
    command took effect is not said; a retry with the same request id gets the answer that counts."""

    def __init__(self, code: str, message: str, retry_after_ms: int = 1_000) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_ms = retry_after_ms


class NotLeader(ShardUnavailable):
    """Another replica leads the shard (code `not_leader`), or nobody is known to (code `not_ready`).

    `leader_url` is where to ask, "" when it is not known.
    """

    def __init__(self, shard: int, message: str, leader: str = "", leader_url: str = "") -> None:
        super().__init__("not_leader" if leader_url else "not_ready", message)
        self.shard = shard
        self.leader = leader
        self.leader_url = leader_url
