"""The composition: the pass on a pair, the backend by name and as a callable, and what it says when nothing moves."""

from __future__ import annotations

import dataclasses
import re
import warnings

import pytest
import torch
from pairs import capture
from subjects import BY_NAME, Mlp
from training import assert_same_bits, fresh, fresh_inputs, train_step

import graphoffload
from graphoffload.backend import OffloadPartitioner
from graphoffload.errors import GraphOffloadWarning, PolicyError, StalePlanError, UsageError
from graphoffload.graphs.erase import erase
from graphoffload.options import read_options
from graphoffload.planning.machine import Machine
from graphoffload.planning.plan import Action, Plan
from graphoffload.planning.policy import ByName, KeepAll, OffloadAll, OffloadBytes, OffloadHidden
from graphoffload.runtime.ops import OFFLOAD, READY, RELEASE, RELOAD
from graphoffload.testing import virtual_device

EVERYTHING = OffloadAll(min_nbytes=0)
VIRTUAL = Machine.named("virtual")


@pytest.fixture(autouse=True)
def device():
    torch._dynamo.reset()
    with virtual_device() as device:
        yield device
    torch._dynamo.reset()


@pytest.fixture
def pair():
    subject = BY_NAME["mlp"]
    return capture(subject.module(), *subject.inputs(), partition="min_cut")


def targets(module):
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def apply(pair, policy=EVERYTHING, **options):
    return graphoffload.offload_pair(
        pair.forward,
        pair.backward,
        num_fwd_outputs=pair.num_fwd_outputs,
        static_inputs=pair.static_input_indices,
        policy=policy,
        **options,
    )


# --- the pass on a pair -------------------------------------------------------------------------------------------------


def test_offload_pair(pair):
    forward, backward, plan = apply(pair)
    count = len(plan.transfers)
    assert count > 0
    assert (targets(forward).count(OFFLOAD), targets(forward).count(RELEASE)) == (count, count)
    assert (targets(backward).count(RELOAD), targets(backward).count(READY)) == (count, count)


def test_offload_pair_is_a_pure_function(pair):
    before = str(pair.forward.graph), str(pair.backward.graph)
    first, second = apply(pair), apply(pair)
    assert (str(pair.forward.graph), str(pair.backward.graph)) == before
    assert first[2] == second[2]
    assert [str(graph.graph) for graph in first[:2]] == [str(graph.graph) for graph in second[:2]]
    assert [str(graph.graph) for graph in erase(*first[:2])] == list(before)


def test_offload_pair_twice_is_refused(pair):
    forward, backward, _ = apply(pair)
    with pytest.raises(UsageError, match="rewritten already"):
        apply(dataclasses.replace(pair, forward=forward, backward=backward))


def test_offload_pair_takes_a_machine(pair):
    budget = 2000
    *_, plan = apply(pair, machine=VIRTUAL.with_budgets(host_budget=budget))
    assert 0 < plan.host_peak_nbytes <= budget


def test_offload_pair_refuses_what_is_no_policy(pair):
    with pytest.raises(PolicyError):
        apply(pair, OffloadAll)


def test_a_plan_of_another_pair_is_stale(pair):
    from graphoffload.graphs.rewrite import rewrite

    *_, plan = apply(pair)
    other = BY_NAME["convolutional"]
    other = capture(other.module(), *other.inputs())
    with pytest.raises(StalePlanError):
        rewrite(other.forward, other.backward, plan, num_fwd_outputs=other.num_fwd_outputs)


# --- the backend --------------------------------------------------------------------------------------------------------


def trained(backend, **options):
    subject = BY_NAME["mlp"]
    module, inputs = subject.module(), subject.inputs()
    return train_step(torch.compile(module, backend=backend, **options), inputs, module=module)


def eager():
    subject = BY_NAME["mlp"]
    module = subject.module()
    return train_step(module, subject.inputs(), module=module)


def test_by_name_with_options():
    """The way of the README; needs graphoffload to be installed, for its entry point."""
    assert "graphoffload" in torch._dynamo.list_backends(exclude_tags=())
    seen = []
    result = trained("graphoffload", options={"policy": EVERYTHING, "compiler": "aot_eager", "on_plan": seen.append})
    assert_same_bits(result, eager())
    assert seen[0].transfers


def test_by_name_without_options():
    """With no option at all: a sensible default, which on a small model is to leave it alone, without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = BY_NAME["mlp"].module()
        torch.compile(model, backend="graphoffload")(*BY_NAME["mlp"].inputs()).sum().backward()
    (plan,) = graphoffload.plans(model)
    assert graphoffload.policies.policy_from_json(plan.policy) == OffloadHidden()


def test_as_a_callable():
    seen = []
    result = trained(graphoffload.backend(EVERYTHING, compiler="aot_eager", on_plan=seen.append))
    assert_same_bits(result, eager())
    assert isinstance(seen[0], Plan)


def test_compiled_in_place():
    model = BY_NAME["mlp"].module()
    model.compile(backend="graphoffload", options={"policy": EVERYTHING, "compiler": "aot_eager"})
    result = train_step(model, BY_NAME["mlp"].inputs(), module=model)
    assert_same_bits(result, eager())
    assert graphoffload.plans(model)[0].transfers


@pytest.mark.parametrize("machine", ["h200", VIRTUAL, None])
def test_the_machine_is_in_the_plan(machine):
    seen = []
    trained(graphoffload.backend(EVERYTHING, machine=machine, compiler="aot_eager", on_plan=seen.append))
    named = Machine.from_json(seen[0].machine)
    if machine is not None:
        assert named == (VIRTUAL if machine is VIRTUAL else Machine.named("h200"))


def test_measured_times():
    seen = []
    backend = graphoffload.backend(EVERYTHING, compiler="aot_eager", timing="measured", on_plan=seen.append)
    assert_same_bits(trained(backend), eager())
    steps = seen[0].facts.steps
    assert any(step.seconds is not None and step.seconds > 0 for step in steps)


def test_a_partition_function():
    from functorch.compile import default_partition

    calls = []

    def partition(*args, **kwargs):
        calls.append(kwargs["num_fwd_outputs"])
        return default_partition(*args, num_fwd_outputs=kwargs["num_fwd_outputs"])

    result = trained(graphoffload.backend(EVERYTHING, compiler="aot_eager", partitioner=partition))
    assert_same_bits(result, eager())
    assert calls == [1]


def test_an_on_plan_that_raises_is_not_hidden():
    def on_plan(plan):
        raise RuntimeError("the callback's own fault")

    with pytest.raises(Exception, match="the callback's own fault"):
        trained(graphoffload.backend(EVERYTHING, compiler="aot_eager", on_plan=on_plan))
    assert_same_bits(trained(graphoffload.backend(EVERYTHING, compiler="aot_eager")), eager())


@dataclasses.dataclass(frozen=True)
class Odd:
    """A policy of the user's own: offload every other storage."""

    def decide(self, value, ledger):
        return Action.OFFLOAD if value.birth is not None and value.birth % 2 else Action.KEEP


def test_a_policy_of_the_users_own():
    seen = []
    assert_same_bits(trained(graphoffload.backend(Odd(), compiler="aot_eager", on_plan=seen.append)), eager())
    assert seen[0].transfers


# --- a request that moves nothing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [OffloadAll(min_nbytes="1GiB"), OffloadBytes(1, min_nbytes=0), ByName("no_such_module")],
    ids=["too small", "too little", "no such name"],
)
def test_offloading_that_moves_nothing_warns(pair, policy):
    """Trap 15: a requested offload that moves no byte is loud, and says why."""
    with pytest.warns(GraphOffloadWarning) as said:
        apply(pair, policy)
    assert any(re.search("moves nothing.*because: .+", str(warning.message)) for warning in said)


@pytest.mark.parametrize("policy", [KeepAll(), OffloadHidden(), OffloadBytes(0), EVERYTHING], ids=str)
def test_what_asks_for_nothing_or_moves_something_is_quiet(pair, policy):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply(pair, policy)


# --- the key of caches --------------------------------------------------------------------------------------------------


def test_the_cache_key():
    def key(**options):
        return OffloadPartitioner(read_options(**{"policy": KeepAll(), **options})).uuid()

    keys = [
        key(),
        key(policy=EVERYTHING),
        key(policy=OffloadAll(min_nbytes=1)),
        key(machine="h200"),
        key(machine="virtual"),
        key(machine=VIRTUAL.with_budgets(host_budget=1)),
        key(partitioner="default"),
        key(timing="measured"),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]
    assert graphoffload.__version__ in key()


def test_models_and_inputs_are_left_as_they_were():
    model = Mlp()
    twin, x = fresh(model), torch.randn(3, 16)
    before = fresh_inputs(x)
    torch.compile(model, backend=graphoffload.backend(EVERYTHING, compiler="aot_eager"))(x).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert torch.equal(x, before)
