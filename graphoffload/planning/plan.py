"""A plan: one decision, with its reason, for every saved value, and one transfer for every offloaded storage."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property

from graphoffload.planning import wire
from graphoffload.planning.sizes import format_nbytes
from graphoffload.planning.values import Facts


class Action(enum.Enum):
    """Answer what to do with a saved value."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Decision:
    """Record what happens to one saved value, and why."""

    value: str
    storage: str
    action: Action
    reason: str


@dataclass(frozen=True)
class Transfer:
    """Record one storage's way to the host and back, by node names and by simulated times.

    `offload_after` and `release_after` name forward nodes; `reload_before` and `ready_before` name backward nodes. With
    `wait`, compute waits at the release until the copy has ended; without, the release hands the source memory to the
    runtime's in-flight queue and does not wait (used at the end of forward). Times are seconds from the start of forward.

    Where several things are inserted at one place: after a forward step offloads come before releases, before a backward
    step reloads come before readys, and equals are in the order of the plan's transfers. The order of reloads is the order
    in which the H2D stream runs them, so `Plan.transfers` is in order of return: first needed, first.
    """

    storage: str
    carrier: str
    nbytes: int
    offload_after: str
    release_after: str
    wait: bool
    reload_before: str
    ready_before: str
    offload_start: float
    offload_end: float
    released: float
    reload_start: float
    reload_end: float
    needed: float


@dataclass(frozen=True)
class Plan:
    """Hold one plan: facts, decisions, transfers, totals and predictions. Totals count each storage once.

    `decisions` are in the order of `facts.values`, `transfers` in order of return. `policy` and `machine` are their JSON
    forms. `predicted_*_without` is the same program with everything kept. `recomputed_nbytes` counts what backward computes
    again already and what the plan adds. `offload_requested` says whether the policy or a tag asked for offloading; `notes`
    are what the user should know, such as a pattern that matches nothing. Sizes are bytes, times are seconds.
    """

    facts: Facts
    policy: str
    machine: str
    decisions: tuple[Decision, ...]
    transfers: tuple[Transfer, ...]
    kept_nbytes: int
    offloaded_nbytes: int
    recomputed_nbytes: int
    host_peak_nbytes: int
    predicted_peak_nbytes: int
    predicted_peak_nbytes_without: int
    predicted_seconds: float
    predicted_seconds_without: float
    exposed_seconds: float
    offload_requested: bool = False
    notes: tuple[str, ...] = ()
    version: int = 1

    @cached_property
    def decision_by_value(self) -> dict[str, Decision]:
        """Map a value's name to its decision."""
        return {decision.value: decision for decision in self.decisions}

    @cached_property
    def transfer_by_storage(self) -> dict[str, Transfer]:
        """Map an offloaded storage's name to its transfer."""
        return {transfer.storage: transfer for transfer in self.transfers}

    def __str__(self) -> str:
        # Late: the table reads plans, so it imports this module.
        from graphoffload.planning.table import plan_text

        return plan_text(self)

    def to_json(self, *, indent: int | None = None) -> str:
        """Write the plan, facts and all, as JSON. Law 3: `Plan.from_json(plan.to_json()) == plan`."""
        return wire.to_json(self, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote. Raises `UsageError` for anything else, naming what is wrong."""
        return wire.from_json(cls, text)

    def diff(self, other: Plan) -> tuple[str, ...]:
        """List, in lines for people, what `other` does differently; no line when the two decide and place alike.

        Law: `plan.diff(plan) == ()`. Predictions and times are compared in the totals only.
        """
        return (*_differing_decisions(self, other), *_differing_transfers(self, other), *_differing_totals(self, other))


_PLACES = ("offload_after", "release_after", "wait", "reload_before", "ready_before", "nbytes")
_TOTALS = ("kept_nbytes", "offloaded_nbytes", "recomputed_nbytes", "host_peak_nbytes", "predicted_peak_nbytes")


def _differing_decisions(one: Plan, other: Plan) -> list[str]:
    lines = []
    for name in dict.fromkeys((*one.decision_by_value, *other.decision_by_value)):
        mine, theirs = one.decision_by_value.get(name), other.decision_by_value.get(name)
        if mine is None or theirs is None:
            lines.append(f"{name}: only in the {'second' if mine is None else 'first'} plan")
        elif mine.action is not theirs.action:
            lines.append(f"{name}: {mine.action.value} ({mine.reason}) -> {theirs.action.value} ({theirs.reason})")
    return lines


def _differing_transfers(one: Plan, other: Plan) -> list[str]:
    lines = []
    # Storages that only one plan moves are told by the decisions.
    for mine in one.transfers:
        theirs = other.transfer_by_storage.get(mine.storage)
        if theirs is not None:
            for place in _PLACES:
                before, after = getattr(mine, place), getattr(theirs, place)
                if before != after:
                    lines.append(f"transfer of {mine.storage}: {place} {before} -> {after}")
    return lines


def _differing_totals(one: Plan, other: Plan) -> list[str]:
    lines = []
    for total in _TOTALS:
        before, after = getattr(one, total), getattr(other, total)
        if before != after:
            lines.append(f"{total}: {format_nbytes(before)} -> {format_nbytes(after)}")
    if one.predicted_seconds != other.predicted_seconds:
        lines.append(f"predicted_seconds: {one.predicted_seconds:.6g} -> {other.predicted_seconds:.6g}")
    return lines
