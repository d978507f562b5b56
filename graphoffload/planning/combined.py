"""Policies made of policies: the first that answers, one restricted to some values, and a veto."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from graphoffload.errors import PolicyError
from graphoffload.planning.answers import (
    NEVER,
    Answer,
    Ledger,
    Policy,
    ask,
    check_policy,
    fit,
    forbids,
    needs_of,
)
from graphoffload.planning.answers import least_nbytes as least_nbytes_of
from graphoffload.planning.answers import requests_offload as asks_offload
from graphoffload.planning.answers import requests_recompute as asks_recompute
from graphoffload.planning.answers import unmatched as unmatched_of
from graphoffload.planning.machine import Machine
from graphoffload.planning.patterns import PatternKind, as_patterns, unmatched
from graphoffload.planning.plan import Action
from graphoffload.planning.sizes import parse_nbytes
from graphoffload.planning.values import Facts, Value

_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, init=False)
class FirstOf:
    """Ask several policies in turn; the first that has an opinion is followed. What one of them forbids, none may offload."""

    policies: tuple[Policy, ...]

    def __init__(self, *policies: Policy) -> None:
        if not policies:
            raise PolicyError(
                "FirstOf has no policies; give one or more, such as FirstOf(FollowTags(), OffloadBytes('4GB'))"
            )
        object.__setattr__(self, "policies", tuple(check_policy(policy) for policy in policies))

    @property
    def needs(self) -> frozenset[str]:
        """Name what any of them needs."""
        return _NOTHING.union(*(needs_of(policy) for policy in self.policies))

    @property
    def requests_offload(self) -> bool:
        """Say whether any of them asks for offloading."""
        return any(asks_offload(policy) for policy in self.policies)

    @property
    def requests_recompute(self) -> bool:
        """Say whether any of them asks for recomputation."""
        return any(asks_recompute(policy) for policy in self.policies)

    @property
    def least_nbytes(self) -> int:
        """Return the size below which none of them moves anything."""
        return min(least_nbytes_of(policy) for policy in self.policies)

    def fit(self, facts: Facts, machine: Machine) -> Policy:
        """Fit each to the program."""
        return FirstOf(*(fit(policy, facts, machine) for policy in self.policies))

    def forbids(self, value: Value, ledger: Ledger) -> bool:
        """Forbid what any of them forbids."""
        return any(forbids(policy, value, ledger) for policy in self.policies)

    def answer(self, value: Value, ledger: Ledger) -> Answer:
        """Answer what the first with an opinion answers; without one, give all their reasons."""
        answers = []
        for policy in self.policies:
            if forbids(policy, value, ledger):
                return ask(policy, value, ledger)
        for policy in self.policies:
            answer = ask(policy, value, ledger)
            if answer.action is not None:
                return answer
            answers.append(answer.reason)
        return Answer(None, "; ".join(answers))

    def decide(self, value: Value, ledger: Ledger) -> Action | None:
        """Return the action of `answer`."""
        return self.answer(value, ledger).action

    def unmatched(self, values: tuple[Value, ...]) -> tuple[str, ...]:
        """Name the patterns of any of them that match no value at all."""
        return tuple(fault for policy in self.policies for fault in unmatched_of(policy, values))


@dataclass(frozen=True)
class Only:
    """Ask a policy only about values that match; no opinion on others.

    `names`, `modules`, `ops` as in `ByName`; `dtypes` such as "bfloat16"; `min_nbytes` is compared with the storage. A
    value must match one pattern of every kind given.
    """

    inner: Policy
    names: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    min_nbytes: int = 0

    def __post_init__(self) -> None:
        check_policy(self.inner)
        for kind in ("names", "modules", "ops", "dtypes"):
            object.__setattr__(self, kind, as_patterns(getattr(self, kind), what=f"Only({kind})"))
        nbytes = parse_nbytes(self.min_nbytes, what="Only(min_nbytes)", error=PolicyError)
        object.__setattr__(self, "min_nbytes", nbytes)
        if not self._given() and not self.min_nbytes:
            raise PolicyError("Only restricts nothing; give names, modules, ops, dtypes or min_nbytes")

    @property
    def needs(self) -> frozenset[str]:
        """Name what the policy needs and what the patterns are matched with."""
        matched = frozenset(kind.value for kind, _ in self._given() if kind is not PatternKind.DTYPE)
        return needs_of(self.inner) | matched

    @property
    def requests_offload(self) -> bool:
        """Say whether the policy asks for offloading."""
        return asks_offload(self.inner)

    @property
    def requests_recompute(self) -> bool:
        """Say whether the policy asks for recomputation."""
        return asks_recompute(self.inner)

    @property
    def least_nbytes(self) -> int:
        """Return the size below which nothing moves."""
        return max(self.min_nbytes, least_nbytes_of(self.inner))

    def fit(self, facts: Facts, machine: Machine) -> Policy:
        """Fit the policy to the part of the program that it is asked about."""
        storages = {value.storage for value in facts.values if self._matches(value)}
        seen = replace(facts, storages=tuple(one for one in facts.storages if one.name in storages))
        return replace(self, inner=fit(self.inner, seen, machine))

    def forbids(self, value: Value, ledger: Ledger) -> bool:
        """Forbid, among the values that match, what the policy forbids."""
        return self._matches(value) and forbids(self.inner, value, ledger)

    def answer(self, value: Value, ledger: Ledger) -> Answer:
        """Answer what the policy answers, for a value that matches."""
        if not self._matches(value):
            return Answer(None, f"outside what Only lets {type(self.inner).__name__} decide")
        return ask(self.inner, value, ledger)

    def decide(self, value: Value, ledger: Ledger) -> Action | None:
        """Return the action of `answer`."""
        return self.answer(value, ledger).action

    def unmatched(self, values: tuple[Value, ...]) -> tuple[str, ...]:
        """Name the patterns that match no value at all."""
        own = tuple(fault for kind, patterns in self._given() for fault in unmatched(kind, patterns, values, of="Only"))
        return own + unmatched_of(self.inner, values)

    def _given(self) -> tuple[tuple[PatternKind, tuple[str, ...]], ...]:
        kinds = (
            (PatternKind.NAME, self.names),
            (PatternKind.MODULE, self.modules),
            (PatternKind.OP, self.ops),
            (PatternKind.DTYPE, self.dtypes),
        )
        return tuple((kind, patterns) for kind, patterns in kinds if patterns)

    def _matches(self, value: Value) -> bool:
        if value.storage_nbytes is not None and value.storage_nbytes < self.min_nbytes:
            return False
        return all(any(kind.matches(pattern, value) for pattern in patterns) for kind, patterns in self._given())


@dataclass(frozen=True)
class Never:
    """Forbid offloading: what matches stays on the device, whatever other policies say (a MUST_CPU_OFFLOAD tag is stronger).

    `what` is one pattern or several, each matched with a value's name, module path and operator; or a policy, and then
    whatever it would offload is forbidden. Use it as one of `FirstOf`: `FirstOf(Never("lm_head"), OffloadAll())`.
    """

    what: tuple[str, ...] | Policy
    requests_offload: ClassVar[bool] = False
    requests_recompute: ClassVar[bool] = False
    least_nbytes: ClassVar[int] = NEVER

    def __post_init__(self) -> None:
        if callable(getattr(self.what, "decide", None)):
            check_policy(self.what)
            return
        patterns = as_patterns(self.what, what="Never(what)")
        if not patterns:
            raise PolicyError("Never forbids nothing; give patterns such as 'lm_head', or a policy")
        object.__setattr__(self, "what", patterns)

    @property
    def needs(self) -> frozenset[str]:
        """Name what the patterns are matched with, or what the policy needs."""
        if isinstance(self.what, tuple):
            return frozenset({"label", "module_path", "op"})
        return needs_of(self.what)

    def fit(self, facts: Facts, machine: Machine) -> Policy:
        """Fit the policy, if it is one, to the program."""
        return self if isinstance(self.what, tuple) else Never(fit(self.what, facts, machine))

    def forbids(self, value: Value, ledger: Ledger) -> bool:
        """Forbid what matches."""
        return self.answer(value, ledger).action is Action.KEEP

    def answer(self, value: Value, ledger: Ledger) -> Answer:
        """Answer KEEP for what matches; no opinion on the rest."""
        if isinstance(self.what, tuple):
            for pattern in self.what:
                if any(kind.matches(pattern, value) for kind in _NAMED):
                    return Answer(Action.KEEP, f"Never lets {pattern!r} be offloaded")
            return Answer(None, "Never does not forbid it")
        if ask(self.what, value, ledger).action is Action.OFFLOAD:
            return Answer(Action.KEEP, f"Never lets what {type(self.what).__name__} chooses be offloaded")
        return Answer(None, "Never does not forbid it")

    def decide(self, value: Value, ledger: Ledger) -> Action | None:
        """Return the action of `answer`."""
        return self.answer(value, ledger).action

    def unmatched(self, values: tuple[Value, ...]) -> tuple[str, ...]:
        """Name the patterns that match no value at all."""
        if not isinstance(self.what, tuple):
            return unmatched_of(self.what, values)
        return tuple(
            f"the pattern {pattern!r} of Never matches no saved value"
            for pattern in self.what
            if not any(kind.matches(pattern, value) for kind in _NAMED for value in values)
        )


_NAMED = (PatternKind.NAME, PatternKind.MODULE, PatternKind.OP)
