"""Show what the compiled path does on W1, on one GPU, with plain compile and its peers in the same run.

One command: `python benchmarks/w1_compiled.py`. It starts one process a row, writes every row to a dated file under
`benchmarks/results/` (or `--out`), and prints a short table last. `--small` runs the same at toy size; `--only` picks parts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
GB = 10**9
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
    run = uuid.uuid4().hex[:8]
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / f"w1-compiled-{datetime.date.today().isoformat()}-{run}.jsonl"
    amount = int(arguments.offload_gb * GB) if not arguments.small else 1 << 20
    every = {**ALL, "min_nbytes": 0} if arguments.small else ALL
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append({"run": run, **row})
        with target.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print(_line(rows[-1]), flush=True)

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
        for row in _processes("equality.py", spec, "equality"):
            add(row)
    if "sanitizer" in parts:
        add(_sanitizer())
    print(f"\n{target}")
    return int(any(row.get("error") or row.get("equal") is False for row in rows))


def _processes(script: str, spec: dict[str, Any], name: str, *, prefix: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    # A fresh cache folder a row: compile times are cold, and no row runs code that another row's policy made.
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        done = subprocess.run(
            [*prefix, sys.executable, str(HERE / script), json.dumps(spec)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not found:
        return [{"variant": name, "error": (done.stdout + done.stderr)[-3000:]}]
    return found


def _process(script: str, spec: dict[str, Any], name: str) -> dict[str, Any]:
    return _processes(script, spec, name)[0]


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
    found = _processes("equality.py", spec, "compute-sanitizer", prefix=prefix)
    if "error" in found[0]:
        return {**found[0], "comparison": "compute-sanitizer memcheck"}
    return {"comparison": "compute-sanitizer memcheck, small", "steps": 2, "equal": all(row["equal"] for row in found)}


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row.get('variant')}: FAILED\n{row['error']}"
    if "comparison" in row:
        verdict = "equal to the bit" if row["equal"] else "DIFFERENT: " + "; ".join(row.get("differences", []))
        return f"{row['comparison']:50s} {row['steps']} steps  {verdict}"
    if "step_seconds" not in row:
        return json.dumps(row)
    text = f"{row['variant']:40s} {row['step_seconds'] * 1e3:8.1f} ms  peak {row['peak_nbytes'] / GB:6.2f} GB"
    text += f"  first {row['first_step_seconds']:5.1f} s  host {row['host_nbytes'] / GB:5.2f} GB"
    if "moved_nbytes" in row:
        text += (
            f"  moved {row['moved_nbytes'] / GB:5.2f} GB in {row['transfers']}"
            f"  predicted {row['predicted_peak_nbytes'] / GB:6.2f} GB {row['predicted_step_seconds'] * 1e3:7.1f} ms"
        )
    return text


if __name__ == "__main__":
    sys.exit(main())
