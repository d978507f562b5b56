"""Guess which values of a graph get memory of their own once the downstream compiler has fused, and when it is read.

Without fusion the answer is exact: every storage has memory, and a node reads its inputs at its own step.

With fusion (Inductor) it is a heuristic, made to follow the peak of transformer-like graphs within a few per cent:

- An operator that Inductor generates code for (pointwise, reduction, cast, gather, copy) has no memory of its own,
  unless it is kept (saved, returned), an operator that is not generated (matrix product, convolution, attention,
  scatter, sort, collective, custom or higher-order operator) reads it, or several kernels with such an operator between
  them read it and computing it again in each would read more than `_INLINE_READS` buffers or repeat a reduction.
- What such a value reads is read when the kernel that consumes it runs, so the lives of its inputs reach to there.
- A pointwise result takes over the memory of an input of the same size that dies with it.

Its limits: it knows no tile sizes, so two kernels that Inductor fails to fuse (different loop orders) look like one; it
knows no templates with fused epilogues; Inductor's own reordering is not followed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from graphoffload._torch import OpOverload
from graphoffload.graphs.saved import is_getitem, maker
from graphoffload.graphs.storage import Memory

# Inductor realizes a value with several users once computing it reads more buffers than this (realize_reads_threshold).
_INLINE_READS = 4
_REDUCTION_NAMES = (
    "sum mean amax amin prod any all argmax argmin max min var std var_mean std_mean logsumexp norm linalg_vector_norm "
    "native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward _fused_rms_norm "
    "_fused_rms_norm_backward native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training batch_norm_backward _batch_norm_with_update_functional _softmax _log_softmax "
    "_softmax_backward_data _log_softmax_backward_data nll_loss_forward"
)
_REDUCTIONS = frozenset(_REDUCTION_NAMES.split())
_GENERATED_NAMES = (
    "_to_copy clone copy cat constant_pad_nd full full_like zeros ones zeros_like ones_like empty empty_like new_zeros "
    "new_ones new_full new_empty scalar_tensor arange where embedding index gather index_select native_dropout "
    "native_dropout_backward rand rand_like randn randn_like bernoulli threshold_backward gelu_backward silu_backward "
    "sigmoid_backward tanh_backward hardtanh_backward hardswish_backward leaky_relu_backward elu_backward "
    "softplus_backward mish_backward hardsigmoid_backward log_sigmoid_forward log_sigmoid_backward nll_loss_backward "
    "slice_scatter select_scatter slice_backward select_backward expand_copy view_copy repeat flip roll tril triu "
    "masked_fill lift_fresh_copy glu glu_backward mse_loss mse_loss_backward sum_to_size split_with_sizes_copy "
    "convert_element_type iota inductor_random inductor_lookup_seed inductor_seeds device_put copy_"
)
_GENERATED = frozenset(_GENERATED_NAMES.split())


@dataclass(frozen=True)
class Kernels:
    """Hold which roots have memory, and for every node the first and last position at which its inputs are read."""

    material: frozenset[Node]
    first_read: dict[Node, int]
    last_read: dict[Node, int]
    pointwise: frozenset[Node]


def kernels_of(
    graph: Graph, memory: Memory, position: dict[Node, int], *, fused: bool, kept: Iterable[Node]
) -> Kernels:
    """Return the kernels of a graph. `kept` are roots that have memory in any case (saved values, outputs)."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if not fused:
        own = {node: position[node] for node in calls}
        return Kernels(frozenset(memory.root.values()), own, dict(own), frozenset())
    return _Fusing(calls, memory, position, frozenset(kept)).result()


class _Fusing:
    """Walk a graph from its end, so that each value's consumers are known before the value itself."""

    def __init__(self, calls: list[Node], memory: Memory, position: dict[Node, int], kept: frozenset[Node]) -> None:
        self.calls = calls
        self.memory = memory
        self.position = position
        self.kept = kept
        self.generated = {node: is_generated(node) for node in calls}
        self.consumers = self._consumers()
        self.barriers = self._barriers()
        self.reads = self._reads()
        self.first: dict[Node, int] = {}
        self.last: dict[Node, int] = {}

    def _consumers(self) -> dict[Node, list[Node]]:
        """Map each root to the nodes, views aside, that read it."""
        consumers: dict[Node, list[Node]] = {}
        for node in self.calls:
            for source in node.all_input_nodes:
                for root in self.memory.held.get(source, ()):
                    if root not in self.memory.held.get(node, ()) and not is_getitem(node):
                        consumers.setdefault(root, []).append(node)
        return consumers

    def _barriers(self) -> dict[int, int]:
        """Map each position to how many operators that cannot be fused come up to it."""
        count, result = 0, {}
        for node in self.calls:
            count += not self.generated[node] and not self._is_view(node)
            result[self.position[node]] = count
        return result

    def _is_view(self, node: Node) -> bool:
        return is_getitem(node) or self.memory.root.get(node, node) is not node

    def _reads(self) -> dict[Node, int]:
        """Map each root to how many buffers computing it reads when everything generated before it is inlined."""
        reads: dict[Node, frozenset[Node]] = {}
        for node in self.calls:
            if self.memory.root.get(node) is not node:
                continue
            made_by = maker(node)
            found: set[Node] = set()
            for source in made_by.all_input_nodes:
                for root in self.memory.held.get(source, ()):
                    inlined = reads.get(root)
                    found.update((root,) if inlined is None else inlined)
            if self.generated.get(made_by, False) and node not in self.kept and not is_reduction(made_by):
                # Longer chains are realized anyway, so the exact set beyond the threshold does not matter.
                reads[node] = frozenset(sorted(found, key=lambda item: item.name)[: _INLINE_READS + 1])
        return {node: len(found) for node, found in reads.items()}

    def result(self) -> Kernels:
        material = {root for root in self.memory.root.values() if root.op != "call_function"}
        for node in reversed(self.calls):
            root = self.memory.root.get(node)
            if root is node and self._is_material(node):
                material.add(node)
            self._place(node, root is not None and root is node and node not in material)
        # A list's elements are judged one by one; the list itself runs where its latest element is needed.
        pointwise = {node for node in material if node in self.generated and self._is_pointwise(node)}
        return Kernels(frozenset(material), self.first, self.last, frozenset(pointwise))

    def _is_pointwise(self, node: Node) -> bool:
        made_by = maker(node)
        return self.generated.get(made_by, False) and not is_reduction(made_by)

    def _is_material(self, root: Node) -> bool:
        made_by = maker(root)
        if root in self.kept or not self.generated.get(made_by, False):
            return True
        consumers = self.consumers.get(root, [])
        if not consumers or any(not self.generated[node] and not reads_nothing(node) for node in consumers):
            return True
        begin = min(self.first[node] for node in consumers)
        end = max(self.last[node] for node in consumers)
        if self.barriers[begin] == self.barriers[end]:
            return False
        return is_reduction(made_by) or self.reads.get(root, 0) > _INLINE_READS

    def _place(self, node: Node, inlined: bool) -> None:
        """Set when a node's inputs are read: at its own step, or, if it is computed inside its consumers, at theirs."""
        own = self.position[node]
        users = self.consumers.get(node, []) if inlined else []
        if is_getitem(node) and not inlined:
            users = []
        elif self.generated[node] and isinstance(node.meta.get("val"), (tuple, list)):
            users = [user for user in node.users if is_getitem(user)]
        self.first[node] = min((self.first[user] for user in users), default=own)
        self.last[node] = max((self.last[user] for user in users), default=own)


def is_generated(node: Node) -> bool:
    """Tell whether Inductor writes the code of a node itself and so can fuse it; views count as generated."""
    if is_getitem(node):
        return True
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))
    name = target._schema.name.partition("::")[2]
    if torch.Tag.pointwise in target.tags or name in _GENERATED or name in _REDUCTIONS:
        return True
    return name == "_unsafe_view" or any(item.alias_info is not None for item in target._schema.returns)


def is_reduction(node: Node) -> bool:
    """Tell whether a node combines elements, so that computing it again in every consumer is dear."""
    return isinstance(node.target, OpOverload) and node.target._schema.name.partition("::")[2] in _REDUCTIONS


def reads_nothing(node: Node) -> bool:
    """Tell whether a node has no tensor value and so moves no data (size arithmetic, assertions)."""
    return not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))
