"""Measure one eager variant of W1 or W2 in this process and print one JSON row (the keys are those of the results files).

usage: eager_variant.py SPEC   where SPEC is JSON: {"variant": name, "role": what the tables take it for, "kind": "eager" |
"saved_tensors" | "trl" | "torchtune" | "save_on_cpu", "workload": "W1" | "W2", "layers": n, "checkpoint": bool (W2: true),
"policy": policy JSON, "host_budget": size, "in_flight": size, "steps": n, "warmup": n, "run_ahead": bool, "small": bool,
"arguments": of the peer's context}. Without a GPU it runs on the virtual device, which only says that it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import lora
import peers
import torch
from gauges import Gauge, gauge
from workload import SMALL, Shape, build, loss_of

import graphoffload
from graphoffload.runtime import ops

SERIES = ("allocated", "reserved", "host")


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """Run the variant and return its row."""
    with gauge() as reading:
        model, ids = _model(spec, reading.device)
        contexts, ours = _contexts(model, spec, reading)

        def step() -> torch.Tensor:
            with contexts():
                loss = loss_of(model.model, model.lm_head, ids)
            loss.backward()
            model.zero_grad(set_to_none=True)
            return loss.detach()

        return {**_head(spec, reading), **_measure(step, spec, reading, ours), "equal": None}


def _model(spec: dict[str, Any], device: torch.device) -> tuple[Any, torch.Tensor]:
    small, layers = spec.get("small", False), spec.get("layers")
    if spec.get("workload", "W1") == "W2":
        shape = lora.SMALL_SHAPE if small else lora.SHAPE
        shape = dataclasses.replace(shape, layers=layers or shape.layers)
        return lora.build_lora(shape, device=device, checkpoint_layers=spec.get("checkpoint", True))
    shape = SMALL if small else Shape()
    shape = dataclasses.replace(shape, layers=layers or shape.layers)
    return build(shape, device=device, checkpoint_layers=spec.get("checkpoint", False))


def _contexts(
    model: Any, spec: dict[str, Any], reading: Gauge
) -> tuple[peers.Contexts, graphoffload.saved_tensors | None]:
    """Return what gives the context of each forward, and ours if it is ours."""
    match spec["kind"]:
        case "eager":
            return contextlib.nullcontext, None
        case "trl":
            return peers.trl(model, **spec.get("arguments", {})), None
        case "torchtune":
            return peers.torchtune(model, **spec.get("arguments", {})), None
        case "save_on_cpu":
            return peers.save_on_cpu(model), None
        case "saved_tensors":
            machine = None
            if spec.get("host_budget") or spec.get("in_flight"):
                machine = graphoffload.Machine.for_device_name(reading.name())
                machine = machine.with_budgets(host_budget=spec.get("host_budget"), in_flight=spec.get("in_flight"))
            policy = graphoffload.policies.policy_from_json(json.dumps(spec["policy"]))
            ours = graphoffload.saved_tensors(policy, model=model, machine=machine)
            return lambda: ours, ours
    raise SystemExit(f"there is no kind {spec['kind']!r}")


def _head(spec: dict[str, Any], reading: Gauge) -> dict[str, Any]:
    workload = spec.get("workload", "W1") + ("-small" if spec.get("small") else "")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "device": reading.name(),
        "workload": workload + (f", {spec['layers']} layers" if spec.get("layers") else ""),
        "variant": spec["variant"],
        "role": spec.get("role"),
        "policy": spec.get("policy"),
    }


def _measure(
    step: Callable[[], torch.Tensor], spec: dict[str, Any], reading: Gauge, ours: graphoffload.saved_tensors | None
) -> dict[str, Any]:
    steps, warmup, run_ahead = spec.get("steps", 8), spec.get("warmup", 3), spec.get("run_ahead", False)
    reading.synchronize()
    reading.reset_peak()
    started = time.perf_counter()
    loss = step()
    reading.synchronize()
    first_step_seconds, first_step_peak = time.perf_counter() - started, reading.peak()
    for _ in range(warmup - 1):
        step()
    reading.synchronize()
    gc.collect()
    reading.reset_peak()
    resident = reading.allocated()
    before = ours.stats() if ours else None
    seconds: list[float] = []
    series: dict[str, list[int]] = {name: [] for name in SERIES}
    started = time.perf_counter()
    for _ in range(steps):
        begin = time.perf_counter()
        loss = step()
        if not run_ahead:
            reading.synchronize()
        seconds.append(time.perf_counter() - begin)
        for name, nbytes in zip(SERIES, (reading.allocated(), reading.reserved(), _pinned(reading, ours)), strict=True):
            series[name].append(nbytes)
    reading.synchronize()
    # Of steps that run ahead, the host's times say nothing: the mean of all is what one takes.
    step_seconds = (time.perf_counter() - started) / steps if run_ahead else statistics.median(seconds)
    row: dict[str, Any] = {
        "step_seconds": step_seconds,
        "step_seconds_all": [round(one, 5) for one in seconds],
        "peak_nbytes": reading.peak(),
        "reserved_nbytes": reading.peak_reserved(),
        "resident_nbytes": resident,
        "host_nbytes": max(series["host"]),
        "first_step_seconds": first_step_seconds,
        "first_step_peak_nbytes": first_step_peak,
        "loss": loss.item(),
    }
    for name, all_of_it in series.items():
        row[f"{name}_first_last"] = [all_of_it[0], all_of_it[-1]]
        row[f"{name}_least_most"] = [min(all_of_it), max(all_of_it)]
    return {**row, **(_of_ours(ours, before, steps, reading) if ours and before else {})}


def _pinned(reading: Gauge, ours: graphoffload.saved_tensors | None) -> int:
    """Return the bytes pinned, by whoever it was."""
    return reading.torch_pinned() + (ops.runtime_for(reading.device).stats().pinned_nbytes if ours else 0)


def _of_ours(ours: graphoffload.saved_tensors, before: Any, steps: int, reading: Gauge) -> dict[str, Any]:
    """Say what the context counted: bytes and waits a step over the measured steps, and everything since the start."""
    stats = ours.stats()
    waited = None
    if stats.exposed_seconds is not None:
        waited = (stats.exposed_seconds - (before.exposed_seconds or 0.0)) / steps
    return {
        "moved_nbytes": (stats.moved_nbytes - before.moved_nbytes) // steps,
        "transfers": (stats.moved - before.moved) // steps,
        "recomputed_nbytes": 0,
        "predicted_peak_nbytes": None,
        "predicted_step_seconds": None,
        "exposed_seconds": waited,
        "host_used_peak_nbytes": stats.host_peak_nbytes,
        "pinned_peak_nbytes": stats.pinned_peak_nbytes,
        "stats": dataclasses.asdict(stats),
        "runtime": dataclasses.asdict(ops.runtime_for(reading.device).stats()),
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
