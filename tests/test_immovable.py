"""Every reason why a storage may not move, one test each."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from graphoffload.graphs.facts import gather_facts
from graphoffload.graphs.immovable import is_random_state
from graphoffload.planning.values import Facts, Storage

aten = torch.ops.aten


def on_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def only(facts: Facts, name: str) -> Storage:
    """Return the one storage whose name begins with `name`."""
    found = [storage for storage in facts.storages if storage.name.startswith(name)]
    assert len(found) == 1, [storage.name for storage in facts.storages]
    return found[0]


def _hand_made(
    second: Any = None, *, value: torch.Tensor | None = None, in_backward: Any = None, after: Any = None
) -> tuple[GraphModule, GraphModule]:
    """Return a pair that saves `sin(x)` and, with `second`, what that makes of it; `value` replaces the fake of `sin`."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    forward, backward = Graph(), Graph()

    def fake(node: Node, given: torch.Tensor | None = None) -> Node:
        if given is None:
            with mode:
                arguments = torch.fx.map_arg(node.args, lambda item: item.meta["val"])
                given = torch.empty(4, 8) if node.op == "placeholder" else node.target(*arguments)
        node.meta["val"] = given
        return node

    x = fake(forward.placeholder("primals_1"))
    made = fake(forward.call_function(aten.sin.default, (x,)), value)
    saved = [made]
    if second is not None:
        saved.append(fake(second(made, forward)))
    if after is not None:
        fake(after(made, forward))
    loss = fake(forward.call_function(aten.cos.default, (x,)))
    forward.output((loss, *saved))
    received = [fake(backward.placeholder(node.name), node.meta["val"]) for node in saved]
    tangent = fake(backward.placeholder("tangents_1"))
    extra = [] if in_backward is None else [fake(in_backward(received[0], backward))]
    with mode:
        product = backward.call_function(aten.mul.Tensor, (tangent, received[0]))
        product.meta["val"] = torch.empty(4, 8)
    backward.output((product, *extra))
    return GraphModule({}, forward), GraphModule({}, backward)


def _facts(pair: tuple[GraphModule, GraphModule], *, on_device: Any = on_cpu) -> Facts:
    return gather_facts(*pair, num_fwd_outputs=1, on_device=on_device, fused=False)


def test_a_plain_hand_made_pair_may_move() -> None:
    assert only(_facts(_hand_made()), "sin").immovable == ()


def test_memory_that_forward_or_backward_writes_in_place_may_not_move() -> None:
    forward = _hand_made(after=lambda made, graph: graph.call_function(aten.add_.Tensor, (made, 1)))
    assert "forward changes it in place" in only(_facts(forward), "sin").immovable[0]
    backward = _hand_made(in_backward=lambda made, graph: graph.call_function(aten.add_.Tensor, (made, 1)))
    assert "backward changes it in place" in only(_facts(backward), "sin").immovable[0]


def test_host_tensors_and_other_devices_may_not_move() -> None:
    elsewhere = _facts(_hand_made(), on_device=lambda device: device.type == "cuda")
    assert only(elsewhere, "sin").immovable == ("it is already in host memory",)
    with FakeTensorMode():
        on_meta = torch.empty(4, 8, device="meta")
    other = _facts(_hand_made(value=on_meta))
    assert only(other, "sin").immovable == ("it is on meta, which is not offloaded",)
    both = _facts(_hand_made(lambda made, graph: _on_cpu(graph), value=on_meta), on_device=lambda device: True)
    assert both.device == "meta"
    assert "it is on cpu, while this graph offloads from meta" in only(both, "full").immovable


def _on_cpu(graph: Graph) -> Node:
    return graph.call_function(aten.full.default, ([4, 8], 1.0))


class _Wrapper(torch.Tensor):
    """Stand for a wrapper subclass (DTensor, float8, NF4)."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> _Wrapper:
        return _Wrapper(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def _odd(kind: str) -> torch.Tensor:
    if kind == "sparse":
        return torch.eye(4, 8).to_sparse()
    if kind == "csr":
        return torch.sparse_csr_tensor(torch.zeros(5, dtype=torch.int64), [], torch.empty(0), (4, 8))
    if kind == "wrapper":
        return _Wrapper(torch.empty(4, 8))
    if kind == "conjugate":
        return torch.empty(4, 8, dtype=torch.complex64).conj()
    if kind == "negative":
        return torch.empty(4, 8, dtype=torch.complex64).conj().imag
    if kind == "quantized":
        return torch.quantize_per_tensor(torch.zeros(4, 8), 1.0, 0, torch.qint8)
    return torch.empty(0, 8)


@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant):UserWarning", "ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("sparse", "layout is sparse_coo"),
        ("csr", "layout is sparse_csr"),
        ("wrapper", "tensor subclass (_Wrapper)"),
        ("conjugate", "lazy conjugate"),
        ("negative", "lazy conjugate or negative"),
        ("quantized", "quantized"),
        ("empty", "it has no bytes"),
    ],
)
def test_kinds_whose_bytes_are_not_the_value_may_not_move(kind: str, words: str) -> None:
    storage = only(_facts(_hand_made(value=_odd(kind))), "sin")
    assert any(words in reason for reason in storage.immovable), storage.immovable


def test_a_value_made_by_something_unknown_may_not_move() -> None:
    pair = _hand_made(lambda made, graph: graph.call_function(torch.mul, (made, 2)))
    facts = _facts(pair)
    assert any("aliasing is unknown" in reason for reason in only(facts, "mul").immovable)
    assert any("may keep a view" in reason for reason in only(facts, "sin").immovable)


def test_a_view_that_leaves_its_carrier_may_not_move() -> None:
    with FakeTensorMode():
        row = torch.empty(8, 8)[2]
        whole = row.as_strided((8, 8), (8, 1), 0)
    pair = _hand_made(
        lambda made, graph: _given(graph.call_function(aten.as_strided.default, (made, [8, 8], [8, 1], 0)), whole),
        value=row,
    )
    assert any(
        "reaches memory that sin_default does not cover" in reason for reason in only(_facts(pair), "sin").immovable
    )


def _given(node: Node, value: torch.Tensor) -> Node:
    node.meta["val"] = value
    return node


def test_values_of_different_types_on_one_memory_may_not_move() -> None:
    pair = _hand_made(lambda made, graph: graph.call_function(aten.view.dtype, (made, torch.int32)))
    assert "values of different types share its memory" in only(_facts(pair), "sin").immovable


def test_a_value_that_backward_only_measures_may_not_move() -> None:
    mode = FakeTensorMode()
    forward, backward = _hand_made()
    (received, _) = (node for node in backward.graph.nodes if node.op == "placeholder")
    product = next(node for node in backward.graph.nodes if node.op == "call_function")
    with backward.graph.inserting_before(product):
        size = backward.graph.call_function(aten.sym_size.int, (received, 0))
        like = backward.graph.call_function(aten.zeros_like.default, (received,))
    size.meta["val"] = 4
    with mode:
        like.meta["val"] = torch.empty(4, 8)
    product.replace_input_with(received, like)
    storage = only(_facts((forward, backward)), "sin")
    assert storage.immovable == ("backward uses only its shape, not its data",)


@pytest.mark.parametrize(("index", "random"), [(0, False), (1, False), (2, True), (3, True)])
def test_a_seed_that_attention_returns_is_random_state(index: int, random: bool) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    attention = graph.call_function(aten._scaled_dot_product_efficient_attention.default, (x, x, x, None, True))
    assert is_random_state(graph.call_function(operator.getitem, (attention, index))) is random
