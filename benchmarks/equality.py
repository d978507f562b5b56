"""Compare losses and every gradient of W1, to the bit, between plain compile and graphoffload, step by step.

One process, one set of weights: each step runs the plain compiled model, then the other, on the same weights, compares the
loss and every gradient with torch.equal, and moves the weights by plain SGD. Deterministic algorithms are on for both sides,
and one row compares plain against plain, so that the comparison itself is known to be sound.

usage: equality.py SPEC   where SPEC is JSON: {"policies": {name: policy JSON}, "steps": n, "delays": n, "small": bool,
"inductor": options of Inductor for both sides, "compiler": "inductor" (default) or "aot_eager" for both sides}
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from workload import SMALL, Shape, build, loss_of

import graphoffload
from graphoffload.runtime import ops


def main(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row a comparison: its name, the steps compared, and whether all was equal."""
    torch.use_deterministic_algorithms(True)  # with warn_only attention's backward would stay as it is
    device = torch.device("cuda", 0)
    model, ids = build(SMALL if spec.get("small") else Shape(), device=device)
    inductor, compiler = spec.get("inductor", {}), spec.get("compiler", "inductor")
    plain = torch.compile(model.model, backend=compiler, options=inductor or None)
    bodies = {"plain against plain": plain}
    for name, policy in spec["policies"].items():
        bodies[name] = torch.compile(
            model.model,
            backend="graphoffload",
            options={
                "policy": graphoffload.policies.policy_from_json(json.dumps(policy)),
                "compiler": compiler,
                "inductor": inductor,
            },
        )
    labels = ["loss", *(name for name, _ in model.named_parameters())]
    found: dict[str, list[str]] = {name: [] for name in bodies}
    for step in range(spec["steps"]):
        reference = _gradients(model, plain, ids)
        for name, body in bodies.items():
            found[name] += [
                f"step {step}: {one}" for one in _differences(labels, reference, _gradients(model, body, ids))
            ]
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), reference[1:], strict=True):
                parameter.sub_(gradient, alpha=1e-2)
        del reference
    rows = [_row(name, spec["steps"], differences) for name, differences in found.items()]
    name = list(spec["policies"])[-1]
    reference = _gradients(model, bodies[name], ids)
    different: list[str] = []
    for seed in range(spec.get("delays", 0)):
        with graphoffload.testing.slow_copies(ops.runtime_for(device), seed=seed, max_seconds=0.02):
            different += [
                f"seed {seed}: {one}" for one in _differences(labels, reference, _gradients(model, bodies[name], ids))
            ]
    if spec.get("delays"):
        rows.append(_row(f"{name}, with random delays against without", spec["delays"], different))
    return rows


def _row(comparison: str, steps: int, differences: list[str]) -> dict[str, Any]:
    return {"comparison": comparison, "steps": steps, "differences": differences[:20], "equal": not differences}


def _gradients(model: Any, body: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = loss_of(body, model.lm_head, ids)
    loss.backward()
    found = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    model.zero_grad(set_to_none=True)
    return found


def _differences(labels: list[str], left: list[torch.Tensor], right: list[torch.Tensor]) -> list[str]:
    """Name what differs, and by how much."""
    return [
        f"{label} by {(a.double() - b.double()).abs().max().item():.3g} of {a.double().abs().max().item():.3g}"
        for label, a, b in zip(labels, left, right, strict=True)
        if not torch.equal(a, b)
    ]


if __name__ == "__main__":
    for row in main(json.loads(sys.argv[1])):
        print(json.dumps(row), flush=True)
