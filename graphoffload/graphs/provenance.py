"""Read out of node metadata where a value comes from, for people and for policies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any

from torch.fx import Node

_PACKAGE = str(Path(__file__).parents[1])
_FRAME = re.compile(r'File "([^"]*)", line (\d+)')
_GETATTR = re.compile(r"getattr\(([^()]*), *['\"]([^'\"]*)['\"]\)")
_ROOT = re.compile(r"^[LG]\[['\"][^'\"]*['\"]\]\.?")
_INDEX = re.compile(r"\[['\"]?([^\]'\"]*)['\"]?\]")
_NOISE = re.compile(r"\._modules(?=\.|$)|\._orig_mod(?=\.|$)|\._checkpoint_wrapped_module(?=\.|$)")


def module_path(nodes: Iterable[Node]) -> str:
    """Return the path of the innermost module that made the first of `nodes` that knows: `model.layers.0.mlp`."""
    for node in nodes:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        if stack:
            entry = list(stack.values())[-1]
            path = clean_path(entry[0] if isinstance(entry, tuple) else str(entry))
            if path:  # the model itself, which stands in the stack only where a function calls it, says nothing
                return path
    return ""


def clean_path(path: str) -> str:
    """Return a module path as its owner would write it: no `L['self']`, `_modules`, `getattr` or brackets."""
    while (plain := _GETATTR.sub(r"\1.\2", path)) != path:
        path = plain
    path = _ROOT.sub("", path, count=1)
    path = _NOISE.sub("", "." + _INDEX.sub(r".\1", path))
    return re.sub(r"\.{2,}", ".", path).strip(".")


def source_line(nodes: Iterable[Node]) -> str:
    """Return `file.py:123` of the innermost frame, not one of this package, of the first of `nodes` that knows."""
    for node in nodes:
        found = _FRAME.findall(node.meta.get("stack_trace") or "")
        # transform() and explain() call the user's program from a frame of ours.
        frames = [(path, line) for path, line in found if not path.startswith(_PACKAGE)]
        if frames:
            path, line = frames[-1]
            return f"{PurePath(path).name}:{line}"
    return ""


def label(nodes: Iterable[Node]) -> str:
    """Return the name that the user gave (`torch.fx.traceback.annotate({"name": ...})`)."""
    for node in nodes:
        name = (node.meta.get("custom") or {}).get("name")
        if name:
            return str(name)
    return ""


def region(nodes: Iterable[Node]) -> int | None:
    """Return the number of the recomputation region that a value was made in."""
    return next((int(node.meta["ac_graph_id"]) for node in nodes if "ac_graph_id" in node.meta), None)


def tag(nodes: Iterable[Node]) -> str | None:
    """Return the name of the `CheckpointPolicy` that the user's code put on a value.

    A MUST_SAVE outside any region is the partitioner's own note, not the user's.
    """
    for node in nodes:
        policy: Any = node.meta.get("recompute")
        name = getattr(policy, "name", None)
        if name is not None and not (name == "MUST_SAVE" and "ac_graph_id" not in node.meta):
            return str(name)
    return None
