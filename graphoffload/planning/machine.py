"""Machines: speeds and budgets, numbers only."""

from __future__ import annotations

import importlib
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, replace

from graphoffload.errors import MachineError, UsageError
from graphoffload.planning import wire
from graphoffload.planning.sizes import parse_nbytes

_RATES = ("d2h_bytes_per_second", "h2d_bytes_per_second", "memory_bytes_per_second")
_TIMES = ("copy_latency_seconds", "step_seconds")
_BUDGETS = ("host_budget_nbytes", "in_flight_nbytes")

IN_FLIGHT_NBYTES = 4 << 30
"""The bound on bytes in flight where nobody gave one: 80 ms of copying at 55 GB/s, more than the pause between two graphs of a
step, so that a release at the end of a graph does not stall, and little beside the memory of a device that trains."""


@dataclass(frozen=True)
class Machine:
    """Hold the speeds and budgets that a plan is made for.

    d2h_bytes_per_second, h2d_bytes_per_second: what one pinned copy each way reaches alone.
    duplex_bytes_per_second: both ways at once, in total; None: the two ways do not slow each other.
    memory_bytes_per_second: device memory, reads plus writes.
    flops_per_second: (dtype name, FLOP/s) pairs, such as ("bfloat16", 8e14); a dict is taken too. Multiply and add count
    separately.
    copy_latency_seconds: fixed cost of one copy. step_seconds: fixed cost of one kernel.
    host_budget_nbytes: most bytes on the host at one time; None: no bound. 0: nothing may be offloaded.
    in_flight_nbytes: most bytes that may be on their way out while nothing but the copy still needs them; None:
    `IN_FLIGHT_NBYTES`. The planner may choose less; the runtime bounds its in-flight queue by it.

    Budgets take bytes or strings such as "64GiB". Raises `MachineError` for impossible numbers, naming the field.
    """

    name: str
    d2h_bytes_per_second: float
    h2d_bytes_per_second: float
    memory_bytes_per_second: float
    flops_per_second: tuple[tuple[str, float], ...]
    copy_latency_seconds: float = 5e-6
    step_seconds: float = 3e-6
    duplex_bytes_per_second: float | None = None
    host_budget_nbytes: int | None = None
    in_flight_nbytes: int | None = None

    def __post_init__(self) -> None:
        name: object = self.name
        if not isinstance(name, str) or not name:
            raise MachineError(f"Machine.name is {name!r}; give a name, such as 'my-workstation'")
        for field in _RATES:
            self._set(field, _rate(getattr(self, field), field))
        for field in _TIMES:
            self._set(field, _time(getattr(self, field), field))
        if self.duplex_bytes_per_second is not None:
            self._set("duplex_bytes_per_second", _rate(self.duplex_bytes_per_second, "duplex_bytes_per_second"))
        self._set("flops_per_second", _arithmetic(self.flops_per_second))
        for field in _BUDGETS:
            budget = getattr(self, field)
            if budget is not None:
                self._set(field, parse_nbytes(budget, what=f"Machine.{field}", error=MachineError))

    def _set(self, field: str, number: object) -> None:
        # The one place where a frozen value is written: numbers are brought to one form before anybody can see them.
        object.__setattr__(self, field, number)

    def flops_for(self, dtype: str) -> float:
        """Return the arithmetic rate for a dtype in FLOP/s; the slowest known one for a dtype that is not listed."""
        for name, rate in self.flops_per_second:
            if name == dtype:
                return rate
        return min(rate for _, rate in self.flops_per_second)

    @property
    def both_ways_factor(self) -> float:
        """Return the fraction of its speed, in (0, 1], that each way of the link keeps while both are busy."""
        if self.duplex_bytes_per_second is None:
            return 1.0
        return min(1.0, self.duplex_bytes_per_second / (self.d2h_bytes_per_second + self.h2d_bytes_per_second))

    @property
    def in_flight_bound(self) -> int:
        """Return the most bytes in flight: the budget if there is one, else `IN_FLIGHT_NBYTES`."""
        return IN_FLIGHT_NBYTES if self.in_flight_nbytes is None else self.in_flight_nbytes

    def with_budgets(self, *, host_budget: int | str | None = None, in_flight: int | str | None = None) -> Machine:
        """Return this machine with other budgets (bytes or strings such as "64GiB"); None leaves a budget as it is."""
        changes: dict[str, object] = {}
        if host_budget is not None:
            changes["host_budget_nbytes"] = host_budget
        if in_flight is not None:
            changes["in_flight_nbytes"] = in_flight
        return replace(self, **changes)  # type: ignore[arg-type]  # __post_init__ reads the strings

    def to_json(self, *, indent: int | None = None) -> str:
        """Write the machine as JSON. Law 3: `Machine.from_json(machine.to_json()) == machine`."""
        return wire.to_json(self, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """Read what `to_json` wrote. Raises `UsageError` for anything else."""
        return wire.from_json(cls, text)

    @classmethod
    def named(cls, name: str) -> Machine:
        """Return a machine by name: "h200", "generic" or "virtual". Raises `MachineError` for other names."""
        machines = {machine.name: machine for machine in _named_machines()}
        if name not in machines:
            raise MachineError(
                f"there is no machine named {name!r}; named machines are {', '.join(map(repr, machines))}. "
                "Measure yours with Machine.measure(), or give its numbers: Machine(name=..., ...)"
            )
        return machines[name]

    @classmethod
    def for_device_name(cls, device_name: str) -> Machine:
        """Return the named machine of a device such as "NVIDIA H200", or the generic one when there is none."""
        words = device_name.lower().replace("-", " ").split()
        for machine in _named_machines():
            if machine.name in words:
                return machine
        return cls.named("generic")

    @classmethod
    def measure(cls, device: object = None) -> Machine:
        """Measure the present accelerator (or `device`): link speeds each way and both ways, memory, arithmetic.

        Takes seconds. Raises `MachineError` where there is nothing to measure.
        """
        # By name, at the call: planning is pure and imports neither torch nor the runtime, yet users look for this here.
        measured = importlib.import_module("graphoffload.runtime.measure").measure_machine(device)
        if not isinstance(measured, Machine):
            raise MachineError(f"measuring {device!r} gave a {type(measured).__name__}, not a Machine")
        return measured


def as_machine(given: Machine | str | None, *, what: str) -> Machine | None:
    """Read an argument that takes a machine, the name of one, or None. Raises `UsageError` for others; `what` names it."""
    if isinstance(given, str):
        return Machine.named(given)
    if given is not None and not isinstance(given, Machine):
        raise UsageError(f"{what} is a {type(given).__name__}; give a graphoffload.Machine or a machine's name")
    return given


def _named_machines() -> tuple[Machine, ...]:
    """List the machines that have names. h200 is measured (torch 2.11, CUDA 13); the others are round numbers.

    The h200's 16-bit rates are those that a whole training step sustains, matrix products and attention of a Llama's shape
    together (benchmarks/w1_compiled.py); one large matrix product alone reaches 785 TFLOP/s.
    """
    return (
        Machine(
            name="h200",
            d2h_bytes_per_second=55e9,
            h2d_bytes_per_second=55e9,
            duplex_bytes_per_second=100e9,
            memory_bytes_per_second=4.3e12,
            flops_per_second=(
                ("bfloat16", 670e12),
                ("float16", 670e12),
                ("float32", 50e12),
                ("float64", 50e12),
                ("float8_e4m3fn", 1500e12),
                ("float8_e5m2", 1500e12),
            ),
            copy_latency_seconds=5e-6,
            step_seconds=3e-6,
        ),
        # A card of the PCIe 4 kind: where nothing is known, neither the link nor the arithmetic should be overrated much.
        Machine(
            name="generic",
            d2h_bytes_per_second=22e9,
            h2d_bytes_per_second=22e9,
            duplex_bytes_per_second=38e9,
            memory_bytes_per_second=1.2e12,
            flops_per_second=(("bfloat16", 200e12), ("float16", 200e12), ("float32", 20e12), ("float64", 1e12)),
            copy_latency_seconds=10e-6,
            step_seconds=5e-6,
        ),
        # The virtual device computes at the speed of a CPU while its link is that of a GPU: copies of small models hide.
        Machine(
            name="virtual",
            d2h_bytes_per_second=20e9,
            h2d_bytes_per_second=20e9,
            duplex_bytes_per_second=40e9,
            memory_bytes_per_second=20e9,
            flops_per_second=(("bfloat16", 50e9), ("float16", 50e9), ("float32", 100e9), ("float64", 50e9)),
            copy_latency_seconds=1e-6,
            step_seconds=10e-6,
        ),
    )


def _number(given: object) -> float | None:
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        return None
    number = float(given)
    return number if math.isfinite(number) else None


def _rate(given: object, field: str) -> float:
    number = _number(given)
    if number is None or number <= 0:
        raise MachineError(
            f"Machine.{field} is {given!r}; give a finite rate above zero, in bytes per second, such as 55e9"
        )
    return number


def _time(given: object, field: str) -> float:
    number = _number(given)
    if number is None or number < 0:
        raise MachineError(f"Machine.{field} is {given!r}; give a time in seconds, zero or more, such as 5e-6")
    return number


def _arithmetic(given: object) -> tuple[tuple[str, float], ...]:
    how = 'give (dtype name, FLOP/s) pairs, such as (("bfloat16", 8e14), ("float32", 5e13))'
    pairs = tuple(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, (tuple, list)) or not pairs:
        raise MachineError(f"Machine.flops_per_second is {given!r}; {how}")
    rates: dict[str, float] = {}
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise MachineError(f"Machine.flops_per_second holds {pair!r}; {how}")
        dtype, number = pair[0], _number(pair[1])
        if number is None or number <= 0:
            raise MachineError(f"Machine.flops_per_second for {dtype!r} is {pair[1]!r}; give a finite rate above zero")
        if dtype in rates:
            raise MachineError(f"Machine.flops_per_second names {dtype!r} twice; give each dtype once")
        rates[dtype] = number
    # Sorted, so that two machines of the same numbers are equal however they were written.
    return tuple(sorted(rates.items()))
