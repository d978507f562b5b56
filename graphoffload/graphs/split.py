"""The split: cut a joint graph into (forward, backward) with a base partitioner, and never replay what must run once.

A base partitioner may compute a forward node again in backward instead of saving it. Then a random operator draws a new
mask, one with a side effect acts twice, and one that reads an input which the program changes in place sees the changed
input. All three are tagged as must-save before the split (on a copy), and the result is looked at after it. Regions that
the user checkpointed keep their own tags: there torch itself runs random operators on the saved state.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx

from graphoffload._torch import (
    MEMORY_BUDGET_ANNOTATION_KEY,
    CheckpointPolicy,
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    default_partition,
    functorch_config,
    min_cut_rematerialization_partition,
)
from graphoffload.errors import UnsupportedGraphError, UsageError
from graphoffload.graphs.changed import copy_what_is_read_late, reads_of_changed_inputs
from graphoffload.graphs.duplicate import duplicate

Partitioner = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]

BASES: dict[str, Partitioner] = {
    "min_cut": min_cut_rematerialization_partition,
    "default": default_partition,
}

RECOMPUTE_TAGS = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
OFFLOAD_TAGS = tuple(policy for policy in CheckpointPolicy if policy.name in ("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"))

# At a budget of exactly 0 torch saves the inputs alone and looks at no tag (pytorch #190758); at any other it looks.
_NEARLY_NOTHING = 1e-9


def split(
    joint: fx.GraphModule,
    joint_inputs: Sequence[object],
    *,
    base: str | Partitioner,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    **kwargs: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return (forward, backward) as the base partitioner cuts the joint graph, which is not touched.

    `base` is "min_cut", "default" or a partition function; it receives `kwargs` (such as `compiler`) where it takes them.
    Nodes come out with the recompute tags that they came in with. Values that the user tagged for offloading are saved.

    Law: no random or effectful operator of forward runs again in backward, under any `activation_memory_budget`, unless
    torch hands it the saved random state. Raises `UnsupportedGraphError` where the base partitioner breaks the law.
    """
    partition = _partitioner(base)
    options = {
        "num_fwd_outputs": num_fwd_outputs,
        "static_lifetime_input_indices": static_lifetime_input_indices,
        **kwargs,
    }
    takes = inspect.signature(partition).parameters
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in takes.values()):
        options = {name: value for name, value in options.items() if name in takes}
    guarded = _prepared(joint)
    if _guard(guarded):
        with _positive_budget(guarded):
            pair = partition(guarded, joint_inputs, **options)
        if _saves_a_tuple(pair[0], num_fwd_outputs):
            pair = _split_again(joint, joint_inputs, partition, options)
    else:
        pair = partition(guarded, joint_inputs, **options)
    _restore_tags(joint, pair)
    _tell_values_of_replays(pair[1])
    _drop_dead_replays(*pair)
    _refuse_replays(*pair)
    return pair


def _partitioner(base: str | Partitioner) -> Partitioner:
    if callable(base):
        return base
    if base not in BASES:
        raise UsageError(
            f"the base partitioner {base!r} is unknown; use one of {sorted(BASES)} or a partition function"
        )
    return BASES[base]


def _prepared(joint: fx.GraphModule) -> fx.GraphModule:
    """Copy the joint graph and make the copy ready for a partitioner.

    Changed inputs that backward reads are copied when forward begins. Where regions are recomputed the checks of dtype and
    device go: they are effects without a result, at which torch's default partitioner gives up, and tracing has checked the
    same already.
    """
    copy = duplicate(joint)
    if any(node.meta.get("recompute") in RECOMPUTE_TAGS for node in copy.graph.nodes):
        checks = copy.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default)
        for node in checks:
            copy.graph.erase_node(node)
        if checks:
            copy.recompile()
    copy_what_is_read_late(copy)
    return copy


# --- before the split: what must be saved ---------------------------------------------------------------------------------


def _guard(joint: fx.GraphModule) -> bool:
    """Tag as must-save, in place, what must not be replayed and what the user wants offloaded; say if there is any."""
    changed = reads_of_changed_inputs(joint.graph)
    found = False
    for node in joint.graph.nodes:
        if node.op != "call_function" or node.meta.get("partitioner_tag") == "is_backward":
            continue
        tag = node.meta.get("recompute")
        if tag in RECOMPUTE_TAGS or not (tag in OFFLOAD_TAGS or node in changed or must_run_once(node, joint)):
            continue
        for saved in _savable(node):
            saved.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            found = True
    return found


def _savable(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes on which both partitioners accept a must-save tag.

    An operator with several outputs is tagged itself (for min-cut, which looks past `getitem`) and so are its outputs (for
    the default one, which cannot save a tuple). Impure operators are refused; torch keeps them out of backward itself.
    """
    value = node.meta.get("val")
    if isinstance(node.target, OpOverload) and node.is_impure(impure_random=False):
        return
    if isinstance(value, FakeTensor):
        yield node
    elif (
        isinstance(value, (tuple, list)) and node.users and all(user.target is operator.getitem for user in node.users)
    ):
        yield node
        for user in node.users:
            yield from _savable(user)


def _is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem


def must_run_once(node: fx.Node, module: fx.GraphModule) -> bool:
    """Tell whether running a node a second time could give another result or act a second time."""
    if isinstance(node.target, OpOverload):
        return _draws(node.target, node) or _acts(node.target)
    if not isinstance(node.target, HigherOrderOperator):
        return False
    if node.target is torch.ops.higher_order.with_effects:
        return True
    inner = (
        argument for argument in (*node.args, *node.kwargs.values()) if isinstance(argument, (OpOverload, fx.Node))
    )
    return any(_argument_must_run_once(argument, module) for argument in inner if not _replays_state(node.target))


def _argument_must_run_once(argument: OpOverload | fx.Node, module: fx.GraphModule) -> bool:
    if isinstance(argument, OpOverload):
        return _random(argument)
    if argument.op != "get_attr":
        return False
    inner = getattr(module, str(argument.target), None)
    return isinstance(inner, fx.GraphModule) and any(must_run_once(node, inner) for node in inner.graph.nodes)


def _random(target: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in target.tags


def _draws(target: OpOverload, node: fx.Node) -> bool:
    """Tell whether an operator draws random numbers: attention that drops nothing is tagged as random, but draws none."""
    if not _random(target):
        return False
    for i, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.kwargs.get("dropout_p", node.args[i] if i < len(node.args) else argument.default_value)
            return bool(given != 0.0)
    return True


def _acts(target: OpOverload) -> bool:
    return target._schema.is_mutable and target is not torch.ops.aten.copy_.default


def _replays_state(target: HigherOrderOperator) -> bool:
    """Tell torch's own wrappers of random operators: they draw from a state that was saved."""
    return str(target) in ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state")


# --- around the split: the budget -----------------------------------------------------------------------------------------


def _positive_budget(guarded: fx.GraphModule) -> AbstractContextManager[object]:
    """Replace a budget of exactly 0 by one at which torch respects tags: in the configuration and, in place, in meta."""
    for node in guarded.graph.nodes:
        if node.meta.get("memory_budget") == 0.0:
            node.meta["memory_budget"] = _NEARLY_NOTHING
        custom = node.meta.get("custom")
        if isinstance(custom, dict) and custom.get(MEMORY_BUDGET_ANNOTATION_KEY) == 0.0:
            node.meta["custom"] = {**custom, MEMORY_BUDGET_ANNOTATION_KEY: _NEARLY_NOTHING}
    if functorch_config.activation_memory_budget == 0:
        patch: AbstractContextManager[object] = functorch_config.patch(activation_memory_budget=_NEARLY_NOTHING)
        return patch
    return nullcontext()


def _saves_a_tuple(forward: fx.GraphModule, num_fwd_outputs: int) -> bool:
    outputs: Sequence[Any] = forward.graph.output_node().args[0]  # type: ignore[assignment]
    saved = (node for node in outputs[num_fwd_outputs:] if isinstance(node, fx.Node))
    return any(isinstance(node.meta.get("val"), (tuple, list)) for node in saved)


def _split_again(
    joint: fx.GraphModule, joint_inputs: Sequence[object], partition: Partitioner, options: dict[str, Any]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split at the least that min-cut can save when only must-save nodes may not be recomputed.

    There torch skips its last min-cut and returns those nodes as they are, tuples among them, which AOTAutograd refuses to
    save. Its aggressive mode makes that very min-cut.
    """
    guarded = _prepared(joint)
    _guard(guarded)
    for node in guarded.graph.nodes:
        node.meta.pop("memory_budget", None)
        if isinstance(custom := node.meta.get("custom"), dict):
            node.meta["custom"] = {key: value for key, value in custom.items() if key != MEMORY_BUDGET_ANNOTATION_KEY}
    with functorch_config.patch(activation_memory_budget=1.0, aggressive_recomputation=True):
        return partition(guarded, joint_inputs, **options)


# --- after the split ------------------------------------------------------------------------------------------------------


def _restore_tags(joint: fx.GraphModule, pair: tuple[fx.GraphModule, fx.GraphModule]) -> None:
    """Give the pair's nodes back the meta that was changed for the partitioner, so that only the user's tags are left."""
    before = {node.name: node.meta for node in joint.graph.nodes}
    for module in pair:
        for node in module.graph.nodes:
            if node.name not in before:
                continue
            for key in ("recompute", "memory_budget", "custom"):
                if key in before[node.name]:
                    node.meta[key] = before[node.name][key]
                else:
                    node.meta.pop(key, None)


def _replays(forward: fx.GraphModule, backward: fx.GraphModule) -> list[fx.Node]:
    """Find the nodes of backward that must run once and are in forward already."""
    first = {node.name: node.target for node in forward.graph.nodes if must_run_once(node, forward)}
    return [n for n in backward.graph.nodes if n.op == "call_function" and first.get(n.name) is n.target]


def _tell_values_of_replays(backward: fx.GraphModule) -> None:
    """Put into meta, where torch does not, what its replays of random operators return: facts count their memory too."""
    for node in backward.graph.nodes:
        if isinstance(node.target, HigherOrderOperator) and _replays_state(node.target) and "val" not in node.meta:
            first = next(i for i, argument in enumerate(node.args) if isinstance(argument, OpOverload))
            operator_, *arguments = fx.map_arg(node.args[first:], lambda source: source.meta.get("val"))
            options = {name: value for name, value in node.kwargs.items() if name != "rng_state"}
            fake = next((value for value in arguments if isinstance(value, FakeTensor)), None)
            if fake is not None:
                with fake.fake_mode, torch.no_grad():
                    node.meta["val"] = operator_(
                        *arguments, **fx.map_arg(options, lambda source: source.meta.get("val"))
                    )


def _drop_dead_replays(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Erase, in place, replays that nothing reads, and what only they read.

    Torch keeps random operators in backward as impure although all their results were saved, when Inductor's
    `fallback_random` is on or no trace is under way; they would draw from the random state a second time.
    """
    dead = [node for node in _replays(forward, backward) if not node.users and not _has_effect(node)]
    if not dead:
        return
    while dead:
        node = dead.pop()
        sources = node.all_input_nodes
        backward.graph.erase_node(node)
        dead += [n for n in sources if not n.users and n.op == "call_function" and not n.is_impure()]
    backward.recompile()


def _has_effect(node: fx.Node) -> bool:
    return not isinstance(node.target, OpOverload) or _acts(node.target)


def _refuse_replays(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Raise UnsupportedGraphError when a node that must run once is in both graphs."""
    again = _replays(forward, backward)
    if again:
        named = ", ".join(f"{node.name} ({node.target})" for node in again[:5])
        raise UnsupportedGraphError(
            f"the base partitioner runs {named} in forward and again in backward, with fresh randomness or a second "
            f'effect, so gradients would be wrong; use partitioner="min_cut" or "default", or a partition function that '
            f"respects must-save tags"
        )


# --- more recomputation than the tags ask for -----------------------------------------------------------------------------


def force_recompute(joint: fx.GraphModule, names: Iterable[str]) -> tuple[fx.GraphModule, dict[str, str]]:
    """Tag forward nodes, on a copy of the joint graph, so that a split computes them again instead of saving them.

    Returns the copy, and for each name that cannot be recomputed the reason. What a recomputed node reads is saved, or
    recomputed too if it was named as well (or if min-cut finds that cheaper).
    """
    tagged = duplicate(joint)
    by_name = {node.name: node for node in tagged.graph.nodes}
    changed = reads_of_changed_inputs(tagged.graph)
    tangents = _depend_on_tangents(tagged.graph)
    refused: dict[str, str] = {}
    accepted: list[fx.Node] = []
    for name in dict.fromkeys(names):
        node = by_name.get(name)
        reason = "it is not in the joint graph" if node is None else _not_recomputable(node, tagged, changed | tangents)
        if node is None or reason:
            refused[name] = reason
            continue
        accepted.append(node)
    for node in accepted:
        for each in _with_maker(node):
            each.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return tagged, refused


def _with_maker(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a node and, where it takes one of several outputs, the operator that makes them."""
    while True:
        yield node
        if node.target is not operator.getitem:
            return
        node = node.args[0]  # type: ignore[assignment]


def _depend_on_tangents(graph: fx.Graph) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if (node.op == "placeholder" and "tangents" in str(node.target)) or any(
            n in found for n in node.all_input_nodes
        ):
            found.add(node)
    return found


def _not_recomputable(node: fx.Node, module: fx.GraphModule, excluded: set[fx.Node]) -> str:
    """Say why a node cannot be computed again in backward; empty if it can."""
    if node.op != "call_function":
        return "it is an input of the graph, and nothing computes it"
    for each in _with_maker(node):
        tag = each.meta.get("recompute")
        if must_run_once(each, module) or each.is_impure(impure_random=False):
            return f"{each.target} is random or has an effect, and must not run twice"
        if tag in RECOMPUTE_TAGS:
            return "it is the edge of a checkpointed region, which is computed again from it"
        if tag is CheckpointPolicy.MUST_SAVE or (tag in OFFLOAD_TAGS and tag.name.startswith("MUST")):
            return f"the user's code tagged it {tag.name}"
        if each in excluded:
            return "it reads a gradient, or an input that the program changes in place"
    return ""
