"""Machines: named ones, numbers that cannot be, budgets."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from small_facts import machine

from graphoffload.errors import MachineError, UsageError
from graphoffload.planning.machine import IN_FLIGHT_NBYTES, Machine


def test_the_named_machines() -> None:
    h200 = Machine.named("h200")
    assert (h200.d2h_bytes_per_second, h200.h2d_bytes_per_second, h200.duplex_bytes_per_second) == (55e9, 55e9, 100e9)
    assert h200.flops_for("bfloat16") == 670e12
    assert h200.memory_bytes_per_second == 4.3e12
    for name in ("h200", "generic", "virtual"):
        assert Machine.named(name).name == name
        assert hash(Machine.named(name)) == hash(Machine.named(name))
    with pytest.raises(MachineError, match="no machine named 'h2000'; named machines are 'h200', 'generic', 'virtual'"):
        Machine.named("h2000")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA-H200-NVL", "h200"),
        ("NVIDIA GH2000", "generic"),
        ("AMD MI300X", "generic"),
        ("", "generic"),
    ],
)
def test_a_device_finds_its_machine(device: str, name: str) -> None:
    assert Machine.for_device_name(device).name == name


@pytest.mark.parametrize(
    ("field", "number", "message"),
    [
        *[
            (field, number, "give a finite rate above zero")
            for field in (
                "d2h_bytes_per_second",
                "h2d_bytes_per_second",
                "memory_bytes_per_second",
                "duplex_bytes_per_second",
            )
            for number in (0, -1.0, float("nan"), float("inf"), True, "55GB")
        ],
        *[
            (field, number, "give a time in seconds, zero or more")
            for field in ("copy_latency_seconds", "step_seconds")
            for number in (-1e-9, float("nan"), float("inf"), False, None)
        ],
        ("host_budget_nbytes", -1, "cannot be negative"),
        ("host_budget_nbytes", float("nan"), "not a finite number"),
        ("host_budget_nbytes", True, "not a size"),
        ("in_flight_nbytes", "4 gigs", "no unit of memory"),
        ("flops_per_second", (), "pairs"),
        ("flops_per_second", 5e13, "pairs"),
        ("flops_per_second", (("float32",),), "pairs"),
        ("flops_per_second", ((5e13, "float32"),), "pairs"),
        ("flops_per_second", (("float32", 0.0),), "give a finite rate above zero"),
        ("flops_per_second", (("float32", float("inf")),), "give a finite rate above zero"),
        ("flops_per_second", (("float32", 1.0), ("float32", 2.0)), "names 'float32' twice"),
    ],
)
def test_impossible_numbers_are_refused_with_the_field_named(field: str, number: Any, message: str) -> None:
    with pytest.raises(MachineError, match=message) as caught:
        machine(**{field: number})
    assert f"Machine.{field}" in str(caught.value)


@pytest.mark.parametrize("name", ["", None, 7])
def test_a_machine_has_a_name(name: Any) -> None:
    with pytest.raises(MachineError, match=r"Machine.name .* give a name"):
        Machine(name, 1.0, 1.0, 1.0, (("float32", 1.0),))


def test_numbers_are_brought_to_one_form() -> None:
    as_dict: Any = {"float32": 1, "bfloat16": 8}
    text: Any = "2GiB"
    one = Machine("m", 1, 2, 3, as_dict, host_budget_nbytes=text)
    other = Machine("m", 1.0, 2.0, 3.0, (("bfloat16", 8.0), ("float32", 1.0)), host_budget_nbytes=2 * 2**30)
    assert one == other
    assert hash(one) == hash(other)
    assert one.to_json() == other.to_json()


def test_budgets_are_changed_one_at_a_time() -> None:
    plain = machine()
    assert (plain.host_budget_nbytes, plain.in_flight_nbytes, plain.in_flight_bound) == (None, None, IN_FLIGHT_NBYTES)
    host = plain.with_budgets(host_budget="64GiB")
    assert host.host_budget_nbytes == 64 * 2**30
    both = host.with_budgets(in_flight=0)
    assert (both.host_budget_nbytes, both.in_flight_nbytes, both.in_flight_bound) == (64 * 2**30, 0, 0)
    assert plain.with_budgets() == plain
    with pytest.raises(MachineError, match=r"Machine.host_budget_nbytes is -1"):
        plain.with_budgets(host_budget=-1)


def test_an_unlisted_dtype_computes_as_slowly_as_the_slowest() -> None:
    rates = machine(flops_per_second=(("bfloat16", 8.0), ("float32", 2.0)))
    assert (rates.flops_for("bfloat16"), rates.flops_for("float32"), rates.flops_for("int8")) == (8.0, 2.0, 2.0)


@pytest.mark.parametrize(("duplex", "factor"), [(None, 1.0), (20.0, 1.0), (50.0, 1.0), (15.0, 0.75), (10.0, 0.5)])
def test_both_ways_at_once_slow_each_other(duplex: float | None, factor: float) -> None:
    assert machine(duplex_bytes_per_second=duplex).both_ways_factor == factor


def test_json_of_something_else_is_refused() -> None:
    with pytest.raises(UsageError, match="'Machine' was asked for"):
        Machine.from_json('{"type": "Plan", "version": 1}')


def test_measuring_goes_to_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = machine()
    asked = []

    def measure_machine(device: object) -> object:
        asked.append(device)
        return measured if device == "cuda:1" else "nothing"

    stand_in: Any = types.ModuleType("graphoffload.runtime.measure")
    stand_in.measure_machine = measure_machine
    monkeypatch.setitem(sys.modules, "graphoffload.runtime.measure", stand_in)
    assert Machine.measure("cuda:1") is measured
    with pytest.raises(MachineError, match="gave a str, not a Machine"):
        Machine.measure()
    assert asked == ["cuda:1", None]
