"""Train eager programs beside plain twins of theirs on the virtual device. A difference, a race or a leak raises."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from training import Outcome, assert_same_bits, fresh, is_finite, outcome

import graphoffload
from graphoffload._torch import saved_tensors_hooks_are_active
from graphoffload.planning.answers import Ledger
from graphoffload.planning.machine import Machine
from graphoffload.planning.plan import Action
from graphoffload.planning.policy import OffloadAll, Policy
from graphoffload.planning.values import Value
from graphoffload.runtime.keep import active
from graphoffload.runtime.stats import SavedTensorsStats
from graphoffload.testing import VirtualRun, check_log, virtual_device

EVERYTHING = OffloadAll(min_nbytes=0)
VIRTUAL = Machine.named("virtual")
OWNED = "it is the memory of a parameter or buffer"
CHANGED = "modified by an inplace operation"
STEPS = 3  # the first learns, the second follows, the third follows what followed

Step = Callable[[Any, Any], Any]
"""Run one training step of a model under a context, which may be entered often; return tensors to compare, if any."""


@dataclass(frozen=True)
class KeepsByItself:
    """Keep every value, asked about each: unlike KeepAll, which is known to keep, it makes the ledger see them all."""

    requests_offload = False

    def decide(self, value: Value, ledger: Ledger) -> Action:
        return Action.KEEP


@contextlib.contextmanager
def offloading(**options: Any) -> Iterator[VirtualRun]:
    """Run the block on a virtual device; at its end judge the log, the slots and the hooks (law 8)."""
    with virtual_device(**options) as device:
        yield device
        assert not saved_tensors_hooks_are_active()
        check_log(device)
        assert_empty(device)


def assert_empty(device: VirtualRun) -> None:
    """Raise unless every slot is gone and the host memory is free again (law 8)."""
    if device.stats().slots:
        gc.collect()  # an exception's traceback may still hold a graph
    stats = device.stats()
    assert (stats.slots, stats.host_nbytes) == (0, 0)


def same_as_plain(
    model: nn.Module,
    step: Step,
    *,
    policy: Policy = EVERYTHING,
    steps: int = STEPS,
    **options: Any,
) -> SavedTensorsStats:
    """Run steps of a model and of a copy of it, with and without a context; raise on any different bit in any step.

    Gradients start from nothing in each step, for some faults are wrong only in the first and others only in a later one.
    """
    plain, ours = fresh(model), fresh(model)
    context = graphoffload.saved_tensors(policy, model=ours, **options)
    for number in range(steps):
        want = _judged(plain, step, contextlib.nullcontext(), number)
        assert is_finite(want)
        assert_same_bits(_judged(ours, step, context, number), want)
    return context.stats()


def _judged(model: nn.Module, step: Step, context: Any, number: int) -> Outcome:
    torch.manual_seed(number)
    model.zero_grad(set_to_none=True)
    results = pytree.tree_leaves(step(model, context))
    found = outcome([leaf for leaf in results if isinstance(leaf, torch.Tensor)], module=model)
    # A step may have gradients of its own to show, instead of the model's.
    return {name.replace("output", "gradient or output"): one for name, one in found.items()}


@dataclass
class Moves:
    """Record what a runtime is asked to copy out: where each range begins, and its bytes."""

    ranges: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, device: VirtualRun) -> Moves:
        """Begin to record."""
        moves, offload = cls(), device.runtime.offload

        def recording(src: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            moves.ranges.append((src.data_ptr(), src.numel() * src.element_size()))
            return offload(src, *args, **kwargs)

        device.runtime.offload = recording  # type: ignore[method-assign]
        return moves

    @property
    def nbytes(self) -> list[int]:
        """List the bytes of each move, in order."""
        return [nbytes for _, nbytes in self.ranges]

    def of_memory(self, *tensors: torch.Tensor) -> int:
        """Count the bytes moved out of the storages of these tensors. They must have been alive all the time."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(
            nbytes
            for begin, nbytes in self.ranges
            if any(address <= begin < address + length for address, length in storages.items())
        )


def rows(seed: int, count: int = 4, width: int = 16) -> torch.Tensor:
    """Return a batch that asks for a gradient, always the same for a seed."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def saving(model: nn.Module | None = None, policy: Policy = EVERYTHING, **options: Any) -> graphoffload.saved_tensors:
    """Make a context that has learnt nothing from other tests."""
    return graphoffload.saved_tensors(policy, model=nn.Module() if model is None else model, **options)


def gradients(model: nn.Module) -> Outcome:
    """Copy the gradients of a model, and the rest that it may be judged by."""
    return outcome((), module=model)


def plain_gradients(model: nn.Module, *seeds: int) -> Outcome:
    """Return what plain eager adds up over the batches of these seeds."""
    twin = fresh(model)
    for seed in seeds:
        twin(rows(seed)).sum().backward()
    return gradients(twin)


def assert_saves_plainly() -> None:
    """Raise unless what is saved now is saved by autograd itself."""
    assert not saved_tensors_hooks_are_active()
    assert active() is None
    x = rows(0)
    assert x.sin().grad_fn._saved_self.data_ptr() == x.data_ptr()


def assert_next_step_is_right(context: graphoffload.saved_tensors, model: nn.Module, device: VirtualRun) -> None:
    """Train a step as if nothing had happened."""
    model.zero_grad()
    with context:
        loss = model(rows(9)).sum()
    loss.backward()
    assert_same_bits(gradients(model), plain_gradients(model, 9))
    del loss
    assert_saves_plainly()
    assert_empty(device)
