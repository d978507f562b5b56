"""Make real partitioned pairs: what Dynamo and AOTAutograd hand to a partitioner, cut in two by one of torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from functorch.compile import default_partition, make_boxed_func, min_cut_rematerialization_partition
from torch._functorch.aot_autograd import aot_module_simplified

from graphoffload.graphs.facts import gather_facts
from graphoffload.planning.values import Facts

Partition = Literal["default", "min_cut"]


@dataclass(frozen=True)
class Pair:
    """Hold one partitioned pair as the partitioner returned it, before any lowering.

    `static_input_indices` are the forward placeholders whose memory lives on across steps: parameters and buffers.
    `joint` is the graph that was cut.
    """

    joint: torch.fx.GraphModule
    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    num_fwd_outputs: int
    static_input_indices: tuple[int, ...]


def capture(
    subject: Callable[..., Any] | torch.nn.Module,
    *inputs: Any,
    partition: Partition = "default",
    dynamic: bool = False,
    decompositions: dict[Any, Callable[..., Any]] | None = None,
    mutations_in_graph: bool = False,
    **kwargs: Any,
) -> Pair:
    """Return the one pair of a function or module, as `torch.compile(fullgraph=True)` meets it. The subject runs once.

    `mutations_in_graph` leaves the writes to arguments in the graph as `copy_` nodes, as Inductor asks for.

    Raises AssertionError where the call needs no backward or makes more than one pair.
    """
    pairs = capture_all(
        subject,
        *inputs,
        partition=partition,
        dynamic=dynamic,
        decompositions=decompositions,
        fullgraph=True,
        mutations_in_graph=mutations_in_graph,
        **kwargs,
    )
    assert len(pairs) == 1, f"expected one pair, got {len(pairs)}: does any input require grad?"
    return pairs[0]


def capture_all(
    subject: Callable[..., Any] | torch.nn.Module,
    *inputs: Any,
    partition: Partition = "default",
    dynamic: bool = False,
    decompositions: dict[Any, Callable[..., Any]] | None = None,
    fullgraph: bool = False,
    mutations_in_graph: bool = False,
    **kwargs: Any,
) -> list[Pair]:
    """Return every pair that one call makes, in order of capture (several where the graph breaks)."""
    split = {"default": default_partition, "min_cut": min_cut_rematerialization_partition}[partition]
    pairs: list[Pair] = []

    def partition_fn(joint: torch.fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> tuple[Any, Any]:
        before = torch.fx.GraphModule(joint, joint.graph.__class__())
        before.graph.output(before.graph.graph_copy(joint.graph, {}))
        forward, backward = split(joint, joint_inputs, **options)
        static = options.get("static_lifetime_input_indices") or ()
        pairs.append(Pair(before, forward, backward, options["num_fwd_outputs"], tuple(static)))
        return forward, backward

    def boxed(module: torch.fx.GraphModule, _: Sequence[Any]) -> Any:
        return make_boxed_func(module.forward)

    def backend(module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return aot_module_simplified(
            module,
            example_inputs,
            fw_compiler=boxed,
            bw_compiler=boxed,
            inference_compiler=boxed,
            partition_fn=partition_fn,
            decompositions=decompositions,
            keep_inference_input_mutations=mutations_in_graph,
        )

    torch._dynamo.reset()
    try:
        torch.compile(subject, backend=backend, fullgraph=fullgraph, dynamic=dynamic or None)(*inputs, **kwargs)
    finally:
        torch._dynamo.reset()
    return pairs


def facts_of(pair: Pair, *, fused: bool = False, on_device: Callable[[torch.device], bool] | None = None) -> Facts:
    """Return the facts of a pair, on the CPU unless said otherwise."""
    return gather_facts(
        pair.forward,
        pair.backward,
        num_fwd_outputs=pair.num_fwd_outputs,
        static_inputs=pair.static_input_indices,
        on_device=on_device or (lambda device: device.type == "cpu"),
        fused=fused,
    )
