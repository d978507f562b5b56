"""Run one script a process, and write every row that it prints to a results file as it comes."""

from __future__ import annotations

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


class Results:
    """Collect the rows of one run, in memory and in a dated file, and print a line for each."""

    def __init__(self, folder: Path, name: str) -> None:
        self.run = uuid.uuid4().hex[:8]
        self.rows: list[dict[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}-{datetime.date.today().isoformat()}-{self.run}.jsonl"

    def add(self, row: dict[str, Any]) -> None:
        """Write the row at once, so that an interrupted run leaves what it measured."""
        self.rows.append({"run": self.run, **row})
        with self.path.open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")
        print(line(self.rows[-1]), flush=True)

    @property
    def failed(self) -> bool:
        """Say whether a row is an error, or a comparison that found a difference."""
        return any(row.get("error") or row.get("equal") is False for row in self.rows)


def run_script(
    script: str, spec: dict[str, Any], name: str, *, prefix: tuple[str, ...] = (), timeout: float | None = None
) -> list[dict[str, Any]]:
    """Run `script` on `spec` and return the rows that it printed; one row with "error" if it failed or took too long."""
    # A fresh cache folder a row: compile times are cold, and no row runs code that another row's policy made.
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        try:
            done = subprocess.run(
                [*prefix, sys.executable, str(HERE / script), json.dumps(spec)],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired as late:
            return [{"variant": name, "error": f"stopped after {late.timeout:.0f} s"}]
    found = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    if done.returncode or not found:
        return [*found, {"variant": name, "error": (done.stdout + done.stderr)[-3000:]}]
    return found


def line(row: dict[str, Any]) -> str:
    """Write a row as one line for people."""
    if "error" in row:
        return f"{row.get('variant')}: FAILED\n{row['error']}"
    if "comparison" in row:
        verdict = "equal to the bit" if row["equal"] else "DIFFERENT: " + "; ".join(row.get("differences", []))
        return f"{row['comparison']:50s} {row['steps']} steps  {verdict}"
    if "cost_seconds_per_tensor" in row:
        return (
            f"{row['variant']:40s} {row['step_seconds'] * 1e3:8.2f} ms a step  "
            f"{row['cost_seconds_per_tensor'] * 1e6:7.2f} us a tensor over plain, {row['packed']} tensors"
        )
    if "step_seconds" not in row:
        return json.dumps(row)
    text = f"{row['variant']:40s} {row['step_seconds'] * 1e3:8.1f} ms  peak {row['peak_nbytes'] / GB:6.2f} GB"
    text += f"  first {row['first_step_seconds']:5.1f} s  host {row['host_nbytes'] / GB:5.2f} GB"
    if row.get("moved_nbytes"):
        text += f"  moved {row['moved_nbytes'] / GB:5.2f} GB in {row['transfers']}"
    if row.get("predicted_peak_nbytes"):
        text += f"  predicted {row['predicted_peak_nbytes'] / GB:6.2f} GB {row['predicted_step_seconds'] * 1e3:7.1f} ms"
    return text
