"""Measure one variant of W1 in this process and print one JSON row (the keys are those of the results files).

usage: variant.py SPEC   where SPEC is JSON: {"variant": name, "kind": "eager"|"compile"|"graphoffload", "checkpoint": bool,
"aggressive": bool, "policy": policy JSON or null, "steps": n, "small": bool}
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import json
import statistics
import sys
import time
from typing import Any

import torch
from workload import SMALL, Shape, build, loss_of

import graphoffload
from graphoffload._torch import functorch_config
from graphoffload.runtime import ops


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """Run the variant and return its row."""
    device = torch.device("cuda", 0)
    shape = SMALL if spec.get("small") else Shape()
    model, ids = build(shape, device=device, checkpoint_layers=spec.get("checkpoint", False))
    plans: list[graphoffload.Plan] = []
    body = _body(model.model, spec, plans)
    torch.cuda.synchronize()
    started = time.perf_counter()
    _step(model, body, ids)
    torch.cuda.synchronize()
    first_step_seconds = time.perf_counter() - started
    for _ in range(2):
        _step(model, body, ids)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    resident = torch.cuda.memory_allocated()
    seconds, allocated, reserved, host = [], [], [], []
    for _ in range(spec.get("steps", 8)):
        begin = time.perf_counter()
        loss = _step(model, body, ids)
        if not spec.get("run_ahead"):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        allocated.append(torch.cuda.memory_allocated())
        reserved.append(torch.cuda.memory_reserved())
        host.append(_stats(plans).get("pinned_nbytes", 0))
    torch.cuda.synchronize()
    plan = plans[0] if plans else None
    row: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "workload": "W1-small" if spec.get("small") else "W1",
        "variant": spec["variant"],
        "policy": spec.get("policy"),
        "step_seconds": statistics.median(seconds),
        "step_seconds_all": [round(one, 5) for one in seconds],
        "peak_nbytes": torch.cuda.max_memory_allocated(),
        "reserved_nbytes": torch.cuda.max_memory_reserved(),
        "resident_nbytes": resident,
        "host_nbytes": host[-1],
        "first_step_seconds": first_step_seconds,
        "allocated_first_last": [allocated[0], allocated[-1]],
        "reserved_first_last": [reserved[0], reserved[-1]],
        "host_first_last": [host[0], host[-1]],
        "loss": loss.item(),
        "equal": None,
    }
    if plan is not None:
        row.update(_of_plan(plan, resident, model), runtime=_stats(plans))
    return row


def _body(body: Any, spec: dict[str, Any], plans: list[graphoffload.Plan]) -> Any:
    if spec["kind"] == "eager":
        return body
    if spec["kind"] == "compile":
        if spec.get("aggressive"):
            functorch_config.aggressive_recomputation = True
        return torch.compile(body)
    policy = graphoffload.policies.policy_from_json(json.dumps(spec["policy"]))
    return torch.compile(body, backend="graphoffload", options={"policy": policy, "on_plan": plans.append})


def _step(model: Any, body: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = loss_of(body, model.lm_head, ids)
    loss.backward()
    model.zero_grad(set_to_none=True)
    return loss.detach()


def _stats(plans: list[graphoffload.Plan]) -> dict[str, Any]:
    return dataclasses.asdict(ops.runtime_for(torch.device("cuda", 0)).stats()) if plans else {}


def _of_plan(plan: graphoffload.Plan, resident: int, model: Any) -> dict[str, Any]:
    """Say what the plan foretold. It sees only its own graph; what lives outside (the head and its gradient) is added."""
    known = sum(buffer.nbytes for buffer in plan.facts.buffers if buffer.born < 0)
    known += sum(storage.nbytes or 0 for storage in plan.facts.storages if storage.birth < 0)
    head_gradient = sum(p.numel() * p.element_size() for p in model.lm_head.parameters())
    outside = max(resident - known, 0) + head_gradient
    return {
        "moved_nbytes": plan.offloaded_nbytes,
        "kept_nbytes": plan.kept_nbytes,
        "recomputed_nbytes": plan.recomputed_nbytes,
        "transfers": len(plan.transfers),
        "host_peak_nbytes": plan.host_peak_nbytes,
        "outside_nbytes": outside,
        "predicted_peak_nbytes": plan.predicted_peak_nbytes + outside,
        "predicted_peak_nbytes_without": plan.predicted_peak_nbytes_without + outside,
        "predicted_step_seconds": plan.predicted_seconds,
        "predicted_step_seconds_without": plan.predicted_seconds_without,
        "exposed_seconds": plan.exposed_seconds,
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
