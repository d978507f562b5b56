"""The command line: `graphoffload demo`.

Exit codes: 0, all is well; 1, the runs differ; 2, what was asked cannot be done (one line says why).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphoffload._version import __version__
from graphoffload.errors import UsageError

if TYPE_CHECKING:
    from graphoffload.demo import Run, Settings
    from graphoffload.planning.plan import Plan
    from graphoffload.planning.policy import Policy

POLICIES = """\
policies:
  all          offload everything that may move
  all:64KiB    offload every storage of at least that size
  20MiB        offload that many bytes a step
  50%          offload that part of the bytes that may move
  hidden       offload what the link hides behind compute (graphoffload's default)
  keep         offload nothing
  {...}        any policy in its JSON form
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        return _demo(options)
    except UsageError as error:
        print(f"graphoffload: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("graphoffload: interrupted", file=sys.stderr)
        return 130


def parse_policy(text: str) -> Policy:
    """Read a policy as the command line spells it (see POLICIES).

    Raises `UsageError` for anything else.
    """
    from graphoffload import policies

    if text.lstrip().startswith("{"):
        return policies.policy_from_json(text)
    name, _, size = text.partition(":")
    if name == "all":
        return policies.OffloadAll(min_nbytes=size or 0)  # type: ignore[arg-type]  # it reads strings
    named: dict[str, Policy] = {"keep": policies.KeepAll(), "hidden": policies.OffloadHidden(min_nbytes=0)}
    if text in named:
        return named[text]
    if text[:1].isdigit():
        return policies.OffloadBytes(_fraction(text) if text.endswith("%") else text, min_nbytes=0)
    raise UsageError(f"{text!r} is not a policy; give one of: all, all:SIZE, SIZE, PERCENT%, hidden, keep, or JSON")


def _fraction(text: str) -> float:
    try:
        return float(text[:-1]) / 100
    except ValueError:
        raise UsageError(f"{text!r} is not a percentage") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="graphoffload", description="Plan and run activation offloading inside torch.compile."
    )
    parser.add_argument("--version", action="version", version=f"graphoffload {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train a small Llama with offloading and without, and compare",
        description="Train a small Llama (random weights) byte by byte on the source of Python's standard library, "
        "with offloading, with everything kept, and without graphoffload; print the three side by side. "
        "Exit code 1 if one loss or one parameter differs.",
        epilog=POLICIES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_argument("--policy", default="all", help="what to offload, see below (default: all)")
    demo.add_argument("--steps", type=_positive, default=30, metavar="N", help="training steps (default: 30)")
    demo.add_argument("--layers", type=_positive, default=4, metavar="N", help="layers of the model (default: 4)")
    demo.add_argument(
        "--hidden", type=_positive, default=128, metavar="N", help="hidden size, a multiple of 8 (default: 128)"
    )
    demo.add_argument("--batch", type=_positive, default=8, metavar="N", help="sequences a step (default: 8)")
    demo.add_argument("--length", type=_positive, default=128, metavar="N", help="bytes a sequence (default: 128)")
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="seed of weights and batches (default: 0)")
    demo.add_argument(
        "--device",
        default="auto",
        help="cpu (with the virtual device), cuda, …; default: an accelerator if there is one",
    )
    demo.add_argument(
        "--compiler",
        choices=("auto", "aot_eager", "inductor"),
        default="auto",
        help="what compiles the graphs; default: inductor on an accelerator, aot_eager on the CPU (no C++ needed)",
    )
    demo.add_argument("--plan", type=Path, metavar="FILE", help="write the plans there, as a JSON list")
    demo.add_argument("--rows", type=_positive, default=8, metavar="N", help="rows of the plan to print (default: 8)")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _demo(options: argparse.Namespace) -> int:
    settings = _settings(options)
    from graphoffload.demo import run_demo, same_results

    print(
        f"A Llama of {settings.layers} layers, hidden size {settings.hidden}, on the standard library's source, "
        f"{settings.steps} steps of {settings.batch} × {settings.length} bytes; device {settings.device}"
        f"{' (the virtual device)' if settings.device == 'cpu' else ''}, compiler {settings.compiler}.",
        flush=True,
    )
    runs = run_demo(settings, Progress(settings.steps))
    _print_runs(runs)
    _print_plan(runs[0], options.rows)
    if options.plan is not None:
        _write_plan(options.plan, runs[0])
    if not same_results(runs):
        print("\nDIFFERENT: the runs above do not agree; please report this.")
        return 1
    print("\nIdentical to the bit: every loss and every trained parameter, in all three runs.")
    return 0


def _settings(options: argparse.Namespace) -> Settings:
    """Check the options that argparse cannot check; raises `UsageError`."""
    policy = parse_policy(options.policy)
    if options.hidden % 8:
        raise UsageError(f"--hidden {options.hidden} is not a multiple of 8 (4 heads of an even size)")
    if options.plan is not None and not options.plan.absolute().parent.is_dir():
        raise UsageError(f"--plan: there is no folder {str(options.plan.parent)!r}")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # CUDA's matrix products are deterministic only with it

    import torch

    from graphoffload.demo import Settings

    device = options.device
    present = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"  # type: ignore[union-attr]
    if device == "auto":
        device = present
    if device not in ("cpu", present):
        raise UsageError(
            f"--device {device}: this machine has {present!r}" + (" only" if present == "cpu" else " and 'cpu'")
        )
    compiler = options.compiler
    if compiler == "auto":
        compiler = "aot_eager" if device == "cpu" else "inductor"
    return Settings(
        policy=policy,
        steps=options.steps,
        layers=options.layers,
        hidden=options.hidden,
        batch=options.batch,
        length=options.length,
        device=device,
        compiler=compiler,
        seed=options.seed,
    )


class Progress:
    """Print progress: one line that changes on a terminal, some lines elsewhere."""

    def __init__(self, steps: int) -> None:
        self.every = max(1, steps // 5)
        self.terminal = sys.stdout.isatty()
        self.seen = 0
        self.steps = steps

    def __call__(self, line: str) -> None:
        """Take one line a step; the runs follow each other."""
        self.seen += 1
        step = (self.seen - 1) % self.steps + 1
        last = step == self.steps
        if self.terminal:
            print(f"\r\033[K{line}", end="\n" if last else "", flush=True)
        elif step == 1 or last or step % self.every == 0:
            print(line, flush=True)


def _print_runs(runs: Sequence[Run]) -> None:
    """Print the losses of every step and then what each run cost, the runs side by side."""
    from graphoffload.planning.table import align

    losses = zip(*(run.losses for run in runs), strict=True)
    steps = [[str(step + 1), *(repr(loss) for loss in row)] for step, row in enumerate(losses)]
    print("\n" + align([["step", *(f"loss, {run.name}" for run in runs)], *steps]))
    columns = [_costs(run) for run in runs]
    rows = [[label, *(column[label] for column in columns)] for label in columns[0]]
    print("\n" + align([["", *(run.name for run in runs)], *rows]))


def _costs(run: Run) -> dict[str, str]:
    """Say what one run saved, moved and took; without plans (torch alone) nothing is known of its saved values."""
    from graphoffload.planning.sizes import format_nbytes

    def planned(count: Callable[[Plan], int]) -> str:
        return format_nbytes(sum(map(count, run.plans))) if run.plans else "not known"

    return {
        "saved for backward": planned(lambda plan: plan.kept_nbytes + plan.offloaded_nbytes),
        "  kept": planned(lambda plan: plan.kept_nbytes),
        "  offloaded": planned(lambda plan: plan.offloaded_nbytes),
        "recomputed": planned(lambda plan: plan.recomputed_nbytes),
        "transfers a step": str(sum(len(plan.transfers) for plan in run.plans)),
        "peak of device memory": "not known" if run.peak_nbytes is None else format_nbytes(run.peak_nbytes),
        "first step, compilation in it": f"{run.first_step_seconds:.2f} s",
        "a later step (median)": f"{run.step_seconds:.3f} s",
    }


def _print_plan(run: Run, count: int) -> None:
    """Print the biggest storages of the run's plans: what happens to each, when, and why."""
    from graphoffload.planning.table import plan_table

    for plan in run.plans:
        shown = min(count, len(plan.facts.storages))
        print(f"\nThe plan, its {shown} biggest of {len(plan.facts.storages)} storages:")
        print(plan_table(plan, biggest=shown))


def _write_plan(file: Path, run: Run) -> None:
    try:
        file.write_text("[" + ",\n".join(plan.to_json() for plan in run.plans) + "]\n")
    except OSError as error:
        raise UsageError(f"--plan: {error}") from error
