"""Show what the eager path does on W1 and W2, on one GPU, with plain eager and its peers in the same run.

One command: `TRL_OFFLOAD=… TORCHTUNE_OFFLOAD=… python benchmarks/w1_eager.py` (peers.py says what these name; without them
the peers' rows fail and the others do not). It starts one process a row, writes every row to a dated file under
`benchmarks/results/` (or `--out`), and prints what must be reached, and what was, last. `--small` runs the same at toy size,
on the virtual device where there is no GPU; `--only` picks parts. Ratios need both rows in one run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eager_targets import targets
from processes import HERE, Results, run_script

SCRIPT = "eager_variant.py"
ALL: dict[str, Any] = {"policy": "OffloadAll"}


def main() -> int:
    """Run the parts asked for; exit code 1 when a row failed or a comparison found a difference."""
    arguments = _parser().parse_args()
    results = Results(arguments.out, "w1-eager")
    for part in arguments.only or PARTS:
        began = time.perf_counter()
        for row in PARTS[part](arguments):
            results.add(row)
        print(f"-- {part}: {time.perf_counter() - began:.0f} s", flush=True)
    print(f"\n{'':70s} {'must':>20s}  have")
    for target in targets(results.rows):
        print(f"{target.what:70s} {target.must:>20s}  {target.have}{'' if target.met else '  MISSED'}")
    print(f"\n{results.path}")
    return int(results.failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="toy sizes: does it run at all")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="the parts to run, in this order")
    parser.add_argument("--steps", type=int, default=20, help="steps that are compared to the bit")
    parser.add_argument("--amount", default="5GB", help="what the partial rows move")
    parser.add_argument("--trl-amount", default="18GB", help="what is moved to be at TRL's peak")
    parser.add_argument("--w2-layers", type=int, default=None, help="layers of W2, instead of its 32")
    parser.add_argument("--timeout", type=float, default=400, help="seconds after which a row is given up")
    return parser


def some(arguments: argparse.Namespace, amount: str) -> dict[str, Any]:
    """Return the policy that offloads so much, the earliest first; at toy size a little."""
    if arguments.small:
        return {"policy": "OffloadBytes", "amount": 1 << 20, "min_nbytes": 0}
    return {"policy": "OffloadBytes", "amount": amount}


def everything(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the policy that offloads all that is large enough; at toy size all."""
    return {**ALL, "min_nbytes": 0} if arguments.small else ALL


def _rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    partial, at_trl = some(arguments, arguments.amount), some(arguments, arguments.trl_amount)
    yield _row(arguments, {"variant": "eager", "role": "eager", "kind": "eager"})
    for name, role, policy in (
        (arguments.amount, "partial", partial),
        (arguments.trl_amount, "at_trl", at_trl),
        ("everything", "everything", everything(arguments)),
    ):
        yield _row(arguments, {"variant": f"graphoffload, {name}", "role": role, **_ours(policy)})
    tight = {"variant": "graphoffload, everything, 512 MiB in flight", "role": "tight", "in_flight": "512MiB"}
    yield _row(arguments, {**tight, **_ours(everything(arguments))})


def _peers(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    short = {"steps": 3, "warmup": 2}
    yield _row(arguments, {"variant": "TRL", "role": "trl", "kind": "trl", **short})
    yield _row(arguments, {"variant": "torchtune", "role": "torchtune", "kind": "torchtune", **short})
    yield _row(arguments, {"variant": "eager + checkpoint", "role": "checkpoint", "kind": "eager", "checkpoint": True})


def _torch_own(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    spec = {"variant": "save_on_cpu(pin_memory=True)", "role": "save_on_cpu", "kind": "save_on_cpu"}
    yield _row(arguments, {**spec, "steps": 3, "warmup": 2})


def _w2(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    steps = {"workload": "W2", "layers": arguments.w2_layers, "steps": 2, "warmup": 2}
    yield _row(arguments, {"variant": "eager + checkpoint", "role": "w2_checkpoint", "kind": "eager", **steps})
    ours = _ours(everything(arguments))
    yield _row(arguments, {"variant": "graphoffload, everything", "role": "w2_ours", **ours, **steps})
    yield _row(arguments, {"variant": "TRL", "role": "w2_trl", "kind": "trl", **steps})


def _flat(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    spec = _ours(some(arguments, arguments.amount))
    steps = {"steps": 20 if arguments.small else 200, "run_ahead": True}
    name = f"graphoffload, {arguments.amount}, {steps['steps']} steps run ahead"
    yield _row(arguments, {"variant": name, "role": "flat", **spec, **steps})


def _equal(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    policies = {arguments.amount: some(arguments, arguments.amount), "everything": everything(arguments)}
    spec = {"policies": policies, "steps": arguments.steps, "upset_runs": 10, "small": arguments.small}
    yield from run_script("eager_equality.py", spec, "equality", timeout=arguments.timeout)


def _cost(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    spec: dict[str, Any] = {"rounds": 5, "steps": 1, "layers": 20, "peers": _on_gpu()} if arguments.small else {}
    yield from run_script("eager_cost.py", spec, "cost", timeout=arguments.timeout)


def _link(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    yield from run_script("link.py", {}, "link", timeout=arguments.timeout)


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "rows": _rows,
    "peers": _peers,
    "w2": _w2,
    "equal": _equal,
    "cost": _cost,
    "flat": _flat,
    "link": _link,
    "torch": _torch_own,
}
"""The parts by name, the important ones first."""


def _ours(policy: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "saved_tensors", "policy": policy}


def _row(arguments: argparse.Namespace, spec: dict[str, Any]) -> dict[str, Any]:
    name = str(spec["variant"])
    return run_script(SCRIPT, {**spec, "small": arguments.small}, name, timeout=arguments.timeout)[-1]


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
