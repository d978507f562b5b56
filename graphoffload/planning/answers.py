"""What a policy is: an object that answers, for one saved value at a time, what to do with it.

A policy is a frozen dataclass with `decide(value, ledger)`. It may have more:

- `needs`: the names of facts it cannot do without (see `FACTS`); a path that does not know one refuses the policy;
- `requests_offload`, `requests_recompute`: whether it ever asks for that action (true where not given);
- `answer(value, ledger)`: like `decide`, with the reason in words;
- `forbids(value, ledger)`: whether the memory of this value must not be offloaded, whatever the other policies say;
- `unmatched(values)`: what it names that does not exist, in words;
- `least_nbytes`: no storage below this is ever offloaded (0 where not given), so that small ones need not be asked about;
- `fit(facts, machine)`: the policy to use for one program, for policies that look at the whole of it first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from graphoffload.errors import PolicyError
from graphoffload.planning.machine import Machine
from graphoffload.planning.plan import Action
from graphoffload.planning.values import Facts, Value

MUST, PREFER = "MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"
FACTS = frozenset({"label", "module_path", "op", "tag", "timeline", "total_nbytes"})
"""Facts that a policy may name in `needs`: those of `Value` that not every path knows; "timeline": positions and seconds of
the whole program; "total_nbytes": the ledger's total."""


NEVER = 1 << 62
"""More bytes than any storage has."""


@dataclass(frozen=True)
class Ledger:
    """Hold the running totals while a policy is folded over the values of a program, in bytes, each storage once.

    Only storages that the policy may decide about are counted. `total_nbytes` is what they will come to in the end, None
    where that is not known beforehand.
    """

    kept_nbytes: int = 0
    offloaded_nbytes: int = 0
    recomputed_nbytes: int = 0
    total_nbytes: int | None = None

    def moved(self, nbytes: int, *, to: Action, before: Action | None = None) -> Ledger:
        """Return the ledger with a storage entered under `to`, and taken out of `before` if it was there."""
        ledger = self if before is None else self._changed(before, -nbytes)
        return ledger._changed(to, nbytes)

    def _changed(self, action: Action, nbytes: int) -> Ledger:
        if action is Action.KEEP:
            return replace(self, kept_nbytes=self.kept_nbytes + nbytes)
        if action is Action.OFFLOAD:
            return replace(self, offloaded_nbytes=self.offloaded_nbytes + nbytes)
        return replace(self, recomputed_nbytes=self.recomputed_nbytes + nbytes)


class Policy(Protocol):
    """Decide what happens to saved values. See the module for what a policy may have besides `decide`."""

    def decide(self, value: Value, ledger: Ledger) -> Action | None:
        """Return the action for a value, or None for no opinion. Must depend on nothing but its arguments and fields."""


@dataclass(frozen=True)
class Answer:
    """Hold a policy's action for a value (None: no opinion) and the reason, a phrase for people."""

    action: Action | None
    reason: str


def ask(policy: Policy, value: Value, ledger: Ledger) -> Answer:
    """Ask a policy about one value. Raises `PolicyError` when it answers something that is no action."""
    explained = getattr(policy, "answer", None)
    if explained is not None:
        answer = explained(value, ledger)
        if not isinstance(answer, Answer):
            raise PolicyError(
                f"{_name(policy)}.answer returned {answer!r} for {value.name!r}; it must return an Answer"
            )
    else:
        action = policy.decide(value, ledger)
        said = "has no opinion" if action is None else f"says {getattr(action, 'value', action)}"
        answer = Answer(action, f"{_name(policy)} {said}")
    if answer.action is not None and not isinstance(answer.action, Action):
        raise PolicyError(
            f"{_name(policy)} answered {answer.action!r} for {value.name!r}; a policy answers Action.KEEP, Action.OFFLOAD, "
            "Action.RECOMPUTE, or None for no opinion"
        )
    return answer


def ask_with_tag(policy: Policy, value: Value, ledger: Ledger) -> Answer:
    """Ask a policy about one value, and let the user's tag count: MUST before the policy, PREFER where it has no opinion."""
    if value.tag == MUST:
        return Answer(Action.OFFLOAD, f"tagged {MUST}")
    answer = ask(policy, value, ledger)
    if answer.action is None and value.tag == PREFER:
        return Answer(Action.OFFLOAD, f"tagged {PREFER}, and the policy has no opinion ({answer.reason})")
    return answer


def forbids(policy: Policy, value: Value, ledger: Ledger) -> bool:
    """Say whether a policy forbids that this value's memory be offloaded by anybody."""
    forbid = getattr(policy, "forbids", None)
    return forbid is not None and bool(forbid(value, ledger))


def fit(policy: Policy, facts: Facts, machine: Machine) -> Policy:
    """Return the policy to fold over one program: itself, unless it looks at the whole program first."""
    fitting = getattr(policy, "fit", None)
    return policy if fitting is None else check_policy(fitting(facts, machine))


def unmatched(policy: Policy, values: tuple[Value, ...]) -> tuple[str, ...]:
    """Say, in words, what a policy names that no value of the program has."""
    find = getattr(policy, "unmatched", None)
    return () if find is None else tuple(find(values))


def needs_of(policy: Policy) -> frozenset[str]:
    """Return the names of the facts that a policy cannot do without."""
    return frozenset(getattr(policy, "needs", ()))


def requests_offload(policy: Policy) -> bool:
    """Say whether a policy ever asks for offloading; one that does and moves nothing deserves a warning."""
    return bool(getattr(policy, "requests_offload", True))


def requests_recompute(policy: Policy) -> bool:
    """Say whether a policy ever asks for recomputation."""
    return bool(getattr(policy, "requests_recompute", True))


def least_nbytes(policy: Policy) -> int:
    """Return the bytes below which a policy offloads no storage; `NEVER` for one that offloads nothing without a tag."""
    return int(getattr(policy, "least_nbytes", 0))


def check_policy(policy: Any) -> Any:
    """Return the policy if it is one. Raises `PolicyError` that says what is missing."""
    if isinstance(policy, type):
        raise PolicyError(f"the policy is the class {policy.__name__}, not an object: write {policy.__name__}(...)")
    if not callable(getattr(policy, "decide", None)):
        raise PolicyError(
            f"a {type(policy).__name__} is not a policy: it has no decide(value, ledger). Take one of graphoffload.policies, "
            "or write a frozen dataclass with that method"
        )
    try:
        hash(policy)
    except TypeError as fault:
        raise PolicyError(
            f"the policy {_name(policy)} cannot be hashed ({fault}): make it a frozen dataclass whose fields are hashable "
            "(tuples instead of lists)"
        ) from None
    unknown = sorted(needs_of(policy) - FACTS)
    if unknown:
        raise PolicyError(f"{_name(policy)}.needs names {', '.join(unknown)}; facts are {', '.join(sorted(FACTS))}")
    return policy


def _name(policy: object) -> str:
    return type(policy).__name__
