"""Run the same step plainly and under the hooks on the virtual device, and compare to the bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensor_kinds import bits, numbers
from torch import nn
from torch.distributed.tensor import DTensor

import graphoffload
from graphoffload.planning.policy import OffloadAll
from graphoffload.runtime.stats import SavedTensorsStats
from graphoffload.testing import check_log, virtual_device

EVERYTHING = OffloadAll(min_nbytes=0)
Leaves = Sequence[torch.Tensor]


class Recorded(torch.autograd.Function):
    """Double the first argument; save the tensors, and in backward hand them to `see`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, see: Callable[[torch.Tensor], None], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.see = see
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        for tensor in saved:
            ctx.see(tensor)
        return gradient * 2, None, *(None for _ in saved)


def gradient_bits(leaf: torch.Tensor) -> bytes | None:
    gradient = leaf.grad
    if gradient is None:
        return None
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()
    elif gradient.layout is torch.jagged:
        gradient = gradient.values()
    elif gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    return bits(gradient)


def trained(make: Callable[[], Leaves], forward: Callable[..., torch.Tensor], context: Any) -> list[bytes | None]:
    """Run one step and return the bits of the loss and of the leaves' gradients."""
    torch.manual_seed(0)
    leaves = make()
    with context:
        loss = forward(*leaves)
    loss.backward()
    gradients = [gradient_bits(leaf) for leaf in leaves if leaf.requires_grad and leaf.is_leaf]
    assert any(gradients)
    return [bits(loss), *gradients]


def same_as_plain(
    make: Callable[[], Leaves], forward: Callable[..., torch.Tensor], *, model: nn.Module | None = None
) -> SavedTensorsStats:
    """Check that each of three steps on the virtual device gives the plain run's bits; return what was counted."""
    plain = trained(make, forward, contextlib.nullcontext())
    with virtual_device() as device:
        # What is learnt belongs to the model: each test has its own.
        context = graphoffload.saved_tensors(EVERYTHING, model=model or nn.Identity())
        for step in range(3):
            if model is not None:
                model.zero_grad()
            assert trained(make, forward, context) == plain, f"step {step}"
        check_log(device)
        return context.stats()


def seen_in_backward(
    make: Callable[[], torch.Tensor], see: Callable[[torch.Tensor], Any]
) -> tuple[Any, list[Any], SavedTensorsStats]:
    """Return what backward sees of a saved tensor in the plain run, at each of three steps under the hooks, and the counts."""
    seen: list[Any] = []

    def forward(x: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = Recorded.apply(x.sin(), lambda saved: seen.append(see(saved)), tensor)
        return doubled.sum()

    stats = same_as_plain(lambda: (numbers(8).requires_grad_(), make()), forward)
    return seen[0], seen[1:], stats


def reasons(stats: SavedTensorsStats) -> set[str]:
    return set(stats.kept_nbytes_by_reason)
