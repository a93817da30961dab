"""A whole cluster under torture, in short; and the judge itself, given evidence that was tampered with."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from socket import create_connection, create_server

import msgspec
import pytest

from metaservice.cli.local.places import temporary_folder
from metaservice.core import events as ev
from metaservice.core.model import Quota
from metaservice.journal.codec import decode_batch, encode_batch
from tests.torture.cluster import Evidence, Outcome, Torture, Wanted
from tests.torture.cluster_journals import Journals, Told
from tests.torture.cluster_judge import DIRTY, EARLY, FORKS, LOST, QUOTA, Judge, Verdict
from tests.torture.cluster_load import TENANT
from tests.torture.cluster_proxy import Proxies
from tests.torture.cluster_record import Commit, Looked, Record
from tests.torture.cluster_site import SHARDS
from tests.torture.service_process import ROOT

pytestmark = pytest.mark.timeout(300)
SMOKE = Wanted(kills=1, handovers=1, ttl_ms=2_000, engines=4, etcd_members=1)
Run = tuple[Outcome, Verdict, Evidence]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """One run with one kill of a leader."""
    notes: list[str] = []
    with temporary_folder() as folder:
        yield Torture(folder, SMOKE, notes.append).run()


def judged(evidence: Evidence) -> Verdict:
    return Judge(evidence.record, evidence.journals, TENANT, evidence.reclaim_delay_ms).judge()


def copy_of(evidence: Evidence) -> Evidence:
    """Evidence of the same, to be tampered with."""
    record = Record(
        commits=list(evidence.record.commits),
        lookups=list(evidence.record.lookups),
        positions=list(evidence.record.positions),
    )
    journals = Journals("", SHARDS)
    journals.told = [list(told) for told in evidence.journals.told]
    journals.digests = dict(evidence.journals.digests)
    return Evidence(record, journals, [], evidence.reclaim_delay_ms)


@pytest.mark.torture
def test_d2_a_leader_is_killed_under_load_and_every_answer_was_right(run: Run) -> None:
    outcome, verdict, evidence = run
    assert verdict.problems == []
    assert outcome.problems == 0
    assert outcome.acked_commits > 100
    assert outcome.lookups > 100
    assert outcome.blocks_read > 100
    assert verdict.checked_states > 0
    assert {one.shard for one in evidence.record.positions} == set(range(SHARDS))
    assert any(not one.at.leader for one in evidence.record.lookups), "no follower answered"
    killed = evidence.windows[0]
    assert killed.shards and max(killed.away_s.values()) > 0.5, "nobody noticed the kill"


# ---------------------------------------------------------------- the judge


def acknowledges_what_is_not_in_the_journal(evidence: Evidence) -> None:
    commit = evidence.record.commits[-1]
    evidence.record.commits.append(replace(commit, place=(commit.place[0], commit.place[1] + 1)))


def acknowledges_another_key(evidence: Evidence) -> None:
    evidence.record.commits.append(replace(evidence.record.commits[0], key=bytes(16)))


def acknowledges_before_it_is_durable(evidence: Evidence) -> None:
    commit = evidence.record.commits[0]
    evidence.record.commits[0] = replace(commit, at=replace(commit.at, seq=1))


def some_leaders_lookup(evidence: Evidence) -> Looked:
    return next(one for one in evidence.record.lookups if one.at.leader and one.rows)


def shows_what_is_not_published(evidence: Evidence) -> None:
    looked = some_leaders_lookup(evidence)
    evidence.record.lookups.append(replace(looked, at=replace(looked.at, seq=1)))


def shows_a_place_of_another_key(evidence: Evidence) -> None:
    looked = some_leaders_lookup(evidence)
    evidence.record.lookups.append(replace(looked, rows=((bytes(16), looked.rows[0][1]),)))


def shows_what_was_removed(evidence: Evidence) -> None:
    """A lookup of the beginning, as if it had been answered at the end."""
    looked = some_leaders_lookup(evidence)
    shard = looked.at.shard
    gone = {slot for told in evidence.journals.told[shard] for slot in slots_in(told, ev.BlocksRemoved)}
    commit = next(one for one in evidence.record.commits if one.at.shard == shard and slot_of(one) in gone)
    last = evidence.journals.told[shard][-1].batch
    at = replace(looked.at, seq=last.last_seq, epoch=last.epoch)
    evidence.record.lookups.append(replace(looked, at=at, rows=((commit.key, commit.place),)))


def misses_what_serves(evidence: Evidence) -> None:
    """A lookup right after a block was looked up and found, which does not find it."""
    looked = next(one for one in reversed(evidence.record.lookups) if one.at.leader and one.rows)
    known = {commit.key for commit in evidence.record.commits}
    key = next(key for key, _ in looked.rows if key in known)
    evidence.record.lookups.append(replace(looked, rows=(), absent=(key,)))


def deletes_under_a_lease(evidence: Evidence) -> None:
    """A lease that would have held to this day, over a place that is gone."""
    gone = {
        (shard << 44) + slot
        for shard, told in enumerate(evidence.journals.told)
        for one in told
        for slot in slots_in(one, ev.LocationsGone)
    }
    looked = next(
        one for one in evidence.record.lookups for _, place in one.rows if place[0] in gone and place[1] == 1
    )
    evidence.record.lookups.append(replace(looked, until_s=looked.until_s + 1_000))


def deletes_at_once(evidence: Evidence) -> None:
    evidence.reclaim_delay_ms = 1_000_000


def answers_in_another_epoch(evidence: Evidence) -> None:
    at = evidence.record.positions[0]
    evidence.record.positions.append(replace(at, epoch=at.epoch + 1))


def answers_from_the_future(evidence: Evidence) -> None:
    at = evidence.record.positions[-1]
    evidence.record.positions.append(replace(at, seq=at.seq + 1_000_000))


def goes_back(evidence: Evidence) -> None:
    """Asked at the end, answered from the beginning."""
    first, last = evidence.record.positions[0], evidence.record.positions[-1]
    at = replace(first, sent_s=last.received_s + 1, received_s=last.received_s + 2)
    evidence.record.positions.append(at)


def leads_on_after_another_took_over(evidence: Evidence) -> None:
    shard = next(number for number, told in enumerate(evidence.journals.told) if told[-1].batch.epoch > 1)
    old = next(one for one in evidence.record.positions if one.shard == shard and one.leader)
    late_s = evidence.journals.told[shard][-1].commit_s + 1
    evidence.record.positions = [replace(old, sent_s=late_s, received_s=late_s + 1)]


def follows_from_far_behind(evidence: Evidence) -> None:
    looked = some_leaders_lookup(evidence)
    late_s = evidence.journals.told[looked.at.shard][-1].commit_s + 1
    at = replace(looked.at, leader=False, sent_s=late_s)
    evidence.record.lookups.append(replace(looked, at=at, staleness_ms=10))


def loses_a_batch(evidence: Evidence) -> None:
    del evidence.journals.told[1][3]


def has_another_state(evidence: Evidence) -> None:
    """A sum in the journal is another one."""
    change(evidence, 1, ev.StateChecked, lambda event: msgspec.structs.replace(event, summary=b"other"))


def allows_less(evidence: Evidence) -> None:
    """The quota was smaller than what was used."""
    for shard in range(SHARDS):
        change(
            evidence, shard, ev.TenantPut, lambda event: msgspec.structs.replace(event, quota=Quota(blocks=7))
        )


def grants_twice(evidence: Evidence) -> None:
    """Budget that comes out of nothing: every grant of blocks is one larger than what it was decided from."""
    told = evidence.journals.told[0]
    grants = [
        event
        for one in told
        for event in decode_batch(one.batch.payload)
        if isinstance(event, ev.SliceGranted)
    ]
    rows = [row for row, event in enumerate(grants) if event.blocks]
    assert rows, "no grant of blocks"
    for row in rows:
        change(
            evidence,
            0,
            ev.SliceGranted,
            lambda event: msgspec.structs.replace(event, blocks=event.blocks + 1),
            skip=row,
        )


def slots_in(told: Told, kind: type[ev.BlocksRemoved] | type[ev.LocationsGone]) -> list[int]:
    """The slots of all events of this kind."""
    slots: list[int] = []
    for event in decode_batch(told.batch.payload):
        if isinstance(event, kind):
            slots += memoryview(event.slots).cast("I").tolist()
    return slots


def slot_of(commit: Commit) -> int:
    return commit.place[0] & ((1 << 44) - 1)


def change(evidence: Evidence, shard: int, kind: type, to: Callable[..., ev.Event], *, skip: int = 0) -> None:
    """Put another event in the place of the first one of a kind, after `skip` of them."""
    told = evidence.journals.told[shard]
    for row, one in enumerate(told):
        events = decode_batch(one.batch.payload)
        for at, event in enumerate(events):
            if isinstance(event, kind):
                if skip:
                    skip -= 1
                    continue
                events[at] = to(event)
                told[row] = replace(one, batch=replace(one.batch, payload=encode_batch(events)))
                return
    raise AssertionError(f"no {kind.__name__} in shard {shard}")


@pytest.mark.torture
@pytest.mark.parametrize(
    ("tamper", "kind"),
    [
        (acknowledges_what_is_not_in_the_journal, LOST),
        (acknowledges_another_key, LOST),
        (acknowledges_before_it_is_durable, LOST),
        (misses_what_serves, LOST),
        (shows_what_is_not_published, DIRTY),
        (shows_a_place_of_another_key, DIRTY),
        (shows_what_was_removed, DIRTY),
        (leads_on_after_another_took_over, DIRTY),
        (follows_from_far_behind, DIRTY),
        (deletes_under_a_lease, EARLY),
        (deletes_at_once, EARLY),
        (answers_in_another_epoch, FORKS),
        (answers_from_the_future, FORKS),
        (goes_back, FORKS),
        (loses_a_batch, FORKS),
        (has_another_state, FORKS),
        (allows_less, QUOTA),
        (grants_twice, QUOTA),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_judge_sees_a_cluster_that(run: Run, tamper: Callable[[Evidence], None], kind: str) -> None:
    evidence = copy_of(run[2])
    tamper(evidence)
    assert judged(evidence).counts[kind] > 0


# ---------------------------------------------------------------- the links


def test_a_silent_cut_holds_what_was_sent_and_lets_it_go_late() -> None:
    with create_server(("127.0.0.1", 0)) as server, Proxies({"link": server.getsockname()[1]}) as proxies:
        here = create_connection(("127.0.0.1", proxies.ports["link"]), 5)
        there, _ = server.accept()
        with here, there:
            there.settimeout(5)
            here.sendall(b"one")
            assert there.recv(10) == b"one"
            proxies.cut(["link"], ["out"])
            here.sendall(b"two")
            there.sendall(b"back")
            assert here.recv(10) == b"back", "the other direction passes"
            there.settimeout(0.2)
            with pytest.raises(TimeoutError):
                there.recv(10)
            proxies.heal()
            there.settimeout(5)
            assert there.recv(10) == b"two"


def test_a_loud_cut_resets_connections_and_refuses_new_ones() -> None:
    with create_server(("127.0.0.1", 0)) as server, Proxies({"link": server.getsockname()[1]}) as proxies:
        address = ("127.0.0.1", proxies.ports["link"])
        here = create_connection(address, 5)
        there, _ = server.accept()
        with here, there:
            proxies.cut(["link"], loud=True)
            with pytest.raises(OSError):
                here.recv(10)
            with pytest.raises(OSError), create_connection(address, 5) as again:
                again.sendall(b"x")
                again.recv(10)
                again.sendall(b"x")
            proxies.heal()
            with create_connection(address, 5) as again:
                again.sendall(b"one")
                anew, _ = server.accept()
                with anew:
                    assert anew.recv(10) == b"one"


# ---------------------------------------------------------------- long runs


@pytest.mark.torture
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kind_of_fault_once(seed: int) -> None:
    """As a person runs it. How long service was away is for `make torture` to judge, on a machine of its
    own."""
    counts = ["--kills", "10", "--pauses", "10", "--partitions", "9", "--ttl-ms", "2000"]
    last, said = spoken("cluster.py", [*counts, "--seed", str(seed)])
    wrong = ("lost_commits", "dirty_reads", "early_reclaims", "quota_overshoot", "forks", "problems")
    assert {name: last[name] for name in wrong} == dict.fromkeys(wrong, 0), said
    assert last["acked_commits"] > 1_000


@pytest.mark.torture
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quota_over_shards_whose_leaders_are_killed(seed: int) -> None:
    last, said = spoken("quota.py", ["--seconds", "30", "--seed", str(seed)])
    assert (last["quota_overshoot"], last["problems"]) == (0, 0), said
    assert last["filled_share"] >= 0.95, said


def spoken(program: str, options: list[str]) -> tuple[dict[str, int | float], str]:
    """The last line of a program that came to its end, and what it said before."""
    command = [sys.executable, f"tests/torture/{program}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=880)
    assert done.returncode in (0, 1), done.stderr[-4_000:] + done.stdout[-500:]
    last: dict[str, int | float] = json.loads(done.stdout.splitlines()[-1])
    return last, done.stderr[-4_000:] + json.dumps(last)
