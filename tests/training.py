"""Run one training step and compare what came of it to the bit. What is compared has names, and a difference raises."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import graphoffload
from graphoffload.planning.plan import Plan
from graphoffload.planning.policy import OffloadAll, Policy
from graphoffload.testing import VirtualRun, check_log, virtual_device

Outcome = dict[str, torch.Tensor | None]


def weighted_sum(outputs: Any) -> torch.Tensor | None:
    """Make a loss of all outputs that have a gradient, each with another weight; None when there is none."""
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    parts = [(leaf.double() * (index + 1)).sum() for index, leaf in enumerate(leaves)]
    return torch.stack(parts).sum() if parts else None


def train_step(
    run: Callable[..., Any],
    inputs: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    module: nn.Module | None = None,
    seed: int = 0,
    loss: Callable[[Any], torch.Tensor | None] = weighted_sum,
) -> Outcome:
    """Run forward and backward once and return outputs, gradients, and whatever the step changed, by name."""
    torch.manual_seed(seed)
    outputs = run(*inputs, **dict(kwargs or {}))
    total = loss(outputs)
    if total is not None:
        total.backward()
    return outcome(outputs, inputs=(inputs, dict(kwargs or {})), module=module)


def outcome(outputs: Any, *, inputs: Any = (), module: nn.Module | None = None) -> Outcome:
    """Copy everything that a step may be judged by, so that what happens later cannot change it."""
    found: Outcome = {}
    for index, leaf in enumerate(pytree.tree_leaves(outputs)):
        if isinstance(leaf, torch.Tensor):
            found[f"output {index}"] = leaf
    for index, leaf in enumerate(pytree.tree_leaves(inputs)):
        if isinstance(leaf, torch.Tensor):
            found[f"input {index}"] = leaf
            found[f"gradient of input {index}"] = leaf.grad
    if module is not None:
        for name, parameter in module.named_parameters():
            found[f"gradient of {name}"] = parameter.grad
            found[f"parameter {name}"] = parameter
        for name, buffer in module.named_buffers():
            found[f"buffer {name}"] = buffer
    return {name: None if one is None else one.detach().clone() for name, one in found.items()}


def is_finite(result: Outcome) -> bool:
    """Say whether every number is finite: otherwise NaN cannot tell poison from arithmetic."""
    return all(
        bool(torch.isfinite(one).all()) for one in result.values() if one is not None and one.is_floating_point()
    )


def assert_same_bits(have: Outcome, want: Outcome) -> None:
    """Raise unless both hold the same names and the same bits, naming each difference."""
    assert have.keys() == want.keys(), f"different names: {sorted(have.keys() ^ want.keys())}"
    assert any(name.startswith("gradient") and one is not None for name, one in want.items()), "no gradient to compare"
    faults = [f"{name}: {fault}" for name in want if (fault := _difference(have[name], want[name]))]
    assert not faults, "not the same to the bit:\n  " + "\n  ".join(faults)


def assert_close(have: Outcome, want: Outcome) -> None:
    """Raise unless both hold the same names and nearly the same numbers, as the dtype of each allows."""
    assert have.keys() == want.keys(), f"different names: {sorted(have.keys() ^ want.keys())}"
    for name, other in want.items():
        mine = have[name]
        assert (mine is None) == (other is None), name
        if mine is not None and other is not None:
            rough = other.dtype in (torch.bfloat16, torch.float16)
            torch.testing.assert_close(mine, other, rtol=0.1 if rough else 1e-4, atol=0.1 if rough else 1e-4, msg=name)


def _difference(have: torch.Tensor | None, want: torch.Tensor | None) -> str:
    if have is None or want is None:
        return (
            ""
            if have is want
            else f"{'none' if have is None else 'there'}, should be {'none' if want is None else 'there'}"
        )
    if (have.dtype, have.shape) != (want.dtype, want.shape):
        return f"{have.dtype} {tuple(have.shape)}, should be {want.dtype} {tuple(want.shape)}"
    if torch.equal(_bits(have), _bits(want)):
        return ""
    if have.is_floating_point() and not bool(torch.isfinite(have).all()):
        return f"not finite in {int((~torch.isfinite(have)).sum())} of {have.numel()} places"
    return f"differs by up to {float((have.double() - want.double()).abs().max())}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@dataclass
class Compiler:
    """Compile with graphoffload and keep the plans it makes, in order."""

    policy: Policy
    compiler: str = "aot_eager"
    fullgraph: bool = True
    dynamic: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)

    def __call__(self, subject: Any) -> Any:
        """Compile a function or module; Dynamo forgets all it compiled before, so that nothing is taken from a cache."""
        torch._dynamo.reset()
        backend = graphoffload.backend(self.policy, compiler=self.compiler, on_plan=self.plans.append, **self.options)
        return torch.compile(subject, backend=backend, fullgraph=self.fullgraph, dynamic=self.dynamic)

    @property
    def moved(self) -> int:
        """Return how many storages the plans move."""
        return sum(len(plan.transfers) for plan in self.plans)


def fresh(module: nn.Module) -> nn.Module:
    """Return a copy of a module without gradients, to be trained beside it."""
    twin = copy.deepcopy(module)
    twin.zero_grad(set_to_none=True)
    return twin


def fresh_inputs(inputs: Any) -> Any:
    """Return leaf copies of all input tensors with the same strides."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, copied, inputs)


@dataclass(frozen=True)
class Ran:
    """Hold what a comparison left behind for more assertions."""

    plans: tuple[Plan, ...]
    device: VirtualRun

    @property
    def plan(self) -> Plan:
        (plan,) = self.plans
        return plan

    @property
    def moved(self) -> frozenset[str]:
        """Return the names of the storages that move."""
        return frozenset(transfer.storage for plan in self.plans for transfer in plan.transfers)


def assert_trains_as_eager(
    module: nn.Module,
    inputs: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    policy: Policy = OffloadAll(min_nbytes=0),
    steps: int = 2,
    **how: Any,
) -> Ran:
    """Train a module and a copy of it, with and without offloading, on the virtual device; raise on any different bit.

    Steps are compared one by one, for some faults are wrong only in the first and others only in a later one.
    """
    plain, ours = fresh(module), fresh(module)
    plain_inputs, our_inputs = (
        fresh_inputs((tuple(inputs), dict(kwargs or {}))),
        fresh_inputs((tuple(inputs), dict(kwargs or {}))),
    )
    compile_ = Compiler(policy, **how)
    with virtual_device() as device:
        run = compile_(ours)
        for step in range(steps):
            want = train_step(plain, *plain_inputs, module=plain, seed=step)
            assert is_finite(want)
            assert_same_bits(train_step(run, *our_inputs, module=ours, seed=step), want)
        check_log(device)
    return Ran(tuple(compile_.plans), device)
