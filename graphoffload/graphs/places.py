"""The places of saved values: where each stands in forward's outputs and in backward's placeholders, and how it prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from graphoffload._torch import SavedForBackwardsAOTOutput, SavedForBackwardsNoVcCheckAOTOutput
from graphoffload.graphs.saved import match_saved


@dataclass(frozen=True)
class Place:
    """Record where a saved value stands, without a reference to a graph.

    `name` is the forward node's; `placeholder`, `target` and `meta` are the backward placeholder's. The indices count
    forward's outputs, forward's saved outputs and backward's placeholders, each from 0. `desc` and `stack_trace` are the
    output's entries in the lists in the output node's meta.
    """

    name: str
    placeholder: str
    target: str
    meta: Mapping[str, Any] = field(repr=False)
    output_index: int
    saved_index: int
    placeholder_index: int
    desc: Any = None
    stack_trace: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class SavedValue:
    """Hold one saved value's two nodes and its place."""

    node: fx.Node
    placeholder: fx.Node
    place: Place


def saved_values(forward: fx.GraphModule, backward: fx.GraphModule, *, num_fwd_outputs: int) -> dict[str, SavedValue]:
    """Return the saved tensors by the names of their forward nodes, in order.

    Raises UnsupportedGraphError when `num_fwd_outputs` or the two modules do not belong together.
    """
    output = forward.graph.output_node()
    outputs: Sequence[Any] = output.args[0]  # type: ignore[assignment]
    descs, traces = (output.meta.get(key) or [None] * len(outputs) for key in ("desc", "output_stack_traces"))
    # A user output may be saved as well: its place among the saved outputs is meant here.
    leaves_at = {node: i for i, node in enumerate(outputs) if i >= num_fwd_outputs and isinstance(node, fx.Node)}
    enters_at = {node: i for i, node in enumerate(backward.graph.find_nodes(op="placeholder"))}
    found: dict[str, SavedValue] = {}
    for node, placeholder in match_saved(forward, backward, num_fwd_outputs=num_fwd_outputs):
        at = leaves_at[node]
        place = Place(
            name=node.name,
            placeholder=placeholder.name,
            target=str(placeholder.target),
            meta=dict(placeholder.meta),
            output_index=at,
            saved_index=at - num_fwd_outputs,
            placeholder_index=enters_at[placeholder],
            desc=descs[at],
            stack_trace=traces[at],
        )
        found[node.name] = SavedValue(node, placeholder, place)
    return found


def renumbered(descs: Sequence[Any], *, num_fwd_outputs: int) -> list[Any]:
    """Return the descriptors of outputs with those of saved ones numbered from 0, as torch's partitioners do."""
    return [
        replace(desc, idx=i - num_fwd_outputs)
        if isinstance(desc, (SavedForBackwardsAOTOutput, SavedForBackwardsNoVcCheckAOTOutput))
        else desc
        for i, desc in enumerate(descs)
    ]
