"""The split: what is random or has an effect runs once, under any base partitioner and budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from aot import assert_trains_as_eager
from functorch.compile import default_partition, min_cut_rematerialization_partition
from pairs import Pair, capture
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from graphoffload.errors import UnsupportedGraphError, UsageError
from graphoffload.graphs.split import force_recompute, must_run_once, split

BASES = ["min_cut", "default"]
BUDGETS = [1.0, 0.5, 0.1, 0.0]


class Dropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(torch.relu(self.a(x)), 0.5)
        h = F.dropout(torch.sin(h) * torch.rand_like(h), 0.3)
        return self.b(h).cos().sum()


class OnlyPointwise(nn.Module):
    """Leave min-cut nothing but must-save nodes that it may not recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout((x * self.a).sin(), 0.5).cos().sum()


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        self.dropout = dropout
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(2, 4, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True).sin().sum()


class Region(nn.Module):
    """Drop inside a checkpointed region, whose random state torch saves, and outside it."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.relu(self.a(x)), 0.5).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(self.block, self.b(x).cos(), use_reentrant=self.reentrant, preserve_rng_state=True)
        return F.dropout(self.b(h).sin(), 0.3).sum()


class ChangesBuffer(nn.Module):
    """Read a buffer and then change it: to compute from it again in backward reads the changed one."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16))
        self.register_buffer("b", torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (self.b.sin() * self.w * x).cos() * torch.relu(self.b)
        self.b.add_(1.0)
        return y.sum()


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dropouts": (Dropouts, (4, 16)),
    "only pointwise": (OnlyPointwise, (4, 16)),
    "attention": (Attention, (2, 4, 16)),
    "region": (Region, (4, 16)),
    "reentrant region": (lambda: Region(reentrant=True), (4, 16)),
    "changes a buffer": (ChangesBuffer, (4, 16)),
}


def splitting(base: Any) -> Callable[..., tuple[fx.GraphModule, fx.GraphModule]]:
    return lambda joint, joint_inputs, **options: split(joint, joint_inputs, base=base, **options)


@pytest.mark.parametrize(
    ("base", "budget"), [*(("min_cut", budget) for budget in BUDGETS), ("default", 1.0), ("default", 0.0)]
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_of_the_mask_that_forward_drew(name: str, base: str, budget: float) -> None:
    """Scenario 6 (pytorch #190758), and #197039 for inputs that are changed."""
    make, shape = PROGRAMS[name]
    torch.manual_seed(0)
    with functorch_config.patch(activation_memory_budget=budget):
        assert_trains_as_eager(make(), (torch.randn(shape),), splitting(base), steps=2)


def test_without_the_guard_the_mask_is_another() -> None:
    """Show that the test above can fail: torch alone is wrong at budget 0 (2.11 to 2.14)."""
    with (
        functorch_config.patch(activation_memory_budget=0.0),
        pytest.raises(AssertionError, match=r"gradient of a.weight.*differ from eager"),
    ):
        assert_trains_as_eager(Dropouts(), (torch.randn(4, 16),), min_cut_rematerialization_partition)


def test_a_partition_function_of_the_users_own_is_guarded() -> None:
    with functorch_config.patch(activation_memory_budget=0.0):
        assert_trains_as_eager(
            Dropouts(), (torch.randn(4, 16),), splitting(min_cut_rematerialization_partition), steps=2
        )


@pytest.mark.parametrize("base", BASES)
def test_backward_draws_nothing_even_where_torch_keeps_dead_random_operators(base: str) -> None:
    with inductor_config.patch(fallback_random=True):
        assert_trains_as_eager(Dropouts(), (torch.randn(4, 16),), splitting(base), steps=2)


def test_a_budget_in_the_graph_is_guarded_too() -> None:
    def partition(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        for node in joint.graph.nodes:
            node.meta["memory_budget"] = 0.0
        pair = split(joint, joint_inputs, base="min_cut", **options)
        kept = [node for module in pair for node in module.graph.nodes if "memory_budget" in node.meta]
        assert all(node.meta["memory_budget"] == 0.0 for node in kept)
        return pair

    assert_trains_as_eager(Dropouts(), (torch.randn(4, 16),), partition)


def test_a_partition_function_that_ignores_tags_is_refused() -> None:
    def replaying(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        for node in joint.graph.nodes:
            node.meta.pop("recompute", None)
        with functorch_config.patch(activation_memory_budget=0.0):
            return min_cut_rematerialization_partition(joint, joint_inputs, **options)

    pair = capture(Dropouts(), torch.randn(4, 16))
    with pytest.raises(UnsupportedGraphError, match=r"native_dropout.*runs|runs native_dropout.*fresh randomness"):
        split_again(pair, base=replaying)


def split_again(pair: Pair, *, base: Any = "min_cut", joint: fx.GraphModule | None = None) -> Pair:
    """Split a captured joint graph by `split`, as if AOTAutograd called it."""
    options = {
        "num_fwd_outputs": pair.num_fwd_outputs,
        "static_lifetime_input_indices": list(pair.static_input_indices),
    }
    joint = pair.joint if joint is None else joint
    mode = next(
        node.meta["val"] for node in joint.graph.nodes if isinstance(node.meta.get("val"), FakeTensor)
    ).fake_mode
    with tracing(TracingContext(mode)):
        forward, backward = split(joint, [], base=base, compiler="inductor", **options)
    return Pair(joint, forward, backward, pair.num_fwd_outputs, pair.static_input_indices)


@pytest.mark.parametrize("base", BASES)
def test_the_joint_graph_is_not_touched(base: str) -> None:
    pair = capture(Region(), torch.randn(4, 16))
    before = pair.joint.code, [dict(node.meta) for node in pair.joint.graph.nodes]
    with functorch_config.patch(activation_memory_budget=0.1):
        split_again(pair, base=base)
    assert (pair.joint.code, [node.meta.keys() for node in pair.joint.graph.nodes]) == (
        before[0],
        [meta.keys() for meta in before[1]],
    )
    for node, meta in zip(pair.joint.graph.nodes, before[1], strict=True):
        assert node.meta.get("recompute") == meta.get("recompute")


@pytest.mark.parametrize("base", BASES)
def test_nodes_come_out_with_the_tags_they_came_in_with(base: str) -> None:
    """A tag in the facts is then one that the user's code put there."""
    pair = capture(Region(), torch.randn(4, 16))
    tags = {node.name: node.meta.get("recompute") for node in pair.joint.graph.nodes}
    assert CheckpointPolicy.PREFER_RECOMPUTE in tags.values() or CheckpointPolicy.MUST_RECOMPUTE in tags.values()
    new = split_again(pair, base=base)
    for module in (new.forward, new.backward):
        assert all(node.meta.get("recompute") == tags[node.name] for node in module.graph.nodes if node.name in tags)


@pytest.mark.parametrize("base", BASES)
def test_without_anything_random_the_base_partitioner_decides_alone(base: str) -> None:
    pair = capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8), partition=base)
    new = split_again(pair, base=base)
    assert (new.forward.code, new.backward.code) == (pair.forward.code, pair.backward.code)


def offload_products(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return CheckpointPolicy.MUST_CPU_OFFLOAD
    return CheckpointPolicy.PREFER_RECOMPUTE


def offloading_contexts() -> Any:
    return create_selective_checkpoint_contexts(offload_products)


class Offloads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.b(torch.sin(self.a(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False, context_fn=offloading_contexts).cos().sum()


@pytest.mark.parametrize("budget", [1.0, 0.0])
@pytest.mark.parametrize("base", BASES)
def test_values_tagged_for_offloading_are_saved_and_keep_their_tag(base: str, budget: float) -> None:
    pair = capture(Offloads(), torch.randn(4, 16), partition="min_cut")  # torch's default one fails on these tags
    wanted = [n.name for n in pair.joint.graph.nodes if n.meta.get("recompute") == CheckpointPolicy.MUST_CPU_OFFLOAD]
    assert wanted
    with functorch_config.patch(activation_memory_budget=budget):
        new = split_again(pair, base=base)
    saved = [n for n in new.forward.graph.output_node().args[0][pair.num_fwd_outputs :] if n.name in wanted]
    assert saved
    assert all(node.meta["recompute"] == CheckpointPolicy.MUST_CPU_OFFLOAD for node in saved)
    again = {n.name for n in new.backward.graph.nodes if n.op == "call_function"}
    assert not again & set(wanted)


@pytest.fixture
def noted() -> Iterator[tuple[Callable[[torch.Tensor], torch.Tensor], list[int]]]:
    """Yield an operator with an effect on the outside, and the list that it appends to."""
    calls: list[int] = []

    @torch.library.custom_op("graphoffload_tests::noted", mutates_args=())
    def noted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.sin()

    noted.register_fake(torch.empty_like)
    noted.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    handle = _register_effectful_op(torch.ops.graphoffload_tests.noted.default, _EffectType.ORDERED)
    yield noted, calls
    handle.destroy()


def test_an_operator_with_an_effect_runs_once(noted: Any) -> None:
    act, calls = noted

    class Acts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (act(self.a(x)).cos() * 2).exp().sum()

    for base, budget in (("min_cut", 1.0), ("min_cut", 0.0), ("default", 1.0)):
        calls.clear()
        with functorch_config.patch(activation_memory_budget=budget):
            assert_trains_as_eager(Acts(), (torch.randn(4, 16),), splitting(base))
        assert len(calls) == 2, "once in eager, once compiled"


@pytest.mark.parametrize("base", BASES)
def test_checks_of_metadata_do_not_stop_recomputation(base: str) -> None:
    """Torch's default partitioner gives up on a region where one of these is anywhere in the graph."""

    def partition(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        first = next(node for node in joint.graph.nodes if node.op == "call_function")
        with joint.graph.inserting_after(first):
            check = joint.graph.call_function(torch.ops.aten._assert_tensor_metadata.default, (first,))
        check.meta = {"val": None, "partitioner_tag": "is_forward"}
        return split(joint, joint_inputs, base=base, **options)

    assert_trains_as_eager(Region(), (torch.randn(4, 16),), partition)


def test_attention_that_drops_nothing_is_not_random() -> None:
    for dropout, expected in ((0.0, False), (0.25, True)):
        graph = fx.Graph()
        q, k, v = (graph.placeholder(name) for name in "qkv")
        op = torch.ops.aten._scaled_dot_product_flash_attention.default
        node = graph.call_function(op, (q, k, v, dropout, True))
        assert must_run_once(node, fx.GraphModule({}, graph)) is expected


def test_a_random_operator_inside_a_higher_order_one_counts() -> None:
    inner = fx.Graph()
    inner.output(inner.call_function(torch.ops.aten.rand_like.default, (inner.placeholder("x"),)))
    outer = fx.Graph()
    x = outer.placeholder("x")
    body = outer.get_attr("body")
    node = outer.call_function(torch.ops.higher_order.invoke_subgraph, (body, "body", x))
    outer.output(node)
    assert must_run_once(node, fx.GraphModule({"body": fx.GraphModule({}, inner)}, outer))


def test_an_unknown_base_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'minimum'.*'default', 'min_cut'"):
        split_again(capture(OnlyPointwise(), torch.randn(4, 16)), base="minimum")


# --- force_recompute ------------------------------------------------------------------------------------------------------


class Pointwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.a(x).sin().exp())
        return F.dropout(self.b(h).cos(), 0.25).sum()


def saved_names(pair: Pair) -> set[str]:
    return {node.name for node in pair.forward.graph.output_node().args[0][pair.num_fwd_outputs :]}


@pytest.mark.parametrize("base", BASES)
def test_what_is_named_is_computed_again_and_no_longer_saved(base: str) -> None:
    """Law 12 for recomputation: any one value, then all together."""
    torch.manual_seed(0)
    module, x = Pointwise(), torch.randn(4, 16)
    pair = capture(module, x, partition=base)
    names = sorted(saved_names(pair))
    refused_before: dict[str, str] | None = None
    for chosen in [*([name] for name in names), names]:
        tagged, refused = force_recompute(pair.joint, chosen)
        new = split_again(pair, base=base, joint=tagged)
        assert not saved_names(new) & (set(chosen) - refused.keys())
        assert all(refused.values())
        refused_before = refused
    assert refused_before is not None
    assert refused_before.keys() != set(names)

    def partition(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        tagged, _ = force_recompute(joint, names)
        return split(tagged, joint_inputs, base=base, **options)

    assert_trains_as_eager(module, (x,), partition, steps=2)


def test_force_recompute_says_why_it_refuses() -> None:
    pair = capture(Offloads(), torch.randn(4, 16), partition="min_cut")  # torch's default one fails on these tags
    must = next(n.name for n in pair.joint.graph.nodes if n.meta.get("recompute") == CheckpointPolicy.MUST_CPU_OFFLOAD)
    inside = next(
        n.name for n in pair.joint.graph.nodes if n.meta.get("recompute") == CheckpointPolicy.PREFER_RECOMPUTE
    )
    tangent = next(n for n in pair.joint.graph.nodes if n.op == "placeholder" and "tangents" in n.name)
    gradient = next(iter(tangent.users)).name
    _, refused = force_recompute(pair.joint, [must, inside, gradient, "primals_1", "nowhere"])
    assert "MUST_CPU_OFFLOAD" in refused[must]
    assert "region" in refused[inside]
    assert "gradient" in refused[gradient]
    assert "input" in refused["primals_1"]
    assert "not in the joint graph" in refused["nowhere"]
    random = capture(Dropouts(), torch.randn(4, 16))
    mask = next(n.name for n in random.joint.graph.nodes if n.target is torch.ops.aten.rand_like.default)
    assert "random" in force_recompute(random.joint, [mask])[1][mask]


def test_force_recompute_refuses_what_reads_a_changed_input() -> None:
    refused: dict[str, str] = {}

    def partition(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        reads = next(n.name for n in joint.graph.nodes if n.target is torch.ops.aten.relu.default)
        tagged, why = force_recompute(joint, [reads])
        refused.update(why)
        return split(tagged, joint_inputs, base="min_cut", **options)

    assert_trains_as_eager(ChangesBuffer(), (torch.randn(4, 16),), partition)
    assert [*refused] == ["relu"]
    assert "in place" in refused["relu"]


def test_force_recompute_does_not_touch_the_joint_graph() -> None:
    pair = capture(Pointwise(), torch.randn(4, 16))
    before = [dict(node.meta) for node in pair.joint.graph.nodes]
    force_recompute(pair.joint, sorted(saved_names(pair)))
    assert [node.meta.keys() for node in pair.joint.graph.nodes] == [meta.keys() for meta in before]


def test_the_default_partitioner_is_among_the_bases() -> None:
    pair = capture(OnlyPointwise(), torch.randn(4, 16))
    assert split_again(pair, base=default_partition).forward.code == split_again(pair, base="default").forward.code
