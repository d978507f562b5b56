"""The events of a plan: what the plan asks of each stream, before any graph is rewritten."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from graphoffload.errors import StalePlanError
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
from graphoffload.planning.plan import Plan


@dataclass
class _Moment:
    """Gather what happens at one position; the fields are in order of issue, `reads` and `frees` being one step."""

    reloads: list[Event] = field(default_factory=list)
    readies: list[Event] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    frees: list[str] = field(default_factory=list)
    carriers: list[Event] = field(default_factory=list)
    offloads: list[Event] = field(default_factory=list)
    releases: list[Event] = field(default_factory=list)

    def events(self, label: str) -> list[Event]:
        """List the events in order of issue; `label` names the step at this position."""
        reads, frees = tuple(dict.fromkeys(self.reads)), tuple(self.frees)
        step = [Event(COMPUTE, "run", label, reads=reads, frees=frees)] if reads or frees else []
        return [*self.reloads, *self.readies, *step, *self.carriers, *self.offloads, *self.releases]


def events_of_plan(plan: Plan) -> tuple[Event, ...]:
    """List the events that `plan` stands for, without waits that others imply.

    Keeps laws 5 and 6. Only steps that matter appear: per transfer its carrier, the last forward use, the first and the
    last backward use (which frees). At one position reloads come before readies before the step, and after it offloads before
    releases; among equals the order is that of the plan's transfers. A transfer that names a step or storage which the
    plan's facts lack is a StalePlanError.
    """
    facts = plan.facts
    # A carrier may be an input of the graph, which is no step: it is there before forward begins.
    forward = {transfer.carrier: -1 for transfer in plan.transfers}
    forward |= {step.name: position for position, step in enumerate(facts.forward)}
    backward = {step.name: position for position, step in enumerate(facts.backward, start=len(facts.forward))}
    moments: defaultdict[int, _Moment] = defaultdict(_Moment)
    for transfer in plan.transfers:
        name = transfer.storage
        if name not in facts.storage_by_name:
            raise StalePlanError(f"the plan moves storage {name}, which its facts do not have")
        storage = facts.storage_by_name[name]
        made = Event(COMPUTE, "run", transfer.carrier, allocs=(device(name),))
        moments[storage.carried_at].carriers.append(made)
        if storage.last_forward_use > storage.carried_at:
            moments[storage.last_forward_use].reads.append(device(name))
        moments[_position(forward, transfer.offload_after)].offloads += offload_events(name)
        released = release_events(name, source=name, wait=transfer.wait)
        moments[_position(forward, transfer.release_after)].releases += released
        moments[_position(backward, transfer.reload_before)].reloads += reload_events(name)
        moments[_position(backward, transfer.ready_before)].readies += ready_events(name, slot=name)
        moments[storage.first_backward_use].reads.append(reload(name))
        moments[storage.last_backward_use].frees.append(reload(name))
    labels = {position: step.name for position, step in enumerate(facts.steps)}
    issued = [event for position in sorted(moments) for event in moments[position].events(labels.get(position, ""))]
    return without_covered_waits(issued)


def _position(positions: Mapping[str, int], name: str) -> int:
    if name not in positions:
        raise StalePlanError(f"the plan names {name}, which is no step where it is looked for")
    return positions[name]
