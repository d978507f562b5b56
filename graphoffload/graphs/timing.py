"""Measure how long the nodes of a graph take on a device, each by itself, instead of estimating them by a roofline."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphoffload._torch import OpOverload
from graphoffload.graphs.fusion import is_generated
from graphoffload.graphs.storage import hint
from graphoffload.planning.values import Step

_WARMUPS, _REPEATS = 1, 5


class _CannotRunError(Exception):
    """Say that a node has no plain tensors and numbers as arguments."""


def measured_steps(
    graph_module: GraphModule, steps: tuple[Step, ...], *, device: torch.device, fused: bool = False
) -> tuple[Step, ...]:
    """Return `steps` with `seconds` measured on `device`, where that can be done; the rest stay with the roofline.

    Each distinct (operator, shapes, dtypes, strides, constants) is run a few times on made-up inputs, zeros for integers
    and random numbers otherwise, and the median is taken. Steps without cost stay as they are, and so does a node that
    cannot be run by itself (mutating, collective, custom without a kernel here, sizes unknown). With `fused`, nodes that
    the compiler fuses stay as well: alone they say nothing about the kernel they end up in. Random state is left as it
    was. Needs memory for the inputs of one node at a time.
    """
    measured: dict[Any, float | None] = {}
    nodes = {node.name: node for node in graph_module.graph.nodes if node.op == "call_function"}
    result = []
    with _random_state_kept(device), torch.no_grad():
        for step in steps:
            node = nodes.get(step.name)
            if node is None or not (step.flops or step.nbytes) or not _is_measurable(node, fused):
                result.append(step)
                continue
            key = _key(node)
            if key not in measured:
                measured[key] = _seconds(node, device)
            result.append(dataclasses.replace(step, seconds=measured[key]))
    return tuple(result)


def _random_state_kept(device: torch.device) -> AbstractContextManager[None]:
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[torch.empty(0, device=device).device.index], device_type=device.type)


def _is_measurable(node: Node, fused: bool) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or target._schema.is_mutable or target.namespace.startswith("_c10d"):
        return False
    return not (fused and is_generated(node))


def _key(node: Node) -> Any:
    """Return what two nodes that take the same time have in common."""
    return (node.target, _signature(node.args), _signature(sorted(node.kwargs.items())))


def _signature(item: Any) -> Any:
    if isinstance(item, Node):
        return _signature(item.meta.get("val"))
    if isinstance(item, (list, tuple)):
        return tuple(_signature(part) for part in item)
    if isinstance(item, torch.Tensor):
        sizes = tuple(hint(size) for size in item.size())
        strides = tuple(hint(stride) for stride in item.stride()) if item.layout == torch.strided else ()
        return (sizes, strides, item.dtype, item.device)
    return hint(item) if isinstance(item, torch.SymInt) else repr(item)


def _seconds(node: Node, device: torch.device) -> float | None:
    """Return the median time of a node in seconds; None where it cannot be run alone."""
    try:
        args, kwargs = _arguments((node.args, dict(node.kwargs)), device)
        call: Callable[..., Any] = node.target  # type: ignore[assignment]
        for _ in range(_WARMUPS):
            call(*args, **kwargs)
        times = []
        for _ in range(_REPEATS):
            _wait(device)
            begin = time.perf_counter()
            call(*args, **kwargs)
            _wait(device)
            times.append(time.perf_counter() - begin)
    except Exception:  # noqa: BLE001 - any operator may refuse made-up inputs; then the estimate stands
        return None
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _arguments(item: Any, device: torch.device) -> Any:
    if isinstance(item, Node):
        return _arguments(item.meta.get("val"), device)
    if isinstance(item, (list, tuple)) and type(item) in (list, tuple):
        return type(item)(_arguments(part, device) for part in item)
    if isinstance(item, dict):
        return {name: _arguments(part, device) for name, part in item.items()}
    if isinstance(item, torch.SymInt):
        return _known(item)
    if isinstance(item, torch.Tensor):
        return _made_up(item, device)
    if isinstance(item, (torch.SymFloat, torch.SymBool)):
        raise _CannotRunError
    return item


def _known(size: int | torch.SymInt) -> int:
    known = hint(size)
    if known is None:
        raise _CannotRunError
    return known


def _made_up(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a real tensor with the sizes, strides and dtype of a fake one; host tensors stay on the host."""
    if value.layout != torch.strided:
        raise _CannotRunError
    sizes, strides = [_known(size) for size in value.size()], [_known(stride) for stride in value.stride()]
    place = value.device if value.device.type == "cpu" and device.type != "cpu" else device
    made = torch.empty_strided(sizes, strides, dtype=value.dtype, device=place)
    if not value.dtype.is_floating_point and not value.dtype.is_complex:
        return made.zero_()
    # Random data: zeros would flatter a device that slows down under load. An expanded tensor cannot be filled itself.
    flat = torch.randn(made.untyped_storage().nbytes() // made.element_size(), device=place).to(value.dtype)
    return flat.as_strided(sizes, strides)
