"""Hypothesis strategies of valid facts, machines and policies, small enough to read and odd enough to matter.

Numbers are small, so that steps and copies take times of the same kind and every kind of stall occurs. A new field of the
facts, and a new policy, is added here first, so that every old law meets it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from graphoffload.planning.machine import Machine
from graphoffload.planning.plan import Action
from graphoffload.planning.policy import (
    ByName,
    FirstOf,
    FollowTags,
    KeepAll,
    Never,
    OffloadAll,
    OffloadBytes,
    OffloadHidden,
    Only,
    Policy,
)
from graphoffload.planning.values import Buffer, Facts, Step, Storage, Value

DTYPES = ("bfloat16", "float32", "int64")
OPS = ("aten.mm.default", "aten.relu.default", "aten.view.default")
MODULES = ("", "model.layers.0", "model.layers.1.mlp")
TAGS = (None, None, None, "PREFER_CPU_OFFLOAD", "MUST_SAVE", "MUST_RECOMPUTE")
BUFFER_KINDS = ("parameter", "input", "output", "gradient", "tangent", "transient")


@dataclass
class _Draft:
    """Gather one storage while positions are walked."""

    name: str
    birth: int
    held: bool
    nbytes: int | None
    members: list[tuple[str, int]] = field(default_factory=list)


def steps(half: str) -> st.SearchStrategy[tuple[Step, ...]]:
    """Draw one half's steps: arithmetic, traffic, views that cost nothing, measured ones."""
    one = st.tuples(
        st.integers(0, 50),
        st.integers(0, 50),
        st.sampled_from(DTYPES),
        st.one_of(st.none(), st.none(), st.floats(0, 5, allow_nan=False)),
    )
    return st.lists(one, min_size=1, max_size=8).map(
        lambda drawn: tuple(
            Step(f"{half}{index}", OPS[index % len(OPS)], flops=flops, nbytes=nbytes, dtype=dtype, seconds=seconds)
            for index, (flops, nbytes, dtype, seconds) in enumerate(drawn)
        )
    )


@st.composite
def facts(draw: st.DrawFn, *, musts: bool = False, unknown: bool = True) -> Facts:
    """Draw valid facts: views that share a storage, held and immovable and unknown-sized storages, tags, buffers.

    `musts`: some values carry MUST_CPU_OFFLOAD. `unknown`: some sizes are not known.
    """
    forward, backward = draw(steps("f")), draw(steps("b"))
    count, last = len(forward), len(forward) + len(backward) - 1
    drafts = [_Draft(f"input{index}", -1, True, draw(st.integers(0, 60))) for index in range(draw(st.integers(0, 2)))]
    for position, step in enumerate(forward):
        kind = draw(st.sampled_from(("transient", "new", "new", "view")))
        if kind == "new":
            size = st.one_of(st.integers(0, 60), st.none()) if unknown else st.integers(0, 60)
            drafts.append(_Draft(step.name, position, False, draw(size), [(step.name, position)]))
        elif kind == "view" and drafts:
            draw(st.sampled_from(drafts)).members.append((step.name, position))
    drafts = [draft for draft in drafts if draft.members]
    storages = tuple(_storage(draw, draft, count, last) for draft in drafts)
    tags = (*TAGS, "MUST_CPU_OFFLOAD") if musts else TAGS
    values = [
        _value(draw, name, position, storage, tags)
        for draft, storage in zip(drafts, storages, strict=True)
        for name, position in draft.members
    ]
    buffers = st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from(BUFFER_KINDS), st.integers(-1, last), st.integers(0, last))
    )
    return Facts(
        values=tuple(sorted(values, key=lambda value: value.birth or 0)),
        storages=storages,
        forward=forward,
        backward=backward,
        buffers=tuple(
            Buffer(f"buffer{index}", nbytes, kind, min(born, dies), max(born, dies))
            for index, (nbytes, kind, born, dies) in enumerate(draw(buffers))
        ),
        recomputed_nbytes=draw(st.integers(0, 100)),
        device=draw(st.sampled_from(("cpu", "cuda:0"))),
        fused=draw(st.booleans()),
    )


def _storage(draw: st.DrawFn, draft: _Draft, count: int, last: int) -> Storage:
    carrier, carried_at = ("", -1) if draft.held else draw(st.sampled_from(draft.members))
    latest = max(position for _, position in draft.members)
    uses = sorted((draw(st.integers(count, last)), draw(st.integers(count, last))))
    immovable = ("it is an input",) if draft.held else draw(st.sampled_from(((), (), (), ("it is a module output",))))
    return Storage(
        name=draft.name,
        nbytes=draft.nbytes,
        dtype=draw(st.sampled_from(DTYPES)),
        device="cuda:0",
        members=tuple(name for name, _ in draft.members),
        carrier=carrier or draft.name,
        birth=draft.birth,
        carried_at=carried_at,
        last_forward_use=draw(st.integers(latest, count - 1)),
        first_backward_use=uses[0],
        last_backward_use=uses[1],
        nbytes_expr="4*s0" if draft.nbytes is None else None,
        immovable=immovable,
        held=draft.held,
    )


def _value(draw: st.DrawFn, name: str, position: int, storage: Storage, tags: tuple[str | None, ...]) -> Value:
    free = not storage.immovable and storage.nbytes is not None
    return Value(
        name=name,
        storage=storage.name,
        op=draw(st.sampled_from(OPS)),
        shape=(2, "s0") if storage.nbytes is None else (storage.nbytes,),
        stride=("s0", 1) if storage.nbytes is None else (1,),
        storage_offset=0,
        dtype=storage.dtype,
        nbytes=storage.nbytes,
        storage_nbytes=storage.nbytes,
        nbytes_expr=storage.nbytes_expr,
        module_path=draw(st.sampled_from(MODULES)),
        source="model.py:1",
        label=draw(st.sampled_from(("", "hidden", "gate"))),
        region=draw(st.sampled_from((None, 0, 1))),
        # A MUST that cannot be honoured is an error; that has tests of its own.
        tag=draw(st.sampled_from(tags if free else TAGS)),
        birth=position,
        last_forward_use=storage.last_forward_use,
        first_backward_use=storage.first_backward_use,
    )


def machines(*, budgets: bool = True) -> st.SearchStrategy[Machine]:
    """Draw machines whose links, memory and arithmetic are about equally fast, with and without budgets."""
    rate = st.sampled_from((1.0, 7.0, 10.0, 100.0))
    budget = st.one_of(st.none(), st.integers(0, 150)) if budgets else st.none()
    return st.builds(
        Machine,
        name=st.just("small"),
        d2h_bytes_per_second=rate,
        h2d_bytes_per_second=rate,
        memory_bytes_per_second=rate,
        flops_per_second=st.just((("bfloat16", 20.0), ("float32", 5.0))),
        copy_latency_seconds=st.sampled_from((0.0, 0.5)),
        step_seconds=st.sampled_from((0.0, 0.25)),
        duplex_bytes_per_second=st.one_of(st.none(), rate),
        host_budget_nbytes=budget,
        in_flight_nbytes=budget,
    )


def policies() -> st.SearchStrategy[Policy]:
    """Draw policies of every kind, also inside one another."""
    size = st.sampled_from((0, 1, 10, 40))
    patterns = st.sampled_from((("f1",), ("hidden", "f?"), ("*",), ("nothing.like.it",)))
    modules = st.sampled_from(((), ("model.layers.0",), ("model.*",)))
    ops = st.sampled_from(((), ("aten.mm",), ("aten.*",)))
    leaves = st.one_of(
        st.just(KeepAll()),
        st.just(FollowTags()),
        st.builds(OffloadAll, min_nbytes=size),
        st.builds(OffloadBytes, st.one_of(st.integers(0, 200), st.sampled_from((0.25, 0.5, 1.0))), min_nbytes=size),
        st.builds(OffloadHidden, min_nbytes=size, slack=st.sampled_from((0.0, 0.1))),
        st.builds(ByName, names=patterns, modules=modules, ops=ops, action=st.sampled_from(Action)),
        st.builds(Never, patterns),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(lambda chosen: FirstOf(*chosen)),
            st.builds(Only, inner, names=patterns, min_nbytes=size),
            st.builds(Only, inner, dtypes=st.just(("bfloat16",))),
            st.builds(Never, inner),
        ),
        max_leaves=4,
    )
