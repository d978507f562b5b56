"""Train through plain AOTAutograd with a partition function of the test's own, and compare with eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._functorch.aot_autograd import aot_module_simplified

PartitionFn = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def backend_with(partition_fn: PartitionFn) -> Callable[..., Any]:
    """Return a torch.compile backend that runs the partitioned graphs as they are, in Python."""

    def boxed(module: fx.GraphModule, _: Sequence[Any]) -> Any:
        return make_boxed_func(module.forward)

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return aot_module_simplified(
            module,
            example_inputs,
            fw_compiler=boxed,
            bw_compiler=boxed,
            inference_compiler=boxed,
            partition_fn=partition_fn,
        )

    return backend


def step(run: Callable[..., Any], module: nn.Module, inputs: Sequence[Any], *, seed: int = 7) -> dict[str, Any]:
    """Run forward and backward once; return the loss, all gradients, all buffers and the random state by name."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]
    torch.manual_seed(seed)
    loss = run(*leaves)
    loss.backward()
    found: dict[str, Any] = {"loss": loss.detach()}
    found |= {f"gradient of {name}": parameter.grad for name, parameter in module.named_parameters()}
    found |= {f"gradient of input {i}": x.grad for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
    found["random state"] = torch.get_rng_state()
    found |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    return found


def assert_trains_as_eager(
    module: nn.Module, inputs: Sequence[Any], partition_fn: PartitionFn, *, steps: int = 1, dynamic: bool | None = None
) -> None:
    """Raise unless each compiled step gives what eager gives, to the bit: loss, gradients, buffers and random state."""
    plain, other = copy.deepcopy(module), copy.deepcopy(module)
    torch._dynamo.reset()
    compiled = torch.compile(other, backend=backend_with(partition_fn), fullgraph=True, dynamic=dynamic)
    try:
        for number in range(steps):
            want, have = step(plain, plain, inputs, seed=number), step(compiled, other, inputs, seed=number)
            different = [name for name in want if not _same(have[name], want[name])]
            assert not different, f"step {number}: {different} differ from eager"
            assert any(name.startswith("gradient") and value is not None for name, value in want.items())
    finally:
        torch._dynamo.reset()


def _same(have: torch.Tensor | None, want: torch.Tensor | None) -> bool:
    if have is None or want is None:
        return have is want
    return have.shape == want.shape and have.dtype == want.dtype and torch.equal(have, want)
