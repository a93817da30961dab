"""What routers are told of blocks, as the core decides it. Rows are those of the known problems of routers'
events (`docs/routers.md`)."""

from array import array

import pytest
from msgspec.structs import replace

from metaservice.core.commands import (
    DeleteInstance,
    Deregister,
    PutGroup,
    PutInstance,
    PutStorage,
    PutTenant,
    RegisterEngine,
    Restate,
    StartWrite,
)
from metaservice.core.model import AttentionGroup, Endpoints, GroupKind, Part, Publication
from metaservice.core.state import WINDOW_FIRST
from metaservice.wire.tokens import pack_tokens
from tests.sim.fleet import FINGERPRINT, chain, key
from tests.unit.core_told import PUBLICATION, TOKENS, TOLD, Told, rows


def test_a_block_is_told_once_it_is_durable_and_after_its_parent() -> None:
    told = Told()
    told.auto = False
    told.write(chain(20))
    told.tell()
    assert not told.router.known, "not durable yet"
    told.auto = True
    told.flush()
    windows = told.tell()
    filled = [window for window in windows if window.stored]
    assert [sum(len(run.tokens) for run in window.stored) for window in filled] == [8, 8, 4]
    assert filled[0].number > WINDOW_FIRST and filled[1].stored[0].parent == key("k7")
    assert told.router.keys() == set(chain(20))
    told.sound()


def test_without_tokens_or_without_a_publication_nothing_is_told() -> None:
    told = Told()
    told.put(chain(3))
    told.write(chain(2, "below"), parent=key("k2"))
    assert not any(window.stored for window in told.tell())
    silent = Told(publication=None)
    silent.write(chain(3))
    assert not silent.tell() and not silent.machine.announces(silent.now_ms + 10_000)
    assert not any(silent.machine.state.index.tokens), "nothing is kept that is never told"


def test_row_04_a_child_waits_for_a_parent_that_was_never_told() -> None:
    told = Told()
    told.write(chain(3, "child"), parent=key("unknown"))
    assert not any(window.stored for window in told.tell())
    assert told.machine.memory.telling.waiting == 3
    told.write([key("unknown")])
    told.tell()
    assert told.router.keys() == {key("unknown"), *chain(3, "child")}
    told.sound()


def test_row_05_a_block_that_moves_to_another_tier_is_told_as_removed_there_and_stored_here() -> None:
    told = Told()
    told.prefer("mem", "s")
    told.write(chain(2))
    told.tell()
    assert told.router.keys("CPU") == set(chain(2)) and {place[2] for place in told.router.known} == {"n1"}
    told.prefer("s")
    told.remove(chain(2))
    told.write(chain(2))
    (window,) = [one for one in told.tell() if one.removed]
    assert {gone.medium for gone in window.removed} == {"CPU"}
    assert told.router.keys("CPU") == set() and told.router.keys() == set(chain(2))
    told.sound()


def test_row_06_an_engine_whose_hash_differs_is_refused() -> None:
    told = Told()
    fingerprint = replace(FINGERPRINT, canary="aa")
    told.done(PutInstance(instance="j", group="g", fingerprint=fingerprint))
    told.done(RegisterEngine(engine="x", incarnation="1", instance="j", canary="aa"))
    wrong = RegisterEngine(engine="y", incarnation="1", instance="j", canary="bb")
    assert told.refused(wrong) == "canary_mismatch"


@pytest.mark.parametrize(
    "change",
    [
        {"canary": "bb"}, {"hash_scheme": "sha256_cbor"}, {"hash_seed": "1"}, {"block_size_tokens": 32},
        {"key_length": 32},
    ],
)  # fmt: skip
def test_row_27_two_hash_spaces_in_one_routing_group_are_refused(change: dict[str, object]) -> None:
    told = Told()
    other = replace(FINGERPRINT, **change)
    put = PutInstance(instance="j", group="g", fingerprint=other, publication=Publication("model"))
    assert told.refused(put) == "hash_space_mixed"
    told.done(replace(put, publication=Publication("model", routing_group="its own")))
    told.done(PutInstance(instance="l", group="g", fingerprint=FINGERPRINT, publication=PUBLICATION))
    assert told.refused(
        PutInstance(
            instance="m", group="g", fingerprint=FINGERPRINT,
            publication=Publication("model", hash_of="head64"),
        )
    ) == "hash_space_mixed"  # fmt: skip


def test_an_adapters_blocks_are_told_in_its_bases_streams_only_to_its_own_tenant() -> None:
    told = Told()
    told.done(PutTenant(tenant="other"))
    told.done(PutGroup(group="theirs", tenant="other", storages=("s",)))
    adapter = PutInstance(
        instance="a", group="g", fingerprint=FINGERPRINT, publication=Publication("model", lora="l", base="i")
    )
    for wrong in (
        replace(adapter, group="theirs"),
        replace(adapter, publication=Publication("model", base="i")),
        replace(adapter, publication=Publication("model", lora="l", base="nobody")),
        replace(adapter, publication=Publication("model", lora="l", base="a")),
    ):
        assert told.refused(wrong) == "invalid_field"
    told.done(adapter)
    below = replace(adapter, instance="b", publication=Publication("model", lora="m", base="a"))
    assert told.refused(below) == "invalid_field"


def test_row_16_tokens_that_are_not_a_whole_block_are_refused() -> None:
    told = Told()
    start = {"instance": "i", "engine": "e1", "incarnation": "1"}
    for tokens, code in (
        ([pack_tokens(range(15))], "invalid_field"),
        ([b"\x05" + bytes(80)], "invalid_field"),
        ([TOKENS, TOKENS], "column_length"),
    ):
        command = StartWrite(**start, keys=chain(1), tokens=tokens)  # type: ignore[arg-type]
        assert told.refused(command) == code


def test_row_17_only_the_main_attention_is_told() -> None:
    parts = (Part("tp0", 10), Part("w", 5, "swa"))
    groups = (AttentionGroup("swa", GroupKind.sliding_window, 2), AttentionGroup("full"))
    hybrid = replace(FINGERPRINT, parts=parts, groups=groups)
    told = Told()
    told.publish(Publication("hybrid"), "h", hybrid)
    for group in ("swa", "full"):
        started = told.start(chain(2), instance="h", group=group, tokens=[TOKENS] * 2)
        told.finish(started, checksums=array("Q", range(2)))
    told.tell()
    assert told.router.known == {("h", "EXTERNAL", "", one) for one in chain(2)}
    told.sound()


def test_row_18_engines_of_one_rank_share_a_stream_and_others_have_their_own() -> None:
    told = Told()

    def channels(engine: str, rank: int, node: str, instance: str = "i") -> tuple[int, int]:
        told.done(
            RegisterEngine(
                engine=engine, incarnation="1", instance=instance, rank=rank, endpoints=Endpoints(node=node)
            )
        )
        member = told.machine.state.engines[engine]
        return member.pool_channel, member.local_channel

    told.publish(PUBLICATION, "j")
    made = {
        ("a", 0, "n1"): channels("a", 0, "n1"), ("b", 0, "n2"): channels("b", 0, "n2"),
        ("c", 1, "n1"): channels("c", 1, "n1"), ("d", 0, "n1"): channels("d", 0, "n1"),
        ("e", 0, ""): channels("e", 0, ""), ("f", 0, "n1"): channels("f", 0, "n1", "j"),
    }  # fmt: skip
    a, b, c, d, e, f = made.values()
    assert a == d, "the same rank on the same node"
    assert a[0] == b[0] == e[0] and a[1] != b[1] and e[1] == -1
    numbers = [a[0], a[1], b[1], c[0], c[1], f[0], f[1]]
    assert sorted(numbers) == list(range(7)), "dense, and nothing is used twice"
    assert channels("a", 0, "n1") == a and channels("d", 0, "n2") == b
    told.done(Deregister(kind="engine", id="c", incarnation="1"))
    assert set(channels("g", 2, "n3")) == set(c), "numbers of engines that left are free"
    told.sound()


# ---------------------------------------------------------------- removal


def test_what_goes_is_told_with_all_that_hangs_on_it_and_comes_back_with_it() -> None:
    told = Told()
    told.write(chain(10))
    told.write(chain(2, "side"), parent=key("k4"))
    told.tell()
    told.remove([key("k3")])
    told.tell()
    assert told.router.keys() == set(chain(3))
    told.write([key("k3")], parent=key("k2"))
    told.tell()
    assert told.router.keys() == {*chain(10), *chain(2, "side")}
    told.sound()


def test_a_retired_instance_and_one_that_is_announced_no_more_are_told_as_gone() -> None:
    told = Told()
    told.write(chain(30))
    told.tell()
    told.publish(None)
    told.tell()
    assert not told.router.known and told.lookup(chain(30)).hits == 30
    told.publish(PUBLICATION)
    told.tell()
    assert len(told.router.known) == 30, "told again from what is there"
    told.done(DeleteInstance(instance="i"))
    told.tick()
    told.tell()
    assert not told.router.known
    told.sound()


def test_what_a_worker_takes_with_it_is_told_as_gone() -> None:
    told = Told()
    told.prefer("mem", "s")
    told.write(chain(5))
    told.tell()
    assert len(told.router.keys("CPU")) == 5
    told.restart("m2")
    told.tell()
    assert not told.router.known
    told.sound()


def test_a_storage_that_is_reached_by_others_now_is_told_anew() -> None:
    told = Told()
    told.write(chain(5))
    told.tell()
    told.done(PutStorage(storage="s", kind="posix", options={}, reach="node", fault_domain="n7"))
    told.machine.memory.telling.look_again()
    told.tell()
    assert told.router.known == {("i", "STORAGE", "n7", one) for one in chain(5)}
    told.sound()


def test_memory_of_nobody_knows_which_node_is_told_to_nobody() -> None:
    told = Told()
    told.done(PutStorage(storage="mem", kind="shm", options={"dir": "/dev/shm"}))
    told.prefer("mem", "s")
    told.write(chain(5))
    told.tell()
    assert not told.router.known
    told.done(PutStorage(storage="mem", kind="shm", options={"dir": "/dev/shm"}, fault_domain="n2"))
    told.tell()
    assert told.router.known == {("i", "CPU", "n2", one) for one in chain(5)}
    told.sound()


def test_a_block_in_another_nodes_memory_is_nobodys_parent() -> None:
    told = Told()
    for name in ("n1", "n2"):
        told.done(PutStorage(storage=name, kind="posix", options={}, reach="node", fault_domain=name))
    told.prefer("n1")
    told.write(chain(2))
    told.prefer("n2")
    told.write(chain(2, "far"), parent=key("k1"))
    told.prefer("s")
    told.write(chain(2, "pool"), parent=key("k1"))
    told.tell()
    assert told.router.keys("STORAGE") == set(chain(2)) and told.router.keys() == set(chain(2, "pool"))
    told.sound()


def test_removals_are_told_again_twice_and_not_when_the_block_is_back() -> None:
    told = Told(replace(TOLD, restate_ms=1_000))
    told.write(chain(6))
    told.tell()
    told.remove(chain(6))
    told.tell()
    told.write(chain(2))
    again: list[bytes] = []
    for _ in range(40):
        told.now_ms += 100
        again += [one for window in told.tell() for gone in window.again for one in rows(gone)]
    assert sorted(again) == sorted(2 * chain(6)[2:])
    assert not told.machine.state.tombstones
    told.sound()


# ---------------------------------------------------------------- budget


def test_the_coldest_go_when_more_would_be_announced_than_may_be() -> None:
    told = Told(publication=Publication("model", entries_max=10))
    told.write(chain(6, "old"))
    told.now_ms += 10
    told.write(chain(4, "hot"))
    told.tell()
    told.now_ms += 10
    told.lookup(chain(4, "hot"))
    told.now_ms += 10
    told.write(chain(5, "new"))
    told.tell()
    assert told.router.keys() == {key("old0"), *chain(4, "hot"), *chain(5, "new")}
    assert told.machine.state.instances["i"].announced == 10
    told.sound()


def test_what_a_lookup_found_comes_back() -> None:
    told = Told(replace(TOLD, hot_summary_ms=1_000), Publication("model", entries_max=6))
    told.write(chain(6, "a"))
    told.tell()
    told.now_ms += 10
    told.write(chain(6, "b"))
    told.tell()
    assert told.router.keys() == set(chain(6, "b"))
    told.now_ms += 1_000
    assert told.lookup(chain(6, "a")).hits == 6
    told.tick(1_000)
    told.tell()
    assert told.router.keys() == set(chain(6, "a"))
    told.sound()


def test_a_lower_limit_is_kept_at_once() -> None:
    told = Told()
    told.write(chain(50))
    told.tell()
    told.publish(Publication("model", entries_max=7))
    told.tell()
    assert told.router.keys() == set(chain(7))
    told.sound()


# ---------------------------------------------------------------- telling again


def test_restating_tells_all_of_an_instance_parents_first() -> None:
    told = Told()
    told.write(chain(20))
    told.write(chain(5, "side"), parent=key("k3"))
    told.write(chain(5, "other"))
    told.tell()
    again = told.restate()
    assert sorted(again) == sorted([*chain(20), *chain(5, "side"), *chain(5, "other")])
    seen: set[bytes] = set()
    for one in again:
        slot = told.machine.state.instances["i"].primary.slots[one]
        parent = told.machine.state.index.parent[slot]
        assert parent is None or parent in seen
        seen.add(one)
    assert told.refused(Restate(instance="nobody")) == "instance_unknown"
    told.publish(None)
    assert told.refused(Restate(instance="i")) == "not_published"


def test_everything_is_told_again_as_time_passes() -> None:
    told = Told(replace(TOLD, restate_ms=2_000))
    told.write(chain(40))
    told.tell()
    again: list[bytes] = []
    for _ in range(60):
        told.now_ms += 100
        again += [one for window in told.tell() for run in window.restated for one in rows(run)]
    assert set(again) == set(chain(40)) and len(again) <= 4 * 40


def test_a_block_whose_parent_is_told_elsewhere_is_told_again_soon() -> None:
    told = Told()
    told.write(chain(2))
    told.prefer("mem", "s")
    told.write(chain(3, "local"), parent=key("k1"))
    told.tell()
    told.now_ms += 2_100
    again = [one for window in told.tell() for run in window.restated for one in rows(run)]
    assert again == chain(3, "local")


def test_a_silent_shard_beats() -> None:
    told = Told()
    told.tell()
    number = told.router.number
    for _ in range(5):
        assert not told.machine.announces(told.now_ms + 100)
        told.now_ms += 1_000
        (window,) = told.tell()
        assert not (window.stored or window.removed or window.restated or window.again)
    assert told.router.number == number + 5


def test_row_09_windows_go_on_with_the_next_leader() -> None:
    told = Told()
    told.write(chain(10))
    told.tell()
    told.capture()
    told.crash(from_capture=True)
    told.take_over()
    told.write(chain(10, "more"))
    told.tell()
    assert told.router.keys() == {*chain(10), *chain(10, "more")}
    told.sound()
