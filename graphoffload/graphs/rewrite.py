"""The rewrite: put a plan's transfers into a (forward, backward) pair. It asks the plan, never the graph, what to do.

Forward: `h = offload(carrier, 'S')` after the plan's `offload_after`, `release(h, carrier, wait)` after `release_after`; in
the outputs `h` stands where the first member of storage S stood, and the other members are gone.
Backward: one placeholder `h` where the first member's stood; `d = reload(h, device)` before `reload_before`, `ready(d, h)`
before `ready_before`; each member is rebuilt from `d` right before its first use. A recomputation region reads the same
placeholders, so it reads what was reloaded; nothing here knows about regions.

At one anchor offloads come before releases and reloads before readies (a wait never delays a copy that may start).
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphoffload._torch import FakeTensor
from graphoffload.errors import StalePlanError, UnsupportedGraphError, UsageError
from graphoffload.graphs.duplicate import empty_graph, module_with
from graphoffload.graphs.places import Place, SavedValue, renumbered, saved_values
from graphoffload.graphs.stale import refuse_stale
from graphoffload.graphs.symbols import SizeNodes, expression
from graphoffload.planning.plan import Plan, Transfer
from graphoffload.runtime.ops import OFFLOAD, READY, RELEASE, RELOAD

OPERATORS = frozenset({OFFLOAD, RELEASE, RELOAD, READY})
"""The operators that only `rewrite` puts into a graph."""

DISPLACED = "graphoffload_displaced"
"""The key of `node.meta`, on both nodes named `h`, under which `rewrite` records what `h` took the place of."""

# Passes after us read these: where a node came from, which half of the joint graph it belongs to. Never the recompute tags:
# a transfer must not be replayed.
_INHERITED = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "partitioner_tag", "seq_nr", "autograd_backward")


@dataclass(frozen=True)
class Displaced:
    """Record, for `erase`, the members that one host tensor took the place of, in the order of their positions.

    `direct` is the member that is the reloaded tensor itself, if one is; the others are views of it under their own names.
    """

    storage: str
    members: tuple[Place, ...]
    direct: str | None


@dataclass(frozen=True)
class _Move:
    """Resolve one transfer against one pair: the plan's names have become nodes, and the new nodes have names."""

    transfer: Transfer
    names: _Names
    carrier: fx.Node
    members: tuple[SavedValue, ...]
    direct: str | None

    @property
    def displaced(self) -> Displaced:
        return Displaced(self.transfer.storage, tuple(member.place for member in self.members), self.direct)


@dataclass(frozen=True)
class _Names:
    host: str
    release: str
    reload: str
    ready: str


def rewrite(
    forward: fx.GraphModule, backward: fx.GraphModule, plan: Plan, *, num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the pair with the plan's transfers in it, as new modules; the given ones are not touched.

    Laws: outputs and gradients are bitwise those of the pair; with an empty plan the pair prints as before; `erase` undoes
    it; the events of the new pair refine those of the plan.
    Raises `UsageError` for a pair that is rewritten already, `StalePlanError` for a plan of another pair,
    `UnsupportedGraphError` for a member that cannot be rebuilt.
    """
    refuse_rewritten(forward, backward)
    saved = saved_values(forward, backward, num_fwd_outputs=num_fwd_outputs)
    refuse_stale(forward, backward, plan, saved)
    fresh = _FreshNames(node.name for module in (forward, backward) for node in module.graph.nodes)
    by_name = {node.name: node for node in forward.graph.nodes}
    moves = tuple(_resolve(transfer, plan, by_name, saved, fresh) for transfer in plan.transfers)
    return _rewrite_forward(forward, moves, num_fwd_outputs), _rewrite_backward(backward, moves, fresh)


class _FreshNames:
    """Give names that neither graph has. The graphs' own nodes must keep theirs, or erase could not give them back."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)

    def __call__(self, name: str) -> str:
        candidates = itertools.chain([name], (f"{name}_{count}" for count in itertools.count(1)))
        free = next(candidate for candidate in candidates if candidate not in self._taken)
        self._taken.add(free)
        return free


def refuse_rewritten(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Raise UsageError when the pair holds operators of ours (law: rewriting twice raises)."""
    for half, module in (("forward", forward), ("backward", backward)):
        found = [node.name for node in module.graph.nodes if node.target in OPERATORS]
        if found:
            raise UsageError(
                f"the {half} graph is rewritten already: it holds {', '.join(found[:3])}; use the pair that was given to "
                f"rewrite, or erase the transfers first"
            )


def _resolve(
    transfer: Transfer, plan: Plan, by_name: dict[str, fx.Node], saved: dict[str, SavedValue], fresh: _FreshNames
) -> _Move:
    carrier = by_name[transfer.carrier]
    storage = plan.facts.storage_by_name[transfer.storage]
    members = tuple(sorted((saved[name] for name in storage.members), key=lambda member: member.place.output_index))
    for member in members:
        _refuse_unlike(member, carrier)
    direct = next((member.placeholder.name for member in members if _same_geometry(member.placeholder, carrier)), None)
    names = _Names(*(fresh(f"{transfer.storage}_{part}") for part in ("host", "release", "reload", "ready")))
    return _Move(transfer, names, carrier, members, direct)


def _refuse_unlike(member: SavedValue, carrier: fx.Node) -> None:
    """Raise UnsupportedGraphError when a strided view of the carrier's memory cannot be this member."""
    values: list[Any] = [node.meta.get("val") for node in (carrier, member.node, member.placeholder)]
    if not all(isinstance(value, FakeTensor) for value in values):
        raise UnsupportedGraphError(
            f"the saved value {member.node.name!r} has no fake tensor in its meta; keep this value"
        )
    mine, *others = values
    lazy = any(value.is_conj() or value.is_neg() for value in values)
    if lazy or any(value.layout is not torch.strided or value.dtype != mine.dtype for value in others):
        raise UnsupportedGraphError(
            f"the saved value {member.node.name!r} is not a strided view, of the same dtype and without a conjugate or "
            f"negative bit, of {carrier.name!r}, which holds its memory; keep this value"
        )


def _same_geometry(member: fx.Node, carrier: fx.Node) -> bool:
    return _geometry(member.meta["val"]) == _geometry(carrier.meta["val"])


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(expression(size) for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))


# --- forward -----------------------------------------------------------------------------------------------------------


def _rewrite_forward(forward: fx.GraphModule, moves: tuple[_Move, ...], num_fwd_outputs: int) -> fx.GraphModule:
    graph = empty_graph(forward.graph)
    copies: dict[fx.Node, fx.Node] = {}
    hosts: dict[str, fx.Node] = {}
    after = _forward_anchors(forward, moves)
    for node in forward.graph.nodes:
        if node.op == "output":
            _write_outputs(graph, node, moves, hosts, copies, num_fwd_outputs)
            break
        copies[node] = graph.node_copy(node, copies.__getitem__)
        for emit in after[node]:
            emit(graph, copies, hosts)
    return module_with(graph, like=forward)


_Emit = Callable[[fx.Graph, dict[fx.Node, fx.Node], dict[str, fx.Node]], None]


def _forward_anchors(forward: fx.GraphModule, moves: tuple[_Move, ...]) -> dict[fx.Node, list[_Emit]]:
    """Say what to emit after each node. After a placeholder means after the last one."""
    after: dict[fx.Node, list[_Emit]] = defaultdict(list)
    by_name: dict[str, fx.Node] = {node.name: node for node in forward.graph.nodes}
    last_placeholder: fx.Node | None = next(
        (node for node in reversed(forward.graph.nodes) if node.op == "placeholder"), None
    )

    def anchor(name: str) -> fx.Node:
        node = by_name[name]
        return last_placeholder if node.op == "placeholder" and last_placeholder is not None else node

    for move in moves:
        after[anchor(move.transfer.offload_after)].append(functools.partial(_emit_offload, move))
    for move in moves:
        after[anchor(move.transfer.release_after)].append(functools.partial(_emit_release, move))
    return after


def _emit_offload(move: _Move, graph: fx.Graph, copies: dict[fx.Node, fx.Node], hosts: dict[str, fx.Node]) -> None:
    host = graph.create_node(
        "call_function", OFFLOAD, (copies[move.carrier], move.transfer.storage), name=move.names.host
    )
    host.meta = _host_meta(move)
    hosts[move.names.host] = host


def _emit_release(move: _Move, graph: fx.Graph, copies: dict[fx.Node, fx.Node], hosts: dict[str, fx.Node]) -> None:
    arguments = (hosts[move.names.host], copies[move.carrier], move.transfer.wait)
    release = graph.create_node("call_function", RELEASE, arguments, name=move.names.release)
    release.meta = {**_inherited(move.carrier), "val": None}


def _host_meta(move: _Move) -> dict[str, Any]:
    """Make the meta of `h`, the same on both sides. It keeps the order class of the place it takes over."""
    meta = {**_inherited(move.carrier), "val": _fake_like(move.carrier, "cpu"), DISPLACED: move.displaced}
    if move.members[0].node.meta.get("saved_tensor_with_no_vc_check"):
        meta["saved_tensor_with_no_vc_check"] = True
    return meta


def _fake_like(carrier: fx.Node, device: torch.device | str) -> torch.Tensor:
    value: FakeTensor = carrier.meta["val"]
    with value.fake_mode:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)


def _inherited(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in _INHERITED if key in node.meta}


def _write_outputs(
    graph: fx.Graph,
    output: fx.Node,
    moves: tuple[_Move, ...],
    hosts: dict[str, fx.Node],
    copies: dict[fx.Node, fx.Node],
    num_fwd_outputs: int,
) -> None:
    """Write forward's output node, with the lists in its meta kept in step with the outputs."""
    first = {move.members[0].place.output_index: hosts[move.names.host] for move in moves}
    gone = {member.place.output_index for move in moves for member in move.members[1:]}
    old = list(output.args[0])  # type: ignore[arg-type]
    kept = [index for index in range(len(old)) if index not in gone]
    new = [first[i] if i in first else fx.map_arg(old[i], copies.__getitem__) for i in kept]
    result = new if isinstance(output.args[0], list) else tuple(new)
    written = graph.create_node("output", "output", (result,), name=output.name, type_expr=output.type)
    written.meta = dict(output.meta)
    if isinstance(descs := output.meta.get("desc"), (list, tuple)):
        written.meta["desc"] = renumbered([descs[i] for i in kept], num_fwd_outputs=num_fwd_outputs)
    if isinstance(traces := output.meta.get("output_stack_traces"), (list, tuple)):
        written.meta["output_stack_traces"] = [traces[i] for i in kept]


# --- backward ----------------------------------------------------------------------------------------------------------


def _rewrite_backward(backward: fx.GraphModule, moves: tuple[_Move, ...], fresh: _FreshNames) -> fx.GraphModule:
    graph = empty_graph(backward.graph)
    rebuild = _Rebuild(graph, moves, fresh)
    before: dict[str, list[Callable[[], None]]] = defaultdict(list)
    for move in moves:
        before[move.transfer.reload_before].append(functools.partial(rebuild.emit_reload, move))
    for move in moves:
        before[move.transfer.ready_before].append(functools.partial(rebuild.emit_ready, move))
    for node in backward.graph.nodes:
        if node.op == "placeholder" and rebuild.displaces(node):
            continue
        for emit in before[node.name]:
            emit()
        for source in node.all_input_nodes:
            rebuild.provide(source, user=node)
        rebuild.copies[node] = graph.node_copy(node, rebuild.copies.__getitem__)
    return module_with(graph, like=backward)


class _Rebuild:
    """Hold what one walk over a backward graph has made so far: copies, hosts, reloaded tensors, which are ready."""

    def __init__(self, graph: fx.Graph, moves: Iterable[_Move], fresh: _FreshNames) -> None:
        self.graph = graph
        self._fresh = fresh
        self.copies: dict[fx.Node, fx.Node] = {}
        self._move_of = {member.placeholder: move for move in moves for member in move.members}
        self._hosts: dict[str, fx.Node] = {}
        self._reloaded: dict[str, fx.Node] = {}
        self._ready: set[str] = set()
        self._sizes: SizeNodes | None = None

    def displaces(self, placeholder: fx.Node) -> bool:
        """Leave a member's placeholder out; at the first of a storage, write its host's placeholder instead."""
        move = self._move_of.get(placeholder)
        if move is None:
            return False
        if move.members[0].placeholder is placeholder:
            host = self.graph.create_node("placeholder", move.names.host, name=move.names.host)
            host.meta = _host_meta(move)
            self._hosts[move.names.host] = host
        return True

    def emit_reload(self, move: _Move) -> None:
        device = move.carrier.meta["val"].device
        arguments = (self._hosts[move.names.host], device)
        reload = self.graph.create_node("call_function", RELOAD, arguments, name=move.names.reload)
        reload.meta = {**self._meta(move.carrier), "val": _fake_like(move.carrier, device)}
        self._reloaded[move.names.host] = reload

    def emit_ready(self, move: _Move) -> None:
        arguments = (self._reloaded[move.names.host], self._hosts[move.names.host])
        ready = self.graph.create_node("call_function", READY, arguments, name=move.names.ready)
        ready.meta = {**self._meta(move.carrier), "val": None}
        self._ready.add(move.names.host)

    def provide(self, placeholder: fx.Node, *, user: fx.Node) -> None:
        """Make a member available right before its first use, and no earlier: a view holds memory."""
        move = self._move_of.get(placeholder)
        if move is None or placeholder in self.copies:
            return
        if move.names.host not in self._ready:
            raise StalePlanError(
                f"the plan brings {placeholder.name!r} back before {move.transfer.ready_before!r}, which is after its first "
                f"use, by {user.name!r}; make a new plan from this pair's facts"
            )
        reloaded = self._reloaded[move.names.host]
        self.copies[placeholder] = (
            reloaded if placeholder.name == move.direct else self._view(placeholder, move.carrier, reloaded)
        )

    def _view(self, placeholder: fx.Node, carrier: fx.Node, reloaded: fx.Node) -> fx.Node:
        """Rebuild a member as a view: the reload brought back the carrier's extent, from the carrier's offset on."""
        member: FakeTensor = placeholder.meta["val"]
        offset = member.storage_offset() - carrier.meta["val"].storage_offset()
        geometry = (tuple(member.size()), tuple(member.stride()), offset)
        if _same_geometry(placeholder, carrier):
            target, sizes = torch.ops.aten.alias.default, tuple[Any, ...]()
        else:
            target, sizes = torch.ops.aten.as_strided.default, self._size_arguments(geometry, placeholder.name)
        view = self.graph.create_node("call_function", target, (reloaded, *sizes), name=placeholder.name)
        with member.fake_mode:
            view.meta = {**self._meta(placeholder), "val": reloaded.meta["val"].as_strided(*geometry)}
        return view

    def _size_arguments(self, geometry: tuple[Any, Any, Any], value: str) -> tuple[Any, ...]:
        if self._sizes is None:
            placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
            self._sizes = SizeNodes(self.graph, placeholders, fresh_name=lambda: self._fresh("reloaded_size"))
        size, stride, offset = geometry
        make = functools.partial(self._sizes.argument, value=value)
        return [make(each) for each in size], [make(each) for each in stride], make(offset)

    def _meta(self, source: fx.Node) -> dict[str, Any]:
        return {**_inherited(source), "partitioner_tag": "is_backward", "autograd_backward": True}
