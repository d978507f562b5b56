"""Hypothesis strategies of whole training programs.

No size is drawn before the list that it sizes, and every list of steps is a program, so Hypothesis shrinks by leaving steps
out. A new feature of graphoffload extends `program_kinds.KINDS` first, so that every old law meets it.
"""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st
from program_kinds import KINDS, REGION_KINDS
from program_writer import Step
from programs import Program

BACK = st.integers(0, 6)
VARIANT = st.integers(0, 7)


def steps(kinds: Iterable[str]) -> st.SearchStrategy[Step]:
    """Draw one step of these kinds; the kinds that come first are the simplest."""
    return st.builds(Step, kind=st.sampled_from(tuple(kinds)), pick=BACK, other=BACK, variant=VARIANT)


def regions() -> st.SearchStrategy[Step]:
    """Draw a recomputation region with a body of plain steps, now and then with a region inside."""
    plain = st.lists(steps(REGION_KINDS), min_size=1, max_size=4).map(tuple)
    inner = st.builds(Step, kind=st.just("region"), pick=BACK, variant=VARIANT, body=plain)
    body = st.lists(st.one_of(steps(REGION_KINDS), steps(REGION_KINDS), inner), min_size=1, max_size=4).map(tuple)
    return st.builds(Step, kind=st.just("region"), pick=BACK, variant=VARIANT, body=body)


@st.composite
def programs(
    draw: st.DrawFn,
    *,
    max_steps: int = 8,
    without: frozenset[str] = frozenset(),
    dynamic: bool | None = False,
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float64"),
) -> Program:
    """Draw a program of steps of every kind but those left out; `dynamic=None` draws that too."""
    plain = steps(kind for kind in KINDS if kind not in without and kind != "region")
    one = plain if "region" in without else st.one_of(plain, plain, plain, regions())
    return Program(
        steps=tuple(draw(st.lists(one, min_size=1, max_size=max_steps))),
        outputs=tuple(draw(st.lists(st.tuples(BACK, st.integers(0, 4)), max_size=3))),
        dtype=draw(st.sampled_from(dtypes)),
        batch=draw(st.sampled_from((2, 5, 7))),
        # Symbolic sizes take five times as long to compile.
        dynamic=draw(st.integers(0, 5)) == 5 if dynamic is None else dynamic,
        input_grad=draw(st.booleans()),
    )
