"""JSON for frozen dataclasses, strict in both directions.

The types of the fields say how they are written and read: int, float, str, bool, None, enums (by value), tuples (as lists),
frozensets (as sorted lists), nested dataclasses (as objects) and unions of these. The outermost object carries its type
and a version, so that a file of another kind or of another release is refused by name instead of being half understood.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from graphoffload.errors import UsageError

T = TypeVar("T")
Reader = Callable[[Any, str], Any]


def to_json(data: Any, *, indent: int | None = None) -> str:
    """Write a frozen dataclass as JSON text.

    Law 3: `from_json(type(data), to_json(data)) == data`. Law 2: equal data give equal text.
    Raises `UsageError` for what JSON cannot hold (NaN, infinity, foreign types), naming the field.
    """
    cls = type(data)
    fields = encode(data, where=cls.__name__)
    fields.pop("version", None)
    return json.dumps({"type": cls.__name__, "version": version_of(cls), **fields}, indent=indent)


def from_json(cls: type[T], text: str) -> T:
    """Read what `to_json` wrote. Raises `UsageError` that names the field which is wrong, missing or unknown."""
    try:
        data = json.loads(text)
    except (TypeError, ValueError) as fault:
        raise UsageError(f"this is not the JSON of a {cls.__name__}: {fault}") from None
    if not isinstance(data, dict):
        raise UsageError(f"this is not the JSON of a {cls.__name__}: expected an object, found {_kind(data)}")
    kind = data.pop("type", None)
    if kind != cls.__name__:
        raise UsageError(f"this JSON says it is a {kind!r}; a {cls.__name__!r} was asked for")
    version = data.pop("version", None)
    if version != version_of(cls):
        raise UsageError(
            f"this {cls.__name__} is in version {version!r} of its form; this release reads version {version_of(cls)}: "
            "write it anew"
        )
    if "version" in field_types(cls):
        data["version"] = version
    return typing.cast(T, decode(cls, data, where=cls.__name__))


def version_of(cls: type) -> int:
    """Return the version of a class's JSON form: the default of its field `version` if it has one, else 1."""
    for field in dataclasses.fields(cls):
        if field.name == "version":
            return int(field.default)  # type: ignore[arg-type]  # a missing default is our own fault, and fails here
    return 1


def encode(data: Any, *, where: str) -> Any:
    """Turn data into what JSON holds. `where` is the path to it, for messages."""
    if data is None or isinstance(data, (bool, str)):
        return data
    if isinstance(data, enum.Enum):
        return data.value
    if isinstance(data, int):
        return int(data)
    if isinstance(data, float):
        if not math.isfinite(data):
            raise UsageError(f"{where} is {data!r}, which JSON cannot hold")
        return data
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return {name: encode(getattr(data, name), where=f"{where}.{name}") for name in _hints(type(data))}
    if isinstance(data, tuple):
        return [encode(item, where=f"{where}[{index}]") for index, item in enumerate(data)]
    if isinstance(data, frozenset):
        # Sets are ordered before they are written, so that equal sets give equal text under any hash seed.
        return sorted((encode(item, where=where) for item in data), key=json.dumps)
    raise UsageError(f"{where} is a {type(data).__name__}, which cannot be written as JSON")


def decode(hint: Any, data: Any, *, where: str, readers: Mapping[Any, Reader] | None = None) -> Any:
    """Turn what JSON holds into data of the type `hint`. `readers` read types that have a form of their own.

    Raises `UsageError` that names `where`, what was expected and what was found.
    """
    if readers and hint in readers:
        return readers[hint](data, where)
    origin = typing.get_origin(hint)
    if origin is types.UnionType or origin is typing.Union:
        return _decode_union(hint, data, where=where, readers=readers)
    if origin in (tuple, frozenset):
        return _decode_items(hint, data, where=where, readers=readers)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _decode_fields(hint, data, where=where, readers=readers)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(data)
        except ValueError:
            known = ", ".join(repr(member.value) for member in hint)
            raise UsageError(f"{where} is {data!r}; expected one of {known}") from None
    if hint is float and type(data) in (int, float):
        return float(data)
    if hint in (int, str, bool, float) and type(data) is hint:
        return data
    if hint in (None, types.NoneType) and data is None:
        return None
    if hint is Any:
        return data
    raise UsageError(f"{where}: expected {_name(hint)}, found {_kind(data)}")


def _decode_union(hint: Any, data: Any, *, where: str, readers: Mapping[Any, Reader] | None) -> Any:
    arms = typing.get_args(hint)
    # An exact match first: 3 read as `float | int` must stay an int.
    for arm in arms:
        if type(data) is arm or (data is None and arm is types.NoneType):
            return data
    # An object or a list that only one arm could take: what is wrong inside it says more than "expected A or null".
    listed = [arm for arm in arms if typing.get_origin(arm) in (tuple, frozenset)]
    nested = [arm for arm in arms if arm not in listed and not _is_plain(arm)]
    fitting = listed if isinstance(data, list) else nested if isinstance(data, dict) else list(arms)
    if len(fitting) == 1:
        return decode(fitting[0], data, where=where, readers=readers)
    for arm in fitting:
        try:
            return decode(arm, data, where=where, readers=readers)
        except UsageError:
            continue
    raise UsageError(f"{where}: expected {_name(hint)}, found {_kind(data)}")


def _decode_items(hint: Any, data: Any, *, where: str, readers: Mapping[Any, Reader] | None) -> Any:
    if not isinstance(data, list):
        raise UsageError(f"{where}: expected a list, found {_kind(data)}")
    arms = typing.get_args(hint)
    if typing.get_origin(hint) is frozenset:
        return frozenset(decode(arms[0], item, where=f"{where}[{i}]", readers=readers) for i, item in enumerate(data))
    if len(arms) == 2 and arms[1] is Ellipsis:
        return tuple(decode(arms[0], item, where=f"{where}[{i}]", readers=readers) for i, item in enumerate(data))
    if len(arms) != len(data):
        raise UsageError(f"{where}: expected {len(arms)} items, found {len(data)}")
    pairs = zip(arms, data, strict=True)
    return tuple(decode(arm, item, where=f"{where}[{i}]", readers=readers) for i, (arm, item) in enumerate(pairs))


def _decode_fields(cls: type, data: Any, *, where: str, readers: Mapping[Any, Reader] | None) -> Any:
    if not isinstance(data, dict):
        raise UsageError(f"{where}: expected an object with the fields of {cls.__name__}, found {_kind(data)}")
    hints = _hints(cls)
    unknown = sorted(set(data) - set(hints))
    missing = [name for name in hints if name not in data]
    if unknown or missing:
        faults = [f"unknown {', '.join(map(repr, unknown))}"] * bool(unknown)
        faults += [f"missing {', '.join(map(repr, missing))}"] * bool(missing)
        raise UsageError(f"{where}: fields {' and '.join(faults)}; a {cls.__name__} has {', '.join(hints)}")
    return cls(**{name: decode(hints[name], data[name], where=f"{where}.{name}", readers=readers) for name in hints})


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def field_types(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name, in order."""
    return dict(_hints(cls))


def _is_plain(hint: Any) -> bool:
    return hint in (int, float, str, bool, types.NoneType)


def _name(hint: Any) -> str:
    if hint in (None, types.NoneType):
        return "null"
    arms = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_name(arm) for arm in arms)
    if typing.get_origin(hint) in (tuple, frozenset):
        return "a list"
    return str(getattr(hint, "__name__", hint))


def _kind(data: Any) -> str:
    if data is None:
        return "null"
    if isinstance(data, dict):
        return "an object"
    if isinstance(data, list):
        return "a list"
    return repr(data)
