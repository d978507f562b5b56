"""What was compiled, and by whom: so that a compiled model can be asked for the plans it runs.

One weak map from the object whose code was traced (a module, or a function's code) to its compiled graphs. A compiled graph
is owned by the function that Dynamo caches; when that goes, so does the entry. Nothing here keeps anything alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from graphoffload._torch import traced_owner
from graphoffload.errors import UsageError
from graphoffload.planning.plan import Plan


class Compiled:
    """Run one compiled graph, and hold its plans and the runtimes they use."""

    def __init__(self, function: Callable[..., Any], plans: tuple[Plan, ...], runtimes: tuple[Any, ...]) -> None:
        self.function = function
        self.plans = plans
        self.runtimes = runtimes

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        return self.function(*args)


_compiled_of: weakref.WeakKeyDictionary[Any, list[weakref.ref[Compiled]]] = weakref.WeakKeyDictionary()


def remember(compiled: Compiled) -> Compiled:
    """Enter a compiled graph under the object that Dynamo is tracing; without one, it is just returned."""
    for owner in traced_owner() or ():
        if owner is None:
            continue
        alive = [entry for entry in _compiled_of.get(owner, ()) if entry() is not None]
        _compiled_of[owner] = [*alive, weakref.ref(compiled)]
    return compiled


def plans(compiled: Any) -> tuple[Plan, ...]:
    """Return the plans that a compiled model or function runs, in order of compilation.

    `compiled` is what `torch.compile` returned, or the module whose `compile()` was called. Graphs compiled for submodules
    count. Empty before the first call. Raises `UsageError` for anything else.
    """
    original = getattr(compiled, "_orig_mod", compiled)
    if isinstance(original, torch.nn.Module):
        owners = [_owner(module) for module in original.modules()]
    else:
        function = getattr(original, "_torchdynamo_orig_callable", original)
        code = getattr(function, "__code__", None)
        if code is None:
            raise UsageError(
                f"plans() takes a compiled model or function, or a compiled module; this is a {type(compiled).__name__}"
            )
        owners = [code]
    found = [entry() for owner in owners for entry in _compiled_of.get(owner, ())]
    return tuple(plan for one in found if one is not None for plan in one.plans)


def _owner(module: torch.nn.Module) -> Any:
    """Return the module if graphs were compiled for it, else its code: Dynamo runs one graph for all modules of a class."""
    return module if module in _compiled_of else getattr(type(module).forward, "__code__", module)
