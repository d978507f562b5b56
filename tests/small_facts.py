"""Facts small enough to compute by hand: steps of one second, a link of ten bytes a second, storages named by a letter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphoffload.planning.machine import Machine
from graphoffload.planning.values import Buffer, Facts, Step, Storage, Value


def machine(**changes: Any) -> Machine:
    """Return a machine whose copies take nbytes / 10 seconds each way."""
    numbers: dict[str, Any] = {
        "d2h_bytes_per_second": 10.0,
        "h2d_bytes_per_second": 10.0,
        "memory_bytes_per_second": 1.0,
        "flops_per_second": (("float32", 1.0),),
        "copy_latency_seconds": 0.0,
        "step_seconds": 0.0,
    }
    return Machine(name="by-hand", **{**numbers, **changes})


def storage(
    name: str,
    nbytes: int | None,
    *,
    birth: int,
    used: int | None = None,
    back: int,
    last: int | None = None,
    **changes: Any,
) -> Storage:
    """Return a storage of one value, born at a forward position and needed from position `back` through `last`."""
    numbers: dict[str, Any] = {
        "members": (name,),
        "carrier": name,
        "carried_at": birth,
        "last_forward_use": birth if used is None else used,
        "last_backward_use": back if last is None else last,
    }
    return Storage(
        name=name,
        nbytes=nbytes,
        dtype="float32",
        device="cuda:0",
        birth=birth,
        first_backward_use=back,
        **{**numbers, **changes},
    )


def value(name: str, of: Storage, **changes: Any) -> Value:
    """Return a value that is all of its storage."""
    numbers: dict[str, Any] = {"op": "aten.mm.default", "birth": of.birth, "nbytes": of.nbytes}
    return Value(
        name=name,
        storage=of.name,
        shape=(of.nbytes or 0,),
        stride=(1,),
        storage_offset=0,
        dtype="float32",
        storage_nbytes=of.nbytes,
        **{**numbers, **changes},
    )


def facts(
    storages: Sequence[Storage],
    *,
    forward: int,
    backward: int,
    values: Sequence[Value] | None = None,
    buffers: Sequence[Buffer] = (),
    seconds: float = 1.0,
) -> Facts:
    """Return facts with that many steps of `seconds` each; forward steps carry the names of the values they make."""
    if values is None:
        values = [value(one.name, one) for one in storages]
    names = {one.carried_at: one.carrier for one in storages} | {
        one.birth: one.name for one in values if one.birth is not None
    }
    return Facts(
        values=tuple(values),
        storages=tuple(storages),
        forward=tuple(
            Step(names.get(index, f"f{index}"), "aten.mm.default", seconds=seconds) for index in range(forward)
        ),
        backward=tuple(Step(f"b{index}", "aten.mm.default", seconds=seconds) for index in range(backward)),
        buffers=tuple(buffers),
        device="cuda:0",
    )
