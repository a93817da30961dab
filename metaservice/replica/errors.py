"""Why a shard could not take a call."""


class ShardUnavailable(Exception):
    """Not now: `code` is a problem code (`not_ready`, `overloaded`, `journal_unavailable`). Whether the
    command took effect is not said; a retry with the same request id gets the answer that counts."""

    def __init__(self, code: str, message: str, retry_after_ms: int = 1_000) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_ms = retry_after_ms
