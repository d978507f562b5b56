"""Measure a machine: the speeds of the present accelerator and of its link, in a few seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from graphoffload.errors import MachineError
from graphoffload.ordering.events import COMPUTE, D2H, H2D
from graphoffload.planning.machine import Machine
from graphoffload.runtime.device import Device
from graphoffload.runtime.ops import runtime_for
from graphoffload.runtime.transfer import Runtime

_COPY_NBYTES = 256 << 20
_ROUNDS = 5
_DTYPES = ("bfloat16", "float16", "float32", "float64")


def measure_machine(device: object = None) -> Machine:
    """Measure `device`, by default the present accelerator, and return its `Machine`.

    Takes a few seconds, some 2 GiB of device memory and 512 MiB of pinned host memory, all given back. Each number is the
    median of several rounds, timed by the host around work that it waits for, so another program on the device shows in
    them. Rates are bytes or operations per second. No budgets are set. Raises `MachineError` without an accelerator, or
    where the device is too full.
    """
    where = _accelerator(device)
    runtime = runtime_for(where)
    torch.accelerator.synchronize(where)
    try:
        out, back, both = _link_rates(runtime)
        return Machine(
            name=_name(where),
            copy_latency_seconds=_copy_latency(runtime),
            step_seconds=_step_seconds(where),
            memory_bytes_per_second=_memory_rate(where),
            flops_per_second=_arithmetic_rates(where),
            d2h_bytes_per_second=out,
            h2d_bytes_per_second=back,
            duplex_bytes_per_second=both,
        )
    except torch.OutOfMemoryError as error:
        message = f"cannot measure {where}: its memory is too full; free about 2 GiB, or give the numbers yourself"
        raise MachineError(message) from error
    finally:
        runtime.trim()


def _accelerator(device: object) -> torch.device:
    present = torch.accelerator.current_accelerator(check_available=True)
    if device is None and present is not None:
        return torch.device(present.type, torch.accelerator.current_device_index())
    if present is None:
        raise MachineError(
            "there is no accelerator here to measure; measure on the machine that trains and save machine.to_json(), "
            'or take a named one such as Machine.named("h200"), or give the numbers: Machine(name=..., ...)'
        )
    try:
        where = torch.device(device)  # type: ignore[call-overload]  # whatever the user gave; checked here
    except (RuntimeError, TypeError) as error:
        raise MachineError(
            f"{device!r} is not a device; give one such as {present.type!r} or '{present.type}:0'"
        ) from error
    if where.type != present.type:
        raise MachineError(f"{device!r} is not an accelerator; the one here is {present.type!r}")
    count = torch.accelerator.device_count()
    index = torch.accelerator.current_device_index() if str(where) == where.type else where.index
    if index >= count:
        raise MachineError(f"there is no device {where}; this machine has {count} of them")
    return torch.device(where.type, index)


def _name(where: torch.device) -> str:
    module = torch.get_device_module(where)
    name = module.get_device_name(where) if hasattr(module, "get_device_name") else ""
    return str(name) or where.type


def _seconds(where: torch.device, work: Callable[[], object], *, rounds: int = _ROUNDS) -> float:
    """Return the median time of `work`, the wait for its end included, after one round that does not count."""
    times = []
    for _ in range(rounds + 1):
        torch.accelerator.synchronize(where)
        start = time.perf_counter()
        work()
        torch.accelerator.synchronize(where)
        times.append(time.perf_counter() - start)
    return max(statistics.median(times[1:]), 1e-9)


def _link_rates(runtime: Runtime) -> tuple[float, float, float]:
    """Return bytes per second out, back, and both ways at once in total."""
    device = runtime.device
    source, target = (torch.empty(_COPY_NBYTES, dtype=torch.uint8, device=device.device) for _ in range(2))
    # Slots, so that it is the memory of the real transfers that is measured; they end with these tensors.
    out, back = (runtime.offload(source, "measure") for _ in range(2))
    for host in (out, back):
        runtime.release(host, wait=True)

    def leave() -> None:
        _copy(device, D2H, out, source)

    def come() -> None:
        _copy(device, H2D, target, back)

    def both() -> None:
        leave()
        come()

    where = device.device
    return (
        _COPY_NBYTES / _seconds(where, leave),
        _COPY_NBYTES / _seconds(where, come),
        2 * _COPY_NBYTES / _seconds(where, both),
    )


def _copy(device: Device, stream: str, dest: torch.Tensor, src: torch.Tensor) -> None:
    device.wait(stream, device.record(COMPUTE))
    device.copy(stream, dest, src)
    device.wait(COMPUTE, device.record(stream))


def _copy_latency(runtime: Runtime) -> float:
    """Return the fixed cost of one copy on its stream: many small ones in a row, divided."""
    device = runtime.device
    small, many = 512, 200
    source = torch.empty(small * many, dtype=torch.uint8, device=device.device)
    host = runtime.offload(source, "measure")
    runtime.release(host, wait=True)
    cuts = range(small, small * many, small)

    def copies() -> None:
        device.wait(D2H, device.record(COMPUTE))
        device.copy(D2H, host, source, cuts=cuts)
        device.wait(COMPUTE, device.record(D2H))

    return _seconds(device.device, copies) / many


def _step_seconds(where: torch.device) -> float:
    """Return the fixed cost of one kernel: many tiny ones in a row, divided."""
    tensor = torch.zeros(1, device=where)
    many = 500

    def kernels() -> None:
        for _ in range(many):
            tensor.add_(1)

    return _seconds(where, kernels) / many


def _memory_rate(where: torch.device) -> float:
    """Return the rate of a copy inside device memory, reads plus writes."""
    source, target = (torch.empty(1 << 29, dtype=torch.uint8, device=where) for _ in range(2))
    repeats = 10

    def copies() -> None:
        for _ in range(repeats):
            target.copy_(source)

    return 2 * repeats * source.numel() / _seconds(where, copies)


def _arithmetic_rates(where: torch.device) -> tuple[tuple[str, float], ...]:
    """Return the rate of square matrix products for each dtype that the device multiplies; multiply and add count apart."""
    rates = {}
    for name in _DTYPES:
        side = 4096 if name in ("bfloat16", "float16") else 2048
        try:
            one = torch.randn(side, side, device=where).to(getattr(torch, name))
            one @ one
        except (RuntimeError, TypeError, NotImplementedError):
            continue  # a device without this dtype
        repeats = 10

        def products(one: torch.Tensor = one, repeats: int = repeats) -> None:
            for _ in range(repeats):
                one @ one

        rates[name] = 2 * side**3 * repeats / _seconds(where, products)
    if not rates:
        raise MachineError(f"cannot measure {where}: it multiplies matrices of none of {', '.join(_DTYPES)}")
    return tuple(sorted(rates.items()))
