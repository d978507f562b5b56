"""Use the pass in a compiler of your own: partition a joint graph, rewrite the pair, run it as you like.

Runs on the virtual device.
"""

from collections.abc import Sequence
from typing import Any

import torch
from functorch.compile import aot_module, default_partition, make_boxed_func

import graphoffload
from graphoffload import policies
from graphoffload.testing import virtual_device


def partition(joint: torch.fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **options: Any) -> Any:
    """Split with torch's default partitioner, then offload."""
    forward, backward = default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
    forward, backward, plan = graphoffload.offload_pair(
        forward,
        backward,
        num_fwd_outputs=num_fwd_outputs,
        policy=policies.OffloadAll(min_nbytes=0),
        static_inputs=options.get("static_lifetime_input_indices") or (),
    )
    print(plan)
    print(forward.print_readable(print_output=False))
    return forward, backward


def run_as_is(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Any:
    """Stand for your compiler: it receives the rewritten graphs."""
    return make_boxed_func(graph.forward)


def main() -> None:
    """Compile a small model and train one step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 32))
    with virtual_device():
        compiled = aot_module(model, fw_compiler=run_as_is, bw_compiler=run_as_is, partition_fn=partition)
        compiled(torch.randn(16, 32)).square().mean().backward()


if __name__ == "__main__":
    main()
