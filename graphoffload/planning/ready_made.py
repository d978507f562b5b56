"""The policies that come with graphoffload. All are frozen and hashable, and can be written as JSON and read back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from graphoffload.errors import PolicyError
from graphoffload.planning.answers import MUST, NEVER, PREFER, Answer, Ledger, Policy
from graphoffload.planning.machine import Machine
from graphoffload.planning.patterns import PatternKind, as_patterns, unmatched
from graphoffload.planning.plan import Action
from graphoffload.planning.schedule import hidden_storages
from graphoffload.planning.sizes import format_nbytes, parse_nbytes
from graphoffload.planning.values import Facts, Value

MIN_NBYTES = 2**20
"""Storages below this are not worth a copy: at 1 MiB a copy reaches about four fifths of the link's speed."""
OFFLOAD_TAGS = frozenset({MUST, PREFER})
NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True)
class KeepAll:
    """Keep every value on the device, also those with a PREFER_CPU_OFFLOAD tag."""

    needs: ClassVar[frozenset[str]] = NOTHING
    requests_offload: ClassVar[bool] = False
    requests_recompute: ClassVar[bool] = False
    least_nbytes: ClassVar[int] = NEVER

    def answer(self, value: Value, ledger: Ledger) -> Answer:
        """Answer KEEP."""
        return Answer(Action.KEEP, "KeepAll keeps everything")

    def decide(self, value: Value, ledger: Ledger) -> Action | None:
        """Return the action of `answer`."""
        return self.answer(value, ledger).action


@dataclass(frozen=True)
class OffloadAll:
    """Offload every value whose storage has at least `min_nbytes`; no opinion on smaller ones.

    `min_nbytes` takes bytes or a string such as "4MiB". Whether the copies hide behind compute is not asked.
    """

    min_nbytes: int = MIN_NBYTES
    needs: ClassVar[frozenset[str]] = NOTHING
    requests_offload: ClassVar[bool] = True
    requests_recompute: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _set(self, "min_nbytes", parse_nbytes(self.min_nbytes, what="OffloadAll(min_nbytes)", error=PolicyError))

    @property
    def least_nbytes(self) -> int:
        """Return the size below which nothing moves."""
        return self.min_nbytes

    def answer(self, value: Value, ledger: Ledger) -> Answer:
        """Answer OFFLOAD unless the storage is small."""
        small = _too_small(value, self.min_nbytes)
        return (
            Answer(None, small)
            if small
            else Answer(Action.OFFLOAD, "OffloadAll offloads everything that is big enough")
        )

    def decide(self, value: Value, ledger: Ledger) -> Action | None:
        """Return the action of `answer`."""
        return self.answer(value, ledger).action


@dataclass(frozen=True)
class OffloadBytes:
    """Offload up to an amount of bytes, in order of birth: what is born first has the longest time to leave and come back.

    `amount` is bytes (5_500_000_000), a string ("5.5GB"), or a fraction of all bytes that may move, a float in (0, 1].
    A storage that would pass the amount is left to the next policy; smaller ones after it may still fit.
    Law: the bytes offloaded for this policy's sake never pass the amount.
    """

    amount: int | float | str
    min_nbytes: int = MIN_NBYTES
    # Python says 1 == 1.0, but one byte is not "all bytes": this makes the two policies differ.
    _is_fraction: bool = field(default=False, init=False, repr=False)
    requests_recompute: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _set(self, "min_nbytes", parse_nbytes(self.min_nbytes, what="OffloadBytes(min_nbytes)", error=PolicyError))
        if isinstance(self.amount, float):
            if not (math.isfinite(self.amount) and 0 < self.amount <= 1):
                raise PolicyError(
                    f"OffloadBytes(amount) is the float {self.amount!r}; a float is a fraction of the bytes that may move, "
                    'above zero and at most 1.0. For bytes give an int, or a string such as "5.5GB"'
                )
            _set(self, "_is_fraction", True)
        else:
            _set(self, "amount", parse_nbytes(self.amount, what="OffloadBytes(amount)", error=PolicyError))

    @property
    def needs(self) -> frozenset[str]:
        """Name the total, which a fraction is taken of."""
        return frozenset({"total_nbytes"}) if self._is_fraction else NOTHING

    @property
    def requests_offload(self) -> bool:
        """Say no only when the amount is zero."""
        return bool(self.amount)

    @property
    def least_nbytes(self) -> int:
        """Return the size below which nothing moves."""
        return self.min_nbytes

    def answer(self, value: Value, ledger: Ledger) -> Answer:
        """Answer OFFLOAD while the amount lasts."""
        small = _too_small(value, self.min_nbytes)
        if small:
            return Answer(None, small)
        amount = self._amount(ledger)
        if ledger.offloaded_nbytes + (value.storage_nbytes or 0) > amount:
            spent = f"{format_nbytes(ledger.offloaded_nbytes)} of OffloadBytes' {format_nbytes(amount)} are used"
            return Answer(None, f"{spent}, and this would pass it")
        return Answer(Action.OFFLOAD, f"within OffloadBytes' {format_nbytes(amount)}, in order of birth")

    def decide(self, value: Value, ledger: Ledger) -> Action | None:
        """Return the action of `answer`."""
        return self.answer(value, ledger).action

    def _amount(self, ledger: Ledger) -> int:
        if not self._is_fraction:
            return int(self.amount)
        if ledger.total_nbytes is None:
            raise PolicyError(
                f"OffloadBytes({self.amount!r}) is a fraction of all bytes that may move, and that total is not known here; "
                'give an amount such as "5.5GB"'
            )
        return int(float(self.amount) * ledger.total_nbytes)


@dataclass(frozen=True)
class OffloadHidden:
    """Offload what the link hides: in order of birth, as long as compute never waits more than `slack` of the step.

    It looks at the whole program and the machine first (`fit`), so it is for graphs; eager code cannot know the timeline.
    It never asks for more than is free, so moving nothing is no failed request.
    """

    min_nbytes: int = MIN_NBYTES
    slack: float = 0.01
    needs: ClassVar[frozenset[str]] = frozenset({"timeline"})
    requests_offload: ClassVar[bool] = False
    requests_recompute: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _set(self, "min_nbytes", parse_nbytes(self.min_nbytes, what="OffloadHidden(min_nbytes)", error=PolicyError))
        slack: object = self.slack
        if isinstance(slack, bool) or not isinstance(slack, (int, float)) or not 0 <= slack < math.inf:
            raise PolicyError(f"OffloadHidden(slack) is {slack!r}; give a fraction of the step's time, such as 0.01")
        _set(self, "slack", float(slack))

    def fit(self, facts: Facts, machine: Machine) -> Policy:
        """Return the policy for one program: the storages that its timeline hides."""
        return Chosen(
            hidden_storages(facts, machine, min_nbytes=self.min_nbytes, slack=self.slack), "the link hides it"
        )

    def decide(self, value: Value, ledger: Ledger) -> Action | None:
        """Refuse: without the whole program there is no answer."""
        raise PolicyError(
            "OffloadHidden needs the timeline of the whole program, which is not known here; use OffloadBytes"
        )


@dataclass(frozen=True)
class Chosen:
    """Offload exactly these storages, for the given reason: what a policy that looks at the whole program comes to."""

    storages: frozenset[str]
    reason: str
    needs: ClassVar[frozenset[str]] = NOTHING
    requests_offload: ClassVar[bool] = False
    requests_recompute: ClassVar[bool] = False

    def answer(self, value: Value, ledger: Ledger) -> Answer:
        """Answer OFFLOAD for the chosen ones."""
        chosen = value.storage in self.storages
        return Answer(Action.OFFLOAD, self.reason) if chosen else Answer(None, f"not so that {self.reason}")

    def decide(self, value: Value, ledger: Ledger) -> Action | None:
        """Return the action of `answer`."""
        return self.answer(value, ledger).action


@dataclass(frozen=True)
class ByName:
    """Give an action to the values that match; no opinion on others.

    `names` match the name that the user gave the value, or its node in the graph; `modules` the path of the module that
    made it, or of one around that ("model.layers.3" matches all inside); `ops` the operator ("aten.mm" or
    "aten.mm.default"). All are patterns with * and ?, one or several. A value must match one pattern of every kind given.
    """

    names: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    action: Action = Action.OFFLOAD

    def __post_init__(self) -> None:
        for kind in ("names", "modules", "ops"):
            _set(self, kind, as_patterns(getattr(self, kind), what=f"ByName({kind})"))
        if not (self.names or self.modules or self.ops):
            raise PolicyError(
                "ByName has no pattern; give names, modules or ops, such as ByName(modules='model.layers.*')"
            )
        if not isinstance(self.action, Action):
            raise PolicyError(
                f"ByName(action) is {self.action!r}; give Action.KEEP, Action.OFFLOAD or Action.RECOMPUTE"
            )

    @property
    def needs(self) -> frozenset[str]:
        """Name what the patterns are matched with."""
        return frozenset(kind.value for kind, _ in self._given())

    @property
    def requests_offload(self) -> bool:
        """Say whether the action is OFFLOAD."""
        return self.action is Action.OFFLOAD

    @property
    def requests_recompute(self) -> bool:
        """Say whether the action is RECOMPUTE."""
        return self.action is Action.RECOMPUTE

    def answer(self, value: Value, ledger: Ledger) -> Answer:
        """Answer the action for a value that matches."""
        given = self._given()
        if all(any(kind.matches(pattern, value) for pattern in patterns) for kind, patterns in given):
            patterns = ", ".join(repr(pattern) for _, patterns in given for pattern in patterns)
            return Answer(self.action, f"ByName says {self.action.value} for {patterns}")
        return Answer(None, "ByName's patterns do not match it")

    def unmatched(self, values: tuple[Value, ...]) -> tuple[str, ...]:
        """Name the patterns that match no value at all."""
        return tuple(
            fault for kind, patterns in self._given() for fault in unmatched(kind, patterns, values, of="ByName")
        )

    def _given(self) -> tuple[tuple[PatternKind, tuple[str, ...]], ...]:
        kinds = ((PatternKind.NAME, self.names), (PatternKind.MODULE, self.modules), (PatternKind.OP, self.ops))
        return tuple((kind, patterns) for kind, patterns in kinds if patterns)

    def decide(self, value: Value, ledger: Ledger) -> Action | None:
        """Return the action of `answer`."""
        return self.answer(value, ledger).action


@dataclass(frozen=True)
class FollowTags:
    """Offload what the user's code tagged MUST_CPU_OFFLOAD or PREFER_CPU_OFFLOAD; no opinion on anything else."""

    needs: ClassVar[frozenset[str]] = frozenset({"tag"})
    requests_offload: ClassVar[bool] = False
    requests_recompute: ClassVar[bool] = False
    least_nbytes: ClassVar[int] = NEVER

    def answer(self, value: Value, ledger: Ledger) -> Answer:
        """Answer OFFLOAD for a tagged value."""
        if value.tag in OFFLOAD_TAGS:
            return Answer(Action.OFFLOAD, f"tagged {value.tag}")
        return Answer(None, "not tagged for offloading")

    def decide(self, value: Value, ledger: Ledger) -> Action | None:
        """Return the action of `answer`."""
        return self.answer(value, ledger).action


def _set(policy: object, field_name: str, setting: object) -> None:
    # The one place where a frozen policy is written: arguments are brought to one form before anybody can see them.
    object.__setattr__(policy, field_name, setting)


def _too_small(value: Value, min_nbytes: int) -> str:
    """Return why a value is too small to move, or nothing if it is not."""
    nbytes = value.storage_nbytes
    if nbytes is None or nbytes >= min_nbytes:
        return ""
    return f"{format_nbytes(nbytes)} is below min_nbytes ({format_nbytes(min_nbytes)})"
