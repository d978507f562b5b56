"""Test programs that offload, with or without a GPU.

`virtual_device` stands in for a device on the CPU and makes every missing wait show; `assert_same_gradients` compares a
compiled program with the plain one, to the bit; `check_log` judges what the runtime did; `slow_copies` upsets the timing of
a real device. All of them raise when something is wrong.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from graphoffload._torch import pytree, sleep_on_device
from graphoffload.errors import UsageError
from graphoffload.ordering.check import assert_ordered
from graphoffload.ordering.events import Event
from graphoffload.runtime import ops
from graphoffload.runtime.stats import TransferStats
from graphoffload.runtime.transfer import Runtime
from graphoffload.runtime.virtual import Ledger, VirtualDevice

__all__ = ["VirtualRun", "assert_same_gradients", "check_log", "slow_copies", "virtual_device"]


class VirtualRun:
    """Show what happened on an installed virtual device."""

    def __init__(self, runtime: Runtime, ledger: Ledger) -> None:
        self.runtime = runtime
        self.ledger = ledger

    @property
    def log(self) -> tuple[Event, ...]:
        """Return the runtime's own events so far, in the order of issue; empty without recording."""
        return tuple(self.runtime.log.events) if self.runtime.log is not None else ()

    @property
    def peak_nbytes(self) -> int:
        """Return the most device bytes that were alive while a graph node ran."""
        return self.ledger.peak_nbytes

    def stats(self) -> TransferStats:
        """Return the runtime's counts."""
        return self.runtime.stats()


@contextlib.contextmanager
def virtual_device(
    *, in_flight_nbytes: int | None = None, host_budget_nbytes: int | None = None, recording: bool = True
) -> Iterator[VirtualRun]:
    """Make CPU tensors count as being on a device, inside the block.

    Copies run at the latest moment that the waits allow, and memory with undefined contents is poisoned, so that a missing
    wait gives NaN every time. Programs that run through `graphoffload.runtime.interpret` (`compiler="aot_eager"`) also fill
    the ledger, node by node. Not for nesting in threads: the device is installed for the process.
    """
    ledger = Ledger()
    runtime = Runtime(
        VirtualDevice(ledger=ledger),
        in_flight_nbytes=in_flight_nbytes,
        host_budget_nbytes=host_budget_nbytes,
        recording=recording,
    )
    with ops.installed("cpu", runtime):
        try:
            yield VirtualRun(runtime, ledger)
        finally:
            # Values that live on, say in a graph whose backward has not run, are right outside the block too.
            runtime.synchronize()


def check_log(log: Sequence[Event] | VirtualRun | Runtime) -> None:
    """Raise `OrderingError` if the runtime's own events have a race; `UsageError` if nothing was recorded."""
    if isinstance(log, VirtualRun):
        log = log.runtime
    if isinstance(log, Runtime):
        if log.log is None:
            raise UsageError("this runtime has no log; make it with recording=True")
        log = log.log.events
    assert_ordered(tuple(log), program="the runtime's log")


def assert_same_gradients(
    model: Callable[..., Any], compiled: Callable[..., Any], *inputs: Any, steps: int = 1, seed: int = 0
) -> None:
    """Raise `AssertionError` unless two programs give the same outputs, gradients and buffers, to the bit.

    `model` and `compiled` are modules or functions; a compiled module may share its parameters with the plain one.
    Each step seeds torch, runs the program, and runs backward from a weighted sum of the outputs that need gradients.
    Gradients add up over `steps`, so that a fault of a later step shows as well as one of the first. Both run on copies of
    the inputs and start from the same parameters and buffers, which are put back between the runs and at the end. NaNs in
    the same places count as equal; dtype, shape and stride must be equal too. The error names what differs.
    """
    state = _State(model, compiled)
    try:
        plain = _run(model, model, inputs, steps=steps, seed=seed)
        state.restore()
        other = _run(compiled, model, inputs, steps=steps, seed=seed)
    finally:
        state.restore()
    if plain.keys() != other.keys():
        odd = sorted(plain.keys() ^ other.keys())
        raise AssertionError(f"only one of the two programs has {', '.join(odd)}")
    different = [text for name in plain if (text := _difference(name, plain[name], other[name]))]
    if different:
        raise AssertionError("the programs differ:\n" + "\n".join(different))


@contextlib.contextmanager
def slow_copies(
    runtime_or_device: Runtime | torch.device | str, *, seed: int, max_seconds: float = 0.002
) -> Iterator[None]:
    """Put a delay of random length before each copy, on its stream, inside the block.

    On a CUDA device the copy stream sleeps; the host does not. `seed` fixes the delays. `max_seconds` is taken at a clock of
    2 GHz, so it is rough. On the virtual device, whose copies are late in any case, nothing changes.
    """
    runtime = runtime_or_device if isinstance(runtime_or_device, Runtime) else ops.runtime_for(runtime_or_device)
    chance = random.Random(seed)

    def sleep(_stream: str) -> None:
        cycles = int(chance.random() * max_seconds * 2e9)
        if runtime.device.device.type == "cuda" and cycles:
            sleep_on_device(cycles)  # type: ignore[no-untyped-call]

    before = runtime.device.before_copy
    runtime.device.before_copy = sleep
    try:
        yield
    finally:
        runtime.device.before_copy = before


class _State:
    """Remember the parameters, buffers and gradients of the modules among the programs, and put them back."""

    def __init__(self, *programs: Callable[..., Any]) -> None:
        tensors: dict[int, torch.Tensor] = {}
        for program in programs:
            if isinstance(program, torch.nn.Module):
                for tensor in (*program.parameters(), *program.buffers()):
                    tensors[id(tensor)] = tensor
        self._tensors = list(tensors.values())
        self._contents = [tensor.detach().clone() for tensor in self._tensors]
        self._gradients = [tensor.grad for tensor in self._tensors]
        self._clear()

    def _clear(self) -> None:
        for tensor in self._tensors:
            tensor.grad = None

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for tensor, contents, gradient in zip(self._tensors, self._contents, self._gradients, strict=True):
                if not _equal(tensor, contents):
                    tensor.copy_(contents)
                tensor.grad = gradient


def _run(
    program: Callable[..., Any], named: Callable[..., Any], inputs: tuple[Any, ...], *, steps: int, seed: int
) -> dict[str, torch.Tensor]:
    """Run the steps; return everything that can be compared, by name."""
    module = program if isinstance(program, torch.nn.Module) else named
    results: dict[str, torch.Tensor] = {}
    for tensor in module.parameters() if isinstance(module, torch.nn.Module) else ():
        tensor.grad = None
    args = pytree.tree_map_only(torch.Tensor, _copy, inputs)
    for step in range(steps):
        torch.manual_seed(seed + step)
        outputs = [leaf for leaf in pytree.tree_leaves(program(*args)) if isinstance(leaf, torch.Tensor)]
        results.update({f"output {index} of step {step}": leaf.detach().clone() for index, leaf in enumerate(outputs)})
        trained = [leaf for leaf in outputs if leaf.requires_grad]
        if trained:
            # In double precision the loss itself adds no rounding of its own kind.
            sums = [
                (leaf.abs() if leaf.is_complex() else leaf).double().sum() * (index + 1)
                for index, leaf in enumerate(trained)
            ]
            loss = torch.stack(sums).sum()
            results[f"loss of step {step}"] = loss.detach().clone()
            loss.backward()  # type: ignore[no-untyped-call]
        del outputs, trained
    for index, leaf in enumerate(pytree.tree_leaves(args)):
        if isinstance(leaf, torch.Tensor):
            results[f"input {index}"] = leaf.detach()
            if leaf.grad is not None:
                results[f"gradient of input {index}"] = leaf.grad
    results.update(_module_results(module))
    return results


def _module_results(module: Callable[..., Any]) -> dict[str, torch.Tensor]:
    if not isinstance(module, torch.nn.Module):
        return {}
    plain = getattr(module, "_orig_mod", module)  # what torch.compile wraps; its names are those of the plain module
    results = {f"gradient of {name}": p.grad for name, p in plain.named_parameters() if p.grad is not None}
    results.update({f"buffer {name}": buffer.detach().clone() for name, buffer in plain.named_buffers()})
    return results


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    if 0 in tensor.stride():
        copy = tensor.detach().clone()
    with torch.no_grad():
        copy.copy_(tensor)
    return copy.requires_grad_(tensor.requires_grad)


def _equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.is_floating_point() and one.element_size() == 1:
        one, two = one.float(), two.float()  # exact, and torch compares no 8-bit floats
    if one.is_floating_point() or one.is_complex():
        same = (one == two) | ((one != one) & (two != two))
        return bool(same.all())
    return torch.equal(one, two)


def _difference(name: str, plain: torch.Tensor, other: torch.Tensor) -> str:
    """Say how two tensors differ; an empty string if they do not."""
    for what in ("dtype", "shape", "device"):
        if getattr(plain, what) != getattr(other, what):
            return f"{name}: {what} {getattr(plain, what)} against {getattr(other, what)}"
    if plain.layout is torch.strided and plain.stride() != other.stride():
        return f"{name}: stride {plain.stride()} against {other.stride()}"
    if _equal(plain, other):
        return ""
    wrong = (plain != other) & ~((plain != plain) & (other != other))
    nans = int((other != other).sum()) - int((plain != plain).sum())
    first = tuple(int(index) for index in wrong.nonzero()[0])
    text = f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ, first at {first}: "
    text += f"{plain[first].item()} against {other[first].item()}"
    return text + (
        f"; {nans} more NaNs, the mark of memory that was read too early or released too soon" if nans > 0 else ""
    )
