"""Laws 1, 2, 3, 5, 9, 10, 11, 12 and 13 over generated programs: see `strategies.programs`."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import HealthCheck, assume, example, given, note, settings
from hypothesis import strategies as st
from pairs import Pair, Partition, capture
from program_kinds import RANDOM_KINDS
from program_writer import Step
from programs import Program
from strategies import programs
from training import Compiler, Outcome, assert_close, assert_same_bits, is_finite, train_step

from graphoffload.errors import GraphOffloadWarning, UsageError
from graphoffload.graphs.erase import erase
from graphoffload.graphs.facts import gather_facts
from graphoffload.graphs.order import events_of_pair
from graphoffload.graphs.rewrite import rewrite
from graphoffload.ordering.check import check
from graphoffload.ordering.refine import refines
from graphoffload.planning.machine import Machine
from graphoffload.planning.order import events_of_plan
from graphoffload.planning.plan import Action, Plan
from graphoffload.planning.planner import make_plan
from graphoffload.planning.policy import KeepAll, OffloadAll, OffloadBytes, Policy
from graphoffload.planning.values import Facts
from graphoffload.testing import VirtualRun, check_log, virtual_device

EVERYTHING = OffloadAll(min_nbytes=0)
VIRTUAL = Machine.named("virtual")
MANY = settings.default.max_examples

# Compiling is slow, and a program that overflows says nothing; both are no fault of a law.
laws = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
rare = settings(laws, max_examples=max(2, MANY // 12))

policies = st.one_of(
    st.just(EVERYTHING),
    st.builds(OffloadBytes, st.integers(0, 600), min_nbytes=st.just(0)),
    st.builds(OffloadBytes, st.floats(0.05, 1.0), min_nbytes=st.just(0)),
)
partitions = st.sampled_from(("min_cut", "default"))


# --- running a program -------------------------------------------------------------------------------------------------


def run(program: Program, policy: Policy, **how: object) -> tuple[Outcome, list[Plan], VirtualRun]:
    """Train one step on the virtual device, outputs held until the end as a caller may, and judge the runtime's log."""
    compile_ = Compiler(
        policy, dynamic=program.dynamic or None, options={"machine": VIRTUAL, **how.pop("options", {})}, **how
    )
    with virtual_device() as device, warnings.catch_warnings():
        # A small program may well have nothing that can move.
        warnings.simplefilter("ignore", GraphOffloadWarning)
        module = program.module()
        result = train_step(compile_(module), program.inputs(), module=module)
        check_log(device)
    return result, compile_.plans, device


def reference(program: Program) -> Outcome:
    """Train one step eagerly; skip programs whose numbers overflow, since NaN is what shows poison."""
    note(program.source)
    module = program.module()
    result = train_step(module, program.inputs(), module=module)
    assume(is_finite(result))
    return result


# --- programs that once broke a law ------------------------------------------------------------------------------------

CHANGED_BUFFER = Program((Step("unary"), Step("state", variant=2)), input_grad=False)
"""Backward needs a copy of a buffer that forward changes; a partitioner that copies again in backward copies the change."""

TANGENT_OF_A_VIEW = Program((Step("region", 6, body=(Step("parts", 5, 1),)),), outputs=((0, 2),), dtype="bfloat16")
"""The tangent of an output that is a view of an input is traced with the input's storage, and so is every view of it."""

REPLAYED_DROPOUT = Program(
    (Step("region", 2, body=(Step("binary", 6, 6, 3), Step("dropout", 1, 1, 7), Step("inplace", 4, 3, 4))),),
    outputs=((0, 4),),
)
"""Backward replays a dropout for its mask alone, and holds its values too."""

# --- law 12: the same bits ----------------------------------------------------------------------------------------------


@laws
@given(programs(dynamic=None), policies, partitions)
@example(CHANGED_BUFFER, EVERYTHING, "min_cut")
def test_offloading_changes_no_bit(program: Program, policy: Policy, partition: str):
    """Law 12 under aot_eager: as with everything kept and, where nothing is random, as eager."""
    eager = reference(program)
    how = {"options": {"partitioner": partition}}
    kept, _, _ = run(program, KeepAll(), **how)
    moved, plans, device = run(program, policy, **how)
    assert_same_bits(moved, kept)
    if not program.kinds & RANDOM_KINDS:
        # Gradients of several outputs are added up in another order by eager.
        (assert_close if program.outputs else assert_same_bits)(moved, eager)
    assert device.stats().offloads == sum(len(plan.transfers) for plan in plans)


@rare
@given(programs(max_steps=6, dynamic=None))
def test_offloading_changes_no_bit_under_inductor(program: Program):
    """Law 12 under Inductor: as with everything kept through the same backend."""
    reference(program)
    kept, _, _ = run(program, KeepAll(), compiler="inductor")
    moved, _, _ = run(program, EVERYTHING, compiler="inductor")
    assert_same_bits(moved, kept)


# --- law 13: predicted is measured --------------------------------------------------------------------------------------


@laws
@given(programs(), st.one_of(policies, st.just(KeepAll())))
@example(TANGENT_OF_A_VIEW, EVERYTHING)
@example(REPLAYED_DROPOUT, EVERYTHING)
def test_predicted_peak_is_the_ledgers(program: Program, policy: Policy):
    """Law 13: to the byte, under aot_eager on the virtual device."""
    reference(program)
    _, (plan,), device = run(program, policy)
    assert plan.predicted_peak_nbytes == device.peak_nbytes


# --- laws of the pair ---------------------------------------------------------------------------------------------------


def facts_of(pair: Pair) -> Facts:
    return gather_facts(
        pair.forward,
        pair.backward,
        num_fwd_outputs=pair.num_fwd_outputs,
        static_inputs=pair.static_input_indices,
        on_device=lambda _device: True,
        fused=False,
    )


def pair_of(program: Program, partition: Partition) -> Pair:
    note(program.source)
    return capture(program.module(), *program.inputs(), partition=partition, dynamic=program.dynamic)


@laws
@given(programs(dynamic=None), policies, partitions)
def test_plans(program: Program, policy: Policy, partition: Partition):
    """Laws 1, 2, 3 and 5: every value decided once, storages of one mind, same facts same plan, JSON, no race."""
    pair = pair_of(program, partition)
    facts = facts_of(pair)
    assert facts == facts_of(pair)
    plan = make_plan(facts, policy, VIRTUAL)
    assert plan == make_plan(facts, policy, VIRTUAL)
    assert Plan.from_json(plan.to_json()) == plan
    assert sorted(decision.value for decision in plan.decisions) == sorted(value.name for value in facts.values)
    actions: dict[str, set[Action]] = {}
    for decision in plan.decisions:
        assert facts.value_by_name[decision.value].storage == decision.storage
        assert decision.reason
        actions.setdefault(decision.storage, set()).add(decision.action)
    assert all(len(action) == 1 for action in actions.values())
    offloaded = {storage for storage, action in actions.items() if action == {Action.OFFLOAD}}
    assert offloaded == {transfer.storage for transfer in plan.transfers}
    assert not offloaded & {storage.name for storage in facts.storages if storage.immovable}
    total = sum(storage.nbytes or 0 for storage in facts.storages)
    assert plan.kept_nbytes + plan.offloaded_nbytes == total
    assert check(events_of_plan(plan)) == ()


@laws
@given(programs(dynamic=None), policies, partitions)
def test_rewrites(program: Program, policy: Policy, partition: Partition):
    """Laws 5, 9, 10 and 11: no race, undone by erase, as the plan says, and never twice."""
    pair = pair_of(program, partition)
    before = printed(pair.forward, pair.backward)
    plan = make_plan(facts_of(pair), policy, VIRTUAL)
    empty = make_plan(facts_of(pair), KeepAll(), VIRTUAL)
    assert printed(*rewrite(pair.forward, pair.backward, empty, num_fwd_outputs=pair.num_fwd_outputs)) == before
    rewritten = rewrite(pair.forward, pair.backward, plan, num_fwd_outputs=pair.num_fwd_outputs)
    assert printed(pair.forward, pair.backward) == before
    assert printed(*erase(*rewritten)) == before
    events = events_of_pair(*rewritten, num_fwd_outputs=pair.num_fwd_outputs)
    assert check(events) == ()
    assert refines(events, events_of_plan(plan)) == ()
    for graph in rewritten:
        graph.graph.lint()
    if plan.transfers:
        with pytest.raises(UsageError, match="rewritten already"):
            rewrite(*rewritten, plan, num_fwd_outputs=pair.num_fwd_outputs)


def printed(forward, backward) -> str:
    return f"{forward.graph}\n{forward.code}\n{backward.graph}\n{backward.code}"
