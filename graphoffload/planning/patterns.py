"""Names as users write them, with * and ? in them, against the names of a saved value."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from fnmatch import fnmatchcase

from graphoffload.errors import PolicyError
from graphoffload.planning.values import Value


class PatternKind(enum.Enum):
    """Say which of a value's names a pattern is matched with; the member's value is the fact it needs."""

    NAME = "label"
    MODULE = "module_path"
    OP = "op"
    DTYPE = "dtype"

    def matches(self, pattern: str, value: Value) -> bool:
        """Say whether the pattern matches one of the value's names of this kind."""
        return any(fnmatchcase(name, pattern) for name in _NAMES[self](value))


def _user_names(value: Value) -> tuple[str, ...]:
    return tuple(name for name in (value.label, value.name) if name)


def _paths(value: Value) -> tuple[str, ...]:
    # With every path around it: whoever names a block means all that is inside.
    parts = value.module_path.split(".") if value.module_path else []
    return tuple(".".join(parts[: end + 1]) for end in range(len(parts)))


def _operators(value: Value) -> tuple[str, ...]:
    # With its overload and without: "aten.mm.default" and "aten.mm".
    return (value.op, value.op.rpartition(".")[0] or value.op)


def _dtypes(value: Value) -> tuple[str, ...]:
    return (value.dtype, value.dtype.removeprefix("torch."))


_NAMES = {
    PatternKind.NAME: _user_names,
    PatternKind.MODULE: _paths,
    PatternKind.OP: _operators,
    PatternKind.DTYPE: _dtypes,
}


def as_patterns(given: object, *, what: str) -> tuple[str, ...]:
    """Read one pattern or several. Raises `PolicyError` for anything but non-empty strings; `what` names the argument."""
    if isinstance(given, str):
        given = (given,)
    if not isinstance(given, Iterable) or isinstance(given, (bytes, dict)):
        raise PolicyError(f"{what} is a {type(given).__name__}; give a pattern such as 'layers.*' or several of them")
    patterns = tuple(given)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise PolicyError(f"{what} holds {pattern!r}; give patterns that are non-empty strings, such as 'layers.*'")
    return patterns


def unmatched(kind: PatternKind, patterns: tuple[str, ...], values: tuple[Value, ...], *, of: str) -> tuple[str, ...]:
    """Name each pattern that matches no value: most likely a slip of the pen, which must not pass in silence."""
    return tuple(
        f"the pattern {pattern!r} of {of} matches no saved value"
        for pattern in patterns
        if not any(kind.matches(pattern, value) for value in values)
    )
