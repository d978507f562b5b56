"""Symbolic sizes as graph nodes: compute any size that a graph's own placeholders determine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from graphoffload._torch import GraphAppendingTracer, PythonReferenceAnalysis, sympy_interp
from graphoffload.errors import UnsupportedGraphError


class SizeNodes:
    """Make nodes, at the end of a graph under construction, for sizes that the placeholders determine.

    A plain int stays an int. A symbolic size is, in this order, a SymInt placeholder, a dimension of a tensor
    placeholder, or arithmetic on those. Each distinct expression is made once. Names come from `fresh_name`, so that no
    node still to be copied into the graph finds its own name taken.
    """

    def __init__(self, graph: fx.Graph, placeholders: Iterable[fx.Node], *, fresh_name: Callable[[], str]) -> None:
        self._graph = graph
        self._tracer = _NamingTracer(graph, fresh_name)
        self._made: dict[Any, fx.Node] = {}
        self._dimensions: dict[Any, tuple[fx.Node, int]] = {}
        for node in placeholders:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt):
                self._made.setdefault(expression(value), node)
            elif isinstance(value, torch.Tensor):
                sizes: tuple[Any, ...] = tuple(value.shape)  # mypy takes them for ints
                for dimension, size in enumerate(sizes):
                    if isinstance(size, torch.SymInt):
                        self._dimensions.setdefault(expression(size), (node, dimension))

    def argument(self, size: Any, *, value: str) -> int | fx.Node:
        """Return a size, an int or a SymInt, as the argument of a node.

        Raises UnsupportedGraphError, naming the saved value `value`, where backward cannot know the size.
        """
        wanted = expression(size)
        if wanted.is_number:
            return int(wanted)
        found = self._lookup(wanted)
        return self._compute(wanted, size, value) if found is None else found

    def _lookup(self, wanted: Any) -> fx.Node | None:
        if wanted not in self._made and wanted in self._dimensions:
            node, dimension = self._dimensions[wanted]
            made = self._tracer.create_node("call_function", torch.ops.aten.sym_size.int, (node, dimension), {})
            made.meta["val"] = node.meta["val"].shape[dimension]
            self._made[wanted] = made
        return self._made.get(wanted)

    def _compute(self, wanted: Any, size: Any, value: str) -> fx.Node:
        symbols = {symbol: self._lookup(symbol) for symbol in sorted(wanted.free_symbols, key=str)}
        missing = [str(symbol) for symbol, node in symbols.items() if node is None]
        if missing:
            raise UnsupportedGraphError(
                f"the saved value {value!r} has a size, {wanted}, that backward cannot compute, because it receives "
                f"nothing that gives {', '.join(missing)}; keep this value"
            )
        last = next(iter(reversed(self._graph.nodes)))
        proxies = {symbol: fx.Proxy(node, self._tracer) for symbol, node in symbols.items() if node is not None}
        made: fx.Node = sympy_interp(PythonReferenceAnalysis, proxies, wanted).node
        node = last.next
        while node.op != "root":
            node.meta["val"] = node.target(*fx.map_arg(node.args, lambda argument: argument.meta["val"]))
            node = node.next
        made.meta["val"] = size
        self._made[wanted] = made
        return made


class _NamingTracer(GraphAppendingTracer):
    """Append nodes under names of our choice."""

    def __init__(self, graph: fx.Graph, fresh_name: Callable[[], str]) -> None:
        super().__init__(graph)
        self._fresh_name = fresh_name

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *_: Any, **__: Any) -> fx.Node:
        return super().create_node(kind, target, args, kwargs, self._fresh_name())


def expression(size: Any) -> Any:
    """Return a size, an int or a SymInt, as a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
