"""Show what the compiled path does on W1, on one GPU, with plain compile and its peers in the same run.

One command: `python benchmarks/w1_compiled.py`. It starts one process a row, writes every row to a dated file under
`benchmarks/results/` (or `--out`), and prints a short table last. `--small` runs the same at toy size; `--only` picks parts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from processes import GB, HERE, Results, run_script

ALL = {"policy": "OffloadAll", "min_nbytes": 1 << 20}

DETERMINISTIC = {"deterministic": True}
"""For comparisons to the bit, on both sides: Inductor otherwise picks the order of sums by timing each kernel."""


def some(nbytes: int) -> dict[str, Any]:
    """Return the policy that offloads so many bytes, the earliest first."""
    return {"policy": "OffloadBytes", "amount": nbytes}


def main() -> int:
    """Run the parts asked for; exit code 1 when a comparison found a difference or a row failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="toy sizes: does it run at all")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument(
        "--only", nargs="*", choices=["rows", "peers", "equal", "flat", "sanitizer", "link"], default=None
    )
    parser.add_argument("--steps", type=int, default=20, help="steps that are compared to the bit")
    parser.add_argument("--offload-gb", type=float, default=5.5, help="GB that the partial row offloads")
    arguments = parser.parse_args()
    parts = set(arguments.only or ["link", "rows", "peers", "equal", "flat", "sanitizer"])
    results = Results(arguments.out, "w1-compiled")
    add = results.add
    amount = int(arguments.offload_gb * GB) if not arguments.small else 1 << 20
    every = {**ALL, "min_nbytes": 0} if arguments.small else ALL
    if "link" in parts:
        add(_process("link.py", {}, "link"))
    if "rows" in parts:
        for spec in (
            {"variant": "compile", "kind": "compile"},
            {"variant": f"graphoffload, {arguments.offload_gb} GB", "kind": "graphoffload", "policy": some(amount)},
            {"variant": "graphoffload, everything", "kind": "graphoffload", "policy": every},
            {"variant": "graphoffload, default policy", "kind": "graphoffload", "policy": {"policy": "OffloadHidden"}},
        ):
            add(_process("variant.py", {**spec, "small": arguments.small}, str(spec["variant"])))
    if "flat" in parts:
        spec = {"kind": "graphoffload", "policy": some(amount), "steps": 200, "run_ahead": True}
        add(
            _process(
                "variant.py", {**spec, "variant": "graphoffload, 200 steps", "small": arguments.small}, "200 steps"
            )
        )
    if "peers" in parts:
        for spec in (
            {"variant": "compile + checkpoint", "kind": "compile", "checkpoint": True},
            {"variant": "compile + aggressive recomputation", "kind": "compile", "aggressive": True},
            {"variant": "eager", "kind": "eager"},
        ):
            add(_process("variant.py", {**spec, "small": arguments.small}, str(spec["variant"])))
    if "equal" in parts:
        policies = {f"{arguments.offload_gb} GB": some(amount), "everything": every}
        spec = {
            "policies": policies,
            "steps": arguments.steps,
            "delays": 10,
            "small": arguments.small,
            "inductor": DETERMINISTIC,
        }
        for row in run_script("equality.py", spec, "equality"):
            add(row)
    if "sanitizer" in parts:
        add(_sanitizer())
    print(f"\n{results.path}")
    return int(results.failed)


def _process(script: str, spec: dict[str, Any], name: str) -> dict[str, Any]:
    return run_script(script, spec, name)[-1]


def _sanitizer() -> dict[str, Any]:
    """Run the small model under compute-sanitizer's memcheck: any finding makes it exit with 99."""
    spec = {
        "policies": {"everything": {**ALL, "min_nbytes": 0}},
        "steps": 2,
        "delays": 2,
        "small": True,
        "compiler": "aot_eager",
    }
    prefix = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "99")
    found = run_script("equality.py", spec, "compute-sanitizer", prefix=prefix)
    if "error" in found[-1]:
        return {**found[-1], "comparison": "compute-sanitizer memcheck"}
    return {"comparison": "compute-sanitizer memcheck, small", "steps": 2, "equal": all(row["equal"] for row in found)}


if __name__ == "__main__":
    sys.exit(main())
