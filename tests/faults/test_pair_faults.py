"""Faults put into rewritten pairs on purpose: the checker finds each, and the virtual device shows each as NaN or an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from subjects import BY_NAME, Subject
from torch import fx
from training import Outcome, assert_same_bits, is_finite, train_step

from graphoffload.backend import OffloadPartitioner, lower
from graphoffload.errors import SlotError
from graphoffload.graphs.order import events_of_pair
from graphoffload.options import Options, read_options
from graphoffload.ordering.check import check
from graphoffload.ordering.events import Finding
from graphoffload.planning.policy import OffloadAll
from graphoffload.runtime.ops import OFFLOAD, READY, RELEASE, RELOAD
from graphoffload.testing import virtual_device

Fault = Callable[[fx.Graph, fx.Graph, int], bool]
"""Put a fault into the i-th transfer of (forward, backward), in place; say whether there was one to put."""


@dataclass
class Saboteur:
    """Stand in for the partitioner: make the pair, then put one fault into it."""

    fault: Fault
    index: int
    options: Options = field(
        default_factory=lambda: read_options(policy=OffloadAll(min_nbytes=0), compiler="aot_eager")
    )
    done: bool = False
    transfers: int = 0
    findings: tuple[Finding, ...] = ()

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: object, **kwargs: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = OffloadPartitioner(self.options)(gm, joint_inputs, **kwargs)
        self.transfers = len(calls(forward.graph, OFFLOAD))
        if self.index < self.transfers:
            self.done = self.fault(forward.graph, backward.graph, self.index)
        for module in (forward, backward):
            module.graph.lint()
            module.recompile()
        self.findings = check(events_of_pair(forward, backward))
        return forward, backward


def calls(graph: fx.Graph, operator: object) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is operator]


def run(subject: Subject, saboteur: Saboteur) -> Outcome:
    torch._dynamo.reset()
    module, inputs = subject.module(), subject.inputs()
    backend = lambda gm, example_inputs: lower(gm, example_inputs, saboteur.options, saboteur)  # noqa: E731
    with virtual_device():
        return train_step(torch.compile(module, backend=backend, fullgraph=True), inputs, module=module)


def eager(subject: Subject) -> Outcome:
    module = subject.module()
    return train_step(module, subject.inputs(), module=module)


def attempts(subject: Subject, fault: Fault, *, every: int = 1) -> list[tuple[Saboteur, Outcome | Exception]]:
    """Try the fault on each transfer (or each few) alone; return what the checker and what the virtual device said."""
    tried: list[tuple[Saboteur, Outcome | Exception]] = []
    index, transfers = 0, 1
    while index < transfers:
        saboteur = Saboteur(fault, index)
        result: Outcome | Exception
        try:
            result = run(subject, saboteur)
        except (SlotError, IndexError) as error:  # poisoned indices are out of bounds
            result = error
        transfers = saboteur.transfers
        if saboteur.done:
            tried.append((saboteur, result))
        index += every
    assert tried, "no transfer has a place for this fault"
    return tried


def shows(result: Outcome | Exception, want: Outcome) -> bool:
    """Say whether a fault came out: as an error, as NaN, or (masks have no NaN) as other numbers."""
    if isinstance(result, Exception) or not is_finite(result):
        return True
    try:
        assert_same_bits(result, want)
    except AssertionError:
        return True
    return False


# --- faults -------------------------------------------------------------------------------------------------------------


def no_ready(forward: fx.Graph, backward: fx.Graph, index: int) -> bool:
    """Wait only when all is over. (Where the slot goes before that, the runtime waits by itself, as after an exception.)"""
    backward.output_node().prepend(calls(backward, READY)[index])
    return True


def late_ready(forward: fx.Graph, backward: fx.Graph, index: int) -> bool:
    """Wait only after the first node that reads what was reloaded, through views or not."""
    ready = calls(backward, READY)[index]
    order = {node: position for position, node in enumerate(backward.nodes)}
    min(readers(ready.args[0]) - {ready}, key=order.__getitem__).append(ready)
    return True


def readers(node: fx.Node) -> set[fx.Node]:
    """Return the nodes that read the memory of `node`, and do not merely look at it in another shape."""
    found = set()
    for user in node.users:
        returns = user.target._schema.returns if isinstance(user.target, torch._ops.OpOverload) else ()
        found |= readers(user) if any(one.alias_info is not None for one in returns) else {user}
    return found


def no_release(forward: fx.Graph, backward: fx.Graph, index: int) -> bool:
    forward.erase_node(calls(forward, RELEASE)[index])
    return True


def early_release(forward: fx.Graph, backward: fx.Graph, index: int) -> bool:
    """Release right after the offload, though forward goes on to read the source."""
    release = calls(forward, RELEASE)[index]
    host, source = release.args[:2]
    order = list(forward.nodes)
    if not any(
        order.index(user) > order.index(host) and user.target not in (OFFLOAD, RELEASE) for user in source.users
    ):
        return False
    host.append(release)
    release.args = (host, source, True)
    return True


def no_offload(forward: fx.Graph, backward: fx.Graph, index: int) -> bool:
    offload = calls(forward, OFFLOAD)[index]
    value = offload.meta["val"]
    with forward.inserting_before(offload):
        options = {"dtype": value.dtype, "device": torch.device("cpu")}
        empty = forward.call_function(torch.ops.aten.full.default, (list(value.shape), float("nan")), options)
    empty.meta = dict(offload.meta)
    offload.replace_all_uses_with(empty)
    forward.erase_node(offload)
    return True


def no_reload(forward: fx.Graph, backward: fx.Graph, index: int) -> bool:
    reload = calls(backward, RELOAD)[index]
    with backward.inserting_before(reload):
        empty = backward.call_function(torch.ops.aten.empty_like.default, (reload.args[0],))
    empty.meta = dict(reload.meta)
    reload.replace_all_uses_with(empty)
    backward.erase_node(reload)
    return True


def other_wait(forward: fx.Graph, backward: fx.Graph, index: int) -> bool:
    release = calls(forward, RELEASE)[index]
    host, source, wait = release.args[:3]
    release.args = (host, source, not wait)
    return True


def nothing(forward: fx.Graph, backward: fx.Graph, index: int) -> bool:
    return True


# --- what they show -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("subject", "every"), [(BY_NAME["mlp"], 1), (BY_NAME["decoder with regions"], 3)], ids=str)
@pytest.mark.parametrize("fault", [no_ready, late_ready, early_release], ids=lambda fault: fault.__name__)
def test_a_missing_or_misplaced_wait_shows(subject, every, fault):
    """The checker objects to each; and where it finds a race, which no other wait happens to cover, the device shows it."""
    want = eager(subject)
    assert is_finite(want)
    races = 0
    for saboteur, result in attempts(subject, fault, every=every):
        assert saboteur.findings, f"the checker missed {fault.__name__} of transfer {saboteur.index}"
        race = any(finding.kind in ("race", "after-free") for finding in saboteur.findings)
        assert shows(result, want) == race, f"transfer {saboteur.index}: {saboteur.findings}"
        races += race
    assert races


@pytest.mark.parametrize("fault", [no_release, no_offload, no_reload], ids=lambda fault: fault.__name__)
def test_a_missing_operator_shows(fault):
    want = eager(BY_NAME["mlp"])
    for saboteur, result in attempts(BY_NAME["mlp"], fault):
        assert saboteur.findings, f"the checker missed {fault.__name__} of transfer {saboteur.index}"
        assert shows(result, want), f"transfer {saboteur.index}"


@pytest.mark.parametrize("fault", [nothing, other_wait], ids=lambda fault: fault.__name__)
def test_no_false_alarm(fault):
    """The pair as it is, and one whose release waits where the plan hands over or the other way round, are both right."""
    want = eager(BY_NAME["mlp"])
    for saboteur, result in attempts(BY_NAME["mlp"], fault):
        assert saboteur.findings == ()
        assert not isinstance(result, Exception), result
        assert_same_bits(result, want)
