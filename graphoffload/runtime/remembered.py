"""The two modes of a selective checkpoint: one remembers what operators return, the other hands it out in backward.

Theory of operation. A region is run under a mode that asks the user's function about each operator and remembers, by
operator and how many times it ran before, what comes of it: *again* (it is run again in backward) or its results. In
backward the region is run under a second mode, which counts in the same way and hands remembered results out, each once.

What a region remembers lies outside autograd's graph, so autograd shows it to no hooks. Here it goes to the surrounding
`saved_tensors` by its `pack`, with its tag, like any other saved value; that context may be hidden under checkpoint's own
hooks and is looked for below them. Results tagged for the host where there is no such context go to one of the pair's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from graphoffload._torch import (
    CheckpointPolicy,
    HigherOrderOperator,
    TorchDispatchMode,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    pytree,
    sharing_version_counters,
    top_saved_tensors_hooks,
)
from graphoffload.errors import PolicyError, UsageError
from graphoffload.planning.answers import MUST, PREFER
from graphoffload.planning.policy import FollowTags
from graphoffload.runtime.eager import saved_tensors
from graphoffload.runtime.keep import active
from graphoffload.runtime.kinds import is_plain
from graphoffload.runtime.ops import on_device
from graphoffload.runtime.parcels import Kept, unseen
from graphoffload.runtime.slots import Watch

PolicyFunction = Callable[..., "CheckpointPolicy | bool"]

_OFFLOAD = frozenset({CheckpointPolicy[MUST], CheckpointPolicy[PREFER]})
_REMEMBER = _OFFLOAD | {CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE}
_SHOWS_OUTPUT = "op_output" in inspect.signature(torch_checkpoint.SelectiveCheckpointContext).parameters  # 2.13 on
_AGAIN = "again"
_TAKEN = "taken"


def remembering_and_recalling(
    decide: PolicyFunction, *, allow_mutation: bool
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the mode for forward and the mode for backward of one region."""
    entries: dict[Any, list[Any]] = {}
    return _Remembering(decide, entries), _Recalling(entries, allow_mutation)


@dataclass(frozen=True, slots=True)
class _Results:
    """Hold what an operator returned, each tensor as a `_Value`. `drew`: it moved a random generator on."""

    tree: Any
    drew: bool

    def get(self, *, checked: bool) -> Any:
        """Return what the operator returned."""
        return pytree.tree_map_only(_Value, lambda value: value.get(checked=checked), self.tree)


@dataclass(frozen=True, slots=True)
class _Value:
    """Hold one tensor: itself, or what `home.pack` made of it. `watch` is None for a special kind."""

    held: Any
    home: saved_tensors | None
    watch: Watch | None

    def get(self, *, checked: bool) -> torch.Tensor:
        """Return the tensor without a history; raise if it was changed in place."""
        if checked and self.watch is not None and not self.watch.holds():
            raise RuntimeError(
                "graphoffload: a result that a selective checkpoint remembers was changed in place after it was computed (it "
                f"is at version {self.watch.now()}, remembered at {self.watch.version}), so backward cannot start from it. "
                "Do not change it in place, let it be recomputed, or, if the change does not matter, give "
                "allow_cache_entry_mutation=True"
            )
        held = self.held
        if isinstance(held, Kept) and not checked:
            return _detached(held.tensor)
        if self.home is not None:
            with unseen(), sharing_version_counters():
                held = self.home.unpack(held)
        # A fresh alias: autograd is about to write the history of this run into it.
        return _detached(held)


class _Remembering(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Run the region in forward: ask about each operator, and remember."""

    supports_higher_order_operators = True

    def __init__(self, decide: PolicyFunction, entries: dict[Any, list[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._decide = decide
        self._entries = entries
        self._home, self._is_recomputed = _surroundings()
        self._own: saved_tensors | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code inside the region be compiled, as torch's modes do."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in torch_checkpoint.SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        may_draw = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        before = _generator_states(args, kwargs) if may_draw else None
        out = func(*args, **kwargs)
        tag = self._tag(func, out, args, kwargs)
        entry: Any = _AGAIN
        if tag in _REMEMBER and not _returns_what_it_wrote(func, out):
            drew = may_draw and not _are_equal(before, _generator_states(args, kwargs))
            entry = _Results(self._remember(func, out, tag), drew)
        elif tag.name == MUST:
            raise PolicyError(
                f"{func} is tagged {MUST}, and its result cannot be offloaded: it is memory that the operator wrote to, or "
                "no memory. Take the tag away"
            )
        self._entries.setdefault(_key(func, args), []).append(entry)
        return out

    def _tag(self, func: Any, out: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        shown = {"op_output": out} if _SHOWS_OUTPUT else {}
        context = torch_checkpoint.SelectiveCheckpointContext(is_recompute=False, **shown)
        tag = self._decide(context, func, *args, **kwargs)
        if isinstance(tag, bool):
            return CheckpointPolicy.MUST_SAVE if tag else CheckpointPolicy.PREFER_RECOMPUTE
        if not isinstance(tag, CheckpointPolicy):
            raise UsageError(f"the policy function answered {tag!r} for {func}; it must return a CheckpointPolicy")
        return tag

    def _remember(self, func: Any, out: Any, tag: CheckpointPolicy) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        # A tag is about an operator. One with memory to move may also return an empty tensor, or a number on the host.
        movable = {id(tensor) for tensor in tensors if tensor.numel() and on_device(tensor.device)}

        def save(tensor: torch.Tensor) -> _Value:
            eased = tag.name == MUST and movable and id(tensor) not in movable
            try:
                return self._save(tensor, PREFER if eased else tag.name, is_offloaded=tag in _OFFLOAD)
            except PolicyError as error:
                error.add_note(f"the value is what {func} returned in a selective checkpoint")
                raise

        return pytree.tree_map_only(torch.Tensor, save, out)

    def _save(self, tensor: torch.Tensor, tag: str, *, is_offloaded: bool) -> _Value:
        # Without its history, which would hold this pair and so itself.
        alias = _detached(tensor)
        with unseen(), sharing_version_counters():
            watch = Watch.over(alias) if is_plain(alias) else None
        home = None if self._is_recomputed else active() or self._home
        if home is None and is_offloaded and not self._is_recomputed:
            if self._own is None:
                self._own = saved_tensors(FollowTags())
            home = self._own
        if home is None:
            return _Value(alias, None, watch)
        with unseen(), sharing_version_counters():
            packed = home.pack(alias, tag=tag)
        return _Value(packed, home, watch)


class _Recalling(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Run the region again in backward: hand out what was remembered, run what was not."""

    supports_higher_order_operators = True

    def __init__(self, entries: dict[Any, list[Any]], allow_mutation: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._entries = entries
        self._checked = not allow_mutation
        self._counts: dict[Any, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code inside the region be compiled, as torch's modes do."""
        return True

    def __enter__(self) -> Any:
        # Each run of the region counts from the start: a second one must meet what the first has taken.
        self._counts.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in torch_checkpoint.SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        key = _key(func, args)
        index = self._counts.get(key, 0)
        self._counts[key] = index + 1
        entries = self._entries.get(key, [])
        if index >= len(entries):
            raise RuntimeError(
                f"graphoffload: in backward a checkpointed region ran {func} more often than in forward, where it ran "
                f"{_times(len(entries))}. The region must do the same again: nothing in it may depend on state that changes "
                "between forward and backward"
            )
        entry = entries[index]
        if entry is _AGAIN:
            return func(*args, **kwargs)
        if entry is _TAKEN:
            raise RuntimeError(
                "Trying to backward an extra time through a region under selective checkpointing: what it remembered was "
                f"handed out, and let go, in the first backward ({func}). Run forward again"
            )
        if entry.drew:
            # For its draws alone: what is drawn after it must come out as in forward.
            func(*args, **kwargs)
        result = entry.get(checked=self._checked)
        entries[index] = _TAKEN
        return result


def _surroundings() -> tuple[saved_tensors | None, bool]:
    """Return the context of ours around a checkpoint that begins now, and whether this is run again in backward.

    Checkpoints that this one is nested in have put hooks of their own on top; they are lifted for the look below. In one
    that is run again, a nested region is remembered for nobody: backward goes on with what the first run remembered.
    """
    lifted = []
    is_recomputed = False
    try:
        while (top := top_saved_tensors_hooks()) is not None and (kind := _kind_of_checkpoint(top[0])):
            is_recomputed = is_recomputed or kind == "_recomputation_hook"
            pop_saved_tensors_hooks()
            lifted.append(top)
        return active(), is_recomputed
    finally:
        for hooks in reversed(lifted):
            push_saved_tensors_hooks(*hooks)


def _kind_of_checkpoint(pack: Any) -> str:
    """Return the class of torch's own checkpoint hooks that a pack hook is of; empty for any other."""
    if getattr(pack, "__module__", None) != torch_checkpoint.__name__:
        return ""
    name = str(getattr(pack, "__qualname__", "")).partition(".")[0]
    return name if name in ("_checkpoint_hook", "_recomputation_hook") else ""


def _key(func: Any, args: Any) -> Any:
    """Return what invocations are counted by: the operator, and for one that runs a function, which one."""
    if isinstance(func, HigherOrderOperator) and args:
        # Compiled regions are all one operator. One that is skipped must not shift the results of another.
        return func, getattr(args[0], "idx", None)
    return func


def _returns_what_it_wrote(func: Any, out: Any) -> bool:
    """Say whether an operator is there for what it does to its arguments: then it cannot be left out."""
    schema = getattr(func, "_schema", None)
    if schema is not None and any(each.alias_info is not None and each.alias_info.is_write for each in schema.returns):
        return True
    return all(leaf is None for leaf in pytree.tree_leaves(out))


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times" if count else "never"


def _generator_states(args: Any, kwargs: Any) -> tuple[torch.Tensor, ...] | None:
    """Return the states of the generators that an operator may draw from; None while a CUDA graph holds them."""
    leaves = pytree.tree_leaves((args, kwargs))
    devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
    devices |= {leaf for leaf in leaves if isinstance(leaf, torch.device)} or {torch.device("cpu")}
    generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
    with unseen():
        states = [generator.get_state() for generator in generators]
        for device in sorted(devices, key=str):
            if device.type == "cpu":
                states.append(torch.get_rng_state())
            elif device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            elif device.type != "meta":
                states.append(torch.get_device_module(device).get_rng_state(device))
        return tuple(states)


def _are_equal(some: tuple[torch.Tensor, ...] | None, others: tuple[torch.Tensor, ...] | None) -> bool:
    """Say whether no generator has moved on, as far as that can be known."""
    if some is None or others is None:
        return False
    with unseen():
        return all(map(torch.equal, some, others))


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias without a history that counts changes in place together with the tensor."""
    with sharing_version_counters():
        return tensor.detach()
