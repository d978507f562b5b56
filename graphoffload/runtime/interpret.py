"""Run a graph node by node, freeing each value after its last use, and tell the virtual device's ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphoffload._torch import FakeTensor, pytree
from graphoffload.runtime.ops import virtual_runtime
from graphoffload.runtime.virtual import Ledger


class LedgerInterpreter(fx.Interpreter):
    """Interpret a graph; after each node, while what the node used is still alive, tick the ledger if there is one."""

    def __init__(self, module: fx.GraphModule, *, ledger: Ledger | None) -> None:
        super().__init__(module)
        self.ledger = ledger
        self.extra_traceback = False  # an error of the program should look as it does in compiled code

    def run_node(self, n: fx.Node) -> Any:
        """Run the node, then tick: inputs that die here still count, as they do while a kernel runs."""
        result = super().run_node(n)
        if self.ledger is not None and n.op == "call_function":
            self.ledger.tick(n.name, _tensors(result))
        return result


def boxed(graph_module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return a callable that takes a list of inputs, empties it, and runs the graph.

    No reference to an input or an intermediate value outlives its last use in the graph.
    """

    def run(args: list[Any]) -> Any:
        # Fake tensors, which `explain` runs, take no memory: there is nothing to measure, even on a virtual device.
        runtime = None if any(isinstance(arg, FakeTensor) for arg in args) else virtual_runtime()
        ledger = getattr(runtime.device, "ledger", None) if runtime is not None else None
        if ledger is not None:
            ledger.tick("inputs", _tensors(args))
        return LedgerInterpreter(graph_module, ledger=ledger).boxed_run(args)

    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd then passes a list, and keeps no reference itself
    return run


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
