"""The policies by one door, their JSON, and the key that caches use.

`{"policy": "OffloadAll", "min_nbytes": 1048576}`: the name of a policy that comes with graphoffload, or "module:Class" of
the user's own, and its fields; policies inside policies likewise.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import sys
from typing import Any, cast

from graphoffload.errors import PolicyError, UsageError
from graphoffload.planning import wire
from graphoffload.planning.answers import FACTS as FACTS
from graphoffload.planning.answers import MUST as MUST
from graphoffload.planning.answers import NEVER as NEVER
from graphoffload.planning.answers import PREFER as PREFER
from graphoffload.planning.answers import Answer as Answer
from graphoffload.planning.answers import Ledger as Ledger
from graphoffload.planning.answers import Policy as Policy
from graphoffload.planning.answers import ask as ask
from graphoffload.planning.answers import ask_with_tag as ask_with_tag
from graphoffload.planning.answers import check_policy as check_policy
from graphoffload.planning.answers import fit as fit
from graphoffload.planning.answers import forbids as forbids
from graphoffload.planning.answers import least_nbytes as least_nbytes
from graphoffload.planning.answers import needs_of as needs_of
from graphoffload.planning.answers import requests_offload as requests_offload
from graphoffload.planning.answers import requests_recompute as requests_recompute
from graphoffload.planning.answers import unmatched as unmatched
from graphoffload.planning.combined import FirstOf as FirstOf
from graphoffload.planning.combined import Never as Never
from graphoffload.planning.combined import Only as Only
from graphoffload.planning.ready_made import ByName as ByName
from graphoffload.planning.ready_made import Chosen as Chosen
from graphoffload.planning.ready_made import FollowTags as FollowTags
from graphoffload.planning.ready_made import KeepAll as KeepAll
from graphoffload.planning.ready_made import OffloadAll as OffloadAll
from graphoffload.planning.ready_made import OffloadBytes as OffloadBytes
from graphoffload.planning.ready_made import OffloadHidden as OffloadHidden

_READY_MADE: tuple[type, ...] = (
    ByName,
    Chosen,
    FirstOf,
    FollowTags,
    KeepAll,
    Never,
    OffloadAll,
    OffloadBytes,
    OffloadHidden,
    Only,
)


def policy_to_json(policy: Policy) -> str:
    """Write a policy as JSON. Law 3: `policy_from_json(policy_to_json(policy)) == policy`.

    Raises `PolicyError` for a policy that is not a frozen dataclass, or has a field that JSON cannot hold.
    """
    return json.dumps(_to_object(policy))


def policy_from_json(text: str) -> Policy:
    """Read what `policy_to_json` wrote, or what a person wrote in its form; fields with defaults may be left out.

    A policy of the user's own is found only in modules that are already imported: reading a file never runs code.
    Raises `PolicyError` for unknown names and fields, listing those that exist, and for impossible settings.
    """
    try:
        data = json.loads(text)
    except (TypeError, ValueError) as fault:
        raise PolicyError(f"this is not the JSON of a policy: {fault}") from None
    return _from_object(data, "policy")


def policy_key(policy: Policy) -> str:
    """Return a digest of a policy for cache keys: equal policies, equal keys, in every process and under any hash seed.

    For a policy of the user's own the source of its class counts too, so that editing `decide` changes the key.
    """
    digest = hashlib.sha256(policy_to_json(policy).encode())
    for cls in _own_classes(policy):
        digest.update(_code_of(cls))
    return digest.hexdigest()


def _to_object(policy: Any) -> dict[str, Any]:
    check_policy(policy)
    cls = type(policy)
    if not dataclasses.is_dataclass(policy):
        raise PolicyError(
            f"the policy {cls.__name__} is not a dataclass, so it cannot be written down or keyed: make it "
            "@dataclass(frozen=True)"
        )
    name = cls.__name__ if cls in _READY_MADE else f"{cls.__module__}:{cls.__qualname__}"
    fields = wire.field_types(cls)
    if "policy" in fields:
        raise PolicyError(
            f"the policy {cls.__name__} has a field 'policy', which in JSON is its own name: rename the field"
        )
    return {"policy": name, **{field: _encode(getattr(policy, field), f"{cls.__name__}.{field}") for field in fields}}


def _encode(setting: Any, where: str) -> Any:
    if callable(getattr(setting, "decide", None)):
        return _to_object(setting)
    if isinstance(setting, tuple):
        return [_encode(item, f"{where}[{index}]") for index, item in enumerate(setting)]
    try:
        return wire.encode(setting, where=where)
    except UsageError as fault:
        raise PolicyError(f"a policy must be data: {fault}") from None


def _from_object(data: Any, where: str) -> Policy:
    if not isinstance(data, dict) or not isinstance(data.get("policy"), str):
        raise PolicyError(
            f'{where} must be an object such as {{"policy": "OffloadAll", "min_nbytes": 4096}}; found {data!r}'
        )
    cls = _class_named(data["policy"])
    hints = wire.field_types(cls)
    unknown = sorted(set(data) - set(hints) - {"policy"})
    if unknown:
        has = f"it has {', '.join(hints)}" if hints else "it has none"
        raise PolicyError(f"{cls.__name__} has no field {', '.join(map(repr, unknown))}; {has}")
    readers = {Policy: _from_object}
    try:
        fields = {
            name: wire.decode(hint, data[name], where=f"{cls.__name__}.{name}", readers=readers)
            for name, hint in hints.items()
            if name in data
        }
    except PolicyError:
        raise
    except UsageError as fault:
        raise PolicyError(str(fault)) from None
    needed = [
        field.name
        for field in dataclasses.fields(cls)
        if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    missing = [name for name in needed if name not in fields]
    if missing:
        raise PolicyError(f"{cls.__name__} needs the field {', '.join(map(repr, missing))}")
    # FirstOf takes its policies one by one, as people write it.
    policy = cls(*fields["policies"]) if cls is FirstOf else cls(**fields)
    return cast(Policy, check_policy(policy))


def _class_named(name: str) -> type:
    for cls in _READY_MADE:
        if cls.__name__ == name:
            return cls
    known = ", ".join(cls.__name__ for cls in _READY_MADE)
    module, colon, qualname = name.partition(":")
    if not colon:
        raise PolicyError(f"there is no policy {name!r}; there are {known}, and your own as 'module:Class'")
    if module not in sys.modules:
        raise PolicyError(f"the policy {name!r} is in a module that is not imported; import {module} before reading it")
    found: Any = sys.modules[module]
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not dataclasses.is_dataclass(found) or not hasattr(found, "decide"):
        raise PolicyError(
            f"{name!r} names no policy: a frozen dataclass with decide(value, ledger) at the top of its module"
        )
    return found


def _own_classes(policy: Any) -> list[type]:
    """List the classes of a policy and of all policies inside it that are the user's own, in order of appearance."""
    found = [] if type(policy) in _READY_MADE else [type(policy)]
    for name in wire.field_types(type(policy)):
        setting = getattr(policy, name)
        inner = setting if isinstance(setting, tuple) else (setting,)
        for item in inner:
            if callable(getattr(item, "decide", None)):
                found += _own_classes(item)
    return found


def _code_of(cls: type) -> bytes:
    try:
        return inspect.getsource(cls).encode()
    except (OSError, TypeError):
        # Typed at a prompt: there is no source, and the byte code says the same for one version of Python.
        methods = sorted((name, method) for name, method in vars(cls).items() if inspect.isfunction(method))
        return b"".join(name.encode() + method.__code__.co_code for name, method in methods)
