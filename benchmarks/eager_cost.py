"""Measure what saved-tensor hooks cost the CPU for each packed tensor: an MLP of 200 layers of small tensors.

Every way runs in this process, in turn, again and again in a rotated order; each is compared with the plain steps of its
own round. The device computes next to nothing, so that a step lasts as long as the host takes to issue it. Prints one row a
way. A tensor here is one that autograd saves, packed once and unpacked once; the cost is that of both.

usage: eager_cost.py SPEC   where SPEC is JSON: {"layers": 200, "width": 64, "rounds": n, "steps": steps a round and way,
"peers": bool}
"""

from __future__ import annotations

import contextlib
import datetime
import json
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import peers
import torch
from gauges import Gauge, gauge
from torch import nn

import graphoffload
from graphoffload.policies import OffloadAll

PLAIN = "plain"
LARGE = 1 << 20
"""More bytes than any tensor here has: with it as the least size TRL keeps everything, as our default policy does."""


def main(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row a way."""
    with gauge() as reading:
        torch.manual_seed(0)
        width = spec.get("width", 64)
        layers = [part for _ in range(spec.get("layers", 200)) for part in (nn.Linear(width, width), nn.GELU())]
        model = nn.Sequential(*layers).to(reading.device)
        inputs = torch.randn(width, width, device=reading.device)
        ways = _ways(model, with_peers=spec.get("peers", True))
        packed = _packed(model, inputs)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        rounds, steps = spec.get("rounds", 40), spec.get("steps", 5)
        with _quiet():
            for number in range(-2, rounds):  # two rounds to warm up
                names = list(ways)
                start = number % len(names)
                for name in names[start:] + names[:start]:
                    took = _seconds(model, inputs, ways[name], steps, reading)
                    if number >= 0:
                        seconds[name].append(took)
        return [_row(name, spec, reading, seconds, packed, ways[name]) for name in ways]


def _ways(model: nn.Module, *, with_peers: bool) -> dict[str, peers.Contexts]:
    kept = graphoffload.saved_tensors(OffloadAll(), model=model)
    moved = graphoffload.saved_tensors(OffloadAll(min_nbytes=0), model=model)
    ways: dict[str, peers.Contexts] = {
        PLAIN: contextlib.nullcontext,
        # What any hooks written in Python cost.
        "hooks that do nothing": lambda: torch.autograd.graph.saved_tensors_hooks(_same, _same),
        "graphoffload, OffloadAll(): all kept": lambda: kept,
        "graphoffload, OffloadAll(min_nbytes=0): all moved": lambda: moved,
    }
    if with_peers:
        ways["TRL, defaults (at least 1024 bytes)"] = peers.trl(model)
        ways["TRL, min_offload_size=0: all moved"] = peers.trl(model, min_offload_size=0)
        ways["TRL, min_offload_size=1 MiB: all kept"] = peers.trl(model, min_offload_size=LARGE)
    return ways


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _packed(model: nn.Module, inputs: torch.Tensor) -> int:
    """Count the tensors that one step saves."""
    found = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal found
        found += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, _same):
        model(inputs).sum().backward()
    model.zero_grad(set_to_none=True)
    return found


def _seconds(model: nn.Module, inputs: torch.Tensor, contexts: peers.Contexts, steps: int, reading: Gauge) -> float:
    """Return the seconds that one step takes, over `steps` of them without waiting in between."""
    reading.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        with contexts():
            loss = model(inputs).sum()
        loss.backward()
        model.zero_grad(set_to_none=True)
    reading.synchronize()
    return (time.perf_counter() - begin) / steps


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # That nothing is large enough is meant here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graphoffload.GraphOffloadWarning)
        yield


def _row(
    name: str,
    spec: dict[str, Any],
    reading: Gauge,
    seconds: dict[str, list[float]],
    packed: int,
    contexts: peers.Contexts,
) -> dict[str, Any]:
    over_plain = [took - plain for took, plain in zip(seconds[name], seconds[PLAIN], strict=True)]
    context = contexts()
    stats = context.stats() if isinstance(context, graphoffload.saved_tensors) else None
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "device": reading.name(),
        "workload": f"MLP, {spec.get('layers', 200)} layers of {spec.get('width', 64)}",
        "variant": name,
        "step_seconds": statistics.median(seconds[name]),
        "cost_seconds_per_tensor": statistics.median(over_plain) / packed,
        "packed": packed,
        "rounds": len(over_plain),
        "kept_nbytes": None if stats is None else stats.kept_nbytes,
        "moved_nbytes": None if stats is None else stats.moved_nbytes,
    }


if __name__ == "__main__":
    for row in main(json.loads(sys.argv[1])):
        print(json.dumps(row), flush=True)
