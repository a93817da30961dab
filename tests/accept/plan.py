"""All that will be asked, worked out before anything is started: the baseline has to know it."""

from collections.abc import Iterator

from msgspec import Struct

from tests.accept.documents import Documents, Request

ORACLE_DOCUMENTS = 6
TTFT_DOCUMENTS = 12
SHARED_DOCUMENTS = 24
KILL_DOCUMENTS = 6
LATE_DOCUMENTS = 3
"""New ones in each phase after a kill, so that there is something to write, too."""
DOCUMENTS = ORACLE_DOCUMENTS + TTFT_DOCUMENTS + SHARED_DOCUMENTS + KILL_DOCUMENTS + 2 * LATE_DOCUMENTS


class TooFew(Exception):
    """This Python's library has too few sources for the documents."""


class Plan(Struct, frozen=True, kw_only=True):
    """Requests of each scene."""

    oracle: list[Request]
    ttft_cold: list[Request]
    ttft_hit: list[Request]
    warm: list[Request]
    """One about each document that is shared from then on."""
    steady: list[Request]
    engine_kill: list[Request]
    """Each about a document of its own: whoever gets one has something to write."""
    after_engine_kill: list[Request]
    after_leader_kill: list[Request]
    after_restart: list[Request]
    bypassed: list[Request]
    unbypassed: list[Request]
    outage: list[Request]
    after_outage: list[Request]
    damage: list[Request]
    """Each about another document; those are asked whose blocks lie on the disk."""

    def __iter__(self) -> Iterator[Request]:
        """All of them, once each."""
        for field in self.__struct_fields__:
            yield from getattr(self, field)


def plan(documents: Documents) -> Plan:
    """Raises TooFew."""
    if len(documents.documents) < DOCUMENTS:
        raise TooFew(f"{len(documents.documents)} documents; {DOCUMENTS} are needed")
    numbers = iter(range(DOCUMENTS))

    def take(count: int) -> list[int]:
        return [next(numbers) for _ in range(count)]

    oracle, ttft = take(ORACLE_DOCUMENTS), take(TTFT_DOCUMENTS)
    shared, killing = take(SHARED_DOCUMENTS), take(KILL_DOCUMENTS)
    first, second = take(LATE_DOCUMENTS), take(LATE_DOCUMENTS)
    ask = documents.ask
    return Plan(
        oracle=[ask(document) for document in oracle],
        ttft_cold=[ask(document) for document in ttft],
        ttft_hit=[ask(document) for document in ttft],
        warm=[ask(document) for document in shared],
        steady=documents.some(66, shared),
        engine_kill=[ask(document) for document in killing],
        after_engine_kill=documents.some(48, shared + first),
        after_leader_kill=documents.some(120, shared + second),
        after_restart=documents.some(18, shared),
        bypassed=documents.some(6, shared),
        unbypassed=documents.some(6, shared),
        outage=documents.some(30, shared),
        after_outage=documents.some(12, shared),
        damage=[ask(document) for document in shared[:-13:-1]],
    )
