"""Plans of small programs: actions, reasons, tags, budgets, members of one storage, predictions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from small_facts import facts, machine, storage, value

from graphoffload.errors import PolicyError
from graphoffload.planning.machine import Machine
from graphoffload.planning.plan import Action, Plan
from graphoffload.planning.planner import make_plan
from graphoffload.planning.policy import (
    ByName,
    FirstOf,
    FollowTags,
    KeepAll,
    Ledger,
    Never,
    OffloadAll,
    OffloadBytes,
    OffloadHidden,
)
from graphoffload.planning.values import Facts, Storage, Value

KEEP, OFFLOAD, RECOMPUTE = Action.KEEP, Action.OFFLOAD, Action.RECOMPUTE
EVERYTHING = OffloadAll(min_nbytes=0)


def three(**tags: str) -> Facts:
    """Return a program of three storages of 20 bytes that all hide; `tags` by name."""
    storages = [storage(name, 20, birth=index, back=29 - index) for index, name in enumerate("ABC")]
    values = [value(one.name, one, tag=tags.get(one.name), source="model.py:7") for one in storages]
    return facts(storages, forward=15, backward=15, values=values)


def with_view(first: dict[str, Any], second: dict[str, Any], **changes: Any) -> Facts:
    """Return a program with one storage of two values: A, and a view of it."""
    shared = storage("A", 20, birth=0, used=1, back=18, members=("A", "view"), **changes)
    values = [value("A", shared, **first), value("view", shared, **{"birth": 1, **second})]
    return facts([shared], forward=9, backward=10, values=values)


def actions(plan: Plan) -> list[Action]:
    return [decision.action for decision in plan.decisions]


def reasons(plan: Plan) -> list[str]:
    return [decision.reason for decision in plan.decisions]


def test_a_whole_plan_by_hand() -> None:
    # Each copy takes 2 s. Out: A 1-3, B 3-5, C 5-7. Back: needed at 27, 28 and 29 s (C, B, A).
    plan = make_plan(three(), EVERYTHING, machine())
    assert actions(plan) == [OFFLOAD] * 3
    assert [transfer.storage for transfer in plan.transfers] == ["C", "B", "A"]
    assert [transfer.offload_end for transfer in plan.transfers] == [7.0, 5.0, 3.0]
    assert [transfer.reload_start for transfer in plan.transfers] == [23.0, 25.0, 27.0]
    assert (plan.kept_nbytes, plan.offloaded_nbytes, plan.recomputed_nbytes, plan.host_peak_nbytes) == (0, 60, 0, 60)
    assert (plan.predicted_seconds, plan.predicted_seconds_without, plan.exposed_seconds) == (30.0, 30.0, 0.0)
    # Without: 60 bytes from f2 to the step that needs C. With: A, B and C in f2; A goes after it.
    assert (plan.predicted_peak_nbytes_without, plan.predicted_peak_nbytes) == (60, 60)
    assert Machine.from_json(plan.machine) == machine()
    assert plan.notes == ()
    assert plan.offload_requested


def test_no_policy_opinion_keeps() -> None:
    plan = make_plan(three(), ByName("B"), machine())
    assert actions(plan) == [KEEP, OFFLOAD, KEEP]
    assert reasons(plan) == [
        "ByName's patterns do not match it",
        "ByName says offload for 'B'",
        "ByName's patterns do not match it",
    ]
    assert (plan.kept_nbytes, plan.offloaded_nbytes) == (40, 20)


def test_order_of_birth_decides_who_is_offloaded_first() -> None:
    assert actions(make_plan(three(), OffloadBytes(40, min_nbytes=0), machine())) == [OFFLOAD, OFFLOAD, KEEP]
    assert actions(make_plan(three(), OffloadBytes(0.34, min_nbytes=0), machine())) == [OFFLOAD, KEEP, KEEP]


def test_the_fraction_is_of_what_may_move() -> None:
    program = three()
    fixed = replace(program.storages[0], immovable=("it is a module output",))
    program = replace(program, storages=(fixed, *program.storages[1:]))
    assert actions(make_plan(program, OffloadBytes(1.0, min_nbytes=0), machine())) == [KEEP, OFFLOAD, OFFLOAD]
    assert actions(make_plan(program, OffloadBytes(0.5, min_nbytes=0), machine())) == [KEEP, OFFLOAD, KEEP]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"immovable": ("it is a module output", "its memory is an input's")},
            "it is a module output; its memory is an input's",
        ),
        ({"held": True}, "the caller holds this memory, so moving it would free nothing"),
        ({"nbytes": None}, "its size is not known before running"),
        ({"nbytes": 0}, "it has no bytes"),
        ({"birth": -1, "carried_at": -1}, "it is there before forward begins, so moving it would free nothing"),
    ],
)
def test_what_may_not_move_is_kept_whatever_the_policy_says(changes: dict[str, Any], reason: str) -> None:
    program = three()
    fixed = replace(program.storages[1], **changes)
    program = replace(program, storages=(program.storages[0], fixed, program.storages[2]))
    plan = make_plan(program, EVERYTHING, machine())
    assert actions(plan) == [OFFLOAD, KEEP, OFFLOAD]
    assert reasons(plan)[1] == reason
    assert actions(make_plan(program, ByName("*", action=RECOMPUTE), machine())) == [RECOMPUTE, KEEP, RECOMPUTE]


# Tags


def test_prefer_is_followed_where_the_policy_has_no_opinion() -> None:
    program = three(A="PREFER_CPU_OFFLOAD", B="PREFER_CPU_OFFLOAD")
    plan = make_plan(program, FirstOf(ByName("B", action=KEEP), FollowTags()), machine())
    assert actions(plan) == [OFFLOAD, KEEP, KEEP]
    plan = make_plan(program, ByName("B", action=KEEP), machine())
    assert actions(plan) == [OFFLOAD, KEEP, KEEP]
    assert (
        reasons(plan)[0]
        == "tagged PREFER_CPU_OFFLOAD, and the policy has no opinion (ByName's patterns do not match it)"
    )
    assert actions(make_plan(program, FollowTags(), machine())) == [OFFLOAD, OFFLOAD, KEEP]
    assert actions(make_plan(program, KeepAll(), machine())) == [KEEP, KEEP, KEEP]


def test_must_is_followed_whatever_the_policy_says() -> None:
    program = three(B="MUST_CPU_OFFLOAD")
    for policy in (KeepAll(), FollowTags(), Never("*"), ByName("*", action=RECOMPUTE), OffloadBytes(0)):
        plan = make_plan(program, policy, machine())
        assert actions(plan)[1] is OFFLOAD
        assert reasons(plan)[1] == "tagged MUST_CPU_OFFLOAD"


def test_a_must_that_cannot_be_honoured_is_an_error_that_says_why() -> None:
    program = three(B="MUST_CPU_OFFLOAD")
    fixed = replace(program.storages[1], immovable=("it is a module output",))
    program = replace(program, storages=(program.storages[0], fixed, program.storages[2]))
    with pytest.raises(
        PolicyError, match=r"B \(model.py:7\) is tagged MUST_CPU_OFFLOAD .*: it is a module output. Take the tag"
    ):
        make_plan(program, KeepAll(), machine())


def test_musts_beyond_the_host_budget_are_an_error() -> None:
    program = three(A="MUST_CPU_OFFLOAD", B="MUST_CPU_OFFLOAD")
    with pytest.raises(PolicyError, match="take 40 B of host memory, and the host budget is 39 B"):
        make_plan(program, KeepAll(), machine(host_budget_nbytes=39))


def test_a_tag_is_a_request_to_offload() -> None:
    assert make_plan(three(A="PREFER_CPU_OFFLOAD"), KeepAll(), machine()).offload_requested
    assert not make_plan(three(A="MUST_SAVE"), KeepAll(), machine()).offload_requested


# The host budget


def test_the_host_budget_keeps_what_would_pass_it() -> None:
    plan = make_plan(three(), EVERYTHING, machine(host_budget_nbytes=50))
    assert actions(plan) == [OFFLOAD, OFFLOAD, KEEP]
    assert reasons(plan)[2] == "the host budget of 50 B has 10 B left, and this needs 20 B"
    assert actions(make_plan(three(), EVERYTHING, machine(host_budget_nbytes=0))) == [KEEP] * 3


def test_musts_are_set_aside_before_others_fill_the_host() -> None:
    plan = make_plan(three(C="MUST_CPU_OFFLOAD"), EVERYTHING, machine(host_budget_nbytes=40))
    assert actions(plan) == [OFFLOAD, KEEP, OFFLOAD]
    assert plan.host_peak_nbytes == 40


def test_what_the_budget_refuses_does_not_count_as_offloaded() -> None:
    # The first is too big for the host, and the amount goes on to the second.
    storages = [storage("A", 30, birth=0, back=29), storage("B", 20, birth=1, back=28)]
    program = facts(storages, forward=15, backward=15)
    plan = make_plan(program, OffloadBytes(35, min_nbytes=0), machine(host_budget_nbytes=25))
    assert actions(plan) == [KEEP, OFFLOAD]


# Values that share a storage


def test_members_of_a_storage_go_together() -> None:
    plan = make_plan(with_view({}, {"label": "mine"}), ByName("mine"), machine())
    assert actions(plan) == [OFFLOAD, OFFLOAD]
    assert reasons(plan) == [
        "shares its memory with view: ByName says offload for 'mine'",
        "ByName says offload for 'mine'",
    ]
    assert (plan.offloaded_nbytes, len(plan.transfers)) == (20, 1)


def test_a_storage_is_recomputed_only_if_all_its_values_are() -> None:
    policy = ByName("mine", action=RECOMPUTE)
    plan = make_plan(with_view({}, {"label": "mine"}), policy, machine())
    assert actions(plan) == [KEEP, KEEP]
    assert reasons(plan)[1] == "shares its memory with A: ByName's patterns do not match it"
    plan = make_plan(with_view({"label": "mine"}, {"label": "mine"}), policy, machine())
    assert actions(plan) == [RECOMPUTE, RECOMPUTE]
    assert (plan.kept_nbytes, plan.offloaded_nbytes, plan.recomputed_nbytes, plan.transfers) == (0, 0, 20, ())


def test_never_on_a_view_keeps_the_whole_storage() -> None:
    plan = make_plan(with_view({}, {"label": "mine"}), FirstOf(OffloadAll(min_nbytes=0), Never("mine")), machine())
    assert actions(plan) == [KEEP, KEEP]
    assert reasons(plan) == [
        "shares its memory with view: Never lets 'mine' be offloaded",
        "Never lets 'mine' be offloaded",
    ]
    assert plan.host_peak_nbytes == 0


def test_a_must_on_a_view_moves_the_whole_storage() -> None:
    plan = make_plan(with_view({}, {"tag": "MUST_CPU_OFFLOAD"}), Never("*"), machine())
    assert actions(plan) == [OFFLOAD, OFFLOAD]
    assert reasons(plan)[0] == "shares its memory with view: tagged MUST_CPU_OFFLOAD"


# Recomputation


def test_recompute_is_a_decision_until_it_was_tried() -> None:
    policy = FirstOf(ByName("B", action=RECOMPUTE), OffloadAll(min_nbytes=0))
    first = make_plan(three(), policy, machine())
    assert actions(first) == [OFFLOAD, RECOMPUTE, OFFLOAD]
    assert first.recomputed_nbytes == 20
    assert [transfer.storage for transfer in first.transfers] == ["C", "A"]
    second = make_plan(three(), policy, machine(), not_recomputable={"B": "it is random"})
    assert actions(second) == [OFFLOAD, KEEP, OFFLOAD]
    assert reasons(second)[1] == "cannot be recomputed: it is random"
    third = make_plan(three(), policy, machine(), not_recomputable={})
    assert reasons(third)[1] == "cannot be recomputed: the partitioner saves it all the same"


def test_what_backward_computes_again_already_counts() -> None:
    program = replace(three(), recomputed_nbytes=100)
    assert make_plan(program, ByName("B", action=RECOMPUTE), machine()).recomputed_nbytes == 120


# Policies


@dataclass(frozen=True)
class Alternating:
    """Offload whenever less is offloaded than kept."""

    def decide(self, value: Value, ledger: Ledger) -> Action | None:
        return OFFLOAD if ledger.offloaded_nbytes < ledger.kept_nbytes else KEEP


def test_the_ledger_runs_along() -> None:
    assert actions(make_plan(three(), Alternating(), machine())) == [KEEP, OFFLOAD, KEEP]


def test_a_malformed_policy_is_refused() -> None:
    wrong: Any = OffloadAll
    with pytest.raises(PolicyError, match="is the class OffloadAll"):
        make_plan(three(), wrong, machine())


def test_notes_name_patterns_that_match_nothing() -> None:
    plan = make_plan(three(), FirstOf(ByName("Z"), KeepAll()), machine())
    assert plan.notes == ("the pattern 'Z' of ByName matches no saved value",)


def test_the_default_offloads_what_hides_and_keeps_the_rest() -> None:
    storages = [storage(name, 20, birth=index, back=17 - index) for index, name in enumerate("ABC")]
    plan = make_plan(facts(storages, forward=6, backward=12), OffloadHidden(min_nbytes=0), machine())
    assert actions(plan) == [OFFLOAD, OFFLOAD, KEEP]
    assert reasons(plan) == ["the link hides it", "the link hides it", "not so that the link hides it"]
    assert plan.exposed_seconds == 0.0
    assert not plan.offload_requested


def test_nothing_saved_is_a_plan_too() -> None:
    plan = make_plan(facts([], forward=2, backward=2), ByName("x"), machine())
    assert (plan.decisions, plan.transfers, plan.notes) == ((), (), ())
    assert plan.predicted_seconds == 4.0


# The plan for people


def test_diff_says_what_another_plan_does() -> None:
    keep = make_plan(three(), ByName("A"), machine())
    more = make_plan(three(), EVERYTHING, machine(copy_latency_seconds=1.5))
    assert keep.diff(more) == (
        "B: keep (ByName's patterns do not match it) -> offload (OffloadAll offloads everything that is big enough)",
        "C: keep (ByName's patterns do not match it) -> offload (OffloadAll offloads everything that is big enough)",
        "transfer of A: release_after C -> f4",
        "transfer of A: reload_before b12 -> b10",
        "kept_nbytes: 40 B -> 0 B",
        "offloaded_nbytes: 20 B -> 60 B",
        "host_peak_nbytes: 20 B -> 60 B",
    )
    fewer: list[Storage] = list(three().storages[:2])
    other = make_plan(facts(fewer, forward=15, backward=15), ByName("A"), machine())
    assert "C: only in the first plan" in keep.diff(other)
    assert "C: only in the second plan" in other.diff(keep)
    assert "predicted_seconds: 30 -> 60" in keep.diff(
        make_plan(facts(list(three().storages), forward=15, backward=15, seconds=2.0), ByName("A"), machine())
    )


def test_a_plan_looks_things_up_by_name() -> None:
    plan = make_plan(three(), ByName("B"), machine())
    assert plan.decision_by_value["B"].action is OFFLOAD
    assert list(plan.transfer_by_storage) == ["B"]


def test_a_plan_prints_as_its_table() -> None:
    text = str(make_plan(three(), ByName("B"), machine()))
    assert "ByName says offload for 'B'" in text
    assert "predicted peak" in text
