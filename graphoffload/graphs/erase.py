"""Erase: the left inverse of the rewrite."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from torch import fx

from graphoffload.errors import UsageError
from graphoffload.graphs.duplicate import empty_graph, module_with
from graphoffload.graphs.places import renumbered
from graphoffload.graphs.rewrite import DISPLACED, OPERATORS, Displaced
from graphoffload.runtime.ops import RELOAD


def erase(forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the pair without transfers, as new modules: members are outputs and placeholders again.

    Law: `erase(*rewrite(*pair, plan))` prints as `pair`. What is not in the graphs any more (the places of the members)
    comes from the record that `rewrite` left in the meta of the host nodes.
    Raises UsageError when a pass has dropped that record.
    """
    return _erase_forward(forward), _erase_backward(backward)


def _record(host: fx.Node) -> Displaced:
    record = host.meta.get(DISPLACED)
    if not isinstance(record, Displaced):
        raise UsageError(
            f"cannot erase the transfer at {host.name!r}: its meta has lost the record {DISPLACED!r} that rewrite made"
        )
    return record


def _restored(outputs: Sequence[Any], returned: Sequence[tuple[int, Any]]) -> list[Any]:
    """Insert (position, item) pairs into a list, so that each item ends up at its position."""
    restored = list(outputs)
    for position, item in sorted(returned, key=lambda pair: pair[0]):
        restored.insert(position, item)
    return restored


def _erase_forward(forward: fx.GraphModule) -> fx.GraphModule:
    graph = empty_graph(forward.graph)
    copies: dict[fx.Node, fx.Node] = {}
    by_name: dict[str, fx.Node] = {}
    for node in forward.graph.nodes:
        if node.op == "output":
            _restore_outputs(graph, node, copies, by_name)
        elif node.target not in OPERATORS:
            copies[node] = by_name[node.name] = graph.node_copy(node, copies.__getitem__)
    return module_with(graph, like=forward)


def _restore_outputs(
    graph: fx.Graph, output: fx.Node, copies: dict[fx.Node, fx.Node], by_name: dict[str, fx.Node]
) -> None:
    outputs: Sequence[Any] = output.args[0]  # type: ignore[assignment]
    records = {i: _record(node) for i, node in enumerate(outputs) if _is_ours(node)}
    members = [member for record in records.values() for member in record.members]

    def put_back(items: Sequence[Any], returned: Sequence[tuple[int, Any]]) -> list[Any]:
        return _restored([item for i, item in enumerate(items) if i not in records], returned)

    kept = [None if i in records else fx.map_arg(node, copies.__getitem__) for i, node in enumerate(outputs)]
    new = put_back(kept, [(member.output_index, by_name[member.name]) for member in members])
    result = new if isinstance(outputs, list) else tuple(new)
    written = graph.create_node("output", "output", (result,), name=output.name, type_expr=output.type)
    written.meta = dict(output.meta)
    if members and isinstance(descs := output.meta.get("desc"), (list, tuple)):
        first_saved = members[0].output_index - members[0].saved_index
        returned = [(member.output_index, member.desc) for member in members]
        written.meta["desc"] = renumbered(put_back(descs, returned), num_fwd_outputs=first_saved)
    if members and isinstance(traces := output.meta.get("output_stack_traces"), (list, tuple)):
        returned = [(member.output_index, member.stack_trace) for member in members]
        written.meta["output_stack_traces"] = put_back(traces, returned)


def _is_ours(node: Any) -> bool:
    return isinstance(node, fx.Node) and (node.target in OPERATORS or DISPLACED in node.meta)


def _erase_backward(backward: fx.GraphModule) -> fx.GraphModule:
    graph = empty_graph(backward.graph)
    placeholders = _restore_placeholders(graph, backward)
    doomed = _doomed(backward.graph, placeholders)
    copies: dict[fx.Node, fx.Node] = {}
    for node in backward.graph.nodes:
        if node.target is RELOAD:
            direct = _record(node.args[0]).direct
            if direct is not None:
                copies[node] = placeholders[direct]
        elif node.name in placeholders and (node.op == "placeholder" or node in doomed):
            copies[node] = placeholders[node.name]
        elif node not in doomed and not _is_ours(node):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return module_with(graph, like=backward)


def _restore_placeholders(graph: fx.Graph, backward: fx.GraphModule) -> dict[str, fx.Node]:
    """Write all placeholders, the members' at their old positions, and return them by name."""
    now = backward.graph.find_nodes(op="placeholder")
    members = [member for host in now if _is_ours(host) for member in _record(host).members]
    order = _restored([node for node in now if not _is_ours(node)], [(m.placeholder_index, m) for m in members])
    placeholders: dict[str, fx.Node] = {}
    for item in order:
        if isinstance(item, fx.Node):
            placeholders[item.name] = graph.node_copy(item)
        else:
            restored = graph.create_node("placeholder", item.target, name=item.placeholder)
            restored.meta = dict(item.meta)
            placeholders[item.placeholder] = restored
    return placeholders


def _doomed(graph: fx.Graph, members: Container[str]) -> set[fx.Node]:
    """Find the nodes that rewrite made: operators of ours, members rebuilt as views, and sizes that only those use."""
    doomed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and (
            node.target in OPERATORS
            or node.name in members
            or (node.users and all(user in doomed for user in node.users))
        ):
            doomed.add(node)
    return doomed
