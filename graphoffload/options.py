"""Options of the `torch.compile` backend: read once, checked at once, then frozen."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from graphoffload._torch import inductor_config, list_inductor_options, list_mode_options
from graphoffload.errors import UsageError
from graphoffload.planning.machine import Machine, as_machine
from graphoffload.planning.plan import Plan
from graphoffload.planning.policy import OffloadHidden, Policy, check_policy

COMPILERS = ("inductor", "aot_eager")
TIMINGS = ("roofline", "measured")
PARTITIONERS = ("min_cut", "default")
Partitioner = Callable[..., Any]

_OURS = {
    "custom_partitioner_fn": "graphoffload is itself the partitioner; give your own as the option 'partitioner'",
    "reorder_for_peak_memory": "it knows nothing of copy streams and would move reloads away from where the plan put them",
    "allow_buffer_reuse": "it would hold memory between layers that the plan has freed",
    "reorder_for_locality": "it would move compute across the reloads and releases that the plan put between",
}


@dataclass(frozen=True)
class Options:
    """Hold the options of one backend. See `graphoffload.backend` for what each means."""

    policy: Policy
    machine: Machine | None = None
    compiler: str = "inductor"
    inductor: tuple[tuple[str, Any], ...] = ()
    on_plan: Callable[[Plan], None] | None = None
    partitioner: str | Partitioner = "min_cut"
    timing: str = "roofline"


def read_options(
    *,
    policy: Policy | None = None,
    machine: Machine | str | None = None,
    compiler: str = "inductor",
    inductor: Mapping[str, Any] | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    partitioner: str | Partitioner = "min_cut",
    timing: str = "roofline",
    mode: str | None = None,
) -> Options:
    """Check every option and freeze them.

    Raises `UsageError` (or `PolicyError`, `MachineError`) that names the option and what to give instead.
    """
    if compiler not in COMPILERS:
        raise UsageError(f"option 'compiler' is {compiler!r}; give one of {', '.join(map(repr, COMPILERS))}")
    if timing not in TIMINGS:
        raise UsageError(f"option 'timing' is {timing!r}; give one of {', '.join(map(repr, TIMINGS))}")
    if not callable(partitioner) and partitioner not in PARTITIONERS:
        raise UsageError(
            f"option 'partitioner' is {partitioner!r}; give {', '.join(map(repr, PARTITIONERS))} or a partition function"
        )
    if on_plan is not None and not callable(on_plan):
        raise UsageError(f"option 'on_plan' is a {type(on_plan).__name__}; give a function that takes one Plan")
    return Options(
        policy=OffloadHidden() if policy is None else check_policy(policy),
        machine=as_machine(machine, what="option 'machine'"),
        compiler=compiler,
        inductor=_inductor_options(inductor, compiler, mode),
        on_plan=on_plan,
        partitioner=partitioner,
        timing=timing,
    )


def read_compile_options(options: Mapping[str, Any] | None, mode: str | None) -> Options:
    """Read what `torch.compile(..., options=, mode=)` hands to a backend; unknown names are errors."""
    known = {"policy", "machine", "compiler", "inductor", "on_plan", "partitioner", "timing"}
    given = dict(options or {})
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            if name in list_inductor_options():
                hint = f"it is an option of Inductor: give options={{'inductor': {{{name!r}: ...}}}}. "
            raise UsageError(
                f"unknown option {name!r} of backend 'graphoffload'; {hint}known: {', '.join(sorted(known))}"
            )
    return read_options(**given, mode=mode)


def _inductor_options(
    inductor: Mapping[str, Any] | None, compiler: str, mode: str | None
) -> tuple[tuple[str, Any], ...]:
    if inductor is not None and not isinstance(inductor, Mapping):
        raise UsageError(f"option 'inductor' is a {type(inductor).__name__}; give a dict of Inductor's options")
    merged: dict[str, Any] = {}
    if mode not in (None, "default"):
        modes = list_mode_options()
        if mode not in modes:
            raise UsageError(f"mode={mode!r} is not a mode of torch.compile; give one of {', '.join(modes)}")
        merged.update(modes[mode])
    merged.update(inductor or {})
    if merged and compiler != "inductor":
        raise UsageError(
            f"Inductor's options {sorted(merged)} have no effect with compiler={compiler!r}; leave them out"
        )
    known = set(list_inductor_options())
    for name in merged:
        if name in _OURS:
            raise UsageError(f"Inductor's option {name!r} cannot be set here: {_OURS[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise UsageError(f"Inductor has no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    if compiler == "inductor" and merged.get("triton.cudagraphs", inductor_config.triton.cudagraphs):
        # A captured graph replays fixed addresses; slots and reload memory change from step to step, so the replay would
        # read and write memory that is somebody else's by then.
        raise UsageError(
            "CUDA graphs (mode='reduce-overhead', mode='max-autotune' or triton.cudagraphs=True) cannot be combined with "
            "offloading yet: use the default mode or mode='max-autotune-no-cudagraphs'"
        )
    return tuple(sorted(merged.items()))
