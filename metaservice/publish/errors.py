"""What the publisher's side fails with."""


class PublisherUnavailable(Exception):
    """The publisher process does not answer, or answered with a problem. `code` is one of `wire.problems`:
    `events_unavailable` while it starts, is gone or takes too long, else what it refused the request for."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
