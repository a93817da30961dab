"""Lookups while nobody leads: a follower is asked, in the time that is left, and its word is used briefly."""

from array import array
from collections.abc import Iterator
from threading import Event
from typing import Any, cast

import pytest

from engine_adapters.vllm.asking import STALENESS_MS_MAX, UNLEASED_MS, Answer, Asking, Limits, Question
from engine_adapters.vllm.counts import Counts
from engine_adapters.vllm.openings import Openings
from metaservice.client import Client, LookupResult
from metaservice.wire.schemas import PartRef, StorageRef

KEYS = [bytes([number]) * 32 for number in range(3)]
LIMITS = Limits(wait_ms=500, timeout_ms=1_000, lease_ms=10_000)


def found(lease: str | None) -> LookupResult:
    return LookupResult(
        asked=3, hits=2, cut="miss", cut_at=2, keys=KEYS[:2], locations=array("Q", (1, 2)),
        generations=array("I", (1, 1)), storages=array("H", (0, 0)), checksums=array("Q", (7, 8)),
        storage_table=[StorageRef(name="s", kind="posix", options={})], parts=[PartRef(name="tp0", bytes=4)],
        cluster="c", lease=lease,
    )  # fmt: skip


class Service:
    """Answers as told, and remembers what it was asked. A call takes `takes_ms` of the clock's time."""

    def __init__(self, clock: list[int], leader: LookupResult, follower: LookupResult, takes_ms: int) -> None:
        self.asked: list[dict[str, Any]] = []
        self._clock, self._leader, self._follower, self._takes_ms = clock, leader, follower, takes_ms

    def lookup(self, instance: str, keys: list[bytes], **named: Any) -> LookupResult:
        self.asked.append(named)
        self._clock[0] += min(self._takes_ms, named["timeout_ms"])
        return self._follower if "staleness_ms_max" in named else self._leader


@pytest.fixture
def clock() -> Iterator[list[int]]:
    yield [1_000_000]


def ask(clock: list[int], service: Service) -> tuple[Question, Answer, dict[str, int]]:
    counts, answers, done = Counts(), list[Answer](), Event()

    def answered(_: Question, answer: Answer) -> None:
        answers.append(answer)
        done.set()

    asking = Asking(
        cast(Client, service),
        LIMITS,
        Openings(lambda *_: None),
        counts,
        lambda: clock[0],
        lambda _: True,
        answered,
        lambda _: None,
    )
    asking.start()
    question = Question("i", KEYS, "", clock[0], 0)
    asking.put(question)
    assert done.wait(10)
    asking.close()
    asking.join(5)
    return question, answers[0], counts.drain()


@pytest.mark.parametrize("failure", ["rejected:not_ready", "refused_connection", "timeout", "breaker_open"])
def test_a_follower_answers_while_nobody_leads(clock: list[int], failure: str) -> None:
    gone = LookupResult(asked=3, failure=failure)
    service = Service(clock, gone, found(None), 50)
    question, answer, counts = ask(clock, service)
    assert (answer.hits, answer.failure, question.lease) == (2, None, None)
    assert service.asked[1]["staleness_ms_max"] == STALENESS_MS_MAX and "lease_ms" not in service.asked[1]
    assert question.until_ms == clock[0] + UNLEASED_MS
    assert counts["lookups_by_followers"] == 1 and counts["lookup_calls"] == 2


def test_a_leader_that_hangs_leaves_time_for_a_follower(clock: list[int]) -> None:
    service = Service(clock, LookupResult(asked=3, failure="timeout"), found(None), 10_000)
    _, answer, _ = ask(clock, service)
    assert [named["timeout_ms"] for named in service.asked] == [300, 200]
    assert clock[0] == 1_000_500, "no longer than the request waits"
    assert answer.hits == 2


@pytest.mark.parametrize(
    "failure", ["rejected:instance_unknown", "rejected:invalid_field", "overloaded", "protocol"]
)
def test_a_refusal_is_final(clock: list[int], failure: str) -> None:
    service = Service(clock, LookupResult(asked=3, failure=failure), found(None), 1)
    _, answer, counts = ask(clock, service)
    assert (answer.hits, answer.failure, len(service.asked)) == (0, failure, 1)
    assert "lookups_by_followers" not in counts


def test_a_leader_that_answers_is_believed_alone(clock: list[int]) -> None:
    service = Service(clock, found("r-0-1-1"), found(None), 1)
    question, answer, _ = ask(clock, service)
    assert (answer.hits, question.lease, question.until_ms, len(service.asked)) == (2, "r-0-1-1", 0, 1)


def test_when_nobody_answers_it_is_the_leaders_failure(clock: list[int]) -> None:
    gone = LookupResult(asked=3, failure="timeout")
    service = Service(clock, LookupResult(asked=3, failure="rejected:not_ready"), gone, 1)
    _, answer, _ = ask(clock, service)
    assert (answer.hits, answer.failure) == (0, "rejected:not_ready")
