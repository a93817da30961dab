"""A program that starts others ends them too when it is told to end, however often it is told."""

import signal
from types import FrameType
from typing import NoReturn

EXIT_INTERRUPTED = 130
_TOLD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_in_order() -> None:
    """From now on SIGINT, SIGTERM and SIGHUP raise SystemExit(EXIT_INTERRUPTED), the first of them once."""
    for number in _TOLD:
        signal.signal(number, _interrupt)


def _interrupt(number: int, _: FrameType | None) -> NoReturn:
    for later in _TOLD:
        signal.signal(later, signal.SIG_IGN)  # the end in order is under way
    raise SystemExit(EXIT_INTERRUPTED)
