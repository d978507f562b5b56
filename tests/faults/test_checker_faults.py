"""Break real rewritten pairs on purpose, in every place: the checker finds each break, and the virtual device shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from pairs import Pair, capture
from tight import tight_plan
from torch.fx import GraphModule, Node

from graphoffload.errors import OrderingError
from graphoffload.graphs.duplicate import duplicate
from graphoffload.graphs.order import events_of_pair
from graphoffload.graphs.rewrite import rewrite
from graphoffload.graphs.storage import memory_of
from graphoffload.ordering.check import assert_ordered, check
from graphoffload.ordering.refine import refines
from graphoffload.planning.order import events_of_plan
from graphoffload.planning.plan import Plan
from graphoffload.runtime.ops import OFFLOAD, READY, RELEASE, RELOAD
from graphoffload.testing import virtual_device

Graphs = tuple[GraphModule, GraphModule]


def network(x: torch.Tensor) -> torch.Tensor:
    """Save several storages, some with views, whose lives overlap."""
    q, k = x.sin().chunk(2, -1)
    y = (q * k).exp()
    z = (y * y.cos()).tanh()
    return (z * y.t().reshape(y.shape)).sigmoid().sum() + q.pow(3).sum()


def given(*, wait: bool, early: int) -> tuple[Graphs, Plan, Pair]:
    pair = capture(network, torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_())
    plan = tight_plan(pair, wait=wait, early=early)
    return rewrite(pair.forward, pair.backward, plan, num_fwd_outputs=pair.num_fwd_outputs), plan, pair


def calls(module: GraphModule, target: object) -> list[Node]:
    return [node for node in module.graph.nodes if node.target is target]


def copied(graphs: Graphs) -> Graphs:
    return duplicate(graphs[0]), duplicate(graphs[1])


def sharers(module: GraphModule, node: Node) -> list[Node]:
    """List the nodes that take in the memory of `node`, in order, ours left out."""
    memory = memory_of(module.graph)
    root = memory.root[node]
    ours = (OFFLOAD, RELEASE, RELOAD, READY)
    return [
        user
        for user in module.graph.nodes
        if user.target not in ours and any(root in memory.held.get(source, ()) for source in user.all_input_nodes)
    ]


# --- breaks: each yields what was broken and the broken pair ----------------------------------------------------------


def early_releases(graphs: Graphs) -> Iterator[tuple[str, Graphs]]:
    """Move each release to before the last use of the memory that it frees."""
    for number, release in enumerate(calls(graphs[0], RELEASE)):
        forward, backward = copied(graphs)
        moved = calls(forward, RELEASE)[number]
        host, source, _ = moved.args
        last = sharers(forward, source)[-1]
        last.prepend(moved)
        if list(forward.graph.nodes).index(host) < list(forward.graph.nodes).index(moved):
            yield f"{release.name} before {last.name}", (forward, backward)


def late_readies(graphs: Graphs) -> Iterator[tuple[str, Graphs]]:
    """Move each ready to after the last use of the memory that it waits for."""
    for number, ready in enumerate(calls(graphs[1], READY)):
        forward, backward = copied(graphs)
        moved = calls(backward, READY)[number]
        last = sharers(backward, moved.args[0])[-1]
        last.append(moved)
        yield f"{ready.name} after {last.name}", (forward, backward)


def lost_readies(graphs: Graphs) -> Iterator[tuple[str, Graphs]]:
    for number, ready in enumerate(calls(graphs[1], READY)):
        forward, backward = copied(graphs)
        backward.graph.erase_node(calls(backward, READY)[number])
        yield f"no {ready.name}", (forward, backward)


BREAKS = [early_releases, late_readies, lost_readies]


@pytest.mark.parametrize("early", [0, 100])
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("breaks", BREAKS)
def test_the_checker_finds_every_break(
    breaks: Callable[[Graphs], Iterator[tuple[str, Graphs]]], wait: bool, early: int
) -> None:
    graphs, plan, _ = given(wait=wait, early=early)
    broken = list(breaks(graphs))
    assert 0 < len(broken) <= len(plan.transfers)
    assert [what for what, pair in broken if not check(events_of_pair(*pair))] == []
    for _, pair in broken:
        with pytest.raises(OrderingError):
            assert_ordered(events_of_pair(*pair))


@pytest.mark.parametrize("wait", [True, False])
def test_the_loss_of_any_wait_of_the_pair_is_found(wait: bool) -> None:
    """Law 6 for the rewritten pair; and what was lost is missing from what the plan asks (law 10)."""
    graphs, plan, _ = given(wait=wait, early=3)
    events = events_of_pair(*graphs)
    waits = [index for index, event in enumerate(events) if event.kind == "wait"]
    assert waits
    for index in waits:
        without = events[:index] + events[index + 1 :]
        assert "race" in {finding.kind for finding in check(without)}, events[index]
        assert "unordered" in {finding.kind for finding in refines(without, events_of_plan(plan))}, events[index]


def test_the_loss_of_any_record_is_found() -> None:
    graphs, _, _ = given(wait=False, early=3)
    events = events_of_pair(*graphs)
    waited = {event.token for event in events if event.kind == "wait"}
    for index, event in enumerate(events):
        if event.kind == "record" and event.token in waited:
            assert "unrecorded" in {finding.kind for finding in check(events[:index] + events[index + 1 :])}, event


# --- the virtual device agrees: what the checker finds, gives wrong numbers -------------------------------------------


def gradients(graphs: Graphs, pair: Pair) -> list[torch.Tensor]:
    """Run forward and backward as they are written, on the virtual device."""
    forward, backward = graphs
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
    with virtual_device():
        results = torch.fx.Interpreter(forward).run(x)
        outputs, saved = results[: pair.num_fwd_outputs], results[pair.num_fwd_outputs :]
        del results
        tangents = [torch.ones_like(output) for output in outputs]
        found = torch.fx.Interpreter(backward).run(*saved, *tangents)
        return [tensor.clone() for tensor in (*outputs, *found) if isinstance(tensor, torch.Tensor)]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("wait", [True, False])
def test_the_virtual_device_gives_the_plain_numbers_where_nothing_is_found(wait: bool) -> None:
    graphs, _, pair = given(wait=wait, early=3)
    assert check(events_of_pair(*graphs)) == ()
    assert same(gradients(graphs, pair), gradients((pair.forward, pair.backward), pair))


@pytest.mark.parametrize("breaks", BREAKS)
def test_the_virtual_device_shows_every_break(breaks: Callable[[Graphs], Iterator[tuple[str, Graphs]]]) -> None:
    """Reloads start right before their uses here, so that none is covered by another one's ready."""
    graphs, _, pair = given(wait=True, early=0)
    right = gradients(graphs, pair)
    for what, broken in breaks(graphs):
        assert not same(gradients(broken, pair), right), what
