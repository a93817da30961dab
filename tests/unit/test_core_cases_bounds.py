"""Every bound of the core, and corners that random histories seldom reach."""

from array import array
from typing import Any

import pytest

from metaservice.core.commands import (
    Abort,
    DeleteGroup,
    DeleteInstance,
    DeleteStorage,
    DeleteTenant,
    Deregister,
    PutGroup,
    PutInstance,
    PutStorage,
    PutTenant,
    RegisterEngine,
    RegisterWorker,
    RenewWrite,
    SetSwitch,
    StartWrite,
    TakeTasks,
    Unknown,
)
from metaservice.core.ids import location_base
from metaservice.core.model import (
    ENDED_SESSIONS,
    REMEMBERED_REQUESTS,
    AttentionGroup,
    Fingerprint,
    GroupKind,
    Limits,
    Part,
    Quota,
    SwitchMode,
    SwitchScope,
)
from tests.sim.fleet import FINGERPRINT, Fleet, chain, key, outcomes, statuses, windowed

LIMITS = Limits(lease_ms_max=1_000, reclaim_delay_ms=100, late_write_ms=100, expire_ms=1_000_000)


def limits(**more: int) -> Limits:
    """LIMITS with something else."""
    return Limits(lease_ms_max=1_000, reclaim_delay_ms=100, late_write_ms=100, expire_ms=1_000_000, **more)


# ---------------------------------------------------------------- bounded memory


def test_retries_and_ended_sessions_are_remembered_up_to_a_bound() -> None:
    fleet = Fleet(LIMITS)
    first = fleet.start([key("n0")], request_id="r0")
    fleet.finish(first)
    second = fleet.start([key("n1")], request_id="r1")
    fleet.finish(second)
    for number in range(2, REMEMBERED_REQUESTS):
        fleet.put([key(f"n{number}")], request_id=f"r{number}")
    assert fleet.start([key("n0")], request_id="r0") == first
    assert statuses(fleet.finish(first)) == ["serving"]
    fleet.put([key("last")], request_id="last")
    forgotten = fleet.start([key("n0")], request_id="r0")
    assert outcomes(forgotten) == ["present"] and forgotten.session is None, "decided anew"
    assert fleet.start([key("n1")], request_id="r1") == second
    assert fleet.refused(fleet.finishing(first)) == "session_ended"
    assert fleet.refused(fleet.finishing(first, session=1 << 40)) == "session_unknown"
    assert len(fleet.machine.state.remembered) == REMEMBERED_REQUESTS
    assert len(fleet.machine.state.ended) == ENDED_SESSIONS


def test_answers_that_changed_nothing_are_remembered_up_to_a_bound() -> None:
    fleet = Fleet(LIMITS)
    fleet.put([key("k")])
    for number in range(REMEMBERED_REQUESTS + 10):
        assert outcomes(fleet.start([key("k")], request_id=f"r{number}")) == ["present"]
    assert len(fleet.machine.memory.unjournaled) == REMEMBERED_REQUESTS


def test_open_sessions_are_bounded() -> None:
    fleet = Fleet(limits(sessions_max=2))
    started = fleet.start([key("n0")])
    fleet.start([key("n1")])
    asked = StartWrite(instance="i", engine="e1", incarnation="1", keys=[key("n2")])
    assert fleet.refused(asked) == "too_many_sessions"
    fleet.finish(started)
    assert outcomes(fleet.start([key("n2")])) == ["write"]


def test_ended_leases_and_tasks_are_bounded() -> None:
    fleet = Fleet(limits(ended_leases_max=2, ended_tasks_max=2))
    fleet.tick(1_000)
    for number in range(5):
        fleet.put([key(f"n{number}")])
        fleet.lookup([key(f"n{number}")], lease_ms=200)
        fleet.tick(200)
        fleet.remove([key(f"n{number}")])
        fleet.tick(100)
        assert len(fleet.delete()) == 1
    memory = fleet.machine.memory
    assert len(memory.leases._ended) == 2 and len(memory.deletions._ended) == 2


def test_hot_summary_is_bounded_and_survives_the_leader() -> None:
    fleet = Fleet(
        limits(hot_summary_ms=1_000, hot_summary_max=2),
        quota=Quota(blocks=4),
        high_permille=1000,
        low_permille=1000,
    )
    for number in range(4):
        fleet.put([key(f"n{number}")])
    fleet.now_ms += 10_000
    fleet.lookup([key("n0")])
    fleet.lookup([key("n1")])
    fleet.tick(1_000)
    fleet.crash()
    assert outcomes(fleet.start(chain(2, "new"))) == ["write"] * 2
    hit = fleet.lookup([key(f"n{number}") for number in range(4)], mode="each").hit
    assert hit == b"\x01\x01\x00\x00", "the next leader knows what was hot"


def test_eviction_and_retirement_come_in_batches() -> None:
    fleet = Fleet(limits(evict_batch_max=3, retire_batch_max=4))
    fleet.put(chain(10))
    fleet.done(PutTenant(tenant="t", quota=Quota(blocks=5)))
    used = []
    for _ in range(3):
        fleet.tick()
        used.append(fleet.used())
    assert used == [7, 4, 4]
    fleet.done(PutTenant(tenant="t"))
    fleet.put(chain(5, "more"))
    fleet.done(DeleteInstance(instance="i"))
    fleet.tick()
    assert fleet.used() == 5


# ---------------------------------------------------------------- sessions


def test_session_is_renewed_aborted_and_over() -> None:
    fleet = Fleet(LIMITS)
    started = fleet.start(chain(2), ttl_ms=5_000)
    named: dict[str, Any] = {"session": started.session, "engine": "e1", "incarnation": "1"}
    fleet.tick(4_000)
    assert fleet.done(RenewWrite(**named, ttl_ms=1_000)).ttl_ms == 1_000
    assert fleet.done(RenewWrite(**named)).ttl_ms == 5_000, "0: as long as at first"
    before = fleet.machine.seq
    assert fleet.done(RenewWrite(**named, ttl_ms=1_000)).ttl_ms == 5_000, "never shortened"
    assert fleet.machine.seq == before
    fleet.tick(4_999)
    fleet.finish(started, locations=started.locations[:1], generations=started.generations[:1])
    assert fleet.done(Abort(**named)).freed == 1 and fleet.done(Abort(**named)).freed == 1
    assert fleet.lookup(chain(2)).hits == 1, "what was published stays"
    assert fleet.refused(RenewWrite(**named)) == "session_aborted"
    assert fleet.refused(fleet.finishing(started)) == "session_aborted"
    assert fleet.refused(Abort(session=99, engine="e1", incarnation="1")) == "session_unknown"
    assert fleet.refused(Abort(**(named | {"engine": "e2"}))) == "foreign_session"


def test_renewal_of_what_is_over() -> None:
    fleet = Fleet(LIMITS)
    done, late = fleet.put([key("a")]), fleet.start([key("b")], ttl_ms=1_000)
    fleet.tick(1_000)
    for started, code in ((done, "session_ended"), (late, "session_expired")):
        renew = RenewWrite(session=started.session or 0, engine="e1", incarnation="1")
        assert fleet.refused(renew) == code
    assert fleet.refused(Abort(session=late.session or 0, engine="e1", incarnation="1")) == "session_expired"


def test_session_whose_blocks_are_all_removed_is_over() -> None:
    fleet = Fleet(LIMITS)
    started = fleet.start(chain(2))
    fleet.remove(chain(2))
    assert statuses(fleet.finish(started)) == ["removed", "removed"]
    assert fleet.machine.state.sessions == {}
    assert fleet.lookup(chain(2)).hits == 0


def test_engine_that_leaves_ends_its_writes() -> None:
    fleet = Fleet(LIMITS)
    started = fleet.start(chain(2))
    fleet.done(Deregister(kind="engine", id="e1", incarnation="1"))
    assert fleet.used() == 0
    assert fleet.refused(Deregister(kind="engine", id="e1", incarnation="1")) == "engine_unknown"
    assert fleet.refused(fleet.finishing(started)) == "session_aborted"
    assert fleet.refused(Deregister(kind="engine", id="e2", incarnation="7")) == "reregister"


# ---------------------------------------------------------------- instances and the catalogue


def test_retiring_instance_answers_nobody_and_goes_by_itself() -> None:
    fleet = Fleet(LIMITS)
    fleet.tick(1_000)
    fleet.put(chain(3))
    open_write = fleet.start(chain(2, "open"))
    found = fleet.lookup(chain(1), lease_ms=1_000)
    assert fleet.done(DeleteInstance(instance="i")) == fleet.done(DeleteInstance(instance="i"))
    assert (
        fleet.refused(StartWrite(instance="i", engine="e1", incarnation="1", keys=chain(1)))
        == "instance_retiring"
    )
    assert fleet.refused(PutInstance(instance="i", group="g", fingerprint=FINGERPRINT)) == "instance_retiring"
    fleet.tick()
    assert statuses(fleet.finish(open_write)) == ["removed"] * 2
    fleet.tick(100)
    assert len(fleet.delete()) == 4, "all but the leased one"
    assert fleet.refused(DeleteGroup(group="g")) == "in_use"
    fleet.tick(900)
    assert list(fleet.delete()) == [found.located.locations[0]]  # type: ignore[union-attr]
    fleet.tick()
    assert fleet.refused(DeleteInstance(instance="i")) == "instance_unknown"
    fleet.done(PutInstance(instance="i", group="g", fingerprint=windowed()))
    assert fleet.lookup(chain(3)).hits == 0


def test_catalogue_is_taken_down_in_order() -> None:
    fleet = Fleet(LIMITS)
    assert fleet.refused(DeleteTenant(tenant="t")) == "in_use"
    assert fleet.refused(DeleteStorage(storage="s")) == "in_use"
    fleet.done(SetSwitch(scope=SwitchScope.group, id="g", mode=SwitchMode.bypass))
    fleet.done(DeleteInstance(instance="i"))
    fleet.tick()
    for command in (DeleteGroup(group="g"), DeleteStorage(storage="s"), DeleteTenant(tenant="t")):
        fleet.done(command)
        assert fleet.refused(command).endswith("_unknown")
    assert fleet.ask(TakeTasks(worker="k", incarnation="1")).tasks == [], "the storage it served is gone"
    fleet.done(PutTenant(tenant="t"))
    fleet.done(PutStorage(storage="s", kind="other", options={"a": "b"}))
    fleet.done(PutGroup(group="g", tenant="t", storages=("s",)))
    fleet.done(PutInstance(instance="i", group="g", fingerprint=FINGERPRINT))
    assert outcomes(fleet.start(chain(1))) == ["write"], "a new group of the same name has no switch"
    fleet.crash()
    assert outcomes(fleet.start(chain(1, "x"))) == ["write"]


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (PutGroup(group="x", tenant="t9", storages=("s",)), "tenant_unknown"),
        (PutGroup(group="x", tenant="t", storages=("s9",)), "storage_unknown"),
        (PutGroup(group="x", tenant="t", storages=()), "invalid_field"),
        (PutGroup(group="x", tenant="t", storages=("s", "s")), "invalid_field"),
        (PutGroup(group="x", tenant="t", storages=("s",), low_permille=0), "invalid_field"),
        (
            PutGroup(group="x", tenant="t", storages=("s",), high_permille=800, low_permille=900),
            "invalid_field",
        ),
        (PutGroup(group="x", tenant="t", storages=("s",), quota=Quota(bytes=-1)), "invalid_field"),
        (PutTenant(tenant="x", quota=Quota(blocks=1 << 60)), "invalid_field"),
        (PutStorage(storage="x", kind="posix", options={}, capacity_bytes=-1), "invalid_field"),
        (PutStorage(storage="s", kind="other", options={}), "storage_mismatch"),
        (PutInstance(instance="x", group="g9", fingerprint=FINGERPRINT), "group_unknown"),
        (SetSwitch(scope=SwitchScope.cluster, id="x", mode=SwitchMode.bypass), "invalid_field"),
        (SetSwitch(scope=SwitchScope.tenant, id="x", mode=SwitchMode.bypass), "tenant_unknown"),
        (SetSwitch(scope=SwitchScope.instance, id="x", mode=SwitchMode.bypass), "instance_unknown"),
        (RegisterWorker(worker="x", incarnation="1", storages=()), "invalid_field"),
        (RegisterWorker(worker="x", incarnation="1", storages=("s9",)), "storage_unknown"),
        (RegisterEngine(engine="x", incarnation="1", instance="j"), "instance_unknown"),
    ],
)
def test_catalogue_refuses_what_makes_no_sense(command: Any, code: str) -> None:
    assert Fleet(LIMITS).refused(command) == code


def fingerprint(**more: Any) -> Fingerprint:
    """A fingerprint with one thing changed."""
    values: dict[str, Any] = {
        "model": "m", "revision": "1", "kv_dtype": "bf16", "block_size_tokens": 16, "key_length": 16,
        "hash_scheme": "sha256", "hash_seed": "0", "parts": (Part("tp0", 10),),
    }  # fmt: skip
    return Fingerprint(**(values | more))


@pytest.mark.parametrize(
    "wrong",
    [
        {"key_length": 15},
        {"key_length": 65},
        {"block_size_tokens": 0},
        {"parts": ()},
        {"parts": (Part("tp0", 10), Part("tp0", 10))},
        {"parts": (Part("tp0", 0),)},
        {"parts": (Part("../x", 10),)},
        {"parts": (Part("tp0", 10), Part("w", 5, "nothing"))},
        {"groups": ()},
        {"groups": (AttentionGroup("full"), AttentionGroup("full"))},
        {"groups": (AttentionGroup("full"), AttentionGroup("empty"))},
        {"groups": (AttentionGroup("full", GroupKind.full, 3),)},
        {"groups": (AttentionGroup("full", GroupKind.sliding_window, 0),)},
        {"groups": (AttentionGroup("full/../x"),), "parts": (Part("tp0", 10, "full/../x"),)},
        {"parts": tuple(Part(f"tp{n}", 10) for n in range(65))},
    ],
)
def test_fingerprint_that_contradicts_itself_is_refused(wrong: dict[str, Any]) -> None:
    fleet = Fleet(LIMITS)
    asked = PutInstance(instance="x", group="g", fingerprint=fingerprint(**wrong))
    assert fleet.refused(asked) == "invalid_fingerprint"


def test_block_of_as_many_parts_as_there_may_be() -> None:
    names = tuple(f"tp{n}" for n in range(64))
    fleet = Fleet(LIMITS, fingerprint=fingerprint(parts=tuple(Part(name, 1) for name in names)))
    started = fleet.start(chain(2))
    for name in names[1:]:
        assert statuses(fleet.finish(started, parts=(name,))) == ["pending"] * 2
    assert fleet.lookup(chain(2)).hits == 0
    assert statuses(fleet.finish(started, parts=names[:1])) == ["serving"] * 2
    assert fleet.lookup(chain(2)).hits == 2


# ---------------------------------------------------------------- places


def test_places_that_no_block_has_are_told() -> None:
    fleet = Fleet(LIMITS, shard=2)
    fleet.done(PutStorage(storage="s2", kind="posix", options={}))
    fleet.tick(1_000)
    served, written = fleet.put([key("a")]), fleet.start([key("b")])
    removed = fleet.put([key("c")])
    fleet.remove([key("c")])
    one, two, three = (started.locations[0] for started in (served, written, removed))
    never = location_base(2) + 1_000
    at = array("Q", [one, two, three, one, never, 5])
    generations = array("I", [1, 1, 1, 2, 1, 1])
    asked: dict[str, Any] = {
        "worker": "k", "incarnation": "1", "locations": at, "generations": generations,
    }  # fmt: skip
    assert fleet.ask(Unknown(storage="s", **asked)).unknown == b"\x00\x00\x00\x01\x01\x00", (
        "what another shard's places are, that shard says: nobody may take them for orphans"
    )
    elsewhere = fleet.ask(Unknown(storage="s2", **asked)).unknown
    assert elsewhere == b"\x01" * 5 + b"\x00", "they lie in another storage"
    assert fleet.ask(Unknown(storage="s9", **asked)).code == "storage_unknown"
    fleet.tick(100)
    fleet.delete()
    assert fleet.ask(Unknown(storage="s", **asked)).unknown == b"\x00\x00\x01\x01\x01\x00"


def test_storages_are_filled_in_the_order_of_the_group() -> None:
    fleet = Fleet(LIMITS, capacity_bytes=50)
    fleet.done(PutStorage(storage="s2", kind="posix", options={}))
    fleet.done(PutGroup(group="g", tenant="t", storages=("s", "s2")))
    started = fleet.start(chain(4))
    assert list(started.storages) == [0, 0, 1, 1]
    fleet.done(SetSwitch(scope=SwitchScope.storage, id="s2", mode=SwitchMode.read_only))
    full = fleet.start(chain(2, "x"))
    assert outcomes(full) == ["refused"] * 2
    fleet.done(SetSwitch(scope=SwitchScope.storage, id="s2", mode=SwitchMode.normal))
    assert list(fleet.start(chain(2, "x")).storages) == [1, 1]


def test_state_block_in_a_bypassed_storage_is_no_state() -> None:
    fleet = Fleet(LIMITS, fingerprint=windowed())
    fleet.finish(fleet.start(chain(3), group="full"), parts=("tp0", "tp1"))
    fleet.finish(fleet.start(chain(1), group="mamba"), parts=("m",))
    fleet.done(PutStorage(storage="s2", kind="posix", options={}))
    fleet.done(PutGroup(group="g", tenant="t", storages=("s2",)))
    fleet.finish(fleet.start([chain(3)[2]], parent=chain(3)[1], group="mamba"), parts=("m",))
    assert fleet.lookup(chain(3), mode="state").hits == 3
    fleet.done(SetSwitch(scope=SwitchScope.storage, id="s2", mode=SwitchMode.bypass))
    assert fleet.lookup(chain(3), mode="state").hits == 1
    assert fleet.lookup(chain(3)).hits == 3
