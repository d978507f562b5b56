"""Inputs that the program changes in place: what reads them, and a copy for what reads them too late.

AOTAutograd makes the change at the end of forward. A forward node that reads such an input must not run again in backward,
where it would read the change. And backward itself may read the input: the user wrote a `clone` that Inductor then took for
superfluous, or a checkpointed region begins there. These get a copy that is made when forward begins.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from graphoffload._torch import CheckpointPolicy, FakeTensor, InputMutationAOTOutput, OpOverload

_COPY = torch.ops.aten.copy_.default
_RECOMPUTE = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def reads_of_changed_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Find the nodes that read, through views, an input which the program changes in place once forward has run."""
    return {read for placeholder in changed_inputs(graph) for read in _reads(placeholder)}


def changed_inputs(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Find them where AOTAutograd put the change: into a copy at the end of the graph, or into an output of forward."""
    placeholders = graph.find_nodes(op="placeholder")
    copied_into = {node.args[0] for node in graph.find_nodes(op="call_function", target=_COPY)}
    descs = graph.output_node().meta.get("desc") or ()
    mutated = [desc.mutated_input for desc in descs if isinstance(desc, InputMutationAOTOutput)]
    return tuple(node for node in placeholders if node in copied_into or node.meta.get("desc") in mutated)


def copy_what_is_read_late(joint: fx.GraphModule) -> None:
    """Let what reads a changed input read a copy instead, in place, wherever backward reads that input too.

    The copy is tagged as must-save. Writes go to the input itself, as before.
    """
    graph = joint.graph
    last = next((node for node in reversed(graph.nodes) if node.op == "placeholder"), None)
    for placeholder in changed_inputs(graph):
        value = placeholder.meta.get("val")
        if last is None or not isinstance(value, FakeTensor) or not any(map(_is_late, _reads(placeholder))):
            continue
        with graph.inserting_after(last):
            copy = graph.call_function(torch.ops.aten.clone.default, (placeholder,))
        with value.fake_mode, torch.no_grad():
            copy.meta["val"] = torch.ops.aten.clone.default(value.detach())
        copy.meta.update(partitioner_tag="is_forward", recompute=CheckpointPolicy.MUST_SAVE)
        placeholder.replace_all_uses_with(copy, delete_user_cb=_is_read)
        copy.update_arg(0, placeholder)
        last = copy
    joint.recompile()


def _is_late(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward" or node.meta.get("recompute") in _RECOMPUTE


def _is_read(user: fx.Node) -> bool:
    return user.op == "call_function" and user.target is not _COPY


def _reads(source: fx.Node) -> list[fx.Node]:
    """List what reads the memory of a node; a view is no read, but what reads the view is."""
    found: list[fx.Node] = []
    for user in source.users:
        if is_view(user):
            found += _reads(user)
        elif _is_read(user):
            found.append(user)
    return found


def is_view(node: fx.Node) -> bool:
    """Tell whether a node gives other access to the memory of what it takes in."""
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    return any(ret.alias_info is not None and not ret.alias_info.is_write for ret in node.target._schema.returns)
