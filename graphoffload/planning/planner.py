"""The planner: facts, a policy and a machine in, a plan out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphoffload.errors import PolicyError
from graphoffload.ordering.check import assert_ordered
from graphoffload.planning.machine import Machine
from graphoffload.planning.order import events_of_plan
from graphoffload.planning.plan import Action, Decision, Plan, Transfer
from graphoffload.planning.policy import (
    MUST,
    PREFER,
    Answer,
    Ledger,
    Policy,
    ask_with_tag,
    check_policy,
    fit,
    forbids,
    policy_to_json,
    requests_offload,
    unmatched,
)
from graphoffload.planning.profile import peak
from graphoffload.planning.schedule import make_transfers, simulate
from graphoffload.planning.sizes import format_nbytes
from graphoffload.planning.values import Facts, Storage, Value


def make_plan(
    facts: Facts, policy: Policy, machine: Machine, *, not_recomputable: Mapping[str, str] | None = None
) -> Plan:
    """Decide every saved value, and place the transfers of what is offloaded.

    Laws: 1 (every value once, members of a storage alike), 2 (same facts, same plan), 4 (host bytes within the machine's
    host budget), 5 (the plan's events are race-free: checked before it is returned).
    `not_recomputable`: given when the facts are those after recomputation was tried: what is saved still cannot be
    recomputed, so RECOMPUTE becomes KEEP; the mapping gives reasons by value. None: RECOMPUTE is a decision to be carried out.
    Raises `PolicyError` for a malformed policy and for a MUST_CPU_OFFLOAD tag that cannot be honoured.
    """
    check_policy(policy)
    fold = _Fold(facts, fit(policy, facts, machine), machine, not_recomputable)
    for value in facts.values:
        fold.enter(value)
    offloaded = [one for one in facts.storages if fold.actions[one.name] is Action.OFFLOAD]
    plan = _plan(
        facts,
        machine,
        policy=policy_to_json(policy),
        decisions=tuple(fold.decision(value) for value in facts.values),
        transfers=make_transfers(facts, offloaded, machine),
        actions=fold.actions,
        offload_requested=requests_offload(policy) or any(value.tag in (MUST, PREFER) for value in facts.values),
        notes=unmatched(policy, facts.values) if facts.values else (),
    )
    assert_ordered(events_of_plan(plan))
    return plan


def _plan(
    facts: Facts,
    machine: Machine,
    *,
    policy: str,
    decisions: tuple[Decision, ...],
    transfers: tuple[Transfer, ...],
    actions: Mapping[str, Action],
    offload_requested: bool,
    notes: tuple[str, ...],
) -> Plan:
    totals = dict.fromkeys(Action, 0)
    for storage in facts.storages:
        totals[actions[storage.name]] += storage.nbytes or 0
    timeline = simulate(facts, machine, transfers)
    return Plan(
        facts=facts,
        policy=policy,
        machine=machine.to_json(),
        decisions=decisions,
        transfers=transfers,
        kept_nbytes=totals[Action.KEEP],
        offloaded_nbytes=totals[Action.OFFLOAD],
        recomputed_nbytes=facts.recomputed_nbytes + totals[Action.RECOMPUTE],
        # All slots are full at the moment when forward has ended and backward has not begun.
        host_peak_nbytes=sum(transfer.nbytes for transfer in transfers),
        predicted_peak_nbytes=peak(facts, transfers, in_flight_nbytes=machine.in_flight_bound),
        predicted_peak_nbytes_without=peak(facts),
        predicted_seconds=timeline.seconds,
        predicted_seconds_without=simulate(facts, machine).seconds,
        exposed_seconds=timeline.exposed_seconds,
        offload_requested=offload_requested,
        notes=notes,
    )


@dataclass
class _Fold:
    """Fold a policy over the values in order of birth; lives inside one call of `make_plan`.

    `fixed`: storages that stay, whatever anybody says, and why. `answers`: what was said about each value. `refused`: for a
    storage that somebody wanted to offload, the value and the reason why it stays. `host_nbytes` is what the offloaded and
    the MUST-tagged storages take of the host budget.
    """

    facts: Facts
    policy: Policy
    machine: Machine
    not_recomputable: Mapping[str, str] | None
    ledger: Ledger = field(init=False)
    fixed: dict[str, str] = field(init=False)
    musts: frozenset[str] = field(init=False)
    host_nbytes: int = field(init=False)
    actions: dict[str, Action] = field(init=False)
    answers: dict[str, Answer] = field(default_factory=dict)
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        storages = self.facts.storages
        self.actions = {storage.name: Action.KEEP for storage in storages}
        self.fixed = {storage.name: reason for storage in storages if (reason := _why_it_stays(storage))}
        self.musts = frozenset(value.storage for value in self.facts.values if value.tag == MUST)
        free = [storage for storage in storages if storage.name not in self.fixed]
        self.ledger = Ledger(total_nbytes=sum(storage.nbytes or 0 for storage in free))
        # Set aside first: a tag that must be honoured is not to fail because a policy filled the host before it.
        self.host_nbytes = sum(storage.nbytes or 0 for storage in free if storage.name in self.musts)
        self._refuse_musts()

    def enter(self, value: Value) -> None:
        """Ask about one value, and bring its storage's action and the ledger up to date."""
        storage = self.facts.storage_by_name[value.storage]
        if storage.name in self.fixed:
            self.answers[value.name] = Answer(Action.KEEP, self.fixed[storage.name])
            return
        answer = self.answers[value.name] = self._answer(value)
        if storage.name not in self.musts and forbids(self.policy, value, self.ledger):
            self.refused[storage.name] = (value.name, answer.reason)
        before = self.actions[storage.name] if storage.name in self.seen else None
        after = self._action(storage)
        if after is Action.OFFLOAD and before is not Action.OFFLOAD and not self._fits_on_host(storage, value):
            after = Action.KEEP
        self._account(storage, before, after)

    def decision(self, value: Value) -> Decision:
        """Return the decision for a value, once all values are entered."""
        return Decision(value.name, value.storage, self.actions[value.storage], self._reason(value))

    def _answer(self, value: Value) -> Answer:
        answer = ask_with_tag(self.policy, value, self.ledger)
        if answer.action is Action.RECOMPUTE and self.not_recomputable is not None:
            why = self.not_recomputable.get(value.name, "the partitioner saves it all the same")
            return Answer(Action.KEEP, f"cannot be recomputed: {why}")
        return answer

    def _action(self, storage: Storage) -> Action:
        """Combine what was said about a storage's members so far: any OFFLOAD wins, RECOMPUTE must be unanimous."""
        said = [self.answers[name].action for name in storage.members if name in self.answers]
        if Action.OFFLOAD in said and storage.name not in self.refused:
            return Action.OFFLOAD
        return Action.RECOMPUTE if all(action is Action.RECOMPUTE for action in said) else Action.KEEP

    def _fits_on_host(self, storage: Storage, value: Value) -> bool:
        budget = self.machine.host_budget_nbytes
        nbytes = storage.nbytes or 0
        if storage.name in self.musts or budget is None or self.host_nbytes + nbytes <= budget:
            return True
        left = format_nbytes(budget - self.host_nbytes)
        reason = f"the host budget of {format_nbytes(budget)} has {left} left, and this needs {format_nbytes(nbytes)}"
        self.refused[storage.name] = (value.name, reason)
        return False

    def _account(self, storage: Storage, before: Action | None, after: Action) -> None:
        nbytes = storage.nbytes or 0
        self.ledger = self.ledger.moved(nbytes, to=after, before=before)
        if storage.name not in self.musts:
            self.host_nbytes += nbytes * ((after is Action.OFFLOAD) - (before is Action.OFFLOAD))
        self.actions[storage.name] = after
        self.seen.add(storage.name)

    def _reason(self, value: Value) -> str:
        own, action = self.answers[value.name], self.actions[value.storage]
        if value.storage in self.fixed:
            return own.reason
        if value.storage in self.refused:
            culprit, reason = self.refused[value.storage]
            return reason if culprit == value.name else f"shares its memory with {culprit}: {reason}"
        if action is own.action or (action is Action.KEEP and own.action is None):
            return own.reason
        for name in self.facts.storage_by_name[value.storage].members:
            other = self.answers[name]
            if other.action is action or (action is Action.KEEP and other.action is None):
                return f"shares its memory with {name}: {other.reason}"
        return own.reason

    def _refuse_musts(self) -> None:
        for value in self.facts.values:
            storage = self.facts.storage_by_name[value.storage]
            if value.tag == MUST and storage.name in self.fixed and storage.nbytes != 0:
                where = f" ({value.source})" if value.source else ""
                raise PolicyError(
                    f"{value.label or value.name}{where} is tagged {MUST} and cannot be offloaded: {self.fixed[storage.name]}. "
                    f"Take the tag away, or tag it {PREFER}, which need not be honoured"
                )
        budget = self.machine.host_budget_nbytes
        if budget is not None and self.host_nbytes > budget:
            raise PolicyError(
                f"values tagged {MUST} take {format_nbytes(self.host_nbytes)} of host memory, and the host budget is "
                f"{format_nbytes(budget)}: raise the budget, or tag fewer values"
            )


def _why_it_stays(storage: Storage) -> str:
    """Return why a storage can in no case be moved, or nothing if it can."""
    reasons: Sequence[str] = storage.immovable
    if reasons:
        return "; ".join(reasons)
    if storage.held:
        return "the caller holds this memory, so moving it would free nothing"
    if storage.nbytes is None:
        return "its size is not known before running"
    if storage.nbytes == 0:
        return "it has no bytes"
    if storage.carried_at < 0:
        return "it is there before forward begins, so moving it would free nothing"
    return ""
