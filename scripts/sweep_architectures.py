"""Sweep many architectures: train each with everything offloaded and compare with everything kept, to the bit.

    python scripts/sweep_architectures.py --only transformers --compiler aot_eager
    python scripts/sweep_architectures.py --only timm --compiler inductor --merge
    python scripts/sweep_architectures.py --compiler none --merge
    python scripts/sweep_architectures.py --list

Each architecture runs in a process of its own, so that one that fails or hangs stops nothing. On the virtual device,
two training steps (forward, backward) with `OffloadAll(min_nbytes=0)` are compared with the same steps under `KeepAll`
(the same partition): the losses, every gradient, and every buffer, bit for bit. Where the model draws no random numbers
the first step is also compared with eager. With `--compiler none` nothing is compiled: the steps run under
`graphoffload.saved_tensors` and are compared with plain PyTorch, and the checker judges the runtime's log. Verdicts:
*equal*; *refused* (by an error made for it, or because torch.compile itself cannot compile the model), with the reason;
*wrong* (anything else). Results go to `docs/architectures.jsonl`, and from there the page `docs/architectures.md` is
written. Exit code 1 if a row is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import architectures
import torch

import graphoffload
from graphoffload.errors import UnsupportedGraphError, UsageError
from graphoffload.planning.plan import Plan
from graphoffload.planning.sizes import format_nbytes
from graphoffload.testing import check_log, virtual_device

DOCS = Path(__file__).resolve().parent.parent / "docs"
COMPILERS = ("aot_eager", "inductor", "none")
STEPS = 2
POLICY = graphoffload.policies.OffloadAll(min_nbytes=0)

State = list[dict[str, torch.Tensor]]
"""What each training step left: the loss, the gradients and the buffers, by name."""


def main() -> int:
    """Run the sweep."""
    options = _options()
    rows = [row for row in architectures.ROWS if options.only in (None, row.source)]
    if options.names:
        rows = [row for row in rows if row.name in options.names]
    if options.list:
        print("\n".join(f"{row.source}  {row.name}" for row in rows))
        return 0
    # The processes are forked from one that has the packages loaded and has computed nothing.
    present = [name for name in ("graphoffload", "transformers", "timm") if importlib.util.find_spec(name)]
    multiprocessing.set_forkserver_preload(present)
    results = _read(DOCS / "architectures.jsonl") if options.merge else {}
    for index, row in enumerate(rows):
        result = _in_own_process(row, options.compiler, options.timeout)
        results[(result["source"], result["name"], result["compiler"])] = result
        line = f"{result['verdict']:8}{format_nbytes(result['offloaded_nbytes']):>12} offloaded  {result['detail']}"
        print(f"[{index + 1}/{len(rows)}] {row.name:24}{line}", flush=True)
        _write(results)
    wrong = [result for result in results.values() if result["verdict"] == "wrong"]
    print(f"{len(results)} results, {len(wrong)} wrong")
    return 1 if wrong else 0


def measure(row: architectures.Row, compiler: str) -> dict[str, Any]:
    """Run one architecture under one compiler, or none, and return its result, ready for JSON."""
    begin = time.perf_counter()
    # The sweep judges a row by its numbers, so a row that moves nothing is shown as such and not warned of.
    warnings.simplefilter("ignore")
    result = _uncompiled(row) if compiler == "none" else _compiled(row, compiler)
    return {
        "date": datetime.date.today().isoformat(),
        "source": row.source,
        "name": row.name,
        "compiler": compiler,
        **result,
        "torch": torch.__version__,
        "package": f"{row.source} {sys.modules[row.source].__version__}" if row.source in sys.modules else row.source,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def _uncompiled(row: architectures.Row) -> dict[str, Any]:
    """Train plain and under `saved_tensors`, and compare."""
    verdict, detail, stats = "equal", "", None
    try:
        plain = _train(row, None)
        model, _ = built = architectures.build(row)
        with virtual_device() as device:
            offload = graphoffload.saved_tensors(POLICY, model=model)
            offloaded = _train(row, None, built=built, around=offload)
            stats = offload.stats()
            check_log(device)
        detail = _first_difference(plain, offloaded)
        verdict = "wrong" if detail else "equal"
    except UsageError as error:
        verdict, detail = "refused", _line(error)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is this row's result
        verdict, detail = "wrong", _line(error)
    if verdict == "equal" and stats is not None and not stats.moved:
        detail = "nothing was moved: " + "; ".join(sorted(stats.kept_nbytes_by_reason))
    return {
        "verdict": verdict,
        "detail": detail,
        "eager": "",
        "graphs": 0,
        "transfers": stats.moved if stats else 0,
        "offloaded_nbytes": stats.moved_nbytes if stats else 0,
        "kept_nbytes": stats.kept_nbytes if stats else 0,
    }


def _compiled(row: architectures.Row, compiler: str) -> dict[str, Any]:
    """Train compiled, with everything kept and with everything offloaded, and compare."""
    plans: list[Plan] = []
    verdict, detail, eager = "equal", "", ""
    kept: State | None = None
    try:
        with virtual_device():
            kept = _train(row, graphoffload.backend(graphoffload.policies.KeepAll(), compiler=compiler))
            offloaded = _train(row, graphoffload.backend(POLICY, compiler=compiler, on_plan=plans.append))
        detail = _first_difference(kept, offloaded)
        verdict = "wrong" if detail else "equal"
        eager = _against_eager(row, kept)
    except (UsageError, UnsupportedGraphError) as error:
        verdict, detail = "refused", _line(error)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is this row's result
        verdict, detail = "wrong", _line(error)
        if kept is None and not _torch_alone_can(row, compiler):
            verdict, detail = "refused", f"torch.compile alone cannot run it: {_line(error)}"
    if verdict == "equal" and not any(plan.transfers for plan in plans):
        detail = "nothing was moved: " + "; ".join(sorted({one.reason for plan in plans for one in plan.decisions}))
    return {
        "verdict": verdict,
        "detail": detail,
        "eager": eager,
        "graphs": len(plans),
        "transfers": sum(len(plan.transfers) for plan in plans),
        "offloaded_nbytes": sum(plan.offloaded_nbytes for plan in plans),
        "kept_nbytes": sum(plan.kept_nbytes for plan in plans),
    }


def _train(
    row: architectures.Row,
    backend: Callable[..., Any] | str | None,
    *,
    built: tuple[torch.nn.Module, dict[str, Any]] | None = None,
    around: contextlib.AbstractContextManager[Any] | None = None,
) -> State:
    """Train some steps from the seed and return what each left; `backend=None` is eager, with its forward inside `around`."""
    torch.compiler.reset()
    model, inputs = architectures.build(row) if built is None else built
    call = model if backend is None else torch.compile(model, backend=backend)
    torch.manual_seed(2)
    state: State = []
    for _ in range(STEPS):
        with around or contextlib.nullcontext():
            output = call(**inputs)
            loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
            if loss is None:
                loss = output[0]
            loss = loss.float() if loss.ndim == 0 else loss.float().square().mean()
        loss.backward()
        left = {"loss": loss.detach().clone()}
        left |= {f"grad {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        left |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
        state.append(left)
        model.zero_grad(set_to_none=True)
    return state


def _first_difference(expected: State, got: State) -> str:
    """Say where two trainings differ first, or nothing. What is not finite makes a row worthless, so it differs."""
    for step, (one, other) in enumerate(zip(expected, got, strict=True)):
        if one.keys() != other.keys():
            return f"step {step}: only one of the two has {sorted(one.keys() ^ other.keys())[:3]}"
        for name, tensor in one.items():
            if tensor.is_floating_point() and name.startswith(("loss", "grad")) and not tensor.isfinite().all():
                return f"step {step}: {name} is not finite even with everything kept"
            if not torch.equal(tensor, other[name]):
                return f"step {step}: {name} differs"
    return ""


def _against_eager(row: architectures.Row, kept: State) -> str:
    """Compare the first compiled step with eager: to the bit, or by the largest difference of a gradient."""
    if architectures.has_dropout(architectures.build(row)[0]):
        return "random"
    eager = _train(row, None)[0]
    if not _first_difference([eager], kept[:1]):
        return "equal"
    names = [name for name in eager if name in kept[0] and eager[name].is_floating_point()]
    return f"{max((eager[name] - kept[0][name]).abs().max().item() for name in names):.0e}"


def _torch_alone_can(row: architectures.Row, compiler: str) -> bool:
    try:
        _train(row, compiler)
    except Exception:  # noqa: BLE001  # any failure answers the question
        return False
    return True


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:240]


def _in_own_process(row: architectures.Row, compiler: str, timeout: float) -> dict[str, Any]:
    """Measure in a process of its own; a crash or a time-out becomes a row that is wrong."""
    failed = {
        "source": row.source,
        "name": row.name,
        "compiler": compiler,
        "verdict": "wrong",
        "eager": "",
        "graphs": 0,
    }
    failed |= {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "package": row.source}
    failed |= {"transfers": 0, "offloaded_nbytes": 0, "kept_nbytes": 0, "seconds": timeout}
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, row.name, compiler))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            return failed | {"detail": f"no result after {timeout:.0f} s"}
        result: dict[str, Any] = receiver.recv()
        process.join(timeout=30)
    except EOFError:
        process.join()
        return failed | {"detail": f"the process ended without a result, exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()
        receiver.close()
    return result


def _send_result(sender: Connection, name: str, compiler: str) -> None:
    sender.send(measure(architectures.row_named(name), compiler))


def _read(file: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    results = [json.loads(line) for line in lines]
    return {(result["source"], result["name"], result["compiler"]): result for result in results}


def _write(results: dict[tuple[str, str, str], dict[str, Any]]) -> None:
    """Write the data and the page made from them."""
    ordered = [results[key] for key in sorted(results)]
    (DOCS / "architectures.jsonl").write_text("".join(json.dumps(result) + "\n" for result in ordered))
    (DOCS / "architectures.md").write_text(page(ordered))


def page(results: Sequence[dict[str, Any]]) -> str:
    """Write the results as a page: the counts, then one table a package, one row an architecture and compiler."""
    names = {(result["source"], result["name"]) for result in results}
    lines = [
        "# Architectures",
        "",
        f"{len(names)} architectures. {_counts('Compiled', [one for one in results if one['compiler'] != 'none'])}",
        f"{_counts('Not compiled', [one for one in results if one['compiler'] == 'none'])} Written by",
        "`scripts/sweep_architectures.py`.",
        "",
        "Each is a tiny model with random weights, trained for two steps on the virtual device with everything",
        "offloaded (`OffloadAll(min_nbytes=0)`), and compared with the same steps and the same partition with",
        "everything kept. *equal*: losses, every gradient and every buffer are the same to the bit. *refused*: by a",
        "clear error, or because torch.compile alone cannot run the model; the reason is given. *eager*: the first",
        "compiled step against eager PyTorch: equal to the bit, the largest difference (the compiler's own, with or",
        "without offloading), or *random* where the model draws random numbers.",
        "",
        "*saved_tensors*: the same two steps without a compiler, under `graphoffload.saved_tensors`, compared with",
        "plain PyTorch, and the bytes that it moved in both steps together.",
        "",
    ]
    for source in sorted({result["source"] for result in results}):
        mine = [result for result in results if result["source"] == source]
        versions = sorted({f"{result['package']}, torch {result['torch']}" for result in mine})
        lines += [f"## {source}", "", f"Versions: {'; '.join(versions)}.", ""]
        header = "architecture | compiler | verdict | offloaded | kept | transfers | graphs | eager | saved_tensors | moved |"
        lines += [f"| {header} |", "|" + "---|" * (header.count("|") + 1)]
        lines += _rows(mine)
        lines.append("")
    return "\n".join(lines)


def _counts(what: str, results: Sequence[dict[str, Any]]) -> str:
    verdicts = [result["verdict"] for result in results]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("equal", "refused", "wrong"))
    return f"{what}: {len(results)} runs, {counts}."


def _rows(results: Sequence[dict[str, Any]]) -> list[str]:
    """Write one row for each architecture and compiler, each with the run without a compiler at its end."""
    uncompiled = {result["name"]: result for result in results if result["compiler"] == "none"}
    compiled = [result for result in results if result["compiler"] != "none"]
    rows = [_cells(result, uncompiled.get(result["name"])) for result in compiled]
    alone = sorted(uncompiled.keys() - {result["name"] for result in compiled})
    return rows + [_cells(None, uncompiled[name]) for name in alone]


def _cells(compiled: dict[str, Any] | None, uncompiled: dict[str, Any] | None) -> str:
    name = (compiled or uncompiled or {})["name"]
    cells = [name, *[""] * 7]
    if compiled is not None:
        cells = [name, compiled["compiler"], compiled["verdict"], format_nbytes(compiled["offloaded_nbytes"])]
        cells += [format_nbytes(compiled["kept_nbytes"]), str(compiled["transfers"]), str(compiled["graphs"])]
        cells.append(compiled["eager"])
    cells += [uncompiled["verdict"], format_nbytes(uncompiled["offloaded_nbytes"])] if uncompiled else ["", ""]
    detail = "; ".join(result["detail"] for result in (compiled, uncompiled) if result and result["detail"])
    detail = detail.replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")
    return f"| {' | '.join(cells)} | {detail} |"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures to run (default: all)")
    parser.add_argument("--only", choices=("transformers", "timm"), help="run those of one package")
    parser.add_argument(
        "--compiler", choices=COMPILERS, default="aot_eager", help="none: eager, under graphoffload.saved_tensors"
    )
    parser.add_argument(
        "--merge", action="store_true", help="keep the results that are there and replace those that run"
    )
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one architecture (default: 900)")
    parser.add_argument("--list", action="store_true", help="list the architectures and stop")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
