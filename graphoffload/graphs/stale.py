"""Does a plan belong to a pair? A plan can be saved and used later; then the pair may have become another."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from graphoffload.errors import StalePlanError
from graphoffload.graphs.places import SavedValue
from graphoffload.planning.plan import Plan


def refuse_stale(
    forward: fx.GraphModule, backward: fx.GraphModule, plan: Plan, saved: Mapping[str, SavedValue]
) -> None:
    """Raise StalePlanError, saying what is missing, when the plan's names are not the pair's."""
    steps = {half: _positions(module) for half, module in (("forward", forward), ("backward", backward))}
    missing: list[str] = []
    for transfer in plan.transfers:
        storage = plan.facts.storage_by_name.get(transfer.storage)
        if storage is None:
            missing.append(f"storage {transfer.storage}")
            continue
        names: dict[str, tuple[str, ...]] = {
            "forward": (transfer.carrier, transfer.offload_after, transfer.release_after),
            "backward": (transfer.reload_before, transfer.ready_before),
        }
        missing += [f"{half} node {name}" for half in names for name in names[half] if name not in steps[half]]
        missing += [f"saved value {name}" for name in storage.members if name not in saved]
        missing += [_changed(name, plan, saved[name]) for name in storage.members if name in saved]
        order = [steps["forward"].get(name, 0) for name in names["forward"]]
        order += [len(forward.graph.nodes) + steps["backward"].get(name, 0) for name in names["backward"]]
        if order != sorted(order):
            missing.append(f"order of {', '.join(dict.fromkeys(names['forward'] + names['backward']))}")
    found = list(dict.fromkeys(item for item in missing if item))
    if found:
        raise StalePlanError(
            f"the plan was made for another pair of graphs; this one lacks: {'; '.join(found[:8])}"
            f"{'; …' if len(found) > 8 else ''}. Make a new plan from this pair's facts"
        )


def _positions(module: fx.GraphModule) -> dict[str, int]:
    """Return the position of each node; placeholders share position 0, since nothing can come between two of them."""
    return {node.name: 0 if node.op == "placeholder" else i for i, node in enumerate(module.graph.nodes, 1)}


def _changed(name: str, plan: Plan, saved: SavedValue) -> str:
    """Say how a saved value differs from what the plan's facts say; empty if it does not, or where sizes are symbolic."""
    value, tensor = plan.facts.value_by_name.get(name), saved.node.meta.get("val")
    if value is None or not isinstance(tensor, torch.Tensor):
        return ""
    now = tuple(tensor.shape)
    same = len(now) == len(value.shape) and all(
        a == b for a, b in zip(value.shape, now, strict=True) if isinstance(a, int) and isinstance(b, int)
    )
    return "" if same else f"saved value {name} of shape {list(value.shape)} (here it is {list(now)})"
