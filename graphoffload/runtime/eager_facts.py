"""What eager code can know about a tensor when autograd saves it, and what it cannot."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn

from graphoffload.errors import PolicyError
from graphoffload.planning.plan import Action
from graphoffload.planning.policy import MUST, Ledger, Policy, ask_with_tag, forbids, needs_of
from graphoffload.planning.values import Value
from graphoffload.runtime.device import extent_nbytes
from graphoffload.runtime.ops import on_device
from graphoffload.runtime.slots import is_slot

_UNKNOWN = {
    "label": "the names that torch.fx.traceback.annotate gives",
    "op": "which operator made a value",
    "timeline": "the whole program before it runs",
    "total_nbytes": "how many bytes there will be in all",
}


def refuse_unknown_facts(policy: Policy, model: nn.Module | None) -> None:
    """Raise `PolicyError` for a policy that cannot do without facts that are not known here."""
    name, needs = type(policy).__name__, needs_of(policy)
    for fact in sorted(needs):
        if fact in _UNKNOWN:
            raise PolicyError(
                f"{name} needs the fact {fact!r} ({_UNKNOWN[fact]}), which eager code cannot know. Use a policy of sizes, "
                'types and modules, such as OffloadBytes("5GB"), or compile: torch.compile(model, backend="graphoffload")'
            )
    if "module_path" in needs and model is None:
        raise PolicyError(f"{name} needs the module that made a value: give saved_tensors(policy, model=model)")


def why_it_cannot(main: torch.Tensor, nbytes: int) -> str:
    """Say why a tensor cannot be moved at all, or nothing if it can."""
    if not nbytes or not main.numel():
        return "it has no bytes"
    device = main.device
    if not on_device(device):
        return "it is already in host memory" if device.type == "cpu" else f"it is on {device}, which is not offloaded"
    if device.type == "cpu":
        return "it is in a slot, on its way to the host" if is_slot(main) else ""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return ""


def value_of(main: torch.Tensor, nbytes: int, *, place: int, path: str, tag: str | None) -> Value:
    """Say what a policy may know: shapes, sizes and type, the module and the tag, but neither operator nor times."""
    name = f"saved_{place}"
    return Value(
        name=name,
        storage=name,
        op="",
        shape=tuple(main.shape),
        stride=main.stride(),
        storage_offset=int(main.storage_offset()),
        dtype=str(main.dtype).removeprefix("torch."),
        nbytes=extent_nbytes(main),
        storage_nbytes=nbytes,
        module_path=path,
        tag=tag,
    )


def why_not_asked_for(policy: Policy, value: Value, ledger: Ledger, *, note: Callable[[str], None]) -> str:
    """Ask a policy; return why a value is not to be moved, or nothing if it is. `note` takes what the user should know."""
    name = type(policy).__name__
    if value.tag != MUST and forbids(policy, value, ledger):
        return f"{name} forbids moving it"
    answer = ask_with_tag(policy, value, ledger)
    if answer.action is Action.OFFLOAD:
        return ""
    if answer.action is Action.KEEP:
        return answer.reason
    if answer.action is None:
        return f"{name} does not ask for it"
    note(
        f"{name} asks to recompute, which has no effect in eager code: wrap that part of the model in "
        "torch.utils.checkpoint.checkpoint"
    )
    return f"{name} says recompute, which eager code cannot do by itself"


def is_of_compiled_code() -> bool:
    """Say whether AOTAutograd's compiled function is saving: its frame is near the top of the stack then."""
    frame = sys._getframe(0).f_back
    for _ in range(6):
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith("_functorch/_aot_autograd/runtime_wrappers.py"):
            return True
        frame = frame.f_back
    return False
