"""The etcd that tests and `make cluster` start: members can be killed and frozen, and are gone with their
starter."""

import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from metaservice.cli.local.etcd import EtcdMember, LocalEtcd
from metaservice.cli.local.process import LocalFailed


@pytest.fixture(scope="module")
def trio() -> Iterator[LocalEtcd]:
    with LocalEtcd(members=3) as trio:
        yield trio


@pytest.fixture(autouse=True)
def whole_again(trio: LocalEtcd) -> Iterator[None]:
    yield
    trio.thaw()
    trio.start()


def until(check: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def leader(trio: LocalEtcd) -> EtcdMember:
    for member in trio.members:
        status = httpx.post(f"{member.endpoint}/v3/maintenance/status", json={}, timeout=2).json()
        if status["leader"] == status["header"]["member_id"]:
            return member
    raise AssertionError("no member leads")


def put(endpoint: str, timeout_s: float = 0.5) -> bool:
    try:
        reply = httpx.post(f"{endpoint}/v3/kv/put", json={"key": "YQ==", "value": "Yg=="}, timeout=timeout_s)
    except httpx.TransportError:
        return False
    return reply.status_code == 200


def test_every_member_answers(trio: LocalEtcd) -> None:
    assert len(trio.pids) == len(set(trio.endpoints)) == 3
    assert all(put(endpoint) for endpoint in trio.endpoints)


@pytest.mark.parametrize("how", ["crash", pytest.param("freeze", marks=pytest.mark.slow)])
def test_two_of_three_go_on_without_their_leader(trio: LocalEtcd, how: str) -> None:
    gone = leader(trio)
    getattr(gone, how)()
    others = [member for member in trio.members if member is not gone]
    assert until(lambda: all(put(member.endpoint) for member in others))
    assert not put(gone.endpoint)


def test_one_of_three_writes_nothing_until_another_is_back(trio: LocalEtcd) -> None:
    last, back, _ = trio.members
    for member in trio.members[1:]:
        member.crash()
    assert not put(last.endpoint)
    assert not last.healthy()
    trio.restart(back)
    assert until(lambda: put(last.endpoint))


def test_a_member_that_ended_is_told_with_its_log(trio: LocalEtcd) -> None:
    member = trio.members[0]
    member.stop()
    with pytest.raises(LocalFailed, match="etcd e1 ended with status"):
        member.healthy()


@pytest.mark.slow
def test_data_in_a_folder_that_is_given_stay(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("etcd")
    for _ in range(2):
        with LocalEtcd(folder, words=()) as single:
            reply = httpx.post(f"{single.endpoints[0]}/v3/kv/range", json={"key": "YQ=="}).json()
            known = "kvs" in reply
            assert put(single.endpoints[0])
    assert known


def test_pids_are_those_of_running_members(trio: LocalEtcd) -> None:
    member = trio.members[2]
    assert member.pid in trio.pids
    member.crash()
    assert not member.running
    assert len(trio.pids) == 2
    assert member.pid not in trio.pids
