"""Explain beforehand: what would be saved, what would move, and what it would cost, from fake tensors alone."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from graphoffload._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    compile_fx,
    functorch_config,
    pytree,
)
from graphoffload.backend import OffloadPartitioner, lower
from graphoffload.capture import any_number_of_captures, with_own_code
from graphoffload.errors import UsageError
from graphoffload.options import Options, Partitioner, read_options
from graphoffload.planning.machine import Machine
from graphoffload.planning.plan import Plan
from graphoffload.planning.policy import Policy
from graphoffload.report import Explanation
from graphoffload.runtime import ops
from graphoffload.runtime.interpret import boxed


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    policy: Policy | None = None,
    machine: Machine | str | None = None,
    compiler: str = "inductor",
    partitioner: str | Partitioner = "min_cut",
    **kwargs: Any,
) -> Explanation:
    """Plan a training step of `model` on `inputs` without running it: no device memory is used, and no GPU is needed.

    The model may live anywhere (also on "meta"): parameters, buffers and inputs are replaced by fake tensors of the same
    shape. If nothing lives on an accelerator, all of it is planned as if it did; name a `machine` ("h200", or a `Machine`)
    whose speeds to plan for. `kwargs` go to the model. The graphs are those that `compiler` would be given.

    Returns an `Explanation`: print it; `.plans` has one `Plan` a graph (graph breaks make several).
    Raises `UsageError` when the model needs real data to be traced, or saves nothing for backward.
    """
    options = read_options(policy=policy, machine=machine, compiler=compiler, partitioner=partitioner)
    plans: list[Plan] = []
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake_model, fake_args, fake_kwargs = _fake(model, inputs, kwargs, mode)
    tensors = [leaf for leaf in pytree.tree_leaves((fake_args, fake_kwargs)) if isinstance(leaf, torch.Tensor)]
    if isinstance(fake_model, torch.nn.Module):
        tensors += [*fake_model.parameters(), *fake_model.buffers()]
    on_device = ops.on_device if any(ops.on_device(tensor.device) for tensor in tensors) else _anywhere
    partition = OffloadPartitioner(options, on_device=on_device, on_pair=lambda _f, _b, plan: plans.append(plan))
    explained = torch.compile(
        with_own_code(fake_model), backend=functools.partial(_plan_only, options=options, partitioner=partition)
    )
    try:
        with any_number_of_captures(), mode, torch.enable_grad():
            explained(*fake_args, **fake_kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UsageError(
            f"the model needs real data to be traced: it uses the result of {error.func} as a number or a size; compile it "
            "with backend='graphoffload' and read graphoffload.plans(model) instead"
        ) from error
    if not plans:
        raise UsageError("nothing to explain: no output needs a gradient, so nothing is saved for backward")
    return Explanation(tuple(plans))


def _anywhere(_device: torch.device) -> bool:
    return True


def _plan_only(
    gm: fx.GraphModule, inputs: Sequence[Any], *, options: Options, partitioner: OffloadPartitioner
) -> Callable[..., Any]:
    """Go the real way up to the rewritten pair, and then let fake tensors run it instead of compiling it."""
    if options.compiler == "aot_eager":
        return lower(gm, inputs, options, partitioner)
    patches = {**dict(options.inductor), "custom_partitioner_fn": partitioner}
    with functorch_config.patch(enable_autograd_cache=False):
        inner: Any = lambda graph, *_args, **_kwargs: boxed(graph)  # noqa: E731
        return cast("Callable[..., Any]", compile_fx(gm, inputs, inner_compile=inner, config_patches=patches))


def _fake(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode) -> tuple[Any, Any, Any]:
    """Copy the model and its inputs with every tensor replaced by a fake of its shape; shared tensors stay shared."""
    made: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
            with mode:
                one = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                if isinstance(tensor, torch.nn.Parameter):
                    one = torch.nn.Parameter(one, requires_grad=tensor.requires_grad)
                else:
                    one.requires_grad_(tensor.requires_grad)
            made[id(tensor)] = one
        return made[id(tensor)]  # type: ignore[no-any-return]

    if isinstance(model, torch.nn.Module):
        for tensor in [*model.parameters(), *model.buffers()]:
            fake(tensor)
        # deepcopy takes what the memo names instead of copying it, so not one byte of a parameter is copied.
        model = copy.deepcopy(model, dict(made))
    fake_args, fake_kwargs = pytree.tree_map_only(torch.Tensor, fake, (args, kwargs))
    return model, fake_args, fake_kwargs
