"""The events of rewritten pairs: exactly which, and that no inserted node can go missing or move without a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from pairs import Pair, capture
from tight import tight_plan
from torch.fx import Graph, GraphModule, Node

from graphoffload.errors import UnsupportedGraphError
from graphoffload.graphs.duplicate import duplicate
from graphoffload.graphs.order import events_of_pair
from graphoffload.graphs.rewrite import rewrite
from graphoffload.ordering.check import check
from graphoffload.ordering.refine import refines
from graphoffload.ordering.show import show_event
from graphoffload.planning.order import events_of_plan
from graphoffload.planning.plan import Plan
from graphoffload.runtime.ops import OFFLOAD, READY, RELEASE, RELOAD

aten = torch.ops.aten
Graphs = tuple[GraphModule, GraphModule]


def one(x: torch.Tensor) -> torch.Tensor:
    """Save one storage, the sine, which forward and backward both read twice."""
    y = x.sin()
    return (y * y).sum() + y.exp().sum()


def many(x: torch.Tensor) -> torch.Tensor:
    """Save a base and views of it, and several storages whose lives overlap."""
    q, k = x.sin().chunk(2, -1)
    y = (q * k).exp()
    z = (y * y.cos()).tanh()
    return (z * y.t().reshape(y.shape)).sigmoid().sum() + q.pow(3).sum()


def rewritten(subject: Callable[..., torch.Tensor], *, wait: bool = True, early: int = 0) -> tuple[Graphs, Plan, Pair]:
    pair = capture(subject, torch.randn(4, 8, requires_grad=True))
    plan = tight_plan(pair, wait=wait, early=early)
    assert plan.transfers
    graphs = rewrite(pair.forward, pair.backward, plan, num_fwd_outputs=pair.num_fwd_outputs)
    return graphs, plan, pair


def lines(graphs: Graphs) -> list[str]:
    return [" ".join(show_event(event).split()) for event in events_of_pair(*graphs)]


def found(graphs: Graphs) -> set[tuple[str, str]]:
    return {(finding.kind, finding.subject) for finding in check(events_of_pair(*graphs))}


def only(module: GraphModule, target: object) -> Node:
    (node,) = (node for node in module.graph.nodes if node.target is target)
    return node


# --- which events -----------------------------------------------------------------------------------------------------


def test_a_pair_without_transfers_has_no_events() -> None:
    pair = capture(one, torch.randn(4, 8, requires_grad=True))
    assert events_of_pair(pair.forward, pair.backward) == ()


def small_pair(*, wait: bool, move: str = "") -> Graphs:
    """Build by hand: forward is z = view(sin(x)) * x; backward is tangent * view(sin(x)) - tangent.

    `move` names a node of ours that comes as early as its arguments allow.
    """
    x = torch.empty(4)
    forward = Graph()
    made = {"x": forward.placeholder("x")}
    made["y"] = forward.call_function(aten.sin.default, (made["x"],))
    made["host"] = forward.call_function(OFFLOAD, (made["y"], "sine"))
    if move == "release":
        forward.call_function(RELEASE, (made["host"], made["y"], wait))
    made["v"] = forward.call_function(aten.view.default, (made["y"], [4]))
    made["z"] = forward.call_function(aten.mul.Tensor, (made["v"], made["x"]))
    if move != "release":
        forward.call_function(RELEASE, (made["host"], made["y"], wait))
    forward.output((made["z"], made["host"]))
    backward = Graph()
    host, tangent = backward.placeholder("slot"), backward.placeholder("tangents_1")
    back = backward.call_function(RELOAD, (host, torch.device("cpu")))
    if move == "use":
        product = backward.call_function(aten.mul.Tensor, (tangent, back))
    backward.call_function(READY, (back, host))
    view = backward.call_function(aten.as_strided.default, (back, [4], [1], 0))
    if move != "use":
        product = backward.call_function(aten.mul.Tensor, (tangent, view))
    last = backward.call_function(aten.sub.Tensor, (product, tangent))
    backward.output((last,))
    for node in (*forward.nodes, *backward.nodes):
        if node.op != "output" and node.target not in (RELEASE, READY):
            node.meta["val"] = x.clone()
    return GraphModule({}, forward), GraphModule({}, backward)


def test_the_events_of_a_small_pair() -> None:
    """Transfers are found by operator: no node has a telling name. Views count as uses."""
    assert lines(small_pair(wait=True)) == [
        "compute run sin_default allocates device:sine",
        "compute run offload sine allocates host:sine",
        "compute record offload sine offload:sine",
        "d2h wait offload sine offload:sine",
        "d2h run offload sine reads device:sine, writes host:sine",
        "d2h record offload sine d2h:sine",
        "compute run view_default reads device:sine",
        "compute run mul_tensor reads device:sine",
        "compute wait release sine d2h:sine",
        "compute run release sine frees device:sine",
        "compute run reload sine allocates reload:sine",
        "compute record reload sine reload:sine",
        "h2d wait reload sine reload:sine",
        "h2d run reload sine reads host:sine, writes reload:sine",
        "h2d record reload sine h2d:sine",
        "compute wait ready sine h2d:sine",
        "compute run ready sine frees host:sine",
        "compute run as_strided_default reads reload:sine",
        "compute run mul_tensor reads reload:sine, frees reload:sine",
    ]


def test_the_events_of_a_release_that_hands_over() -> None:
    assert lines(small_pair(wait=False))[8:13] == [
        "compute run release sine reads device:sine",
        "compute record release sine release:sine",
        "queue wait release sine release:sine",
        "queue wait release sine d2h:sine",
        "queue run release sine frees device:sine",
    ]


@pytest.mark.parametrize("early", [0, 3, 100])
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("subject", [one, many])
def test_a_rewritten_pair_is_in_order_and_does_what_the_plan_says(
    subject: Callable[..., torch.Tensor], wait: bool, early: int
) -> None:
    graphs, plan, pair = rewritten(subject, wait=wait, early=early)
    events = events_of_pair(*graphs, num_fwd_outputs=pair.num_fwd_outputs)
    assert check(events) == ()
    assert refines(events, events_of_plan(plan)) == ()
    assert events_of_pair(*graphs) == events, "the number of outputs is told rightly from the placeholders"


def test_random_states_of_backward_are_no_saved_values() -> None:
    forward, backward = small_pair(wait=True)
    with backward.graph.inserting_after(backward.graph.find_nodes(op="placeholder")[-1]):
        backward.graph.placeholder("bwd_rng_state_0").meta["val"] = torch.Generator()
    assert events_of_pair(forward, backward) == events_of_pair(forward, backward, num_fwd_outputs=1) != ()


# --- what can go wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [True, False])
def test_a_use_after_the_release_is_found(wait: bool) -> None:
    assert ("after-free", "device:sine") in found(small_pair(wait=wait, move="release"))


def test_a_use_before_the_ready_is_found() -> None:
    assert found(small_pair(wait=True, move="use")) == {("race", "reload:sine"), ("unrecorded", "ready:sine")}


@pytest.mark.parametrize("wait", [True, False])
def test_an_output_that_shares_the_released_memory_is_found(wait: bool) -> None:
    forward, backward = small_pair(wait=wait)
    output = forward.graph.output_node()
    output.args = ((forward.graph.find_nodes(op="call_function", target=aten.view.default)[0], output.args[0][1]),)
    assert ("after-free", "device:sine") in found((forward, backward))


@pytest.mark.parametrize("wait", [True, False])
def test_a_view_that_is_saved_past_the_release_is_found_where_backward_reads_it(wait: bool) -> None:
    forward, backward = small_pair(wait=wait)
    view = forward.graph.find_nodes(op="call_function", target=aten.view.default)[0]
    z, host = forward.graph.output_node().args[0]
    forward.graph.output_node().args = ((z, host, view),)
    tangent = backward.graph.find_nodes(op="placeholder")[1]
    with backward.graph.inserting_before(tangent):
        saved = backward.graph.placeholder("another")
    saved.meta["val"] = torch.empty(4)
    product = backward.graph.find_nodes(op="call_function", target=aten.mul.Tensor)[0]
    product.args = (product.args[0], saved)
    faults = [f for f in check(events_of_pair(forward, backward)) if f.kind == "after-free"]
    labels = {events_of_pair(forward, backward)[fault.index].label for fault in faults}
    assert labels == {"output", product.name}


def test_a_write_to_the_source_during_the_copy_is_found() -> None:
    forward, backward = small_pair(wait=True)
    x, y = forward.graph.find_nodes(op="placeholder")[0], only(forward, aten.sin.default)
    with forward.graph.inserting_after(only(forward, OFFLOAD)):
        forward.graph.call_function(aten.copy_.default, (y, x)).meta["val"] = torch.empty(4)
    assert ("race", "device:sine") in found((forward, backward))


def test_a_reload_of_something_that_no_offload_filled_is_found() -> None:
    forward, backward = small_pair(wait=True)
    with backward.graph.inserting_after(backward.graph.find_nodes(op="placeholder")[1]):
        copy = backward.graph.call_function(aten.clone.default, (backward.graph.find_nodes(op="placeholder")[0],))
    copy.meta["val"] = torch.empty(4)
    only(backward, RELOAD).args = (copy, torch.device("cpu"))
    assert ("before-write", f"host:{copy.name}") in found((forward, backward))


def test_a_release_of_another_memory_than_was_copied_is_found() -> None:
    """Two transfers whose releases are exchanged: each waits for the wrong copy."""
    (forward, backward), _, _ = rewritten(many)
    first, second = [node for node in forward.graph.nodes if node.target is OFFLOAD][:2]
    releases = {node.args[0]: node for node in forward.graph.nodes if node.target is RELEASE}
    source, other = first.args[0], second.args[0]
    releases[first].args = (first, other, True)
    releases[second].args = (second, source, True)
    assert found((forward, backward))


def test_slots_that_change_places_do_not_do_what_the_plan_says() -> None:
    """Each is filled and read in order, so there is no race: only the plan can tell that the wrong one comes back."""
    (forward, backward), plan, pair = rewritten(many)
    outputs = list(forward.graph.output_node().args[0])
    shapes = {}
    for index, node in enumerate(outputs):
        if node.target is OFFLOAD:
            shapes.setdefault((tuple(node.meta["val"].shape), node.meta["val"].stride()), []).append(index)
    a, b = next(indices for indices in shapes.values() if len(indices) > 1)[:2]
    outputs[a], outputs[b] = outputs[b], outputs[a]
    forward.graph.output_node().args = (tuple(outputs),)
    events = events_of_pair(forward, backward, num_fwd_outputs=pair.num_fwd_outputs)
    assert {finding.kind for finding in refines(events, events_of_plan(plan))} >= {"missing"}


def test_a_pair_that_does_not_fit_is_refused() -> None:
    forward, backward = small_pair(wait=True)
    with pytest.raises(UnsupportedGraphError):
        events_of_pair(forward, backward, num_fwd_outputs=7)


# --- no inserted node can go missing ----------------------------------------------------------------------------------


def losses(graphs: Graphs) -> Iterator[tuple[str, Graphs]]:
    """Yield the pair without each of its inserted nodes: where an offload or reload is lost, its argument stands for it."""
    for half, module in enumerate(graphs):
        for node in module.graph.nodes:
            if node.target in (OFFLOAD, RELEASE, RELOAD, READY):
                copies = [duplicate(graphs[0]), duplicate(graphs[1])]
                lost = next(other for other in copies[half].graph.nodes if other.name == node.name)
                if lost.target in (OFFLOAD, RELOAD):
                    lost.replace_all_uses_with(lost.args[0])
                copies[half].graph.erase_node(lost)
                yield node.name, (copies[0], copies[1])


@pytest.mark.parametrize("early", [0, 100])
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("subject", [one, many])
def test_the_loss_of_any_inserted_node_is_found(subject: Callable[..., torch.Tensor], wait: bool, early: int) -> None:
    graphs, plan, _ = rewritten(subject, wait=wait, early=early)
    lost = [(name, found(pair)) for name, pair in losses(graphs)]
    assert len(lost) == 4 * len(plan.transfers)
    assert [name for name, findings in lost if not findings] == []


@pytest.mark.parametrize("wait", [True, False])
def test_any_inserted_node_that_is_there_twice_is_found(wait: bool) -> None:
    graphs, _, _ = rewritten(many, wait=wait)
    for half, module in enumerate(graphs):
        for node in module.graph.nodes:
            if node.target in (OFFLOAD, RELEASE, RELOAD, READY):
                copies = [duplicate(graphs[0]), duplicate(graphs[1])]
                same = next(other for other in copies[half].graph.nodes if other.name == node.name)
                with copies[half].graph.inserting_after(same):
                    copies[half].graph.node_copy(same)
                assert found((copies[0], copies[1])), node.name
