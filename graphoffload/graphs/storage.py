"""Tell, for one graph, which values share memory, what makes that memory, and how much of it a value covers.

Two sources are united: the operators' schemas (which say what an output may alias) and the storages of the fake tensors
in `node.meta["val"]` (which show what it did alias while tracing). Either alone is not enough: schemas leave out a few
operators that return their input, and fake storages are lost when a pass recomputes a node's metadata.

Nothing here adds a guard: symbolic sizes are read as expressions or as hints, and are never compared as `SymInt`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from graphoffload._torch import HigherOrderOperator, OpOverload, OpOverloadPacket

Number = Any
"""A size: an int, or a sympy expression where it is symbolic (sympy has no types)."""

# Operators that return their argument's memory although their schema does not say so.
_SILENT_VIEWS = frozenset(
    {
        "aten::_unsafe_view",
        "aten::unsafe_split",
        "aten::unsafe_split_with_sizes",
        "aten::unsafe_chunk",
        "_c10d_functional::wait_tensor",
    }
)
# Operators whose schema says "view" but which copy when they must: there, two distinct fake storages are believed.
_VIEWS_OR_COPIES = frozenset(
    {
        "aten::reshape",
        "aten::contiguous",
        "aten::flatten",
        "aten::to",
        "aten::type_as",
        "aten::resolve_conj",
        "aten::resolve_neg",
    }
)
# Views which may reach memory that their input does not cover.
_FREE_VIEWS = frozenset({"aten::as_strided", "aten::as_strided_", "aten::set_", "prims::as_strided"})


@dataclass(frozen=True)
class Memory:
    """Hold who shares memory with whom in one graph.

    `root` maps each node that has a tensor value to the node that made its memory (the placeholder, where it came in).
    `held` maps each node to every root that its value keeps alive: one for a tensor, several for a list of tensors.
    `writers` maps a root to the nodes that write it in place. `unsure` maps a root to a sentence that says why its
    aliasing is unknown. `free` holds the nodes whose extent may leave the memory that their input covers.
    `unclaimed` maps a node to the tensors in its list value that no node takes out.
    """

    root: dict[Node, Node]
    held: dict[Node, tuple[Node, ...]]
    writers: dict[Node, tuple[Node, ...]]
    unsure: dict[Node, str]
    free: frozenset[Node]
    unclaimed: dict[Node, tuple[torch.Tensor, ...]]


def alias_roots(graph: torch.fx.Graph) -> dict[Node, Node]:
    """Return, for every node that has a tensor value, the node that made its memory; a maker is its own root."""
    return memory_of(graph).root


def memory_of(graph: torch.fx.Graph, *, apart: Collection[Node] = ()) -> Memory:
    """Return who shares memory with whom in `graph`. Linear in its size; runs nothing; adds no guard.

    `apart` are nodes whose fake storage says nothing: tangents are traced with the storage of the output they belong to,
    so that those of two outputs on one memory look like one.
    """
    reading = _Reading(apart=frozenset(apart))
    for node in graph.nodes:
        if node.op != "output":
            reading.read(node)
    return reading.result(graph)


@dataclass
class _Reading:
    """Collect aliases node by node, in the order of the graph (a union-find whose root is the earliest node)."""

    apart: frozenset[Node]
    parent: dict[Node, Node] = field(default_factory=dict)
    order: dict[Node, int] = field(default_factory=dict)
    by_storage: dict[int, Node] = field(default_factory=dict)
    elements: dict[Node, list[Node]] = field(default_factory=dict)
    taken: dict[tuple[Node, Any], Node] = field(default_factory=dict)
    list_sources: dict[Node, tuple[Node, ...]] = field(default_factory=dict)
    writes: list[tuple[Node, Node]] = field(default_factory=list)
    doubts: list[tuple[Node, str]] = field(default_factory=list)
    free: set[Node] = field(default_factory=set)
    aliasing: dict[OpOverload, _Aliasing] = field(default_factory=dict)

    def find(self, node: Node) -> Node:
        while self.parent[node] is not node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node

    def unite(self, node: Node, other: Node) -> None:
        first, second = self.find(node), self.find(other)
        if self.order[second] < self.order[first]:
            first, second = second, first
        self.parent[second] = first

    def read(self, node: Node) -> None:
        self.order[node] = len(self.order)
        if is_tensor(node):
            self.parent[node] = node
        if node.op == "call_function":
            self._read_call(node)
        if is_tensor(node) and node not in self.apart:
            self._read_storage(node)

    def _read_storage(self, node: Node) -> None:
        """Believe the traced storage as far as it can be true: a result shares memory with what made it, or with nothing.

        Backward's copy of a forward node is traced with that node's storage, which a saved value may have too, and a view
        of a tangent with that of an output; at run time these are memories of their own.
        """
        storage = storage_key(node.meta["val"])
        if storage is None:
            return
        if node.op != "call_function":
            self.unite(node, self.by_storage.setdefault(storage, node))
            return
        maker = node
        while maker.target is operator.getitem and isinstance(maker.args[0], Node):
            maker = maker.args[0]
        siblings = self.elements.setdefault(maker, [])
        for other in (*self._tensors(maker.all_input_nodes), *siblings):
            if other not in self.apart and storage_key(other.meta["val"]) == storage:
                self.unite(node, other)
        siblings.append(node)

    def _read_call(self, node: Node) -> None:
        if node.target is operator.getitem:
            self._read_getitem(node)
        elif isinstance(node.target, OpOverload):
            self._read_operator(node, node.target)
        elif isinstance(node.target, HigherOrderOperator):
            # A higher-order operator has no schema: its fake storages are believed, but one that says it mutates
            # may write any of its inputs.
            if "mutation" in op_name(node):
                self.writes.extend((node, source) for source in self._tensors(node.all_input_nodes))
        elif _has_tensors(node.meta.get("val")) or "val" not in node.meta:
            self._doubt(node)

    def _read_getitem(self, node: Node) -> None:
        source, index = node.args[0], node.args[1]
        if not isinstance(source, Node):
            return
        sources = self.list_sources.get(source, ())
        if not is_tensor(node):
            self.list_sources[node] = sources
            return
        for other in (*sources, self.taken.setdefault((source, index), node)):
            self.unite(node, other)

    def _read_operator(self, node: Node, target: OpOverload) -> None:
        if target not in self.aliasing:
            self.aliasing[target] = _aliasing_of(target)
        aliasing = self.aliasing[target]
        if aliasing.free:
            self.free.add(node)
        self.writes.extend((node, source) for source in self._tensors(_arguments(node, aliasing.written)))
        sources = tuple(self._tensors(_arguments(node, aliasing.returned)))
        if not is_tensor(node):
            self.list_sources[node] = sources
            return
        for source in sources:
            if not (aliasing.may_copy and _known_apart(node, source)):
                self.unite(node, source)

    def _doubt(self, node: Node) -> None:
        """Note that neither schema nor storage can be trusted: the result and all that it read are uncertain."""
        if is_tensor(node):
            self.doubts.append((node, f"it is made by {op_name(node)}, whose aliasing is unknown"))
        for source in self._tensors(node.all_input_nodes):
            self.doubts.append((source, f"it is read by {op_name(node)}, which may keep a view of it"))

    def _tensors(self, nodes: Iterable[Node]) -> Iterator[Node]:
        """Yield the nodes among `nodes` that have a tensor value, and what list-valued ones among them alias."""
        for node in nodes:
            if node in self.parent:
                yield node
            else:
                yield from self.list_sources.get(node, ())

    def result(self, graph: torch.fx.Graph) -> Memory:
        root = {node: self.find(node) for node in self.parent}
        held: dict[Node, tuple[Node, ...]] = {}
        for node in reversed(list(self.order)):  # a list's getitems come after it
            if node in root:
                held[node] = (root[node],)
            else:
                parts = [part for user in node.users if user.target is operator.getitem for part in held.get(user, ())]
                parts.extend(root[source] for source in self.list_sources.get(node, ()))
                held[node] = tuple(sorted(dict.fromkeys(parts), key=self.order.__getitem__))
        writers: dict[Node, list[Node]] = {}
        for writer, written in self.writes:
            writers.setdefault(root[written], []).append(writer)
        unsure: dict[Node, str] = {}
        for node, reason in self.doubts:
            unsure.setdefault(root[node], reason)
        return Memory(
            root=root,
            held=held,
            writers={node: tuple(dict.fromkeys(nodes)) for node, nodes in writers.items()},
            unsure=unsure,
            free=frozenset(self.free),
            unclaimed=self._unclaimed(graph),
        )

    def _unclaimed(self, graph: torch.fx.Graph) -> dict[Node, tuple[torch.Tensor, ...]]:
        result: dict[Node, tuple[torch.Tensor, ...]] = {}
        for node in graph.nodes:
            value = node.meta.get("val")
            if node.op != "call_function" or not isinstance(value, (tuple, list)) or self.list_sources.get(node):
                continue
            seen = {
                storage_key(other.meta["val"])
                for other in (*self.elements.get(node, ()), *self._tensors(node.all_input_nodes))
            }
            left: dict[int, torch.Tensor] = {}
            for index, element in enumerate(value):
                if isinstance(element, torch.Tensor) and (node, index) not in self.taken:
                    storage = storage_key(element)
                    if storage is not None and storage not in seen:
                        left.setdefault(storage, element)
            if left:
                result[node] = tuple(left.values())
        return result


@dataclass(frozen=True)
class _Aliasing:
    """Say, by (position, name), which arguments an operator returns and which it writes."""

    returned: tuple[tuple[int, str], ...]
    written: tuple[tuple[int, str], ...]
    may_copy: bool
    free: bool


def _aliasing_of(target: OpOverload) -> _Aliasing:
    schema = target._schema
    returned, written = [], []
    returns = [item.alias_info.before_set for item in schema.returns if item.alias_info is not None]
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is None:
            continue
        if info.is_write:
            written.append((position, argument.name))
        # The sets of a list (`Tensor(a)[]`) read as empty in Python: then any annotated argument may be the source.
        if any(not labels or not info.before_set or labels & info.before_set for labels in returns):
            returned.append((position, argument.name))
    if schema.name in _SILENT_VIEWS and not returned:
        returned.append((0, schema.arguments[0].name))
    return _Aliasing(tuple(returned), tuple(written), schema.name in _VIEWS_OR_COPIES, schema.name in _FREE_VIEWS)


def _arguments(node: Node, wanted: tuple[tuple[int, str], ...]) -> Iterator[Node]:
    for position, name in wanted:
        value = node.kwargs[name] if name in node.kwargs else node.args[position] if position < len(node.args) else None
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, Node):
                yield item


def _known_apart(node: Node, other: Node) -> bool:
    mine, theirs = storage_key(node.meta["val"]), storage_key(other.meta["val"])
    return mine is not None and theirs is not None and mine != theirs


def _has_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_has_tensors(item) for item in value)
    return isinstance(value, torch.Tensor)


def is_tensor(node: Node) -> bool:
    """Tell whether the node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return what identifies the tensor's storage as long as the tensor lives; None where it has none (sparse)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def op_name(node: Node) -> str:
    """Return the text of the node's operator: `aten.mm.default`, `placeholder`, `flex_attention`."""
    if node.op != "call_function":
        return str(node.op)
    if isinstance(node.target, (OpOverload, OpOverloadPacket)):
        return str(node.target)
    if isinstance(node.target, HigherOrderOperator):
        target: Any = node.target  # `name` has no types
        return str(target.name())
    return str(getattr(node.target, "__name__", node.target))


def number(size: int | torch.SymInt) -> Number:
    """Return a size as an int or as a sympy expression, without a guard."""
    if isinstance(size, torch.SymInt):
        expr = size.node.expr
        return int(expr) if expr.is_number else expr
    return int(size)


def hint(size: int | torch.SymInt) -> int | None:
    """Return the value that a size has in the traced run, without a guard; None where it has none (unbacked)."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    known = number(size)
    if isinstance(known, int):
        return known
    value = size.node.hint
    return value if isinstance(value, int) else None


def extent(tensor: torch.Tensor) -> tuple[Number, Number]:
    """Return the first and one past the last element of its storage that a strided tensor covers, in elements.

    Exact for ints; a symbolic size is taken to be at least one.
    """
    offset = number(tensor.storage_offset())
    sizes = [number(size) for size in tensor.size()]
    if any(isinstance(size, int) and size == 0 for size in sizes):
        return offset, offset
    strides = [number(stride) for stride in tensor.stride()]
    return offset, offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1


def extent_hint(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return `extent` in the traced run; None where a size is unknown."""
    read = [hint(size) for size in (tensor.storage_offset(), *tensor.size(), *tensor.stride())]
    if any(size is None for size in read):
        return None
    offset, *rest = (size for size in read if size is not None)
    sizes, strides = rest[: tensor.dim()], rest[tensor.dim() :]
    if 0 in sizes:
        return offset, offset
    return offset, offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1


def elements_hint(tensor: torch.Tensor) -> int | None:
    """Return the number of elements in the traced run; None where a size is unknown."""
    sizes = [hint(size) for size in tensor.size()]
    known = [size for size in sizes if size is not None]
    return math.prod(known) if len(known) == len(sizes) else None
