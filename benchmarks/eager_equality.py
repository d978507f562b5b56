"""Compare losses and every gradient of W1, to the bit, between plain eager and `saved_tensors`, step by step.

One process, one set of weights: each step runs plain eager, then plain eager again and each policy on the same weights,
compares the loss and every gradient with torch.equal, and moves the weights by plain SGD. Deterministic algorithms are on
for all. Then, on the last weights, runs with random delays in the copy streams, with memory overwritten as soon as it is
freed, and with both, against plain eager without; one row overwrites memory under plain eager, to show that this alone
changes nothing.

usage: eager_equality.py SPEC   where SPEC is JSON: {"policies": {name: policy JSON}, "steps": n, "upset_runs": n,
"small": bool}
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from comparing import comparison_row, descend, differences, gradients, labels_of
from corruption import Corruptor
from gauges import gauge
from workload import SMALL, Shape, build, loss_of

import graphoffload
from graphoffload.runtime import ops

PLAIN = "plain against plain"


def main(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Give one row a comparison: its name, the steps compared, and whether all was equal."""
    torch.use_deterministic_algorithms(True)  # with warn_only attention's backward would stay as it is
    with gauge() as reading:
        model, ids = build(SMALL if spec.get("small") else Shape(), device=reading.device)
        contexts: dict[str, AbstractContextManager[Any]] = {PLAIN: contextlib.nullcontext()}
        for name, policy in spec["policies"].items():
            read = graphoffload.policies.policy_from_json(json.dumps(policy))
            contexts[name] = graphoffload.saved_tensors(read, model=model)

        def run(context: AbstractContextManager[Any], corruptor: Corruptor | None = None) -> list[torch.Tensor]:
            def loss_of_step() -> torch.Tensor:
                with context:
                    loss = loss_of(model.model, model.lm_head, ids)
                if corruptor is not None:
                    corruptor.between_nodes(loss)
                return loss

            with corruptor.between_modules() if corruptor is not None else contextlib.nullcontext():
                return gradients(model, loss_of_step)

        labels = labels_of(model)
        found: dict[str, list[str]] = {name: [] for name in contexts}
        for step in range(spec["steps"]):
            reference = run(contextlib.nullcontext())
            for name, context in contexts.items():
                found[name] += [f"step {step}: {one}" for one in differences(labels, reference, run(context))]
            descend(model, reference)
            del reference
        for name, different in found.items():
            yield comparison_row(name, spec["steps"], different, **_moved(contexts[name]))
        if spec.get("upset_runs"):
            yield from _upset(spec["upset_runs"], contexts, run, labels, reading.device)


def _upset(
    runs: int, contexts: dict[str, Any], run: Any, labels: list[str], device: torch.device
) -> Iterator[dict[str, Any]]:
    """Compare runs whose copies are late and whose freed memory is overwritten with an undisturbed plain one."""
    reference = run(contextlib.nullcontext())
    first, last = next(name for name in contexts if name != PLAIN), list(contexts)[-1]
    cases = [
        (PLAIN, False, True),
        (last, True, False),
        (last, False, True),
        (last, True, True),
        (first, True, True),
    ]
    for name, slowed, corrupting in cases:
        different: list[str] = []
        places = 0
        for seed in range(1 if name == PLAIN else runs):
            corruptor = Corruptor(device, seed=seed) if corrupting else None
            with contextlib.ExitStack() as stack:
                if slowed:
                    stack.enter_context(
                        graphoffload.testing.slow_copies(ops.runtime_for(device), seed=seed, max_seconds=0.02)
                    )
                found = run(contexts[name], corruptor)
            different += [f"run {seed}: {one}" for one in differences(labels, reference, found)]
            del found
            places += corruptor.places if corruptor else 0
        what = " and ".join(
            word for word, done in (("random delays", slowed), ("memory overwritten when freed", corrupting)) if done
        )
        yield comparison_row(
            f"{name}, {what}", 1 if name == PLAIN else runs, different, places=places, **_moved(contexts[name])
        )


def _moved(context: Any) -> dict[str, Any]:
    # A comparison in which nothing moved would say nothing.
    return {"total_moved_nbytes": context.stats().moved_nbytes} if hasattr(context, "stats") else {}


if __name__ == "__main__":
    for row in main(json.loads(sys.argv[1])):
        print(json.dumps(row), flush=True)
