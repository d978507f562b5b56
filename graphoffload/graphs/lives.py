"""Give the life on the device of every storage of a pair that is not a saved value, and the first and last use of all.

When memory goes, and who keeps it:

- *Arguments* of forward, parameters or not, are taken to stay to the end: the caller may hold them.
- *Outputs* of forward stay to the end, save those which AOTAutograd copies back into an argument: they go with forward.
- *Tangents* are there when backward begins. They go after their last use where torch hands them over in a list that is
  cleared (2.13 on); before that (2.11, 2.12) the autograd engine keeps them to the end of backward.
- *Gradients* stay from birth to the end.
- *Transients* go with the last use of any of their views. A list value keeps all of its elements until the last of them
  is taken out. A value that nothing uses stays until its graph ends (as `torch.fx.Interpreter` keeps it).

Sizes are hints; a storage whose size is unknown before running (unbacked) is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from graphoffload.graphs.fusion import Kernels
from graphoffload.graphs.immovable import kept_outputs
from graphoffload.graphs.saved import PairReading, is_getitem, maker
from graphoffload.graphs.storage import Memory, extent_hint, hint
from graphoffload.planning.values import Buffer

_TANGENTS_ARE_FREED_EARLY = hasattr(torch.autograd.Function, "boxed_grads_call")


@dataclass(frozen=True)
class Uses:
    """Map the roots of one graph to the first and last position at which a node uses them, views included."""

    first: dict[Node, int]
    last: dict[Node, int]


def uses_of(graph: Graph, memory: Memory, kernels: Kernels) -> Uses:
    """Return the uses of every root. Making a view or taking an element is a use; the output node is none."""
    first: dict[Node, int] = {}
    last: dict[Node, int] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        begin, end = kernels.first_read[node], kernels.last_read[node]
        for source in node.all_input_nodes:
            for root in memory.held.get(source, ()):
                first[root] = min(first.get(root, begin), begin)
                last[root] = max(last.get(root, end), end)
    return Uses(first, last)


def buffers_of(
    reading: PairReading,
    kernels: tuple[Kernels, Kernels],
    uses: tuple[Uses, Uses],
    *,
    on_device: Callable[[torch.device], bool],
) -> tuple[Buffer, ...]:
    """Return the lives of all unsaved storages on the device, by birth. Kernels and uses are (forward, backward)."""
    saved = {reading.fw.root[node] for node, _ in reading.saved}
    received = {reading.bw.root[placeholder] for _, placeholder in reading.saved}
    found = [
        *_forward_buffers(reading, kernels[0], uses[0], skip=saved, on_device=on_device),
        *_backward_buffers(reading, kernels[1], uses[1], skip=received, on_device=on_device),
    ]
    return tuple(sorted(found, key=lambda buffer: buffer.born))


def _forward_buffers(
    reading: PairReading, kernels: Kernels, uses: Uses, *, skip: set[Node], on_device: Callable[[torch.device], bool]
) -> list[Buffer]:
    memory, last_step = reading.fw, reading.begin_backward - 1
    kept = kept_outputs(reading)
    returned = {memory.root[node] for node in reading.returned if node in memory.root}
    found = []
    for root in _roots(memory, kernels, skip, on_device):
        if root.op == "call_function":
            born = reading.position[maker(root)]
            kind = "output" if root in returned else "transient"
            dies = reading.end if root in kept else last_step if root in returned else uses.last.get(root, last_step)
        else:
            kind = "parameter" if root in reading.static or root.op == "get_attr" else "input"
            born, dies = -1, reading.end
        found.append(Buffer(root.name, storage_nbytes_hint(root) or 0, kind, born, max(born, dies)))
    found.extend(_unclaimed(memory, reading.position, last_step, on_device))
    return _hand_over(found, kernels)


def _backward_buffers(
    reading: PairReading, kernels: Kernels, uses: Uses, *, skip: set[Node], on_device: Callable[[torch.device], bool]
) -> list[Buffer]:
    memory, end = reading.bw, reading.end
    gradients = {memory.root[node] for node in reading.gradients if node in memory.root}
    found = []
    for root in _roots(memory, kernels, skip, on_device):
        nbytes = storage_nbytes_hint(root) or 0
        if root.op == "call_function":
            born = reading.position[maker(root)]
            kind = "gradient" if root in gradients else "transient"
        elif root.op == "get_attr":
            kind, born = "parameter", -1
        else:
            kind, born = "tangent", reading.begin_backward
            # A traced tangent has the storage of the output it belongs to; a real one has memory for itself alone.
            nbytes = min(nbytes, _extent_nbytes_hint(root.meta["val"]) or 0)
        freed = kind == "transient" or (kind == "tangent" and _TANGENTS_ARE_FREED_EARLY and root not in gradients)
        dies = uses.last.get(root, end) if freed else end
        found.append(Buffer(root.name, nbytes, kind, born, max(born, dies)))
    found.extend(_unclaimed(memory, reading.position, end, on_device))
    return _hand_over(found, kernels)


def _roots(
    memory: Memory, kernels: Kernels, skip: set[Node], on_device: Callable[[torch.device], bool]
) -> Iterable[Node]:
    for root in dict.fromkeys(memory.root.values()):
        wanted = root in kernels.material and root not in skip and on_device(root.meta["val"].device)
        if wanted and storage_nbytes_hint(root):
            yield root


def _unclaimed(
    memory: Memory,
    position: dict[Node, int],
    end: int,
    on_device: Callable[[torch.device], bool],
) -> list[Buffer]:
    """Return the lives of list elements that no node takes out: they stay as long as their list."""
    found = []
    for node, tensors in memory.unclaimed.items():
        dies = max((position[user] for user in node.users if is_getitem(user)), default=end)
        for index, tensor in enumerate(tensors):
            nbytes = _nbytes_hint(tensor)
            if nbytes and on_device(tensor.device):
                found.append(Buffer(f"{node.name}:{index}", nbytes, "transient", position[maker(node)], dies))
    return found


def _hand_over(buffers: list[Buffer], kernels: Kernels) -> list[Buffer]:
    """Let a fused pointwise result take the memory of one transient of its size that dies in the same step.

    Empty `kernels.pointwise` (no fusion): nothing changes.
    """
    if not kernels.pointwise:
        return buffers
    dying: dict[tuple[int, int], list[int]] = {}
    for index, buffer in enumerate(buffers):
        if buffer.kind == "transient" and buffer.dies > buffer.born:
            dying.setdefault((buffer.dies, buffer.nbytes), []).append(index)
    pointwise = {node.name for node in kernels.pointwise}
    result = list(buffers)
    for buffer in buffers:
        free = dying.get((buffer.born, buffer.nbytes))
        if buffer.name in pointwise and free:
            index = free.pop(0)
            old = result[index]
            result[index] = Buffer(old.name, old.nbytes, old.kind, old.born, old.dies - 1)
    return result


def recomputed_nbytes(reading: PairReading, kernels: Kernels, *, on_device: Callable[[torch.device], bool]) -> int:
    """Return the bytes of the forward storages that backward makes again: same name, same operator, not received.

    A partitioner copies a recomputed node under its own name; the type and shape are compared so that a pair from
    elsewhere, whose names may collide, is not miscounted.
    """
    forward = {node.name: node for node in reading.fw.root if node.op == "call_function"}
    total = 0
    for node in dict.fromkeys(reading.bw.root.values()):
        twin = forward.get(node.name)
        if node.op != "call_function" or twin is None or twin.target != node.target or node not in kernels.material:
            continue
        mine, theirs = node.meta["val"], twin.meta["val"]
        if mine.dtype == theirs.dtype and mine.dim() == theirs.dim() and on_device(mine.device):
            total += storage_nbytes_hint(node) or 0
    return total


def storage_nbytes_hint(root: Node) -> int | None:
    """Return the bytes of the whole storage that a root made, in the traced run; None where unknown."""
    return _nbytes_hint(root.meta["val"])


def _nbytes_hint(tensor: torch.Tensor) -> int | None:
    try:
        return hint(tensor.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):  # a kind without a storage
        return _extent_nbytes_hint(tensor)


def _extent_nbytes_hint(tensor: torch.Tensor) -> int | None:
    covered = extent_hint(tensor) if tensor.layout == torch.strided else None
    return None if covered is None else (covered[1] - covered[0]) * tensor.element_size()
