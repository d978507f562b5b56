"""The rewrite: outputs and gradients stay the same to the bit, and the graphs say what the plan says."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from aot import assert_trains_as_eager
from pairs import Pair, capture
from tight import facts_of, plan_of_transfers, tight_plan
from torch import fx, nn
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from graphoffload.errors import StalePlanError, UnsupportedGraphError, UsageError
from graphoffload.graphs.order import events_of_pair
from graphoffload.graphs.rewrite import DISPLACED, OPERATORS, rewrite
from graphoffload.graphs.symbols import SizeNodes
from graphoffload.ordering.check import check
from graphoffload.runtime.ops import OFFLOAD, READY, RELEASE, RELOAD
from graphoffload.testing import check_log, virtual_device

BASES = {"default": default_partition, "min_cut": min_cut_rematerialization_partition}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)).sin()).cos().sum()


class Views(nn.Module):
    """Save parts of one storage, a base and its view, a padded layout, an expanded one, and a boolean mask."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.a(x).sin().chunk(3, -1)
        y = (q * k).exp() * v.cos()
        z = y.t()[1:3].sin()
        flat = (y * 2).sin().view(-1)
        mask = F.dropout(y.relu(), 0.25)
        wide = y.mean(0, keepdim=True).exp().expand(5, -1)
        return y.sum() + z.pow(2).sum() + (flat * flat).sum() + (mask * mask).sum() + (wide * wide.cos()).sum()


def keep_products(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


keeping_products = functools.partial(create_selective_checkpoint_contexts, keep_products)


class Regions(nn.Module):
    """Checkpoint in every way that compile accepts, one region nested in another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.relu(self.b(x)).sin(), 0.25).exp()

    def outer(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, self.a(x).sin(), use_reentrant=False).cos()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.c(x).tanh()
        if self.kind == "selective":
            x = checkpoint(self.block, x, use_reentrant=False, context_fn=keeping_products)
        elif self.kind == "nested":
            x = checkpoint(self.outer, x, use_reentrant=False)
        else:
            x = checkpoint(self.block, x, use_reentrant=self.kind == "reentrant")
        return self.a(x.sin()).cos().sum()


class StashesWithoutCheck(torch.autograd.Function):
    """Keep a tensor on ctx, outside save_for_backward: torch puts it into an order class of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.stashed = x.sin()
        kept = x.cos()
        ctx.save_for_backward(kept)
        return ctx.stashed * kept

    @staticmethod
    def backward(ctx, grad):
        (kept,) = ctx.saved_tensors
        return grad * (kept * kept - ctx.stashed * ctx.stashed)


class Stashing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return StashesWithoutCheck.apply(self.a(x)).exp().sum()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x).sin()
        return F.cross_entropy(F.linear(h, self.embed.weight).flatten(0, 1), x.flatten())


PROGRAMS = {
    "mlp": (MLP, lambda: (torch.randn(4, 8),)),
    "views": (Views, lambda: (torch.randn(6, 8),)),
    "tied": (Tied, lambda: (torch.randint(0, 11, (2, 5)),)),
    "stashing": (Stashing, lambda: (torch.randn(4, 8, requires_grad=True),)),
    "non-reentrant": (lambda: Regions("non-reentrant"), lambda: (torch.randn(4, 8),)),
    "reentrant": (lambda: Regions("reentrant"), lambda: (torch.randn(4, 8),)),
    "selective": (lambda: Regions("selective"), lambda: (torch.randn(4, 8),)),
    "nested": (lambda: Regions("nested"), lambda: (torch.randn(4, 8),)),
}


def rewritten(pair: Pair, **options: object) -> tuple[fx.GraphModule, fx.GraphModule]:
    plan = tight_plan(pair, **options)
    assert plan.transfers
    return rewrite(pair.forward, pair.backward, plan, num_fwd_outputs=pair.num_fwd_outputs)


def offloading(base: str, moved: list[int], **options: object):
    """Return a partition function that rewrites each pair by a tight plan and notes how many storages move."""

    def partition(joint, joint_inputs, *, num_fwd_outputs, static_lifetime_input_indices=None, **_):
        forward, backward = BASES[base](
            joint,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
        )
        pair = Pair(joint, forward, backward, num_fwd_outputs, tuple(static_lifetime_input_indices or ()))
        plan = tight_plan(pair, **options)
        moved.append(len(plan.transfers))
        new = rewrite(forward, backward, plan, num_fwd_outputs=num_fwd_outputs)
        for half in new:
            half.graph.lint()
        assert check(events_of_pair(*new, num_fwd_outputs=num_fwd_outputs)) == ()
        return new

    return partition


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_everything_offloaded_trains_as_eager_to_the_bit(name: str, base: str) -> None:
    """Law 12, scenarios 3, 4, 5: with copies as late as the waits allow and released memory poisoned."""
    make, inputs = PROGRAMS[name]
    torch.manual_seed(0)
    moved: list[int] = []
    with virtual_device() as run:
        assert_trains_as_eager(make(), inputs(), offloading(base, moved), steps=2)
        check_log(run)
    assert sum(moved) > 0


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("early", [0, 3])
def test_handed_over_releases_and_early_reloads_train_as_eager(wait: bool, early: int) -> None:
    torch.manual_seed(0)
    moved: list[int] = []
    with virtual_device() as run:
        partition = offloading("default", moved, wait=wait, early=early)
        assert_trains_as_eager(Views(), (torch.randn(6, 8),), partition, steps=2)
        check_log(run)
    assert sum(moved) > 3


@pytest.mark.parametrize("base", BASES)
def test_dynamic_shapes_keep_their_symbols(base: str) -> None:
    """Scenario 25: the saved SymInts stay, and members of symbolic sizes are rebuilt from them."""
    pair = capture(Views(), torch.randn(6, 8), dynamic=True, partition=base)
    _, backward = rewritten(pair)
    placeholders = pair.backward.graph.find_nodes(op="placeholder")
    symbols = [n.name for n in placeholders if isinstance(n.meta.get("val"), torch.SymInt)]
    assert symbols
    assert symbols == [n.name for n in backward.graph.find_nodes(op="placeholder")][: len(symbols)]
    torch.manual_seed(0)
    moved: list[int] = []
    with virtual_device():
        assert_trains_as_eager(Views(), (torch.randn(6, 8),), offloading(base, moved), dynamic=True)
    assert sum(moved) > 0


def test_a_size_that_is_arithmetic_on_symbols_becomes_nodes() -> None:
    def cube(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().exp()
        z = y.transpose(0, 2)  # saved beside y; its innermost stride is a product of two sizes
        return (z * z.cos()).sum()

    pair = capture(cube, torch.randn(3, 4, 5, requires_grad=True), dynamic=True)
    _, backward = rewritten(pair)
    backward.graph.lint()
    views = backward.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)
    made = [n for view in views for n in view.args[2] if isinstance(n, fx.Node) and n.op == "call_function"]
    assert made
    assert all(isinstance(node.meta["val"], torch.SymInt) and node.name.startswith("reloaded_size") for node in made)


def test_a_size_that_backward_cannot_know_is_refused_by_name() -> None:
    graph = fx.Graph()
    shape_env = capture(MLP(), torch.randn(4, 8), dynamic=True).forward.graph.output_node().args[0][0].meta["val"]
    size = shape_env.fake_mode.shape_env.create_unbacked_symint()
    with pytest.raises(UnsupportedGraphError, match=r"'lost'.*keep this value"):
        SizeNodes(graph, [], fresh_name=lambda: "size").argument(size * 2, value="lost")


def test_the_pair_given_is_not_touched() -> None:
    pair = capture(Views(), torch.randn(6, 8))
    plan = tight_plan(pair)
    before = [(m.code, [(n, dict(n.meta)) for n in m.graph.nodes]) for m in (pair.forward, pair.backward)]
    rewrite(pair.forward, pair.backward, plan, num_fwd_outputs=pair.num_fwd_outputs)
    after = [(m.code, [(n, dict(n.meta)) for n in m.graph.nodes]) for m in (pair.forward, pair.backward)]
    assert [code for code, _ in before] == [code for code, _ in after]
    for (_, old), (_, new) in zip(before, after, strict=True):
        assert [node for node, _ in old] == [node for node, _ in new]
        assert all(
            a.keys() == b.keys() and all(a[k] is b[k] for k in a) for (_, a), (_, b) in zip(old, new, strict=True)
        )


def test_the_nodes_stand_where_the_plan_says() -> None:
    pair = capture(MLP(), torch.randn(4, 8))
    plan = tight_plan(pair, early=2)
    forward, backward = rewrite(pair.forward, pair.backward, plan, num_fwd_outputs=pair.num_fwd_outputs)
    first, second = ([n for n in module.graph.nodes if n.op == "call_function"] for module in (forward, backward))
    for transfer in plan.transfers:
        (host,) = [n for n in first if n.target is OFFLOAD and n.args[1] == transfer.storage]
        (release,) = [n for n in first if n.target is RELEASE and n.args[0] is host]
        assert (host.args[0].name, release.args[1].name) == (transfer.carrier, transfer.carrier)
        assert release.args[2] is transfer.wait
        (reload,) = [n for n in second if n.target is RELOAD and n.args[0].name == host.name]
        (ready,) = [n for n in second if n.target is READY and n.args[0] is reload]
        assert ready.args[1] is reload.args[0]
        for made, nodes, anchor, step in (
            (host, first, transfer.offload_after, -1),
            (release, first, transfer.release_after, -1),
            (reload, second, transfer.reload_before, 1),
            (ready, second, transfer.ready_before, 1),
        ):
            at = nodes.index(made) + step
            while nodes[at].target in OPERATORS:
                at += step
            assert nodes[at].name == anchor


def test_the_host_takes_the_first_members_place_on_both_sides() -> None:
    pair = capture(Views(), torch.randn(6, 8))
    plan = tight_plan(pair)
    forward, backward = rewrite(pair.forward, pair.backward, plan, num_fwd_outputs=pair.num_fwd_outputs)
    of = {member: s.name for s in plan.facts.storages if not s.immovable for member in s.members}
    saved = [n.name for n in pair.forward.graph.output_node().args[0][pair.num_fwd_outputs :]]
    expected = list(dict.fromkeys(f"{of[name]}_host" if name in of else name for name in saved))
    assert [n.name for n in forward.graph.output_node().args[0][pair.num_fwd_outputs :]] == expected
    assert [n.name for n in backward.graph.find_nodes(op="placeholder")][: len(expected)] == expected
    assert len(expected) < len(saved)


def test_the_lists_about_outputs_stay_in_step() -> None:
    pair = capture(Views(), torch.randn(6, 8))
    forward, _ = rewritten(pair)
    old, new = pair.forward.graph.output_node(), forward.graph.output_node()
    for key in ("desc", "output_stack_traces"):
        if key in old.meta:
            assert len(new.meta[key]) == len(new.args[0])
    saved = new.meta["desc"][pair.num_fwd_outputs :]
    assert [desc.idx for desc in saved] == list(range(len(saved)))


def test_a_host_keeps_the_order_class_of_its_place() -> None:
    pair = capture(Stashing(), torch.randn(4, 8, requires_grad=True))
    unchecked = [n for n in pair.forward.graph.output_node().args[0] if n.meta.get("saved_tensor_with_no_vc_check")]
    assert unchecked, "torch no longer marks what ctx holds"
    forward, _ = rewritten(pair)
    saved = forward.graph.output_node().args[0][pair.num_fwd_outputs :]
    flags = [bool(n.meta.get("saved_tensor_with_no_vc_check")) for n in saved]
    assert any(flags)
    assert flags == sorted(flags)
    assert all(DISPLACED in n.meta for n, flag in zip(saved, flags, strict=True) if flag)


def test_what_is_inserted_says_what_it_is() -> None:
    pair = capture(Regions("non-reentrant"), torch.randn(4, 8))
    forward, backward = rewritten(pair)
    for module, tag in ((forward, "is_forward"), (backward, "is_backward")):
        for node in module.graph.nodes:
            if node.target not in OPERATORS and DISPLACED not in node.meta:
                continue
            assert not {"recompute", "ac_graph_id"} & node.meta.keys()
            if node.op == "call_function":
                assert node.meta.get("partitioner_tag", tag) == tag
            if node.target in (OFFLOAD, RELOAD) or node.op == "placeholder":
                value = node.meta["val"]
                assert value.fake_mode is pair.forward.graph.output_node().args[0][0].meta["val"].fake_mode
                assert value.device.type == "cpu"
            else:
                assert node.meta["val"] is None


def test_a_recomputation_region_reads_what_was_reloaded() -> None:
    """Scenario 5: a is offloaded, b = f(a) is computed again in backward, from the a that came back."""
    pair = capture(Regions("non-reentrant"), torch.randn(4, 8))
    forward, backward = rewritten(pair)
    names = {n.name for n in forward.graph.nodes if n.op == "call_function"}
    again = [n for n in backward.graph.nodes if n.op == "call_function" and n.name in names]
    assert again
    assert any(source.target is RELOAD for n in again for source in n.all_input_nodes)


def test_rewriting_twice_raises() -> None:
    """Law 11."""
    pair = capture(MLP(), torch.randn(4, 8))
    plan = tight_plan(pair)
    once = rewrite(pair.forward, pair.backward, plan, num_fwd_outputs=pair.num_fwd_outputs)
    with pytest.raises(UsageError, match="rewritten already"):
        rewrite(*once, plan, num_fwd_outputs=pair.num_fwd_outputs)


def test_an_empty_plan_changes_nothing() -> None:
    """Law 9."""
    pair = capture(Views(), torch.randn(6, 8))
    forward, backward = rewrite(
        pair.forward, pair.backward, plan_of_transfers(facts_of(pair)), num_fwd_outputs=pair.num_fwd_outputs
    )
    assert (forward.code, backward.code) == (pair.forward.code, pair.backward.code)
    assert forward is not pair.forward


def test_a_plan_of_another_program_is_stale_and_says_what_is_missing() -> None:
    pair, other = capture(MLP(), torch.randn(4, 8)), capture(Views(), torch.randn(6, 8))
    with pytest.raises(StalePlanError, match=r"forward node (exp|mul|cos|sin)"):
        rewrite(pair.forward, pair.backward, tight_plan(other), num_fwd_outputs=pair.num_fwd_outputs)


def test_a_plan_of_other_shapes_is_stale() -> None:
    pair, other = capture(MLP(), torch.randn(4, 8)), capture(MLP(), torch.randn(5, 8))
    with pytest.raises(StalePlanError, match=r"of shape \[5, 16\] \(here it is \[4, 16\]\)"):
        rewrite(pair.forward, pair.backward, tight_plan(other), num_fwd_outputs=pair.num_fwd_outputs)


@pytest.mark.parametrize("swap", [("offload_after", "release_after"), ("reload_before", "ready_before")])
def test_a_plan_in_the_wrong_order_is_refused(swap: tuple[str, str]) -> None:
    pair = capture(MLP(), torch.randn(4, 8))
    plan = tight_plan(pair, early=2)
    at = next(i for i, t in enumerate(plan.transfers) if getattr(t, swap[0]) != getattr(t, swap[1]))
    wrong = replace(
        plan.transfers[at],
        **{swap[0]: getattr(plan.transfers[at], swap[1]), swap[1]: getattr(plan.transfers[at], swap[0])},
    )
    with pytest.raises(StalePlanError, match="order of"):
        rewrite(pair.forward, pair.backward, replace(plan, transfers=(wrong,)), num_fwd_outputs=pair.num_fwd_outputs)


def test_a_ready_after_the_first_use_is_refused() -> None:
    pair = capture(MLP(), torch.randn(4, 8))
    plan = tight_plan(pair)
    late = replace(plan.transfers[0], ready_before=plan.facts.backward[-1].name)
    with pytest.raises(StalePlanError, match="after its first use"):
        rewrite(pair.forward, pair.backward, replace(plan, transfers=(late,)), num_fwd_outputs=pair.num_fwd_outputs)


def test_a_conjugate_bit_is_refused_by_name() -> None:
    """The facts say that it may not move; a plan that moves it all the same is refused."""
    x = torch.randn(4, dtype=torch.complex64, requires_grad=True)
    pair = capture(lambda x: (x * x).sin().conj().mul(x.conj()).abs().sum(), x)
    facts = facts_of(pair)
    (lazy,) = [storage for storage in facts.storages if storage.members == ("_conj",)]
    assert lazy.immovable
    movable = replace(facts, storages=tuple(replace(s, immovable=()) if s is lazy else s for s in facts.storages))
    plan = tight_plan(pair, facts=movable, choose=lambda storage: storage.name == lazy.name)
    with pytest.raises(UnsupportedGraphError, match=r"'_conj'.*keep this value"):
        rewrite(pair.forward, pair.backward, plan, num_fwd_outputs=pair.num_fwd_outputs)


def test_a_member_of_another_dtype_is_refused_by_name() -> None:
    pair = capture(MLP(), torch.randn(4, 8))
    plan = tight_plan(pair, choose=lambda storage: storage.name == "relu")
    for module in (pair.forward, pair.backward):
        (alias,) = [n for n in module.graph.nodes if n.name == "detach"]
        alias.meta = {**alias.meta, "val": alias.meta["val"].view(torch.int32)}
    with pytest.raises(UnsupportedGraphError, match="of the same dtype"):
        rewrite(pair.forward, pair.backward, plan, num_fwd_outputs=pair.num_fwd_outputs)


def test_a_wrong_number_of_outputs_is_refused() -> None:
    pair = capture(MLP(), torch.randn(4, 8))
    with pytest.raises(UnsupportedGraphError):
        rewrite(pair.forward, pair.backward, tight_plan(pair), num_fwd_outputs=pair.num_fwd_outputs + 1)
