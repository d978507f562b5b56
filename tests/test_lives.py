"""The lives in facts against what really lives while the pair runs, byte for byte at every step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Interpreter, Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from graphoffload.graphs.facts import gather_facts
from graphoffload.graphs.fusion import is_generated, kernels_of
from graphoffload.graphs.saved import read_pair
from graphoffload.graphs.storage import hint
from graphoffload.planning.values import Buffer, Facts
from tests.pairs import Pair, capture, facts_of

aten = torch.ops.aten


def predicted(facts: Facts) -> list[int]:
    """Return the bytes alive at each position when everything is kept."""
    last = len(facts.steps) - 1
    lives = [(buffer.born, buffer.dies, buffer.nbytes) for buffer in facts.buffers]
    for storage in facts.storages:
        assert storage.nbytes is not None
        lives.append((storage.birth, last if storage.held else storage.last_backward_use, storage.nbytes))
    return [sum(nbytes for born, dies, nbytes in lives if born <= at <= dies) for at in range(last + 1)]


class _Ledger:
    """Count the bytes of all storages that are alive, among those that were ever seen."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def see(self, item: Any) -> None:
        for tensor in torch.utils._pytree.tree_leaves(item):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                old = self.seen.get(reference.cdata)
                if old is None or old[0].expired():
                    self.seen[reference.cdata] = (reference, storage.nbytes())

    def alive(self) -> int:
        return sum(nbytes for reference, nbytes in self.seen.values() if not reference.expired())


class _Measured(Interpreter):
    """Run a graph and note, while each step's inputs are still there, how much is alive."""

    def __init__(self, module: torch.fx.GraphModule, ledger: _Ledger, marks: list[int]) -> None:
        super().__init__(module)
        self.ledger = ledger
        self.marks = marks

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            self.ledger.see(result)
            self.marks.append(self.ledger.alive())
        return result


def measured(pair: Pair, inputs: list[Any]) -> list[int]:
    """Run the pair as AOTAutograd does (boxed; the caller keeps inputs and outputs) and return the bytes at each step."""
    gc.collect()
    ledger, marks = _Ledger(), []
    ledger.see(inputs)
    with torch.no_grad():
        outputs = list(_Measured(pair.forward, ledger, marks).boxed_run(list(inputs)))
        described = next(iter(pair.forward.graph.find_nodes(op="output"))).meta["desc"]
        saved = outputs[pair.num_fwd_outputs :]
        kept = [
            output
            for output, what in zip(outputs[: pair.num_fwd_outputs], described, strict=False)
            if type(what).__name__ != "InputMutationAOTOutput"
        ]
        del outputs
        symbols = [item for item in saved if not isinstance(item, torch.Tensor)]
        arguments = symbols + [item for item in saved if isinstance(item, torch.Tensor)]
        del saved
        placeholders = [node for node in pair.backward.graph.nodes if node.op == "placeholder"]
        for node in placeholders[len(arguments) :]:
            value = node.meta["val"]
            sizes, strides = ([hint(item) or 0 for item in sizes] for sizes in (value.size(), value.stride()))
            tangent = torch.empty_strided(sizes, strides)
            arguments.append(tangent.fill_(1.0))
            del tangent
        ledger.see(arguments)
        gradients = _Measured(pair.backward, ledger, marks).boxed_run(arguments)
    assert kept
    assert gradients
    return marks


def mlp() -> tuple[Any, list[Any]]:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)), [torch.randn(4, 8)]


def batch_norm() -> tuple[Any, list[Any]]:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)), [torch.randn(4, 8)]


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(2, 4, 2, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(2, 4, 16)).tanh()


def attention() -> tuple[Any, list[Any]]:
    return _Attention(), [torch.randn(2, 4, 16, requires_grad=True)]


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda t: self.first(t).relu().sin(), x.exp(), use_reentrant=False)
        return self.second(x).max(-1)[0].sum()


def checkpointed() -> tuple[Any, list[Any]]:
    return _Checkpointed(), [torch.randn(4, 8)]


def views() -> tuple[Any, list[Any]]:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x.exp()
        a, b = (h.t() @ w).unbind(1)
        return (a.expand(3, 8) * b).sum(), h[1:].view(-1)

    return f, [torch.randn(4, 8, requires_grad=True), torch.randn(4, 2, requires_grad=True)]


SUBJECTS: list[Callable[[], tuple[Any, list[Any]]]] = [mlp, batch_norm, attention, checkpointed, views]


def _real(pair: Pair) -> list[Any]:
    """Make inputs for the forward graph."""
    made: list[Any] = []
    for node in pair.forward.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            if isinstance(value, torch.Tensor):
                made.append(torch.rand([hint(size) or 0 for size in value.shape]).to(value.dtype))
            else:
                made.append(hint(value))
    return made


@pytest.mark.parametrize("partition", ["default", "min_cut"])
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.__name__)
def test_without_fusion_the_bytes_alive_are_exact_at_every_step(subject: Any, partition: Any) -> None:
    module, inputs = subject()
    pair = capture(module, *inputs, partition=partition)
    facts = facts_of(pair)
    names = [step.name for step in facts.steps]
    tangents_are_freed = hasattr(torch.autograd.Function, "boxed_grads_call")
    want = predicted(facts)
    found = measured(pair, _real(pair))
    if tangents_are_freed:
        assert dict(enumerate(zip(names, found, strict=True))) == dict(enumerate(zip(names, want, strict=True)))
    else:  # the interpreter here frees tangents, the autograd engine of this torch does not
        assert all(mine >= theirs for mine, theirs in zip(want, found, strict=True))


def test_symbolic_sizes_count_as_their_hints() -> None:
    module, inputs = mlp()
    inputs = [torch.randn(5, 8)]
    pair = capture(module, *inputs, dynamic=True)
    assert predicted(facts_of(pair)) == measured(pair, _real(pair))


def _by_kind(facts: Facts, kind: str) -> list[Buffer]:
    return [buffer for buffer in facts.buffers if buffer.kind == kind]


def test_kinds_of_lives() -> None:
    module, inputs = mlp()
    facts = facts_of(capture(module, *inputs))
    last = len(facts.steps) - 1
    begin = len(facts.forward)
    assert all(buffer.born == -1 and buffer.dies == last for buffer in _by_kind(facts, "parameter"))
    assert [buffer.born for buffer in _by_kind(facts, "tangent")] == [begin]
    assert len(_by_kind(facts, "gradient")) == 6
    assert all(buffer.born >= begin and buffer.dies == last for buffer in _by_kind(facts, "gradient"))
    assert [buffer.dies for buffer in _by_kind(facts, "output")] == [last]


def test_tangents_traced_with_one_storage_are_memories_of_their_own() -> None:
    pair = capture(lambda x: (x.sin(), x.exp()), torch.randn(4, 8, requires_grad=True))
    first, second = list(pair.backward.graph.find_nodes(op="placeholder"))[-2:]
    second.meta["val"] = first.meta["val"].view(4, 8)
    assert [buffer.nbytes for buffer in _by_kind(facts_of(pair), "tangent")] == [4 * 8 * 4] * 2


def test_memory_off_the_device_is_in_no_life() -> None:
    module, inputs = mlp()
    pair = capture(module, *inputs)
    facts = gather_facts(
        pair.forward,
        pair.backward,
        num_fwd_outputs=pair.num_fwd_outputs,
        on_device=lambda device: device.type == "cuda",
        fused=False,
    )
    assert facts.buffers == ()
    assert facts.device == ""
    assert all(storage.immovable for storage in facts.storages)


def test_recomputed_bytes_are_those_that_backward_makes_again() -> None:
    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).sin().cos()

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(region, x, w, use_reentrant=False).exp().sum()

    pair = capture(f, torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True))
    assert (
        facts_of(pair).recomputed_nbytes == 2 * 4 * 8 * 4
    )  # the product and its sine; the cosine itself is not needed
    plain = capture(region, torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True))
    assert facts_of(plain).recomputed_nbytes == 0


# --- Fusion -----------------------------------------------------------------------------------------------------------


def test_fused_values_have_no_memory_unless_something_needs_it() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        b = a.cos().neg()
        return (b @ w).tanh().abs()

    facts = facts_of(capture(f, torch.randn(4, 8), torch.randn(8, 3, requires_grad=True)), fused=True)
    names = {buffer.name for buffer in facts.buffers} | {storage.name for storage in facts.storages}
    assert "neg" in names  # a matrix product reads it
    assert "mm" in names
    assert not {"sin", "cos"} & names
    steps = {step.name: step for step in facts.forward}
    assert steps["sin"].nbytes == steps["cos"].nbytes == 0
    assert steps["neg"].nbytes == 2 * 4 * 8 * 4  # reads x, through sin and cos, and writes itself


def test_what_a_fused_value_reads_lives_until_its_consumer_runs() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        first = x @ w
        early = first.sin()
        other = x.cos() @ w
        return (other @ w).tanh() + early.exp().neg()

    pair = capture(f, torch.randn(8, 8), torch.randn(8, 8, requires_grad=True))
    reading = read_pair(pair.forward, pair.backward, num_fwd_outputs=1, static_inputs=())
    kernels = kernels_of(pair.forward.graph, reading.fw, reading.position, fused=True, kept=set(reading.returned))
    nodes = {node.name: node for node in pair.forward.graph.nodes}
    assert nodes["sin"] not in kernels.material
    assert kernels.last_read[nodes["sin"]] == reading.position[nodes["add"]]


@pytest.mark.parametrize("partition", ["default", "min_cut"])
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.__name__)
def test_fusion_only_takes_memory_away(subject: Any, partition: Any) -> None:
    module, inputs = subject()
    pair = capture(module, *inputs, partition=partition)
    plain, fused = facts_of(pair), facts_of(pair, fused=True)
    assert {buffer.name for buffer in fused.buffers} <= {buffer.name for buffer in plain.buffers}
    assert sum(step.nbytes for step in fused.steps) <= sum(step.nbytes for step in plain.steps)
    assert [storage.name for storage in fused.storages] == [storage.name for storage in plain.storages]
    assert [storage.immovable for storage in fused.storages] == [storage.immovable for storage in plain.storages]


def test_what_inductor_generates_and_what_it_calls() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")

    def made(target: Any, *args: Any) -> Node:
        node = graph.call_function(target, (x, *args))
        node.meta["val"] = torch.empty(1)
        return node

    assert all(is_generated(made(target)) for target in (aten.sin.default, aten.sum.default, aten.clone.default))
    assert is_generated(made(aten.view.default, [1]))
    called = (aten.mm.default, aten.convolution.default, aten.sort.default, aten.index_put.default)
    assert not any(is_generated(made(target)) for target in called)
