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
from comparing import comparison_row, descend, differences, gradients, labels_of
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
    labels = labels_of(model)
    found: dict[str, list[str]] = {name: [] for name in bodies}

    def run(body: Any) -> list[torch.Tensor]:
        return gradients(model, lambda: loss_of(body, model.lm_head, ids))

    for step in range(spec["steps"]):
        reference = run(plain)
        for name, body in bodies.items():
            found[name] += [f"step {step}: {one}" for one in differences(labels, reference, run(body))]
        descend(model, reference)
        del reference
    rows = [comparison_row(name, spec["steps"], different) for name, different in found.items()]
    name = list(spec["policies"])[-1]
    reference = run(bodies[name])
    different: list[str] = []
    for seed in range(spec.get("delays", 0)):
        with graphoffload.testing.slow_copies(ops.runtime_for(device), seed=seed, max_seconds=0.02):
            different += [f"seed {seed}: {one}" for one in differences(labels, reference, run(bodies[name]))]
    if spec.get("delays"):
        rows.append(comparison_row(f"{name}, with random delays against without", spec["delays"], different))
    return rows


if __name__ == "__main__":
    for row in main(json.loads(sys.argv[1])):
        print(json.dumps(row), flush=True)
