"""Kind F, identity: what is not certainly the same block is a miss; tenants do not meet."""

from typing import Any

import pytest
from msgspec.structs import replace

from metaservice.core.commands import Lookup, PutGroup, PutInstance, PutTenant, Remove, SetSwitch, StartWrite
from metaservice.core.model import AttentionGroup, GroupKind, Limits, Part, Quota, SwitchMode, SwitchScope
from metaservice.core.outcomes import RefusedReason
from metaservice.core.rejections import Rejection
from tests.sim.fleet import FINGERPRINT, Fleet, chain, key, outcomes, windowed

DIFFERENT: dict[str, Any] = {
    "model": "other",
    "revision": "2",
    "kv_dtype": "fp8",
    "block_size_tokens": 64,
    "key_length": 32,
    "hash_scheme": "xxh3",
    "hash_seed": "7",
    "parts": (Part("tp0", 10),),
    "groups": (AttentionGroup("full"), AttentionGroup("swa", GroupKind.sliding_window, 4)),
    "canary": "c0",
    "extra": {"lora": "x"},
}


@pytest.mark.parametrize("field", FINGERPRINT.__struct_fields__)
def test_f1_same_instance_with_another_fingerprint_is_refused_by_name(field: str) -> None:
    fleet = Fleet()
    other = replace(FINGERPRINT, **{field: DIFFERENT[field]})
    if field == "groups":
        other = replace(other, parts=(*FINGERPRINT.parts, Part("w", 5, "swa")))
    reply = fleet.send(PutInstance(instance="i", group="g", fingerprint=other))
    assert isinstance(reply, Rejection) and reply.code == "fingerprint_mismatch"
    differs = reply.detail["differs"]
    assert (
        isinstance(differs, dict)
        and field in differs
        and differs[field]["registered"] != differs[field]["asked"]
    )
    assert field in reply.message
    assert fleet.done(PutInstance(instance="i", group="g", fingerprint=FINGERPRINT)).created is False


def test_f1_hash_seed_and_canary_make_two_deployments() -> None:
    fleet = Fleet()
    fleet.put([key("k")])
    for number, field in enumerate(("hash_scheme", "hash_seed", "canary")):
        other = replace(FINGERPRINT, **{field: "another"})
        fleet.done(PutInstance(instance=f"j{number}", group="g", fingerprint=other))
        assert fleet.lookup([key("k")], instance=f"j{number}").hits == 0


@pytest.mark.parametrize("mode", ["prefix", "window", "state"])
def test_f4_same_key_with_another_parent_is_a_miss(mode: str) -> None:
    fleet = Fleet(fingerprint=windowed())
    for group in ("full", "swa", "mamba"):
        started = fleet.start([key("a"), key("b"), key("c")], group=group)
        parts = [part.name for part in windowed().parts if part.group == group]
        fleet.finish(started, parts=tuple(parts))
    assert fleet.lookup([key("a"), key("b"), key("c")], mode=mode).cut == "none"
    other = [key("x"), key("b"), key("c")]
    found = fleet.lookup(other, mode=mode, window_blocks=1 if mode == "window" else None)
    assert (found.hits, found.start) == ((1, 2) if mode == "window" else (0, 0))
    assert fleet.lookup([key("b")], mode=mode).hits == 0, "a root is not the child of a"
    assert fleet.lookup([key("b")], mode=mode, parent=key("a")).hits == 1
    assert fleet.lookup([key("b")], mode=mode, parent=key("x")).hits == 0


def test_f4_same_key_with_another_parent_cannot_be_written() -> None:
    fleet = Fleet()
    fleet.put([key("a"), key("b")])
    fleet.start([key("w")])
    reply = fleet.start(
        [key("b"), key("w"), key("n")], "e2", parents=[key("x"), key("x"), key("b")], request_id="r"
    )
    assert outcomes(reply) == ["refused", "refused", "write"]
    assert [RefusedReason(reason).name for reason in reply.reasons] == [
        "parent_mismatch",
        "parent_mismatch",
        "none",
    ]
    fleet.remove([key("b")])
    assert outcomes(fleet.start([key("b")], "e2", parents=[key("x")])) == ["write"], "the old one is gone"


def test_f5_block_without_all_its_parts_is_no_hit() -> None:
    fleet = Fleet()
    started = fleet.start(chain(3))
    fleet.finish(started, ok=b"\x01\x01\x01\x01\x01\x00", parts=("tp0", "tp1"))
    found = fleet.lookup(chain(3))
    assert (found.hits, found.cut, found.cut_at) == (2, "miss", 2)
    assert fleet.lookup(chain(3), mode="each").hit == b"\x01\x01\x00"


def test_f6_tenants_with_equal_keys_do_not_meet() -> None:
    fleet = Fleet(Limits(lease_ms_max=1_000))
    fleet.done(PutTenant(tenant="u", quota=Quota(blocks=10)))
    fleet.done(PutGroup(group="h", tenant="u", storages=("s",)))
    fleet.done(PutInstance(instance="j", group="h", fingerprint=FINGERPRINT))
    mine = fleet.put(chain(4))
    theirs = fleet.put(chain(4), "e2", instance="j")
    assert not set(mine.locations) & set(theirs.locations)
    used = {view.id: view.usage.blocks for view in fleet.machine.describe("tenants")}  # type: ignore[attr-defined]
    assert used == {"t": 4, "u": 4}
    fleet.done(Remove(instance="j", keys=chain(4)))
    assert fleet.lookup(chain(4)).hits == 4 and fleet.lookup(chain(4), instance="j").hits == 0
    fleet.done(SetSwitch(scope=SwitchScope.tenant, id="u", mode=SwitchMode.bypass))
    assert fleet.lookup(chain(4)).cut == "none" and fleet.lookup(chain(4), instance="j").cut == "switch"
    assert outcomes(fleet.start(chain(4, "new"))) == ["write"] * 4


def test_f6_another_tenants_pressure_evicts_nothing_of_mine() -> None:
    fleet = Fleet(Limits(lease_ms_max=1_000))
    fleet.put(chain(4))
    fleet.done(PutTenant(tenant="u", quota=Quota(blocks=3)))
    fleet.done(PutGroup(group="h", tenant="u", storages=("s",)))
    fleet.done(PutInstance(instance="j", group="h", fingerprint=FINGERPRINT))
    for number in range(5):
        fleet.put(chain(3, f"n{number}-"), "e2", instance="j")
    assert fleet.lookup(chain(4)).hits == 4


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"keys": [b"short"]}, "key_length"),
        ({"keys": []}, "empty_batch"),
        ({"keys": chain(9)}, "too_many_keys"),
        ({"instance": "nobody"}, "instance_unknown"),
        ({"group": "nothing"}, "unknown_group"),
        ({"keys": [key("a")], "parent": b"short"}, "key_length"),
    ],
)
def test_requests_that_name_no_block_are_refused(more: dict[str, Any], code: str) -> None:
    fleet = Fleet(Limits(keys_per_request_max=8))
    asked = {"instance": "i", "keys": [key("a")]} | more
    assert fleet.refused(Lookup(**asked)) == code
    assert fleet.refused(StartWrite(engine="e1", incarnation="1", **asked)) == code


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"keys": [key("a"), key("b")], "parents": [key("b"), key("a")]}, "parent_cycle"),
        ({"keys": [key("a")], "parents": [key("a")]}, "parent_cycle"),
        ({"keys": [key("a"), key("a")], "parents": [None, key("b")]}, "duplicate_conflict"),
        ({"parents": [None, None]}, "column_length"),
        ({"parents": [b"short"]}, "key_length"),
        ({"sizes": (10, 11)}, "size_mismatch"),
        ({"ttl_ms": 1}, "ttl_out_of_range"),
        ({"ttl_ms": 10**12}, "ttl_out_of_range"),
        ({"incarnation": "0"}, "reregister"),
        ({"engine": "nobody"}, "reregister"),
    ],
)
def test_writes_that_contradict_themselves_are_refused(more: dict[str, Any], code: str) -> None:
    fleet = Fleet()
    asked = {"instance": "i", "engine": "e1", "incarnation": "1", "keys": [key("a")]} | more
    assert fleet.refused(StartWrite(**asked)) == code


def test_cycle_across_requests_is_refused() -> None:
    fleet = Fleet()
    fleet.put([key("b"), key("c")], parent=key("a"))  # a is not there yet
    cycle = StartWrite(instance="i", engine="e1", incarnation="1", keys=[key("a")], parents=[key("c")])
    assert fleet.refused(cycle) == "parent_cycle"
    fleet.put([key("a")])
    assert fleet.lookup([key("a"), key("b"), key("c")]).hits == 3, "the parent may come last"


def test_same_key_twice_in_a_request_is_one_block() -> None:
    fleet = Fleet()
    started = fleet.start([key("a"), key("b"), key("a")], parents=[None, key("a"), None])
    assert outcomes(started) == ["write"] * 3 and started.locations[0] == started.locations[2]
    assert fleet.used() == 2
