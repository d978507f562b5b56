"""Scenarios about honest plans, later passes, dynamic shapes and CUDA graphs."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from subjects import Mlp
from torch import nn
from torch._functorch.compile_utils import fx_graph_cse
from training import Compiler, assert_same_bits, assert_trains_as_eager, fresh, train_step

import graphoffload
from graphoffload.errors import GraphOffloadWarning, MachineError, PolicyError, UsageError
from graphoffload.graphs.order import events_of_pair
from graphoffload.ordering.check import check
from graphoffload.planning.machine import Machine
from graphoffload.planning.plan import Action
from graphoffload.planning.policy import KeepAll, OffloadAll, OffloadBytes, OffloadHidden
from graphoffload.runtime.ops import OFFLOAD, READY, RELEASE, RELOAD
from graphoffload.testing import check_log, virtual_device

EVERYTHING = OffloadAll(min_nbytes=0)
OURS = (OFFLOAD, RELEASE, RELOAD, READY)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Mlp(depth=4)


def rows(count=4):
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(count)).requires_grad_()


# --- rank 14: later passes -------------------------------------------------------------------------------------------


def test_later_passes_keep_every_operator(model):
    """Rank 14: dead code elimination and common subexpressions drop, join and move none of the operators."""
    with virtual_device():
        made = graphoffload.transform(model, rows(), policy=EVERYTHING)
    before = [
        [node.target for node in half.graph.nodes if node.target in OURS] for half in (made.forward, made.backward)
    ]
    for half in (made.forward, made.backward):
        half.graph.eliminate_dead_code()
        half.graph = fx_graph_cse(half.graph)
        half.recompile()
    after = [
        [node.target for node in half.graph.nodes if node.target in OURS] for half in (made.forward, made.backward)
    ]
    assert after == before
    assert sum(map(len, after)) == 4 * len(made.plan.transfers)
    assert check(events_of_pair(made.forward, made.backward, num_fwd_outputs=1)) == ()


def test_no_transfer_is_tagged_for_recomputation(model):
    """Rank 14: a marker that is computed again would move memory twice."""
    with virtual_device():
        made = graphoffload.transform(model, rows(), policy=EVERYTHING)
    ours = [node for half in (made.forward, made.backward) for node in half.graph.nodes if node.target in OURS]
    assert ours
    assert all("recompute" not in node.meta for node in ours)


# --- rank 25: dynamic shapes -----------------------------------------------------------------------------------------


class BySize(nn.Module):
    """Use sizes as numbers, and one tensor for nothing but its shape."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        y = self.linear(x).sin()
        shape_only = y.new_ones(y.shape)
        z = (y.exp() * y.shape[0] + shape_only).reshape(y.shape[0] * 2, -1)
        return (z.sin() / z.shape[0]).view(y.shape) * y


@pytest.mark.parametrize("partitioner", ["min_cut", "default"])
def test_no_recompilation_per_size(partitioner):
    """Rank 25: one plan for all sizes, right at each; symbolic sizes of backward stay what they are."""
    torch.manual_seed(0)
    model = BySize()
    plain = fresh(model)
    compile_ = Compiler(EVERYTHING, dynamic=True, options={"partitioner": partitioner})
    with virtual_device() as device:
        run = compile_(model)
        for count in (4, 7, 3, 12, 5):
            for each in (model, plain):
                each.zero_grad()
            have = train_step(run, [rows(count)], module=model)
            assert_same_bits(have, train_step(plain, [rows(count)], module=plain))
        check_log(device)
    assert len(compile_.plans) == 1
    assert compile_.moved


def test_marked_dynamic():
    """Rank 25: with mark_dynamic too, and the plan says the sizes as expressions."""
    torch.manual_seed(0)
    model = BySize()
    compile_ = Compiler(EVERYTHING)
    with virtual_device():
        run = compile_(model)
        for count in (6, 9, 11):
            x = rows(count)
            torch._dynamo.mark_dynamic(x, 0)
            run(x).sum().backward()
    (plan,) = compile_.plans
    assert any(isinstance(size, str) for value in plan.facts.values for size in value.shape)
    assert plan.offloaded_nbytes > 0


def test_what_is_used_for_its_shape_alone_stays():
    """Rank 25: backward of sum needs the shape of its input and not one byte of it."""
    torch.manual_seed(0)
    weight = torch.randn(16, 16, requires_grad=True)
    with virtual_device():
        plan = graphoffload.transform(
            lambda x, w: (x @ w).sin().sum(0).expand(4, -1) * 2,
            rows(),
            weight,
            policy=EVERYTHING,
            partitioner="default",
        ).plan
    for storage in plan.facts.storages:
        moved = storage.name in {transfer.storage for transfer in plan.transfers}
        assert not (moved and any("only its shape" in reason for reason in storage.immovable))


def test_sizes_that_no_one_knows_before_running():
    """Rank 25: as for tokens that an expert gets, among them none: kept with the reason, and right."""
    torch.manual_seed(0)
    inside = nn.Linear(16, 16)

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.inside = nn.Linear(16, 16), inside

        def forward(self, x, mask):
            x = self.before(x).sin().exp()
            tokens = x[mask.nonzero().squeeze(-1)]
            return x.index_put((mask.nonzero().squeeze(-1),), self.inside(tokens).sin().exp()).sin()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        ran = None
        for mask in ([True, False, True, True], [False] * 4):
            ran = assert_trains_as_eager(Routed(), [rows(), torch.tensor(mask)])
    assert ran.moved
    assert any("size is unknown" in decision.reason for decision in ran.plan.decisions)


# --- rank 27 and traps 15, 16: honest plans --------------------------------------------------------------------------


@pytest.mark.parametrize("amount", [-1, float("nan"), 0.0, 1.5, -0.5, math.inf, "many", "-3GiB", None, True])
def test_amounts_that_mean_nothing(amount):
    """Rank 27: budgets below zero, NaN and worse are errors when the policy is made."""
    with pytest.raises(PolicyError):
        OffloadBytes(amount)


@pytest.mark.parametrize("budget", [-1, float("nan"), "much"])
def test_host_budgets_that_mean_nothing(budget):
    with pytest.raises(MachineError):
        Machine.named("virtual").with_budgets(host_budget=budget)


def plan_for(model, policy, machine="virtual"):
    with virtual_device():
        return graphoffload.transform(model, rows(), policy=policy, machine=machine).plan


def test_amounts_are_kept_to(model):
    """Rank 27: more may be offloaded with a larger amount, never more than it; 0 and 1 byte move nothing."""
    everything = plan_for(model, EVERYTHING).offloaded_nbytes
    before = -1
    for amount in (0, everything // 4, everything // 2, everything, 10 * everything):
        moved = plan_for(model, OffloadBytes(amount, min_nbytes=0)).offloaded_nbytes
        assert before <= moved <= amount
        before = moved
    assert before == everything
    with pytest.warns(GraphOffloadWarning, match="moves nothing"):
        assert plan_for(model, OffloadBytes(1, min_nbytes=0)).offloaded_nbytes == 0


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
def test_predicted_is_measured_at_every_amount(model, fraction):
    """Rank 27: peaks are not monotonic in the amount, so each is predicted by itself, to the byte."""
    compile_ = Compiler(OffloadBytes(fraction, min_nbytes=0))
    with virtual_device() as device:
        output = compile_(model)(rows())
        output.sum().backward()
        assert compile_.plans[0].predicted_peak_nbytes == device.peak_nbytes


def test_no_host_budget_moves_nothing_and_says_so(model):
    """Rank 27 and trap 15: the reason is in the warning and beside every value."""
    with pytest.warns(GraphOffloadWarning, match="host budget"):
        plan = plan_for(model, EVERYTHING, Machine.named("virtual").with_budgets(host_budget=0))
    assert not plan.transfers
    assert all(decision.reason for decision in plan.decisions)


def test_every_skip_has_a_reason(model):
    """Rank 27: whatever the policy, every decision says why."""
    for policy in (KeepAll(), EVERYTHING, OffloadBytes(0.5, min_nbytes=0), OffloadHidden(min_nbytes=0)):
        assert all(decision.reason for decision in plan_for(model, policy).decisions)


def test_the_last_layer_is_not_offloaded_by_default(model):
    """Trap 16: what backward needs first has no time to go and come back; the default policy keeps it."""
    with virtual_device():
        deep = Mlp(depth=8, width=64)
        x = torch.randn(256, 64)
        plan = graphoffload.transform(deep, x, policy=OffloadHidden(min_nbytes=0), machine="virtual").plan
    moved = {transfer.storage for transfer in plan.transfers}
    movable = [storage.name for storage in plan.facts.storages if not storage.immovable]
    assert moved
    assert movable[-1] not in moved
    assert plan.predicted_seconds <= plan.predicted_seconds_without * 1.02


def test_the_default_declines_where_it_would_not_help():
    """Rank 27: on a machine with a slow link the default policy moves nothing, quietly, and says why beside each value."""
    slow = Machine(
        name="slow",
        d2h_bytes_per_second=1e3,
        h2d_bytes_per_second=1e3,
        memory_bytes_per_second=1e12,
        flops_per_second={"float32": 1e13},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = plan_for(Mlp(), OffloadHidden(min_nbytes=0), slow)
    assert not plan.transfers
    assert {decision.action for decision in plan.decisions} == {Action.KEEP}


# --- rank 30: CUDA graphs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_are_refused(model, mode):
    """Rank 30: refused when compiling, with what to use instead."""
    torch._dynamo.reset()
    with pytest.raises(Exception, match="max-autotune-no-cudagraphs") as raised:
        torch.compile(model, backend="graphoffload", mode=mode)(rows())
    chain = [raised.value]
    while chain[-1].__cause__ or chain[-1].__context__:
        chain.append(chain[-1].__cause__ or chain[-1].__context__)
    assert any(isinstance(error, UsageError) for error in chain)
