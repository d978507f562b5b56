"""Checkpointing for the eager path: selective contexts whose *_CPU_OFFLOAD tags act, and a checkpoint that hides no tensor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils import checkpoint as torch_checkpoint

from graphoffload._torch import (
    CheckpointPolicy,
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    pytree,
    tracing_modes_are_active,
)
from graphoffload.errors import UsageError
from graphoffload.runtime.remembered import PolicyFunction, remembering_and_recalling

Result = TypeVar("Result")

# Torch before 2.14 takes the last one out of the keywords by hand.
_OPTIONS = (frozenset(inspect.signature(torch_checkpoint.checkpoint).parameters) - {"function", "args", "kwargs"}) | {
    "preserve_rng_state"
}
_RESPECT = "respect_saved_tensors_hooks"


def create_selective_checkpoint_contexts(
    policy_fn_or_ops: PolicyFunction | Collection[Any], *, allow_cache_entry_mutation: bool = False
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Make the two contexts of a selective checkpoint, as torch's of this name, with `*_CPU_OFFLOAD` at work.

    ::

        def policy_fn(ctx, op, *args, **kwargs):
            return CheckpointPolicy.MUST_CPU_OFFLOAD if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE

        context_fn = functools.partial(graphoffload.create_selective_checkpoint_contexts, policy_fn)
        y = checkpoint(layer, x, use_reentrant=False, context_fn=context_fn)

    - policy_fn_or_ops: called once for each operator in forward, as torch calls it; or the operators to save (MUST_SAVE),
      the others being PREFER_RECOMPUTE.
    - allow_cache_entry_mutation: do not raise in backward when a remembered result was changed in place since. One that
      moved to the host comes back as it was; one that stayed is as it is now, as with torch's contexts.

    `*_SAVE`: the result is a saved value like any other, and the policy of the surrounding `saved_tensors` decides about it
    (torch's own contexts show theirs to nobody before torch 2.14, and from there on with `respect_saved_tensors_hooks`,
    which says nothing about these); without a surrounding context it stays on the device. `*_CPU_OFFLOAD`: likewise; without
    a surrounding context the result is moved to the host all the same, but what the context would learn from step to step
    about the order across regions is not there, so reloads are later. In backward moved results come back. Under
    torch.compile the tags reach the compiler as with torch's contexts, and the graphoffload backend honours them.

    Two things differ for the better. An operator that returns what it wrote to is always run again (torch's refuse it in
    backward, for what it changes would not be changed). A remembered operator that drew random numbers draws them once
    more in backward, so that those after it draw theirs (with torch's they draw others, and gradients are wrong).

    Raises `UsageError` for something that is neither a function nor operators, and while the region runs for an answer
    that is no `CheckpointPolicy`; `PolicyError` where a result tagged MUST_CPU_OFFLOAD cannot be moved. In backward raises
    `RuntimeError` for a second backward through the region, for a remembered result that was changed in place, and where
    the region does not run as in forward.
    """
    decide = _as_function(policy_fn_or_ops)
    if tracing_modes_are_active():
        return torch_checkpoint.create_selective_checkpoint_contexts(decide, allow_cache_entry_mutation)  # type: ignore[no-any-return,no-untyped-call]
    return remembering_and_recalling(decide, allow_mutation=allow_cache_entry_mutation)


def checkpoint(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Run a region that is computed again in backward: torch's checkpoint, with every tensor argument shown to hooks.

    Torch's own shows positional tensors only: one given by keyword, or inside a tuple, list or dict, is kept on the device
    by the region until backward, and no `saved_tensors` around it sees that. Here all of them are arguments to torch's. The
    rest is torch's, without reentrant autograd: `context_fn`, `preserve_rng_state`, `determinism_check`, `debug` and
    `early_stop` mean what they mean there, and other keywords go to `function`. `respect_saved_tensors_hooks`, where torch
    has it (2.14), is True unless given. Tensors inside other objects are not found.

    Raises `UsageError` for `use_reentrant=True`: the reentrant kind hands tensors out of such containers without their
    history, and gradients through them would be lost.
    """
    options = {name: kwargs.pop(name) for name in sorted(_OPTIONS) if name in kwargs}
    if options.pop("use_reentrant", False):
        raise UsageError(
            "graphoffload.checkpoint(use_reentrant=True): the reentrant kind takes no keyword arguments and gives tensors "
            "inside containers no gradient, so it cannot show them to hooks. Leave use_reentrant out, or use "
            "torch.utils.checkpoint.checkpoint"
        )
    if _RESPECT in kwargs:
        raise UsageError(f"torch {torch.__version__} has no {_RESPECT}; it came with 2.14. Leave it out")
    if torch.compiler.is_compiling():
        # There are no hooks in a trace; the compiler sees all arguments however they are given.
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **options, **kwargs)  # type: ignore[no-any-return]
    if _RESPECT in _OPTIONS:
        options.setdefault(_RESPECT, True)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    tensors = [leaves[place] for place in places]
    for place in places:
        # The region must hold no tensor but through what it saves: whatever else holds one keeps it on the device.
        leaves[place] = None
    region = _Region(function, leaves, spec, places)
    return torch_checkpoint.checkpoint(region, *tensors, use_reentrant=False, **options)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Region:
    """Call a function with its tensors put back where they came from."""

    function: Callable[..., Any]
    leaves: list[Any]
    spec: Any
    places: tuple[int, ...]

    def __call__(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


def _as_function(policy_fn_or_ops: Any) -> PolicyFunction:
    """Return the policy function, or one that saves the operators given."""
    if isinstance(policy_fn_or_ops, (list, tuple, set, frozenset)):
        for op in policy_fn_or_ops:
            if not isinstance(op, (OpOverload, HigherOrderOperator)):
                hint = f"; give one of its overloads, such as {op}.default" if isinstance(op, OpOverloadPacket) else ""
                raise UsageError(f"{op!r} is no operator: an OpOverload such as torch.ops.aten.mm.default is{hint}")
        ops = frozenset(policy_fn_or_ops)
        return lambda context, op, *args, **kwargs: (
            CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE
        )
    if not callable(policy_fn_or_ops):
        raise UsageError(
            f"a selective checkpoint takes a policy function or a list of operators, not {type(policy_fn_or_ops).__name__}"
        )
    function: PolicyFunction = policy_fn_or_ops
    return function
