"""The laws that every plan keeps, over generated facts, machines and policies."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from fact_strategies import facts, machines, policies
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphoffload.ordering.check import check
from graphoffload.planning import wire
from graphoffload.planning.machine import Machine
from graphoffload.planning.order import events_of_plan
from graphoffload.planning.plan import Action, Plan
from graphoffload.planning.planner import make_plan
from graphoffload.planning.policy import (
    ByName,
    KeepAll,
    OffloadAll,
    OffloadBytes,
    OffloadHidden,
    Policy,
    policy_from_json,
    policy_key,
    policy_to_json,
)
from graphoffload.planning.profile import lives, memory_over_time, peak
from graphoffload.planning.schedule import make_transfers, simulate, step_seconds
from graphoffload.planning.sizes import format_nbytes, parse_nbytes
from graphoffload.planning.values import Facts

EVERYTHING = OffloadAll(min_nbytes=0)
# The odd cases are rare, and planning is quick.
many = settings(max_examples=3 * settings().max_examples)


def plan_or_skip(program: Facts, policy: Policy, machine: Machine) -> Plan:
    """Plan; a MUST tag beyond the host budget is a fault of the drawn input."""
    musts = {value.storage for value in program.values if value.tag == "MUST_CPU_OFFLOAD"}
    needed = sum(storage.nbytes or 0 for storage in program.storages if storage.name in musts)
    assume(machine.host_budget_nbytes is None or needed <= machine.host_budget_nbytes)
    return make_plan(program, policy, machine)


# Law 1


@many
@given(facts(musts=True), policies(), machines())
def test_every_value_is_decided_once_and_members_alike(program: Facts, policy: Policy, machine: Machine) -> None:
    plan = plan_or_skip(program, policy, machine)
    assert [decision.value for decision in plan.decisions] == [value.name for value in program.values]
    for storage in program.storages:
        assert len({plan.decision_by_value[name].action for name in storage.members}) == 1
    assert all(decision.reason for decision in plan.decisions)


@many
@given(facts(musts=True), policies(), machines())
def test_one_transfer_for_each_offloaded_storage_and_totals_add_up(
    program: Facts, policy: Policy, machine: Machine
) -> None:
    plan = plan_or_skip(program, policy, machine)
    action = {decision.storage: decision.action for decision in plan.decisions}
    offloaded = [storage for storage in program.storages if action[storage.name] is Action.OFFLOAD]
    assert sorted(transfer.storage for transfer in plan.transfers) == sorted(storage.name for storage in offloaded)
    assert plan.offloaded_nbytes == sum(storage.nbytes for storage in offloaded) == plan.host_peak_nbytes
    recomputed = plan.recomputed_nbytes - program.recomputed_nbytes
    known = sum(storage.nbytes or 0 for storage in program.storages)
    assert plan.kept_nbytes + plan.offloaded_nbytes + recomputed == known
    for storage in program.storages:
        if storage.immovable or storage.nbytes is None:
            assert action[storage.name] is Action.KEEP


@many
@given(facts(musts=True), policies(), machines())
def test_must_is_honoured_whatever_the_policy_says(program: Facts, policy: Policy, machine: Machine) -> None:
    plan = plan_or_skip(program, policy, machine)
    for value in program.values:
        if value.tag == "MUST_CPU_OFFLOAD" and value.storage_nbytes:
            assert plan.decision_by_value[value.name].action is Action.OFFLOAD


# Law 2

HASH_SEED_PROGRAM = """
from hypothesis import given, seed, settings
from fact_strategies import facts, machines, policies
from graphoffload.errors import PolicyError
from graphoffload.planning.planner import make_plan
from graphoffload.planning.policy import policy_key

@seed(7)
@settings(max_examples=40, database=None, derandomize=False, deadline=None)
@given(facts(), policies(), machines())
def show(program, policy, machine):
    plan = make_plan(program, policy, machine)
    print(plan.to_json(), policy_key(policy), hash(plan.notes) and "")

show()
"""


@given(facts(), policies(), machines())
def test_same_facts_same_plan(program: Facts, policy: Policy, machine: Machine) -> None:
    again = wire.from_json(Facts, wire.to_json(program))
    assert make_plan(program, policy, machine) == make_plan(again, policy, machine)


def test_same_facts_same_plan_under_any_hash_seed() -> None:
    root = Path(__file__).parents[2]
    printed = set()
    for hash_seed in ("0", "1", "4242"):
        paths = os.pathsep.join((str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")))
        run = subprocess.run(
            [sys.executable, "-c", HASH_SEED_PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=True,
        )
        printed.add(run.stdout)
    assert len(printed) == 1
    assert printed.pop().count('"type": "Plan"') >= 40


# Law 3


@given(facts(musts=True))
def test_facts_come_back_from_json(program: Facts) -> None:
    assert wire.from_json(Facts, wire.to_json(program)) == program


@given(machines())
def test_machines_come_back_from_json(machine: Machine) -> None:
    assert Machine.from_json(machine.to_json()) == machine


@many
@given(policies())
def test_policies_come_back_from_json_with_the_same_key(policy: Policy) -> None:
    again = policy_from_json(policy_to_json(policy))
    assert again == policy
    assert type(again) is type(policy)
    assert policy_key(again) == policy_key(policy)


@given(policies(), policies())
def test_keys_are_equal_just_where_policies_are(one: Policy, other: Policy) -> None:
    assert (policy_key(one) == policy_key(other)) == (one == other)


@given(facts(), policies(), machines())
def test_plans_come_back_from_json(program: Facts, policy: Policy, machine: Machine) -> None:
    plan = make_plan(program, policy, machine)
    assert Plan.from_json(plan.to_json()) == plan
    assert policy_from_json(plan.policy) == policy
    assert Machine.from_json(plan.machine) == machine


@given(st.integers(0, 2**60))
def test_sizes_come_back(nbytes: int) -> None:
    assert parse_nbytes(nbytes) == parse_nbytes(str(nbytes)) == nbytes
    assert parse_nbytes(format_nbytes(nbytes)) == pytest.approx(nbytes, rel=0.01)


# Law 4


@many
@given(facts(musts=True), policies(), machines())
def test_host_bytes_never_pass_the_host_budget(program: Facts, policy: Policy, machine: Machine) -> None:
    plan = plan_or_skip(program, policy, machine)
    if machine.host_budget_nbytes is not None:
        assert plan.host_peak_nbytes <= machine.host_budget_nbytes


@given(facts(), st.integers(0, 200), machines(budgets=False))
def test_offload_bytes_never_passes_its_amount(program: Facts, amount: int, machine: Machine) -> None:
    program = replace(program, values=tuple(replace(value, tag=None) for value in program.values))
    assert make_plan(program, OffloadBytes(amount, min_nbytes=0), machine).offloaded_nbytes <= amount


@given(facts(), machines(budgets=False))
def test_the_whole_fraction_is_everything(program: Facts, machine: Machine) -> None:
    everything = make_plan(program, EVERYTHING, machine)
    assert make_plan(program, OffloadBytes(1.0, min_nbytes=0), machine).transfers == everything.transfers


# Law 5


@many
@given(facts(musts=True), policies(), machines())
def test_the_checker_finds_nothing_in_a_plan(program: Facts, policy: Policy, machine: Machine) -> None:
    assert check(events_of_plan(plan_or_skip(program, policy, machine))) == ()


# Placement


@many
@given(facts(), machines())
def test_transfers_stand_where_the_facts_allow(program: Facts, machine: Machine) -> None:
    plan = make_plan(program, EVERYTHING, machine)
    for transfer in plan.transfers:
        storage = program.storage_by_name[transfer.storage]
        first = len(program.forward)
        assert program.forward_index[transfer.offload_after] == storage.carried_at
        released = program.forward_index[transfer.release_after]
        assert max(storage.carried_at, storage.last_forward_use) <= released
        assert transfer.wait or released == first - 1
        assert first + program.backward_index[transfer.ready_before] == storage.first_backward_use
        assert program.backward_index[transfer.reload_before] <= program.backward_index[transfer.ready_before]
    needs = [program.backward_index[transfer.ready_before] for transfer in plan.transfers]
    assert needs == sorted(needs)


@many
@given(facts(), machines())
def test_simulated_times_are_in_causal_order(program: Facts, machine: Machine) -> None:
    plan = make_plan(program, EVERYTHING, machine)
    timeline = simulate(program, machine, plan.transfers)
    for transfer in plan.transfers:
        carried = timeline.ends[program.storage_by_name[transfer.storage].carried_at]
        assert carried <= transfer.offload_start <= transfer.offload_end <= transfer.reload_start <= transfer.reload_end
        assert transfer.offload_end <= transfer.released
        assert transfer.reload_end <= timeline.starts[program.storage_by_name[transfer.storage].first_backward_use]
        assert transfer.needed <= timeline.starts[program.storage_by_name[transfer.storage].first_backward_use]
    for copies in (timeline.offloads, timeline.reloads):
        ends = [copy.end for copy in copies]
        assert ends == sorted(ends)
        assert all(one.end <= other.start for one, other in pairwise(copies))


@many
@given(facts(), machines())
def test_seconds_are_the_steps_and_what_is_exposed(program: Facts, machine: Machine) -> None:
    plan = make_plan(program, EVERYTHING, machine)
    assert plan.predicted_seconds_without == pytest.approx(sum(step_seconds(one, machine) for one in program.steps))
    assert plan.predicted_seconds == pytest.approx(plan.predicted_seconds_without + plan.exposed_seconds)
    assert plan.exposed_seconds >= 0
    stalls = simulate(program, machine, plan.transfers).stalls
    assert sum(stall.seconds for stall in stalls) == pytest.approx(plan.exposed_seconds)


@many
@given(facts(), machines(), st.sampled_from((2.0, 10.0)))
def test_a_faster_link_never_makes_the_same_transfers_slower(program: Facts, machine: Machine, times: float) -> None:
    transfers = make_plan(program, EVERYTHING, machine).transfers
    faster = replace(
        machine,
        d2h_bytes_per_second=machine.d2h_bytes_per_second * times,
        h2d_bytes_per_second=machine.h2d_bytes_per_second * times,
        # Beside the two rates, so that the ways slow each other as before.
        duplex_bytes_per_second=machine.duplex_bytes_per_second and machine.duplex_bytes_per_second * times,
    )
    slow, fast = simulate(program, machine, transfers).seconds, simulate(program, faster, transfers).seconds
    assert fast <= slow * (1 + 1e-9)


@given(facts(), machines(budgets=False))
def test_the_link_bounds_the_step_from_below(program: Facts, machine: Machine) -> None:
    plan = make_plan(program, EVERYTHING, machine)
    out = sum(one.nbytes / machine.d2h_bytes_per_second + machine.copy_latency_seconds for one in plan.transfers)
    back = sum(one.nbytes / machine.h2d_bytes_per_second + machine.copy_latency_seconds for one in plan.transfers)
    assert plan.predicted_seconds >= max(out, back) * (1 - 1e-9)


@given(facts(), machines(budgets=False), st.sampled_from((0.0, 0.1, 0.5)))
def test_hidden_means_hidden(program: Facts, machine: Machine, slack: float) -> None:
    program = replace(program, values=tuple(replace(value, tag=None) for value in program.values))
    plan = make_plan(program, OffloadHidden(min_nbytes=0, slack=slack), machine)
    # The schedule itself may spend one per cent or one millisecond for a lower peak.
    spent = max(0.01 * plan.predicted_seconds, 1e-3)
    assert plan.exposed_seconds <= slack * plan.predicted_seconds_without + spent + 1e-9


# Memory


def replayed(program: Facts, plan: Plan, bound: int | None) -> list[int]:
    """Count memory position by position from the definition, with none of the planner's own sums."""
    alive = lives(program, plan.transfers, in_flight_nbytes=bound)
    return [
        sum(life.nbytes for life in alive if life.born <= position <= life.dies)
        for position in range(len(program.steps))
    ]


@many
@given(facts(), machines())
def test_memory_over_time_is_the_sum_of_lives(program: Facts, machine: Machine) -> None:
    plan = make_plan(program, EVERYTHING, machine)
    bound = machine.in_flight_bound
    assert memory_over_time(program, plan.transfers, in_flight_nbytes=bound) == replayed(program, plan, bound)
    assert plan.predicted_peak_nbytes == max(replayed(program, plan, bound))


@many
@given(facts(), machines())
def test_offloading_adds_memory_only_between_reload_and_ready(program: Facts, machine: Machine) -> None:
    # Forward never holds more than without the plan. Backward holds more by at most the sources handed over and not yet
    # dropped, beside the memory that their reloads go to.
    plan = make_plan(program, EVERYTHING, machine)
    before = memory_over_time(program)
    after = memory_over_time(program, plan.transfers, in_flight_nbytes=machine.in_flight_bound)
    handed = sum(transfer.nbytes for transfer in plan.transfers if not transfer.wait)
    count = len(program.forward)
    assert all(now <= then for now, then in zip(after[:count], before[:count], strict=True))
    assert all(now <= then + handed for now, then in zip(after[count:], before[count:], strict=True))
    assert plan.predicted_peak_nbytes <= plan.predicted_peak_nbytes_without + min(handed, machine.in_flight_bound)


@given(facts(), machines())
def test_storages_on_their_way_out_keep_the_bound(program: Facts, machine: Machine) -> None:
    plan = make_plan(program, EVERYTHING, machine)
    for position in range(len(program.forward)):
        # Not through this step, whose end is when the release stands: what is still there when the next one runs.
        held = sum(
            transfer.nbytes
            for transfer in plan.transfers
            if program.storage_by_name[transfer.storage].last_forward_use <= position
            and program.storage_by_name[transfer.storage].carried_at <= position
            and (not transfer.wait or program.forward_index[transfer.release_after] > position)
        )
        assert held <= machine.in_flight_bound


@given(facts(), machines())
def test_keeping_everything_changes_nothing(program: Facts, machine: Machine) -> None:
    plan = make_plan(program, KeepAll(), machine)
    assert plan.transfers == ()
    assert plan.predicted_peak_nbytes == plan.predicted_peak_nbytes_without == peak(program)
    assert plan.predicted_seconds == plan.predicted_seconds_without
    assert {decision.action for decision in plan.decisions} <= {Action.KEEP}


@given(facts(), machines())
def test_the_order_in_which_storages_are_given_does_not_matter(program: Facts, machine: Machine) -> None:
    movable = [one for one in program.storages if not one.immovable and one.nbytes]
    assert make_transfers(program, movable[::-1], machine) == make_transfers(program, movable, machine)


@given(facts(), policies(), policies(), machines())
def test_diff_is_empty_just_for_plans_that_decide_and_place_alike(
    program: Facts, one: Policy, other: Policy, machine: Machine
) -> None:
    first, second = make_plan(program, one, machine), make_plan(program, other, machine)
    assert first.diff(first) == ()
    alike = [d.action for d in first.decisions] == [d.action for d in second.decisions]
    assert (first.diff(second) == ()) == (alike and first.transfers == second.transfers)


@given(facts(), machines())
def test_after_recomputation_was_tried_nothing_is_recomputed(program: Facts, machine: Machine) -> None:
    policy = ByName(names="*", action=Action.RECOMPUTE)
    plan = make_plan(program, policy, machine, not_recomputable={})
    assert Action.RECOMPUTE not in {decision.action for decision in plan.decisions}
