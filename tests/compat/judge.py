"""Whether an indexer says what is true: the one comparison that all cases end with."""

import random
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPException
from time import monotonic

from metaservice.cli.local.process import until
from tests.compat.fleet import Fleet
from tests.compat.indexer import Indexer
from tests.compat.reference import Document, Mismatch, mismatches

SHOWN = 5
SPARE_RANK = 1_000
REGISTER_TIMEOUT_S = 15.0
HEAL_S = 0.5


class CaseFailed(Exception):
    """A case did not end as it has to. `mismatched`: scores that were wrong."""

    def __init__(self, text: str, mismatched: int = 0) -> None:
        super().__init__(text)
        self.mismatched = mismatched


class Judge:
    """Compares one indexer with the truth of one fleet."""

    def __init__(self, fleet: Fleet, indexer: Indexer) -> None:
        self._fleet = fleet
        self._indexer = indexer

    def wrong(self, documents: Sequence[Document]) -> list[Mismatch]:
        """What is scored wrongly now."""
        found: list[Mismatch] = []
        for document in documents:
            board = self._indexer.board(self._fleet.model, document)
            found += mismatches(self._fleet.truth.board(document), board)
        return found

    def settle(self, documents: Sequence[Document], timeout_s: float) -> float:
        """Returns once every score is right: after how many seconds that was. Raises CaseFailed when it takes
        longer than `timeout_s`.

        Those that were wrong are looked at first, so that one look is short while much is still missing.
        """
        began = monotonic()
        first = list(documents)
        for _ in until(began + timeout_s):
            with suppress(OSError, HTTPException):
                at = self._first_wrong(first)
                if at is None:
                    return monotonic() - began
                first.insert(0, first.pop(at))
        wrong = self.wrong(documents)
        if not wrong:
            return monotonic() - began
        shown = "; ".join(map(str, wrong[:SHOWN]))
        raise CaseFailed(f"{len(wrong)} scores are wrong after {timeout_s:g} s, e.g. {shown}", len(wrong))

    def _first_wrong(self, documents: Sequence[Document]) -> int | None:
        for at, document in enumerate(documents):
            board = self._indexer.board(self._fleet.model, document)
            if board != self._fleet.truth.board(document):
                return at
        return None

    def hold(self, documents: Sequence[Document], chance: random.Random, hold_s: float) -> int:
        """Scores stay right for `hold_s` while some are looked at again and again; how many were looked at.
        Raises CaseFailed.

        A look may fall between the two halves of what is told once more (removed, stored), which an indexer
        applies one after the other: that is said, and has to be over at the next look.
        """
        looked = 0
        for _ in until(monotonic() + hold_s):
            some = chance.sample(documents, min(20, len(documents)))
            wrong = self.wrong(some)
            if wrong:
                healed_s = self.settle(some, HEAL_S)
                self._fleet.site.note(f"for {healed_s:.3f} s a score was wrong: {wrong[0]}")
            looked += len(some)
        return looked

    def await_attached(self) -> None:
        """Returns once the service registered a stream for every engine. Raises CaseFailed."""
        wanted = {self._fleet.writer, *(engine.worker for engine in self._fleet.engines)}
        for _ in until(monotonic() + REGISTER_TIMEOUT_S):
            if wanted <= self.attached():
                return
        raise CaseFailed(
            f"the service registered workers {sorted(self.attached())}, not all of {sorted(wanted)}"
        )

    def attached(self) -> set[int]:
        """Workers of this model for which the service registered a stream."""
        return {
            row["instance_id"]
            for row in self._indexer.workers()
            if row["model_name"] == self._fleet.model
            and any(int(rank) >= SPARE_RANK for rank in row["endpoints"])
        }
