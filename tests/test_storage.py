"""Who shares memory in a graph: schemas and fake storages, read together, without a guard."""

from __future__ import annotations

import operator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphoffload.graphs.storage import alias_roots, elements_hint, extent, extent_hint, hint, memory_of, number
from tests.pairs import capture

aten = torch.ops.aten


class _Built:
    """Build a small graph whose nodes carry fake tensors, as AOTAutograd's do."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def input(self, *shape: int, name: str = "x") -> Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape)
        return node

    def call(self, target: object, *args: object, apart: bool = False, **kwargs: object) -> Node:
        """Add a call; `apart` loses the sharing of its fake tensor, as a pass that recomputes metadata may."""
        node = self.graph.call_function(target, args, kwargs)
        read = torch.fx.map_arg(args, lambda item: item.meta["val"])
        with self.mode:
            value = target(*read, **kwargs)
            node.meta["val"] = torch.empty_strided(value.size(), value.stride()) if apart else value
        return node


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (aten.view.default, ([24],)),
        (aten.t.default, ()),
        (aten.expand.default, ([2, 4, 6],)),
        (aten.slice.Tensor, (0, 1, 3)),
        (aten.select.int, (0, 1)),
        (aten.as_strided.default, ([2], [1], 3)),
        (aten.alias.default, ()),
        (aten.detach.default, ()),
        (aten._unsafe_view.default, ([24],)),
        (torch.ops.prims.view_of.default, ()),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
def test_a_view_has_the_root_of_what_it_views(target: object, arguments: tuple[object, ...], apart: bool) -> None:
    built = _Built()
    x = built.input(4, 6)
    made = built.call(aten.sin.default, x)
    view = built.call(target, made, *arguments, apart=apart)
    again = built.call(aten.unsqueeze.default, view, 0)
    roots = alias_roots(built.graph)
    assert roots[made] is made
    assert roots[view] is made
    assert roots[again] is made
    assert roots[x] is x


@pytest.mark.parametrize("target", [aten.clone.default, aten.relu.default, aten.sum.default])
def test_a_result_with_memory_of_its_own_is_its_own_root(target: object) -> None:
    built = _Built()
    node = built.call(target, built.input(4, 6))
    assert alias_roots(built.graph)[node] is node


@pytest.mark.parametrize(("copies", "same"), [(True, False), (False, True)])
def test_an_operator_that_views_or_copies_is_judged_by_its_storage(copies: bool, same: bool) -> None:
    built = _Built()
    x = built.input(4, 6)
    source = built.call(aten.t.default, x) if copies else x
    node = built.call(aten.contiguous.default, source)
    assert (alias_roots(built.graph)[node] is x) is same


@pytest.mark.parametrize("target", [aten.split.Tensor, aten.unsafe_split.Tensor, aten.unbind.int])
def test_elements_of_a_list_of_views_share_the_memory_that_was_split(target: object) -> None:
    built = _Built()
    made = built.call(aten.sin.default, built.input(4, 6))
    parts = built.graph.call_function(target, (made, 2) if target is not aten.unbind.int else (made,))
    with built.mode:
        parts.meta["val"] = list(parts.target(made.meta["val"], *parts.args[1:]))
    items = []
    for index in range(2):
        item = built.graph.call_function(operator.getitem, (parts, index))
        item.meta["val"] = parts.meta["val"][index]
        items.append(item)
    memory = memory_of(built.graph)
    assert [memory.root[item] for item in items] == [made, made]
    assert memory.held[parts] == (made,)
    assert memory.unclaimed == {}


def test_each_output_of_a_multi_output_operator_has_its_own_memory_and_the_list_keeps_them_all() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (6,), w).exp()

    pair = capture(f, torch.randn(4, 6, requires_grad=True), torch.randn(6))
    memory = memory_of(pair.forward.graph)
    norm = next(node for node in pair.forward.graph.nodes if "native_layer_norm" in node.name)
    taken = list(norm.users)
    assert [memory.root[node] for node in taken] == taken
    assert memory.held[norm] == tuple(taken)


def test_the_same_element_taken_twice_is_one_memory() -> None:
    built = _Built()
    x = built.input(4, 6)
    pair = built.graph.call_function(aten.max.dim, (x, 0))
    with built.mode:
        pair.meta["val"] = tuple(aten.max.dim(x.meta["val"], 0))
    first, second = (built.graph.call_function(operator.getitem, (pair, 0)) for _ in range(2))
    first.meta["val"] = second.meta["val"] = pair.meta["val"][0]
    memory = memory_of(built.graph)
    assert memory.root[second] is first
    assert [tensor.shape for tensor in memory.unclaimed[pair]] == [(6,)]
    assert memory.unclaimed[pair][0].dtype == torch.int64


def test_an_in_place_operator_returns_its_argument_and_is_a_writer() -> None:
    built = _Built()
    x = built.input(4, 6)
    made = built.call(aten.sin.default, x)
    view = built.call(aten.t.default, made)
    written = built.call(aten.add_.Tensor, view, 1)
    memory = memory_of(built.graph)
    assert memory.root[written] is made
    assert memory.writers == {made: (written,)}


def test_a_python_function_leaves_doubt_on_what_it_reads_and_makes() -> None:
    built = _Built()
    x = built.input(4, 6)
    node = built.graph.call_function(torch.mul, (x, 2))
    node.meta["val"] = x.meta["val"] * 2
    memory = memory_of(built.graph)
    assert "aliasing is unknown" in memory.unsure[node]
    assert "may keep a view" in memory.unsure[x]


def test_wait_tensor_returns_the_memory_that_it_waited_for() -> None:
    built = _Built()
    x = built.input(4)
    made = built.call(aten.sin.default, x)
    waited = built.graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (made,))
    with built.mode:
        waited.meta["val"] = torch.empty(4)
    assert alias_roots(built.graph)[waited] is made


def test_extent_of_padded_expanded_offset_scalar_and_empty_tensors() -> None:
    assert extent(torch.empty(4, 6)) == (0, 24)
    assert extent(torch.empty_strided((4, 6), (8, 1))) == (0, 30)
    assert extent(torch.empty(6).expand(4, 6)) == (0, 6)
    assert extent(torch.empty(4, 6)[1:3, 2:]) == (8, 18)
    assert extent(torch.empty(())) == (0, 1)
    assert extent(torch.empty(10)[3:3]) == (3, 3)


def test_symbolic_sizes_are_read_as_expressions_and_hints_without_a_guard() -> None:
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    fake = mode.from_tensor(torch.empty(5, 7), static_shapes=False)
    unknown = environment.create_unbacked_symint()
    before = len(environment.guards)
    rows, columns = fake.size()
    low, high = extent(fake.t())
    assert low == 0
    assert (high - number(rows) * number(columns)).expand() == 0
    assert extent_hint(fake) == (0, 35)
    assert elements_hint(fake) == 35
    assert hint(unknown) is None
    assert elements_hint(fake.new_empty((unknown,))) is None
    assert len(environment.guards) == before
