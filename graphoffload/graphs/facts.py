"""Gather the facts of a partitioned pair: every saved value and storage, every step, every other life on the device.

Everything that planning may know is read here, once, before anything is rewritten. Nothing is changed and no guard is
added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from graphoffload.graphs import provenance
from graphoffload.graphs.cost import steps_of
from graphoffload.graphs.fusion import kernels_of
from graphoffload.graphs.immovable import is_held, reasons
from graphoffload.graphs.lives import Uses, buffers_of, recomputed_nbytes, storage_nbytes_hint, uses_of
from graphoffload.graphs.saved import PairReading, maker, read_pair
from graphoffload.graphs.storage import Number, elements_hint, extent, extent_hint, number, op_name
from graphoffload.planning.values import Facts, Size, Storage, Value


@dataclass(frozen=True)
class _Group:
    """Hold one storage of the forward graph that backward receives: its maker, members and the node to copy from."""

    root: Node
    members: tuple[tuple[Node, Node], ...]
    carrier: Node


def gather_facts(
    forward: GraphModule,
    backward: GraphModule,
    *,
    num_fwd_outputs: int,
    static_inputs: Sequence[int] = (),
    on_device: Callable[[torch.device], bool],
    fused: bool,
) -> Facts:
    """Return all facts of a pair. `static_inputs` are the forward placeholders that are parameters or buffers.

    `on_device` tells which devices offloading serves; `fused` says whether the downstream compiler fuses. Values and
    storages come in order of birth. Raises UnsupportedGraphError for a pair that does not fit together.
    """
    reading = read_pair(
        forward, backward, num_fwd_outputs=num_fwd_outputs, static_inputs=tuple(sorted(set(static_inputs)))
    )
    kept_forward = {reading.fw.root[node] for node, _ in reading.saved}
    kept_forward.update(reading.fw.root[node] for node in reading.returned if node in reading.fw.root)
    kept_backward = {reading.bw.root[node] for node in reading.gradients if node in reading.bw.root}
    kernels = (
        kernels_of(forward.graph, reading.fw, reading.position, fused=fused, kept=kept_forward),
        kernels_of(backward.graph, reading.bw, reading.position, fused=fused, kept=kept_backward),
    )
    uses = (uses_of(forward.graph, reading.fw, kernels[0]), uses_of(backward.graph, reading.bw, kernels[1]))
    # The rewrite puts its nodes between graph nodes, so a saved value's uses are those of the graph as written. Fusion
    # may read it later still, when the kernel that inlined a use runs: then its memory is there until that kernel.
    written = (_written_uses(reading, forward), _written_uses(reading, backward))
    read_last = {root: max(position, written[1].last[root]) for root, position in uses[1].last.items()}
    used = (written[0], Uses(written[1].first, read_last))
    groups = _groups(reading)
    device = _device(reading, on_device)
    storages = tuple(_storage(reading, group, used, device=device, on_device=on_device) for group in groups)
    values = [
        _value(reading, storage, group.root, member, placeholder, written[1])
        for group, storage in zip(groups, storages, strict=True)
        for member, placeholder in _distinct(group.members)
    ]
    place = {node.name: index for node, index in reading.order.items()}
    return Facts(
        values=tuple(sorted(values, key=lambda value: place[value.name])),
        storages=storages,
        forward=steps_of(forward.graph, reading.fw, kernels[0]),
        backward=steps_of(backward.graph, reading.bw, kernels[1]),
        buffers=buffers_of(reading, kernels, uses, on_device=on_device),
        recomputed_nbytes=recomputed_nbytes(reading, kernels[1], on_device=on_device),
        device="" if device is None else str(device),
        fused=fused,
    )


def _written_uses(reading: PairReading, module: GraphModule) -> Uses:
    memory = reading.fw if module is reading.forward else reading.bw
    plain = kernels_of(module.graph, memory, reading.position, fused=False, kept=())
    return uses_of(module.graph, memory, plain)


def _device(reading: PairReading, on_device: Callable[[torch.device], bool]) -> torch.device | None:
    """Return the one device that offloading serves in this pair: that of the first saved value on such a device."""
    for node in [*(node for node, _ in reading.saved), *reading.fw.root]:
        device: torch.device = node.meta["val"].device
        if on_device(device):
            return device
    return None


def _groups(reading: PairReading) -> list[_Group]:
    """Return the saved storages in order of birth."""
    members: dict[Node, list[tuple[Node, Node]]] = {}
    for node, placeholder in reading.saved:
        members.setdefault(reading.fw.root[node], []).append((node, placeholder))
    result = []
    for root in sorted(members, key=reading.order.__getitem__):
        ordered = tuple(sorted(members[root], key=lambda pair: reading.order[pair[0]]))
        result.append(_Group(root, ordered, _carrier(reading, root, [node for node, _ in ordered])))
    return result


def _carrier(reading: PairReading, root: Node, members: list[Node]) -> Node:
    """Choose the node to copy from: the root, or a member that makes it unnecessary to build views in backward.

    A member serves if all members are laid out as it is and it covers what the root covers without overlap, and if it
    is there as soon as the root is (only views in between) or has symbolic sizes, which are dear to build again.
    """
    first = members[0]
    if root in members:
        return root
    layouts = {_layout(node) for node in members}
    value = first.meta["val"]
    if len(layouts) != 1 or value.layout != torch.strided or root.meta["val"].layout != torch.strided:
        return root
    if value.dtype != root.meta["val"].dtype or not _same_extent(value, root.meta["val"]) or not _is_dense(value):
        return root
    symbolic = not all(isinstance(size, int) for size in next(iter(layouts)))
    between = list(reading.order)[reading.order[root] + 1 : reading.order[first]]
    if symbolic or not any(_computes(reading, node) for node in between):
        return first
    return root


def _computes(reading: PairReading, node: Node) -> bool:
    """Tell whether a node of forward takes time: whether it makes memory, rather than a view or a size."""
    return any(maker(made) is node for made in reading.fw.held.get(node, ()))


def _layout(node: Node) -> tuple[Number, ...]:
    value = node.meta["val"]
    if value.layout != torch.strided:
        return ()
    return tuple(number(size) for size in (*value.size(), *value.stride(), value.storage_offset()))


def _same_extent(first: torch.Tensor, second: torch.Tensor) -> bool:
    return all(
        a == b or (not (isinstance(a, int) and isinstance(b, int)) and (a - b).expand() == 0)
        for a, b in zip(extent(first), extent(second), strict=True)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has one element for each place in its extent; by hints, as this is only a preference."""
    covered = extent_hint(tensor)
    return covered is not None and elements_hint(tensor) == covered[1] - covered[0]


def _distinct(members: tuple[tuple[Node, Node], ...]) -> list[tuple[Node, Node]]:
    """Drop the second appearance of a node that forward saves twice: it is one value."""
    first: dict[Node, Node] = {}
    for node, placeholder in members:
        first.setdefault(node, placeholder)
    return list(first.items())


def _storage(
    reading: PairReading,
    group: _Group,
    uses: tuple[Uses, Uses],
    *,
    device: torch.device | None,
    on_device: Callable[[torch.device], bool],
) -> Storage:
    root, value = group.root, group.root.meta["val"]
    placeholders = [reading.bw.root[placeholder] for _, placeholder in group.members]
    gradients = {reading.bw.root[node] for node in reading.gradients if node in reading.bw.root}
    returned = any(placeholder in gradients for placeholder in placeholders)
    # Memory that only the output of backward uses, or that nothing uses, is there until backward ends.
    first = min((uses[1].first[node] for node in placeholders if node in uses[1].first), default=reading.end)
    last = max((uses[1].last.get(node, reading.end) for node in placeholders), default=reading.end)
    nbytes = storage_nbytes_hint(root)
    birth, carried_at = reading.position[maker(root)], reading.position[group.carrier]
    return Storage(
        name=root.name,
        nbytes=nbytes,
        dtype=dtype_name(value.dtype),
        device=str(value.device),
        members=tuple(node.name for node, _ in _distinct(group.members)),
        carrier=group.carrier.name,
        birth=-1 if root.op != "call_function" else birth,
        carried_at=-1 if group.carrier.op != "call_function" else carried_at,
        last_forward_use=max(uses[0].last.get(root, carried_at), carried_at),
        first_backward_use=min(first, last),
        last_backward_use=reading.end if returned else last,
        nbytes_expr=_expression(value),
        immovable=reasons(reading, root, group.members, group.carrier, nbytes, device=device, on_device=on_device),
        held=is_held(reading, root),
    )


def _value(reading: PairReading, storage: Storage, root: Node, node: Node, placeholder: Node, uses: Uses) -> Value:
    value = node.meta["val"]
    known = (node, maker(node), root, maker(root))
    strided = value.layout == torch.strided
    covered = extent_hint(value) if strided else None
    return Value(
        name=node.name,
        storage=storage.name,
        op=op_name(maker(root)),
        shape=tuple(_size(size) for size in value.size()),
        stride=tuple(_size(stride) for stride in value.stride()) if strided else (),
        storage_offset=_size(value.storage_offset()) if strided else 0,
        dtype=dtype_name(value.dtype),
        nbytes=None if covered is None else (covered[1] - covered[0]) * value.element_size(),
        storage_nbytes=storage.nbytes,
        nbytes_expr=_expression(value),
        module_path=provenance.module_path(known),
        source=provenance.source_line(known),
        label=provenance.label(known),
        region=provenance.region(known),
        tag=provenance.tag(known),
        birth=-1 if node.op != "call_function" else reading.position[node],
        last_forward_use=storage.last_forward_use,
        first_backward_use=uses.first.get(reading.bw.root[placeholder], storage.first_backward_use),
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return `bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _size(size: int | torch.SymInt) -> Size:
    known = number(size)
    return known if isinstance(known, int) else str(known)


def _expression(value: torch.Tensor) -> str | None:
    """Return the text of a value's bytes where they are symbolic, else None."""
    if value.layout != torch.strided:
        return None
    low, high = extent(value)
    nbytes = (high - low) * value.element_size()
    return None if isinstance(nbytes, int) or nbytes.is_number else str(nbytes.expand())
