"""Match what forward saves with what backward receives, and place every node of the pair on one timeline."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphoffload.errors import UnsupportedGraphError
from graphoffload.graphs.storage import Memory, is_tensor, memory_of

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)


def match_saved(forward: GraphModule, backward: GraphModule, *, num_fwd_outputs: int) -> tuple[tuple[Node, Node], ...]:
    """Return (forward node, backward placeholder) of every saved tensor, in the order in which forward returns them.

    AOTAutograd orders the two lists differently: forward returns tensors, opaque objects, symbols; backward receives
    symbols, tensors, opaque objects, then tangents (torch 2.11 to 2.14; without its runtime, tensors before symbols).
    The order *within* symbols and within the rest is the same, and that is what this relies on; names are not.

    Raises UnsupportedGraphError where the two do not agree in number, shape or dtype.
    """
    outputs = _outputs(forward)[num_fwd_outputs:]
    if not 0 <= num_fwd_outputs <= len(_outputs(forward)):
        raise UnsupportedGraphError(
            f"num_fwd_outputs is {num_fwd_outputs}, but forward returns {len(_outputs(forward))} values"
        )
    symbols = [node for node in outputs if _is_symbol(node)]
    others = [node for node in outputs if not _is_symbol(node)]
    placeholders = [node for node in backward.graph.nodes if node.op == "placeholder"]
    received = [node for node in placeholders if not _is_symbol(node)][: len(others)]
    if len(received) < len(others) or sum(map(_is_symbol, placeholders)) < len(symbols):
        raise UnsupportedGraphError(
            f"forward saves {len(outputs)} values, but backward has only {len(placeholders)} placeholders"
        )
    pairs = tuple((mine, theirs) for mine, theirs in zip(others, received, strict=True) if _is_saved_tensor(mine))
    for mine, theirs in pairs:
        _check_same(mine, theirs)
    return pairs


def _outputs(module: GraphModule) -> tuple[Any, ...]:
    output = next(iter(module.graph.find_nodes(op="output")))
    result = output.args[0]
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _is_symbol(item: Any) -> bool:
    value = item.meta.get("val") if isinstance(item, Node) else item
    return isinstance(value, _SYMBOLS)


def _is_saved_tensor(item: Any) -> bool:
    """Leave out None and opaque objects. A node without `val` is refused: nothing can be said about it."""
    if not isinstance(item, Node):
        return False
    if "val" not in item.meta:
        raise UnsupportedGraphError(
            f"the saved value {item.name!r} has no fake tensor in node.meta['val']; run fake tensor propagation first"
        )
    return is_tensor(item)


def _check_same(mine: Node, theirs: Node) -> None:
    first, second = mine.meta["val"], theirs.meta.get("val")
    same = isinstance(second, torch.Tensor) and first.dtype == second.dtype and first.dim() == second.dim()
    sizes = zip(first.size(), second.size(), strict=True) if same and isinstance(second, torch.Tensor) else ()
    # Symbolic sizes are not compared: that would add a guard.
    if not same or any(a != b for a, b in sizes if isinstance(a, int) and isinstance(b, int)):
        raise UnsupportedGraphError(
            f"forward saves {mine.name!r} as {tuple(first.shape)} {first.dtype}, but backward receives it as "
            f"{theirs.name!r}, which differs: is num_fwd_outputs right?"
        )


@dataclass(frozen=True)
class PairReading:
    """Hold what the rooms of facts share about one pair: memory of both graphs, positions, saved tensors, outputs.

    `position` maps every call_function node of both graphs to its position, and every other node to -1 (forward) or to
    the first position of backward. `order` numbers the forward nodes. `saved` is as `match_saved` returns. `returned`
    and `gradients` are the user outputs of forward and the outputs of backward.
    """

    forward: GraphModule
    backward: GraphModule
    fw: Memory
    bw: Memory
    position: dict[Node, int]
    order: dict[Node, int]
    begin_backward: int
    total: int
    saved: tuple[tuple[Node, Node], ...]
    returned: tuple[Node, ...]
    gradients: tuple[Node, ...]
    static: frozenset[Node]

    @property
    def end(self) -> int:
        """Return the last position of the timeline."""
        return self.total - 1


def read_pair(
    forward: GraphModule, backward: GraphModule, *, num_fwd_outputs: int, static_inputs: tuple[int, ...]
) -> PairReading:
    """Read both graphs once. Raises UnsupportedGraphError for a pair that does not fit together or is not of operators."""
    saved = match_saved(forward, backward, num_fwd_outputs=num_fwd_outputs)
    position: dict[Node, int] = {}
    total = 0
    begin = 0
    for module in (forward, backward):
        begin = total
        for node in module.graph.nodes:
            if node.op in ("call_module", "call_method"):
                raise UnsupportedGraphError(
                    f"the graph holds a {node.op} node, {node.name!r}; only operators are handled"
                )
            if node.op == "call_function":
                position[node] = total
                total += 1
            else:
                position[node] = begin - 1 if module is forward else begin
    received = {placeholder for _, placeholder in saved}
    tangents = [node for node in backward.graph.find_nodes(op="placeholder") if node not in received]
    placeholders = forward.graph.find_nodes(op="placeholder")
    if any(not 0 <= index < len(placeholders) for index in static_inputs):
        raise UnsupportedGraphError(f"a static input index is outside the {len(placeholders)} placeholders of forward")
    return PairReading(
        forward=forward,
        backward=backward,
        fw=memory_of(forward.graph),
        bw=memory_of(backward.graph, apart=tangents),
        position=position,
        order={node: index for index, node in enumerate(forward.graph.nodes)},
        begin_backward=begin,
        total=total,
        saved=saved,
        returned=tuple(node for node in _outputs(forward)[:num_fwd_outputs] if isinstance(node, Node)),
        gradients=tuple(node for node in _outputs(backward) if isinstance(node, Node)),
        static=frozenset(placeholders[index] for index in static_inputs),
    )


def maker(node: Node) -> Node:
    """Return the node whose step makes the memory of a root: where the root takes one of a list, the list's operator."""
    while node.op == "call_function" and is_getitem(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def is_getitem(node: Node) -> bool:
    """Tell whether a node takes an element out of a list value."""
    return node.target is operator.getitem
