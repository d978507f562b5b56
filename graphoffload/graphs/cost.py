"""Count, for every node of a graph, its arithmetic and its traffic through device memory.

Counts are estimates for a roofline: they never raise, and an operator that is not known counts the bytes of its
tensors. Views, elements taken from a list, and values that fusion leaves without memory cost nothing; what they read is
counted where it is in fact read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from graphoffload._torch import HigherOrderOperator, OpOverload
from graphoffload.graphs.fusion import Kernels
from graphoffload.graphs.immovable import reads_only_metadata
from graphoffload.graphs.saved import is_getitem, maker
from graphoffload.graphs.storage import Memory, elements_hint, extent_hint, hint, op_name
from graphoffload.planning.values import Step

# These read, of their first argument, only about as much as they return.
_PICKERS = frozenset({"aten::embedding", "aten::index", "aten::gather", "aten::index_select", "aten::_unsafe_index"})
_WRITES_NOTHING = frozenset(
    {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}
)


def steps_of(graph: Graph, memory: Memory, kernels: Kernels) -> tuple[Step, ...]:
    """Return one step for every call_function node, in order."""
    reads = _Reads(graph, memory, kernels)
    return tuple(
        Step(
            name=node.name,
            op=op_name(node),
            flops=flops_of(node),
            nbytes=reads.traffic(node),
            dtype=_dtype(node),
        )
        for node in graph.nodes
        if node.op == "call_function"
    )


class _Reads:
    """Follow what a node reads through values without memory to the buffers that have some."""

    def __init__(self, graph: Graph, memory: Memory, kernels: Kernels) -> None:
        self.memory = memory
        self.kernels = kernels
        self.writers = {node for nodes in memory.writers.values() for node in nodes}
        self.takers: dict[Node, list[Node]] = {}
        self.inlined: dict[Node, dict[Node, int]] = {}
        for node in graph.nodes:
            source = node.args[0] if is_getitem(node) else None
            if isinstance(source, Node):
                self.takers.setdefault(source, []).append(node)
        for node in graph.nodes:  # in order, so that what a node reads is known before the node
            if node in memory.root and memory.root[node] is node and node not in kernels.material:
                self.inlined[node] = self._inputs(maker(node))

    def traffic(self, node: Node) -> int:
        """Return the bytes that a node reads and writes when it runs."""
        if is_getitem(node) or not self._runs(node):
            return 0
        read = sum(self._inputs(node).values())
        return read + self._written(node)

    def _runs(self, node: Node) -> bool:
        if node in self.writers:
            return True
        if node in self.memory.root:
            return self.memory.root[node] is node and node in self.kernels.material
        takers = [item for item in self.takers.get(node, ()) if self.memory.root.get(item) is item]
        if takers:
            return any(item in self.kernels.material for item in takers)
        return node in self.memory.unclaimed

    def _inputs(self, node: Node) -> dict[Node, int]:
        """Map each buffer with memory that a node reads to the bytes it reads of it."""
        if reads_only_metadata(node):
            return {}
        found: dict[Node, int] = {}
        picks = isinstance(node.target, OpOverload) and node.target._schema.name in _PICKERS
        limit = _bytes(node.meta.get("val")) if picks else None
        for index, source in enumerate(node.all_input_nodes):
            for root in self.memory.held.get(source, ()):
                nbytes = _bytes(source.meta.get("val"))
                if limit is not None and index == 0:
                    nbytes = min(nbytes, limit)
                for buffer, size in self.inlined.get(root, {root: nbytes}).items():
                    found[buffer] = max(found.get(buffer, 0), size)
        return found

    def _written(self, node: Node) -> int:
        if isinstance(node.target, OpOverload) and node.target._schema.name in _WRITES_NOTHING:
            return 0
        takers = [item for item in self.takers.get(node, ()) if self.memory.root.get(item) is item]
        if not takers:
            return _bytes(node.meta.get("val"))
        own = sum(_bytes(item.meta.get("val")) for item in takers if item in self.kernels.material)
        return own + sum(map(_bytes, self.memory.unclaimed.get(node, ())))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _bytes(value: Any) -> int:
    """Return the distinct bytes that a value's elements lie in; 0 where unknown."""
    return sum(_tensor_bytes(tensor) for tensor in _tensors(value))


def _tensor_bytes(tensor: torch.Tensor) -> int:
    count = elements_hint(tensor)
    if count is None:
        return 0
    covered = extent_hint(tensor) if tensor.layout == torch.strided else None
    # An expanded tensor reads its few elements again and again, a sliced one skips: the smaller of the two is right.
    return (count if covered is None else min(count, covered[1] - covered[0])) * tensor.element_size()


def _dtype(node: Node) -> str:
    """Return the type that a node computes with: of its first floating result or argument, else of its first result."""
    # A random operator's saved state is not what is computed with, and may be all that the traced metadata tells of.
    values = (node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes))
    found = [tensor for value in values for tensor in _tensors(value)]
    floating = (tensor for tensor in found if tensor.dtype.is_floating_point)
    own = next(_tensors(node.meta.get("val")), None)
    chosen = own if own is not None and own.dtype.is_floating_point else next(floating, own)
    return "" if chosen is None else str(chosen.dtype).removeprefix("torch.")


def flops_of(node: Node) -> int:
    """Return the arithmetic of a matrix product, convolution or attention, 0 for others. Multiply and add count apart."""
    target, arguments = node.target, node.args
    if isinstance(target, HigherOrderOperator) and target not in flop_registry:
        # Torch runs a random operator again inside another one, which hands it its state.
        place = next((i for i, one in enumerate(arguments) if isinstance(one, OpOverload)), None)
        if place is None:
            return 0
        target, arguments = arguments[place], arguments[place + 1 :]  # type: ignore[assignment]
    if isinstance(target, OpOverload) and target._schema.name.startswith("aten::_scaled_dot_product"):
        return _attention_flops(arguments, node.kwargs, target)
    key = target.overloadpacket if isinstance(target, OpOverload) else target
    if not isinstance(target, (OpOverload, HigherOrderOperator)) or key not in flop_registry:
        return 0
    try:
        args, kwargs, result = _with_hints((arguments, node.kwargs, node.meta.get("val")))
        return int(flop_registry[key](*args, **kwargs, out_val=result))
    except Exception:  # noqa: BLE001 - a formula is torch's or a user's; a count must not stop a compilation
        return 0


def _attention_flops(arguments: tuple[Any, ...], options: dict[str, Any], target: OpOverload) -> int:
    """Count attention ourselves: torch's formulas refuse grouped heads before 2.13 and do not know of causal masks."""
    named = dict(zip((argument.name for argument in target._schema.arguments), arguments, strict=False)) | options
    shapes = [_shape(named.get(name)) for name in ("query", "key", "value")]
    if any(shape is None or len(shape) < 4 for shape in shapes):
        return 0
    query, key, value = (shape for shape in shapes if shape is not None)
    backward = any(name.startswith("grad_out") for name in named)
    per_score = 3 * query[-1] + 2 * value[-1] if backward else query[-1] + value[-1]
    total = 2 * math.prod(query[:-1]) * key[-2] * per_score
    return total // 2 if named.get("is_causal") is True else total


def _shape(item: Any) -> list[int] | None:
    value = item.meta.get("val") if isinstance(item, Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    sizes = [hint(size) for size in value.size()]
    known = [size for size in sizes if size is not None]
    return known if len(known) == len(sizes) else None


def _with_hints(item: Any) -> Any:
    """Replace nodes by their values, and whatever is symbolic by stand-ins with plain sizes, so that nothing guards."""
    if isinstance(item, Node):
        return _with_hints(item.meta.get("val"))
    if isinstance(item, (list, tuple)):
        return type(item)(_with_hints(part) for part in item) if type(item) in (list, tuple) else item
    if isinstance(item, dict):
        return {name: _with_hints(part) for name, part in item.items()}
    if isinstance(item, torch.SymInt):
        return hint(item)
    if isinstance(item, torch.Tensor) and _is_symbolic(item.size()):
        return torch.empty([hint(size) or 0 for size in item.size()], dtype=item.dtype, device="meta")
    return item


def _is_symbolic(sizes: Iterable[int | torch.SymInt]) -> bool:
    return any(isinstance(size, torch.SymInt) for size in sizes)
