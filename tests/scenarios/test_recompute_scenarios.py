"""Scenarios about regions that are computed again in backward, and about operators that must not be."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from requirements import needs_cpp_compiler
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from training import Compiler, assert_same_bits, assert_trains_as_eager, fresh, fresh_inputs, train_step

import graphoffload
from graphoffload.errors import GraphOffloadWarning, PolicyError
from graphoffload.planning.plan import Action
from graphoffload.planning.policy import FirstOf, FollowTags, KeepAll, OffloadAll
from graphoffload.runtime.ops import RELOAD
from graphoffload.testing import virtual_device

EVERYTHING = OffloadAll(min_nbytes=0)


class Region(nn.Module):
    """`a` goes into the region and is offloaded; `b`, made inside, is computed again from it."""

    def __init__(self, **how):
        super().__init__()
        self.before, self.inside, self.after = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.how = {"use_reentrant": False, **how}

    def body(self, a):
        return self.inside(a.exp().sin()).tanh()

    def forward(self, x):
        return self.after(checkpoint(self.body, self.before(x).sin(), **self.how)).cos()


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(3, 8, requires_grad=True)


def saved_with(policy):
    """Make a selective context that puts `policy` on matrix products and lets the rest be computed again."""

    def decide(ctx, op, *args, **kwargs):
        products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return policy if op in products else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, decide)


# --- rank 5: offloading and recomputation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("partitioner", ["min_cut", "default"])
def test_recomputation_reads_what_was_reloaded(x, partitioner):
    """Rank 5: the region's input is offloaded, and the region in backward starts from the reload."""
    ran = assert_trains_as_eager(Region(), [x], options={"partitioner": partitioner})
    assert ran.moved
    with virtual_device():
        made = graphoffload.transform(Region(), x, policy=EVERYTHING, partitioner=partitioner)
    recomputed = [node for node in made.backward.graph.nodes if node.target is torch.ops.aten.exp.default]
    assert recomputed
    assert all(RELOAD in origins(node) for node in recomputed)
    assert made.plan.recomputed_nbytes > 0


def origins(node):
    """Return the operators that a node depends on, itself included."""
    return {node.target}.union(*(origins(source) for source in node.all_input_nodes))


def test_what_is_recomputed_is_not_offloaded_too(x):
    """Rank 5 and trap 14: no value that the region computes again is also moved."""
    with virtual_device():
        made = graphoffload.transform(Region(), x, policy=EVERYTHING)
    again = {node.name for node in made.backward.graph.nodes if node.op == "call_function"}
    assert not again & {transfer.storage for transfer in made.plan.transfers}


# --- rank 6: random and effectful operators -------------------------------------------------------------------------------


class Dropping(nn.Module):
    def __init__(self, *, checkpointed=False):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.checkpointed = checkpointed

    def body(self, x):
        return F.dropout(x * self.scale, 0.5)

    def forward(self, x):
        x = x.exp()
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "region"])
@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("policy", [EVERYTHING, KeepAll()], ids=["offload", "keep"])
@pytest.mark.filterwarnings(
    "ignore:graphoffload was asked to offload and moves nothing"
)  # at budget 0 only inputs are saved
def test_the_mask_of_backward_is_that_of_forward(policy, budget, checkpointed):
    """Rank 6: under any memory budget and policy no random operator is run anew (pytorch #190758 at budget 0)."""
    torch.manual_seed(0)
    x, model = torch.rand(64, 64).add(0.5).requires_grad_(), Dropping(checkpointed=checkpointed)
    with virtual_device(), functorch_config.patch(activation_memory_budget=budget):
        y = Compiler(policy)(model)(x)
        y.sum().backward()
    assert torch.equal(y != 0, x.grad != 0)
    torch.testing.assert_close(x.grad, y.detach())


@torch.library.custom_op("graphoffload_tests::count", mutates_args={"counter"})
def count(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    counter.add_(1)
    return x.new_ones(())


count.register_fake(lambda x, counter: x.new_empty(()))


@pytest.mark.parametrize("budget", [1.0, 0.0])
@pytest.mark.parametrize("partitioner", ["min_cut", "default"])
def test_an_effect_happens_once(x, partitioner, budget):
    """Rank 6: an operator with an effect is not replayed by backward."""
    model, counter = Region(), torch.zeros(())
    with virtual_device(), functorch_config.patch(activation_memory_budget=budget):
        run = Compiler(EVERYTHING, options={"partitioner": partitioner})(
            lambda x, c: model((model(x).exp() * count(x.detach(), c)).sin())
        )
        run(x, counter).sum().backward()
    assert counter == 1


# --- ranks 16 and 19: checkpoint as users write it ------------------------------------------------------------------------


def test_what_a_selective_policy_saves_may_be_offloaded(x):
    """Rank 16: selective checkpointing keeps tensors of its own; the policy covers them."""
    ran = assert_trains_as_eager(Region(context_fn=saved_with(CheckpointPolicy.MUST_SAVE)), [x])
    inside = [value for value in ran.plan.facts.values if value.region is not None]
    assert inside
    assert {value.storage for value in inside} & ran.moved


class Flavours(nn.Module):
    """Pass tensors to regions by position, by keyword and through the closure, with None and plain values between them."""

    def __init__(self, flavour):
        super().__init__()
        self.before, self.inside = nn.Linear(8, 8), nn.Linear(8, 8)
        self.flavour = flavour

    def body(self, a, m=None, scale=1.0, flag=None):
        a = self.inside(a).sin() * scale
        return (a if m is None else a * m.exp()).tanh()

    def nested(self, a, m):
        a = checkpoint(self.body, a.sin(), m, use_reentrant=False)
        return checkpoint(self.body, a.cos(), use_reentrant=False) * m

    def forward(self, x):
        a, m = self.before(x).sin(), self.before(x * 2).cos()
        match self.flavour:
            case "positional":
                return checkpoint(self.body, a, m, use_reentrant=False).cos()
            case "keyword":
                return checkpoint(self.body, a, m=m, scale=0.5, flag=None, use_reentrant=False).cos()
            case "none":
                return checkpoint(self.body, a, None, 2.0, "flag", use_reentrant=False).cos()
            case "closure":
                return checkpoint(lambda a: self.body(a, m), a, use_reentrant=False).cos()
            case "reentrant":
                return checkpoint(self.body, a, m, use_reentrant=True).cos()
            case "nested":
                return checkpoint(self.nested, a, m, use_reentrant=False).cos()
            case "custom function last":
                return checkpoint(lambda a, m: Doubled.apply(self.body(a, m)), a, m, use_reentrant=False).cos()
            case "several outputs":
                b, c = checkpoint(lambda a, m: (self.body(a, m), a * m.sin()), a, m, use_reentrant=False)
                return b.cos() * c
        raise AssertionError(self.flavour)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.exp())
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        return grad * 2 * saved


@pytest.mark.parametrize("partitioner", ["min_cut", "default"])
@pytest.mark.parametrize(
    "flavour",
    ["positional", "keyword", "none", "closure", "reentrant", "nested", "custom function last", "several outputs"],
)
def test_flavours_of_checkpoint(x, flavour, partitioner):
    """Rank 19: every way of writing a region that compile accepts."""
    assert assert_trains_as_eager(Flavours(flavour), [x], options={"partitioner": partitioner}).moved


# --- tags ---------------------------------------------------------------------------------------------------------------

MUST, PREFER = CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD


def tagged(plan, tag):
    return {value.name for value in plan.facts.values if value.tag == tag.name}


def train_tagged(x, tag, policy, compiler="aot_eager"):
    """Train with a tag on the products inside the region; return the plan and whether gradients are those without it."""
    torch.manual_seed(0)
    model = Region(context_fn=saved_with(tag))
    plain, x, y = fresh(model), fresh_inputs(x), fresh_inputs(x)
    plain.how = {"use_reentrant": False}
    compile_ = Compiler(policy, compiler=compiler)
    with virtual_device():
        have = train_step(compile_(model), [x], module=model)
    if compiler == "aot_eager":
        assert_same_bits(have, train_step(plain, [y], module=plain))
    (plan,) = compile_.plans
    return plan


def actions(plan, names):
    return {decision.action for decision in plan.decisions if decision.value in names}


@pytest.mark.parametrize("policy", [KeepAll(), EVERYTHING, FollowTags(), OffloadAll(min_nbytes="1GiB")], ids=str)
def test_must_offload_is_obeyed_whatever_the_policy(x, policy):
    """torch alone keeps such values without a word under compile, and recomputes them in eager."""
    plan = train_tagged(x, MUST, policy)
    assert tagged(plan, MUST)
    assert actions(plan, tagged(plan, MUST)) == {Action.OFFLOAD}
    assert plan.transfers


@needs_cpp_compiler
def test_must_offload_is_obeyed_under_inductor(x):
    plan = train_tagged(x, MUST, KeepAll(), compiler="inductor")
    assert tagged(plan, MUST)
    assert actions(plan, tagged(plan, MUST)) == {Action.OFFLOAD}


def test_prefer_offload_is_followed_unless_the_policy_says_otherwise(x):
    followed = train_tagged(x, PREFER, FollowTags())
    assert actions(followed, tagged(followed, PREFER)) == {Action.OFFLOAD}
    with pytest.warns(GraphOffloadWarning, match="KeepAll keeps everything"):
        overridden = train_tagged(x, PREFER, KeepAll())
    assert actions(overridden, tagged(overridden, PREFER)) == {Action.KEEP}
    either = train_tagged(x, PREFER, FirstOf(FollowTags(), KeepAll()))
    assert actions(either, tagged(either, PREFER)) == {Action.OFFLOAD}


def test_untagged_values_are_left_by_follow_tags(x):
    plan = train_tagged(x, MUST, FollowTags())
    offloaded = {decision.value for decision in plan.decisions if decision.action is Action.OFFLOAD}
    assert offloaded == tagged(plan, MUST)


def _error_of(function):
    with virtual_device(), pytest.raises(Exception) as raised:
        function()
    error = raised.value
    while error is not None:
        if isinstance(error, PolicyError):
            return str(error)
        error = error.__cause__ or error.__context__
    raise AssertionError(f"no PolicyError in the chain of {raised.value!r}")


def test_must_offload_of_an_output_is_an_error_that_says_why(x):
    torch.manual_seed(0)
    inside = nn.Linear(8, 8)

    def function(x):
        def body(a):
            b = inside(a)
            return b, b.sin()

        return checkpoint(body, x.sin(), use_reentrant=False, context_fn=saved_with(MUST))

    message = _error_of(lambda: Compiler(FollowTags())(function)(x))
    assert "MUST_CPU_OFFLOAD" in message
    assert "output" in message


def test_must_offload_of_a_parameter_view_is_an_error_that_says_why(x):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 8))

    def tag_views(ctx, op, *args, **kwargs):
        return (
            MUST if op in (torch.ops.aten.t.default, torch.ops.aten.view.default) else CheckpointPolicy.PREFER_RECOMPUTE
        )

    def function(x, weight):
        context = functools.partial(create_selective_checkpoint_contexts, tag_views)
        return checkpoint(lambda a: (a @ weight.t()).sin(), x.sin(), use_reentrant=False, context_fn=context).cos()

    message = _error_of(lambda: Compiler(FollowTags(), options={"partitioner": "default"})(function)(x, weight))
    assert "MUST_CPU_OFFLOAD" in message
    assert "parameter" in message or "input" in message
