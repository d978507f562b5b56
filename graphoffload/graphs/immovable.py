"""Say why a storage may not move. Each reason is one clause that a plan shows; all that apply are given."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from graphoffload._torch import HigherOrderOperator, OpOverload, is_traceable_wrapper_subclass
from graphoffload.graphs.saved import PairReading, is_getitem, maker
from graphoffload.graphs.storage import extent, op_name

# An output of forward that AOTAutograd copies back into an argument and then drops.
_MUTATION = "InputMutationAOTOutput"
# Names that schemas give to results which hold random state. Traced metadata may place them on the device although
# they are in host memory when run, and a replay must see exactly these bytes.
_RANDOM_RESULTS = ("philox", "rng_state", "seed", "offset", "unused")
_READS_ONLY_METADATA = frozenset(
    f"aten::{name}"
    for name in (
        "sym_size",
        "sym_stride",
        "sym_numel",
        "sym_storage_offset",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_zeros",
        "empty_like",
        "full_like",
        "ones_like",
        "rand_like",
        "randn_like",
        "zeros_like",
    )
)


def reasons(
    reading: PairReading,
    root: Node,
    members: tuple[tuple[Node, Node], ...],
    carrier: Node,
    nbytes: int | None,
    *,
    device: torch.device | None,
    on_device: Callable[[torch.device], bool],
) -> tuple[str, ...]:
    """Return every reason why the storage of `root` may not move; empty: it may.

    `members` are its saved (forward node, backward placeholder) pairs; `device` is the one that offloading serves.
    """
    found: list[str] = []
    found.extend(_owned_by_the_caller(reading, root))
    found.extend(_written(reading, root, members))
    found.extend(_wrong_place(carrier, device, on_device))
    found.extend(_wrong_kind(carrier, members))
    if not found:
        found.extend(_wrong_extent(reading, root, members, carrier))
    if is_random_state(root):
        found.append("it holds random state")
    if root in reading.fw.unsure:
        found.append(reading.fw.unsure[root])
    found.extend(_backward_aliases(reading, members))
    if nbytes is None:
        found.append("its size is unknown before the program runs")
    elif nbytes == 0:
        found.append("it has no bytes")
    if reading.total == reading.begin_backward:
        found.append("backward has no step to bring it back for")
    elif not _read_in_backward(reading, members):
        found.append("backward uses only its shape, not its data")
    return tuple(dict.fromkeys(found))


def is_held(reading: PairReading, root: Node) -> bool:
    """Tell whether something outside the pair keeps the memory to the end: arguments, constants, outputs of forward."""
    return root.op != "call_function" or root in kept_outputs(reading)


def kept_outputs(reading: PairReading) -> frozenset[Node]:
    """Return the roots of forward's outputs that the caller keeps: all but those copied back into an argument."""
    memory = reading.fw
    return frozenset(
        root
        for index, node in enumerate(reading.returned)
        if node in memory.root and not _is_written_back(reading, index)
        for root in (memory.root[node],)
    )


def _is_written_back(reading: PairReading, index: int) -> bool:
    output = next(iter(reading.forward.graph.find_nodes(op="output")))
    described = output.meta.get("desc")
    if not isinstance(described, (list, tuple)) or index >= len(described):
        return False
    return type(described[index]).__name__ == _MUTATION


def _owned_by_the_caller(reading: PairReading, root: Node) -> list[str]:
    memory = reading.fw
    found = []
    sharers = [node for node, other in memory.root.items() if other is root and node.op == "placeholder"]
    if any(node in reading.static for node in sharers):
        found.append("it is the memory of a parameter or buffer")
    elif sharers:
        found.append("it is the memory of a graph input, which the caller may still hold")
    if root.op == "get_attr":
        found.append("it is a constant that the graph module holds")
    if root in kept_outputs(reading):
        found.append("it shares memory with an output of forward, which the caller may still hold or change")
    elif any(memory.root.get(node) is root for node in reading.returned):
        found.append("it is written back into an input after forward")
    return found


def _written(reading: PairReading, root: Node, members: tuple[tuple[Node, Node], ...]) -> list[str]:
    found = []
    if root in reading.fw.writers:
        by = reading.fw.writers[root][0]
        found.append(f"forward changes it in place ({by.name}: {op_name(by)}), so a copy could miss the change")
    for _, placeholder in members:
        by_backward = reading.bw.writers.get(reading.bw.root[placeholder])
        if by_backward:
            found.append(f"backward changes it in place ({by_backward[0].name}: {op_name(by_backward[0])})")
            break
    return found


def _wrong_place(carrier: Node, device: torch.device | None, on_device: Callable[[torch.device], bool]) -> list[str]:
    place = carrier.meta["val"].device
    if not on_device(place):
        kind = "already in host memory" if place.type == "cpu" else f"on {place}, which is not offloaded"
        return [f"it is {kind}"]
    return [f"it is on {place}, while this graph offloads from {device}"] if place != device else []


def _wrong_kind(carrier: Node, members: tuple[tuple[Node, Node], ...]) -> list[str]:
    found = []
    for node in (carrier, *(member for member, _ in members)):
        value = node.meta["val"]
        if value.layout != torch.strided:
            found.append(f"its layout is {str(value.layout).removeprefix('torch.')}, not strided")
        elif is_traceable_wrapper_subclass(value):
            found.append(f"it is a tensor subclass ({type(value).__name__})")
        elif value.is_nested:
            found.append("it is a nested tensor")
        elif value.is_quantized:
            found.append("it is a quantized tensor")
        elif value.is_conj() or value.is_neg():
            found.append("it is a lazy conjugate or negative, which a copy of bytes would lose")
        elif value.dtype != carrier.meta["val"].dtype:
            found.append("values of different types share its memory")
    return found


def _wrong_extent(reading: PairReading, root: Node, members: tuple[tuple[Node, Node], ...], carrier: Node) -> list[str]:
    """Find members outside the carrier. Views stay inside what they view, save `as_strided`: its sizes must be known."""
    low, high = extent(carrier.meta["val"])
    for member, _ in members:
        start, end = extent(member.meta["val"])
        if all(isinstance(size, int) for size in (low, high, start, end)):
            inside = low <= start and end <= high
        else:
            inside = not _through_free_view(reading, root, member)
        if not inside:
            return [f"the saved value {member.name} reaches memory that {carrier.name} does not cover"]
    return []


def _through_free_view(reading: PairReading, root: Node, member: Node) -> bool:
    pending, seen = [member], {member}
    while pending:
        node = pending.pop()
        if node in reading.fw.free:
            return True
        for source in node.all_input_nodes:
            if source not in seen and root in reading.fw.held.get(source, ()):
                seen.add(source)
                pending.append(source)
    return False


def is_random_state(root: Node) -> bool:
    """Tell whether a root is a generator's state or seed rather than data."""
    if root.op == "placeholder":
        return root.name.startswith(("fwd_seed", "fwd_base_offset", "bwd_seed", "bwd_base_offset"))
    made_by = maker(root)
    if isinstance(made_by.target, HigherOrderOperator):
        return op_name(made_by) == "run_and_save_rng_state" and is_getitem(root) and bool(root.args[1] == 0)
    if not isinstance(made_by.target, OpOverload):
        return False
    if made_by.target._schema.name in ("prims::inductor_seeds", "prims::inductor_seed", "prims::inductor_lookup_seed"):
        return True
    index = root.args[1] if is_getitem(root) else 0
    returns = made_by.target._schema.returns
    name = returns[index].name if isinstance(index, int) and index < len(returns) else ""
    return any(part in (name or "") for part in _RANDOM_RESULTS)


def _backward_aliases(reading: PairReading, members: tuple[tuple[Node, Node], ...]) -> list[str]:
    roots = [reading.bw.root[placeholder] for _, placeholder in members]
    return [reading.bw.unsure[root] + " (in backward)" for root in roots if root in reading.bw.unsure][:1]


def _read_in_backward(reading: PairReading, members: tuple[tuple[Node, Node], ...]) -> bool:
    """Tell whether any node of backward reads the data of a member, directly or through a view."""
    pending = [placeholder for _, placeholder in members]
    seen = set(pending)
    while pending:
        node = pending.pop()
        for user in node.users:
            if reads_only_metadata(user) or user in seen:
                continue
            if not set(reading.bw.held.get(user, ())) & set(reading.bw.held.get(node, ())):
                return True
            seen.add(user)
            pending.append(user)
    return False


def reads_only_metadata(node: Node) -> bool:
    """Tell whether a node looks only at sizes, strides and type of its tensor arguments."""
    return isinstance(node.target, OpOverload) and node.target._schema.name in _READS_ONLY_METADATA
