"""Roles as a table and decisions as a function of facts: no process, no waiting."""

from dataclasses import replace
from itertools import product

import pytest

from metaservice.leadership.port import Holder, Member, Report, View
from metaservice.replica.role import (
    TABLE,
    Action,
    Decision,
    Facts,
    Judge,
    Role,
    Timing,
    Turn,
    leads,
    order,
    turned,
)

READY = Report(journal_ok=True, ready=True)
TIMING = Timing(successor_s=1.0, rank_s=0.3, stall_s=2.5, settle_s=5.0)


def view(holders: dict[int, str] | None = None, members: dict[str, Report] | None = None) -> View:
    """Who holds what (`>name`: free, with that successor named), and who is alive."""
    alive = members if members is not None else {"a": READY, "b": READY, "c": READY}
    found = {
        shard: Holder("", "", name[1:]) if name.startswith(">") else Holder(name, f"http://{name}")
        for shard, name in (holders or {}).items()
    }
    return View(found, {name: Member(name, f"http://{name}", report) for name, report in alive.items()})


FOLLOWER = Facts(now_s=100.0, role=Role.FOLLOWER, lease_until_s=0.0, view=view(), warm=True, journal_ok=True)
LEADER = replace(FOLLOWER, role=Role.LEADER, lease_until_s=104.0, view=view({0: "a"}))


def judge(replica: str = "a", shard: int = 0, *, spread: bool = True) -> Judge:
    return Judge(shard, replica, TIMING, spread=spread)


def after(judge: Judge, facts: Facts, seconds: float) -> Decision:
    """What is decided when the facts stay as they are for a while."""
    judge.decide(facts)
    return judge.decide(
        replace(facts, now_s=facts.now_s + seconds, lease_until_s=facts.lease_until_s + seconds)
    )


def test_the_table_names_every_turn_that_can_happen_and_no_other() -> None:
    assert turned(turned(Role.FOLLOWER, Turn.ACQUIRED), Turn.TOOK_OVER) is Role.LEADER
    assert turned(turned(Role.LEADER, Turn.LET_GO), Turn.RELEASED) is Role.FOLLOWER
    for role, turn in product(Role, Turn):
        if (role, turn) not in TABLE:
            with pytest.raises(AssertionError, match=role.value):
                turned(role, turn)
    reached = {Role.FOLLOWER} | set(TABLE.values())
    assert reached == set(Role)


# ---------------------------------------------------------------- following


def test_a_shard_that_another_holds_is_followed() -> None:
    decision = judge().decide(replace(FOLLOWER, view=view({0: "b"})))
    assert decision == Decision(Action.STAY, "following b")


def test_a_free_shard_is_campaigned_for_by_the_first_in_order_at_once_and_by_the_others_later() -> None:
    assert judge("a").decide(FOLLOWER).action is Action.CAMPAIGN
    assert judge("b").decide(FOLLOWER).action is Action.STAY
    assert after(judge("b"), FOLLOWER, 0.31).action is Action.CAMPAIGN
    assert after(judge("c"), FOLLOWER, 0.31).action is Action.STAY
    assert after(judge("c"), FOLLOWER, 0.61).action is Action.CAMPAIGN


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (replace(FOLLOWER, warm=False), "catching up"),
        (replace(FOLLOWER, journal_ok=False), "journal"),
        (replace(FOLLOWER, stopping=True), "stops"),
        (replace(FOLLOWER, view=None), "election does not answer"),
    ],
)
def test_who_could_not_lead_does_not_campaign_however_long_it_is_free(facts: Facts, why: str) -> None:
    decision = after(judge(), facts, 60.0)
    assert decision.action is Action.STAY and why in decision.sentence


def test_one_that_cannot_lead_is_not_waited_for() -> None:
    facts = replace(FOLLOWER, view=view({}, {"a": Report(journal_ok=False, ready=True), "b": READY}))
    assert judge("b").decide(facts).action is Action.CAMPAIGN


def test_a_named_successor_comes_first_and_the_others_after_a_while() -> None:
    facts = replace(FOLLOWER, view=view({0: ">c"}))
    assert judge("c").decide(facts).action is Action.CAMPAIGN
    assert after(judge("a"), facts, 0.9).action is Action.STAY
    assert after(judge("a"), facts, 1.1).action is Action.CAMPAIGN


def test_a_successor_that_is_gone_is_not_waited_for() -> None:
    facts = replace(FOLLOWER, view=view({0: ">c"}, {"a": READY, "b": READY}))
    assert judge("a").decide(facts).action is Action.CAMPAIGN


def test_the_wait_begins_anew_when_the_shard_was_held_in_between() -> None:
    one = judge("b")
    one.decide(FOLLOWER)
    one.decide(replace(FOLLOWER, now_s=100.2, view=view({0: "a"})))
    assert one.decide(replace(FOLLOWER, now_s=100.4)).action is Action.STAY
    assert one.decide(replace(FOLLOWER, now_s=100.8)).action is Action.CAMPAIGN


def test_what_this_very_life_holds_is_taken_up_or_given_back() -> None:
    """A resignation that was lost must not keep everybody from a shard that we cannot lead."""
    facts = replace(FOLLOWER, view=view({0: "b"}))
    assert judge("b").decide(facts).action is Action.CAMPAIGN
    decision = judge("b").decide(replace(facts, warm=False))
    assert (decision.action, decision.successor) == (Action.HAND_OVER, "a")


# ---------------------------------------------------------------- leading


def test_a_leader_leads() -> None:
    assert judge().decide(LEADER) == Decision(Action.STAY, "leading")


@pytest.mark.parametrize("role", [Role.LEADER, Role.PROMOTING])
def test_when_its_lease_is_over_by_its_own_clock_it_stops_whatever_the_view_says(role: Role) -> None:
    facts = replace(LEADER, role=role, now_s=104.0)
    assert judge().decide(facts).action is Action.DEMOTE
    assert judge().decide(replace(facts, view=None)).action is Action.DEMOTE


def test_c7_an_election_that_does_not_answer_is_no_reason_to_stop_before_the_lease_is_over() -> None:
    assert judge().decide(replace(LEADER, view=None, now_s=103.9)).action is Action.STAY


def test_a_leader_that_stops_hands_over_to_one_that_can() -> None:
    members = {"a": READY, "b": Report(journal_ok=False, ready=True), "c": READY}
    facts = replace(LEADER, stopping=True, view=view({0: "a"}, members))
    assert judge().decide(facts) == Decision(Action.HAND_OVER, "this replica stops", "c")
    alone = replace(facts, view=view({0: "a"}, {"a": READY}))
    assert judge().decide(alone) == Decision(Action.HAND_OVER, "this replica stops", "")


def test_an_operator_says_to_whom() -> None:
    assert judge().decide(replace(LEADER, hand_to="c")).successor == "c"
    assert judge().decide(replace(LEADER, hand_to="")).successor == "b"


def test_a_leader_whose_appends_stall_hands_over_only_to_one_whose_journal_works() -> None:
    assert judge().decide(replace(LEADER, stalled_s=2.4)).action is Action.STAY
    decision = after(judge(), replace(LEADER, stalled_s=2.5), 1.5)
    assert (decision.action, decision.successor) == (Action.HAND_OVER, "b")
    deaf = Report(journal_ok=False, ready=True)
    nobody = replace(LEADER, stalled_s=60.0, view=view({0: "a"}, {"a": deaf, "b": deaf, "c": deaf}))
    decision = judge().decide(nobody)
    assert decision.action is Action.STAY and "lookups" in decision.sentence


def test_a_database_that_comes_back_for_everybody_costs_no_leader_its_shard() -> None:
    """Whoever hears of it first says so; the leader's own append comes through a moment later."""
    deaf, one = Report(journal_ok=False, ready=True), judge()
    hung = replace(LEADER, stalled_s=9.0, view=view({0: "a"}, {"a": deaf, "b": deaf, "c": deaf}))
    assert one.decide(hung).action is Action.STAY
    back = replace(
        LEADER, stalled_s=9.1, now_s=100.1, view=view({0: "a"}, {"a": deaf, "b": READY, "c": READY})
    )
    assert one.decide(back).action is Action.STAY
    assert one.decide(replace(back, stalled_s=10.0, now_s=101.0)).action is Action.STAY
    assert one.decide(replace(back, stalled_s=0.0, now_s=101.2)).action is Action.STAY


def test_shards_move_one_by_one_until_all_lead_about_as_many() -> None:
    facts = replace(LEADER, view=view(dict.fromkeys(range(4), "a")))
    assert after(judge(shard=3), facts, 4.9).action is Action.STAY
    decision = after(judge(shard=3), facts, 5.1)
    assert (decision.action, decision.successor) == (Action.HAND_OVER, "b")
    for shard in range(3):
        assert after(judge(shard=shard), facts, 60.0).action is Action.STAY
    assert after(judge(shard=3, spread=False), facts, 60.0).action is Action.STAY
    even = replace(LEADER, view=view({0: "a", 1: "a", 2: "b", 3: "c"}))
    assert after(judge(shard=1), even, 60.0).action is Action.STAY


def test_a_replica_that_comes_and_goes_is_given_nothing() -> None:
    one, facts = judge(shard=3), replace(LEADER, view=view(dict.fromkeys(range(4), "a")))
    gone = replace(facts, view=view(dict.fromkeys(range(4), "a"), {"a": READY}))
    for second in range(0, 60, 3):
        now_s = 100.0 + second
        facts_now = facts if second % 2 else gone
        decision = one.decide(replace(facts_now, now_s=now_s, lease_until_s=now_s + 4))
        assert decision.action is Action.STAY


def test_the_order_spreads_free_shards_over_the_replicas() -> None:
    free = view({})
    assert [order(free, shard)[0] for shard in range(4)] == ["a", "b", "c", "a"]
    held = view({0: "a", 1: "a"})
    assert leads(held, "a") == 2 and order(held, 0) == ["b", "c", "a"]
    assert order(view({}, {}), 7) == []
