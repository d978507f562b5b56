"""The FX transform: a function or module in, its plan, its rewritten graphs and a callable that trains out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from graphoffload.backend import OffloadPartitioner, lower
from graphoffload.capture import one_graph, with_own_code
from graphoffload.errors import UnsupportedGraphError
from graphoffload.options import Partitioner, read_options
from graphoffload.planning.machine import Machine
from graphoffload.planning.plan import Plan
from graphoffload.planning.policy import Policy


class _CapturedError(Exception):
    """Leave the first run of a compiled graph before it computes anything."""


class Transformed:
    """Hold what `transform` made: `plan`, the rewritten `forward` and `backward` GraphModules, and a callable that trains."""

    def __init__(
        self, plan: Plan, forward: fx.GraphModule, backward: fx.GraphModule, function: Callable[..., Any]
    ) -> None:
        self.plan = plan
        self.forward = forward
        self.backward = backward
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the rewritten graphs; outputs carry gradients."""
        return self._function(*args, **kwargs)


def transform(
    fn: Callable[..., Any],
    *inputs: Any,
    policy: Policy | None = None,
    machine: Machine | str | None = None,
    partitioner: str | Partitioner = "min_cut",
    timing: str = "roofline",
) -> Transformed:
    """Capture `fn` on example inputs as one graph, apply the policy, and return the graphs and a callable that runs them.

    `fn` is a function or module of which some output needs a gradient; nothing of it is executed by this call. The callable
    runs exactly the returned graphs (lowered by plain AOTAutograd); called with inputs that do not fit the capture it
    captures anew, as torch.compile does.

    Raises `UnsupportedGraphError` when `fn` is not one graph or saves nothing for backward; `UsageError` for bad arguments.
    """
    options = read_options(policy=policy, machine=machine, compiler="aot_eager", partitioner=partitioner, timing=timing)
    pairs: list[tuple[fx.GraphModule, fx.GraphModule, Plan]] = []
    capturing = True

    def capture_backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        partitioner = OffloadPartitioner(options, on_pair=lambda *pair: pairs.append(pair))
        compiled = lower(gm, example_inputs, options, partitioner)

        def run(*args: Any) -> Any:
            if capturing:
                raise _CapturedError
            return compiled(*args)

        return run

    function = torch.compile(with_own_code(fn), backend=capture_backend, fullgraph=True)
    try:
        with one_graph():
            function(*inputs)
    except _CapturedError:
        pass
    finally:
        capturing = False
    if not pairs:
        raise UnsupportedGraphError(
            "nothing to transform: no output of the function needs a gradient on these inputs, so there is no backward graph"
        )
    forward, backward, plan = pairs[0]
    return Transformed(plan, forward, backward, function)
