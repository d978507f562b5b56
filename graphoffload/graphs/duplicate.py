"""Copy graph modules: same names, meta and printed code, no shared node, tensors and submodules by reference."""

from __future__ import annotations

import copy

from torch import fx


def empty_graph(like: fx.Graph) -> fx.Graph:
    """Return a graph without nodes that traces and prints as `like` does."""
    graph = fx.Graph(tracer_cls=like._tracer_cls)
    graph.set_codegen(copy.copy(like._codegen))
    return graph


def module_with(graph: fx.Graph, *, like: fx.GraphModule) -> fx.GraphModule:
    """Wrap a graph as `like` wraps its own: the same attributes that the graph names, the same class name and meta."""
    module = fx.GraphModule(like, graph, class_name=type(like).__name__)
    module.meta = dict(like.meta)
    return module


def duplicate(module: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph module so that a pass may change the copy in place.

    Law: the copy prints as `module`, and no change of the copy's nodes or of their meta shows in `module` (values inside
    meta are shared).
    """
    graph = empty_graph(module.graph)
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return module_with(graph, like=module)
