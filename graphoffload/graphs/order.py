"""The events of a rewritten pair, read off the graphs alone.

Transfers are found by their operators, never by names, and nothing is taken from the plan: what is judged here is what
will run. A fault of structure (a release or ready that is missing, a slot that no offload fills) is spelled as an event
that the checker objects to, so that one checker sees every fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch.fx import Graph, GraphModule, Node

from graphoffload.graphs.immovable import reads_only_metadata
from graphoffload.graphs.saved import match_saved
from graphoffload.graphs.storage import Memory, memory_of
from graphoffload.ordering.alphabet import (
    device,
    offload_events,
    ready_events,
    release_events,
    reload,
    reload_events,
)
from graphoffload.ordering.clocks import without_covered_waits
from graphoffload.ordering.events import COMPUTE, Event
from graphoffload.runtime.ops import OFFLOAD, READY, RELEASE, RELOAD


def events_of_pair(
    forward: GraphModule, backward: GraphModule, *, num_fwd_outputs: int | None = None
) -> tuple[Event, ...]:
    """List the events of a rewritten pair, without waits that others imply; none where nothing is transferred.

    From the carrier on, every node that takes the source's memory in reads it, views and the output included; so does,
    in backward, every node that takes the reloaded memory in. Without `num_fwd_outputs`, the saved values are as many
    as backward has placeholders that are not tangents. Raises UnsupportedGraphError where the two graphs do not fit.
    """
    targets = {node.target for module in (forward, backward) for node in module.graph.nodes}
    if not targets & {OFFLOAD, RELEASE, RELOAD, READY}:
        return ()
    if num_fwd_outputs is None:
        num_fwd_outputs = _count_fwd_outputs(forward, backward)
    saved = match_saved(forward, backward, num_fwd_outputs=num_fwd_outputs)
    there = _Forward.of(forward.graph)
    back = _Backward.of(backward.graph, saved, there)
    return without_covered_waits(
        [
            *(event for node in forward.graph.nodes for event in there.events(node)),
            *(event for node in backward.graph.nodes for event in back.events(node)),
        ]
    )


# What backward receives besides saved values; AOTAutograd and its partitioners tell them by these names of targets too.
_NOT_SAVED = ("tangents", "bwd_rng_state", "bwd_seed", "bwd_base_offset")


def _count_fwd_outputs(forward: GraphModule, backward: GraphModule) -> int:
    placeholders = backward.graph.find_nodes(op="placeholder")
    saved = [node for node in placeholders if not str(node.target).startswith(_NOT_SAVED)]
    return len(forward.graph.output_node().args[0]) - len(saved)  # type: ignore[arg-type]


def _owed(node: Node, token: str) -> Event:
    """Say that `node` relies on a release or ready that the graph does not have: nothing ever records `token`."""
    return Event(COMPUTE, "wait", node.name, token=token)


def _calls(graph: Graph, operator: object) -> list[Node]:
    return [node for node in graph.nodes if node.target is operator]


def _node(node: Node, position: int) -> Node:
    argument = node.args[position]
    assert isinstance(argument, Node)
    return argument


def _taken_in(memory: Memory, node: Node) -> Iterable[Node]:
    """List the makers of all the memory that `node` takes in."""
    return dict.fromkeys(root for source in node.all_input_nodes for root in memory.held.get(source, ()))


@dataclass
class _Forward:
    """Walk a forward graph. `slots` maps offloads, `carriers` what they read, `offloaded` its makers, to storages."""

    memory: Memory
    slots: dict[Node, str] = field(default_factory=dict)
    carriers: defaultdict[Node, list[str]] = field(default_factory=lambda: defaultdict(list))
    offloaded: defaultdict[Node, list[str]] = field(default_factory=lambda: defaultdict(list))
    carried: set[str] = field(default_factory=set)
    released: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, graph: Graph) -> _Forward:
        walk = cls(memory_of(graph))
        for node in _calls(graph, OFFLOAD):
            carrier, storage = _node(node, 0), str(node.args[1])
            walk.slots[node] = storage
            walk.carriers[carrier].append(storage)
            walk.offloaded[walk.memory.root[carrier]].append(storage)
        return walk

    def storages(self, roots: Iterable[Node]) -> tuple[str, ...]:
        """List the storages that live in memory made by one of `roots`."""
        return tuple(storage for root in roots for storage in self.offloaded.get(root, ()))

    def events(self, node: Node) -> Iterator[Event]:
        if node.target is OFFLOAD:
            yield from offload_events(self.slots[node])
        elif node.target is RELEASE:
            yield from self._release(node)
        else:
            yield from self._step(node)
        if node.op == "output":
            yield from (
                _owed(node, f"release:{storage}") for storage in self.slots.values() if storage not in self.released
            )

    def _release(self, node: Node) -> Iterator[Event]:
        host, source, wait = _node(node, 0), _node(node, 1), bool(node.args[2])
        # What is no slot, or no source of one, keeps its own name: the checker then finds that nothing made it.
        storage = self.slots.get(host, host.name)
        for freed in self.storages(self.memory.held[source]) or (source.name,):
            self.released.add(freed)
            yield from release_events(storage, source=freed, wait=wait)

    def _step(self, node: Node) -> Iterator[Event]:
        roots = _taken_in(self.memory, node)
        reads = tuple(device(storage) for storage in self.storages(roots) if storage in self.carried)
        written = self.storages(root for root in roots if node in self.memory.writers.get(root, ()))
        writes = tuple(device(storage) for storage in written if storage in self.carried)
        allocs = tuple(device(storage) for storage in self.carriers.get(node, ()))
        self.carried.update(self.carriers.get(node, ()))
        if reads or writes or allocs:
            yield Event(COMPUTE, "run", node.name, reads=reads, writes=writes, allocs=allocs)


@dataclass
class _Backward:
    """Walk a backward graph. `slots` and `sources` map makers that are placeholders, `reloads` reloads, to storages.

    `last` maps a node to the storages whose reloaded memory nothing takes in after it.
    """

    memory: Memory
    reloads: dict[Node, str]
    last: defaultdict[Node, list[str]]
    slots: dict[Node, str]
    sources: dict[Node, tuple[str, ...]]
    ready: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, graph: Graph, saved: Iterable[tuple[Node, Node]], forward: _Forward) -> _Backward:
        memory = memory_of(graph)
        slots: dict[Node, str] = {}
        sources: dict[Node, tuple[str, ...]] = {}
        for node, placeholder in saved:
            maker = memory.root[placeholder]
            if node in forward.slots:
                slots[maker] = forward.slots[node]
            sources[maker] = forward.storages(forward.memory.held[node])
        # A slot that no offload fills keeps the name of what stands for it: the checker finds that nothing wrote it.
        reloads = {node: slots.get(_node(node, 0), _node(node, 0).name) for node in _calls(graph, RELOAD)}
        last_use = {node: node for node in reloads}
        for node in graph.nodes:
            last_use.update((maker, node) for maker in _taken_in(memory, node) if maker in reloads)
        last: defaultdict[Node, list[str]] = defaultdict(list)
        for maker, node in last_use.items():
            last[node].append(reloads[maker])
        return cls(memory, reloads, last, slots, sources)

    def events(self, node: Node) -> Iterator[Event]:
        frees = tuple(reload(storage) for storage in self.last.get(node, ()))
        if node.target is RELOAD:
            yield from reload_events(self.reloads[node])
        elif node.target is READY:
            dest, slot = _node(node, 0), _node(node, 1)
            storage = self.reloads.get(self.memory.root.get(dest, dest), dest.name)
            self.ready.add(storage)
            yield from ready_events(storage, slot=self.slots.get(slot, slot.name))
        else:
            yield from self._step(node, frees)
            return
        if frees:
            yield Event(COMPUTE, "run", f"drop {node.name}", frees=frees)

    def _step(self, node: Node, frees: tuple[str, ...]) -> Iterator[Event]:
        reads: list[str] = []
        writes: list[str] = []
        for maker in _taken_in(self.memory, node):
            storage = self.reloads.get(maker)
            if storage is None and not reads_only_metadata(node):
                storage = self.slots.get(maker)  # compute takes in a slot where it should take in what was reloaded
            touched = [device(source) for source in self.sources.get(maker, ())]
            if storage is not None:
                touched.append(reload(storage))
                if storage not in self.ready:
                    yield _owed(node, f"ready:{storage}")
            reads += touched
            if node in self.memory.writers.get(maker, ()):
                writes += touched
        if reads:
            yield Event(COMPUTE, "run", node.name, reads=tuple(reads), writes=tuple(writes), frees=frees)
