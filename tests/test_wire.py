"""The JSON form: strict in both directions, and every refusal names the place."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from small_facts import facts, machine, storage

from graphoffload.errors import UsageError
from graphoffload.planning import wire
from graphoffload.planning.machine import Machine
from graphoffload.planning.plan import Action, Plan
from graphoffload.planning.planner import make_plan
from graphoffload.planning.policy import OffloadAll
from graphoffload.planning.values import Facts


@dataclass(frozen=True)
class Point:
    x: int
    y: float


@dataclass(frozen=True)
class Shape:
    name: str
    points: tuple[Point, ...] = ()
    action: Action = Action.KEEP
    span: tuple[int, str] = (0, "")
    size: int | str | None = None
    where: Point | None = None
    tags: frozenset[str] = frozenset()
    closed: bool = False
    number: int | float = 0


SHAPE = Shape(
    "s", (Point(1, 2.0), Point(3, 0.1)), Action.OFFLOAD, (4, "t"), "s0*4", Point(5, 6.5), frozenset("cab"), True, 1.5
)


def changed(**changes: Any) -> str:
    return json.dumps({**json.loads(wire.to_json(SHAPE)), **changes})


def test_there_and_back() -> None:
    assert wire.from_json(Shape, wire.to_json(SHAPE)) == SHAPE
    assert wire.from_json(Shape, wire.to_json(SHAPE, indent=2)) == SHAPE
    assert wire.from_json(Shape, wire.to_json(Shape("plain"))) == Shape("plain")


def test_the_text_is_what_a_person_would_write() -> None:
    assert wire.to_json(Point(1, 2.5)) == '{"type": "Point", "version": 1, "x": 1, "y": 2.5}'
    assert json.loads(wire.to_json(SHAPE))["tags"] == ["a", "b", "c"]


def test_ints_stay_ints_and_floats_floats() -> None:
    for number in (1, 1.0, 0.1, 1e300):
        again = wire.from_json(Shape, wire.to_json(Shape("s", number=number))).number
        assert (again, type(again)) == (number, type(number))
    assert type(wire.from_json(Point, '{"type": "Point", "version": 1, "x": 1, "y": 2}').y) is float


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"points": [{"x": 1, "y": 2}, {"x": "1", "y": 2}]}, r"Shape.points\[1\].x: expected int, found '1'"),
        ({"points": [{"x": 1}]}, r"Shape.points\[0\]: fields missing 'y'; a Point has x, y"),
        ({"points": [{"x": 1, "y": 2, "z": 3}]}, r"Shape.points\[0\]: fields unknown 'z'; a Point has x, y"),
        ({"points": [{"x": 1, "z": 3}]}, "unknown 'z' and missing 'y'"),
        ({"points": [1]}, "expected an object with the fields of Point, found 1"),
        ({"points": {"x": 1}}, "Shape.points: expected a list, found an object"),
        ({"action": "burn"}, "Shape.action is 'burn'; expected one of 'keep', 'offload', 'recompute'"),
        ({"span": [1]}, "Shape.span: expected 2 items, found 1"),
        ({"size": 1.5}, "Shape.size: expected int or str or null, found 1.5"),
        ({"size": True}, "Shape.size: expected int or str or null, found True"),
        ({"where": {"x": None, "y": 1}}, "Shape.where.x: expected int, found null"),
        ({"where": [1, 2]}, "Shape.where: expected Point or null, found a list"),
        ({"closed": 1}, "Shape.closed: expected bool, found 1"),
        ({"name": None}, "Shape.name: expected str, found null"),
        ({"extra": 1}, "Shape: fields unknown 'extra'"),
        ({"version": 2}, r"Shape is in version 2 of its form; this release reads version 1"),
        ({"version": None}, "version None"),
        ({"type": "Point"}, "this JSON says it is a 'Point'; a 'Shape' was asked for"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        wire.from_json(Shape, changed(**changes))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not the JSON of a Shape"), ("[]", "expected an object, found a list")]
)
def test_what_is_no_object_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        wire.from_json(Shape, text)


def test_bytes_that_are_no_text_are_refused() -> None:
    nothing: Any = None
    with pytest.raises(UsageError, match="not the JSON of a Shape"):
        wire.from_json(Shape, nothing)


@pytest.mark.parametrize(
    ("number", "message"),
    [(float("nan"), "Shape.number is nan"), (float("inf"), "Shape.number is inf"), ([1], "Shape.number is a list")],
)
def test_what_json_cannot_hold_is_refused_when_written(number: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        wire.to_json(Shape("s", number=number))


def test_plans_are_versioned_and_strict() -> None:
    a = storage("A", 20, birth=0, back=9)
    plan = make_plan(facts([a], forward=5, backward=5), OffloadAll(min_nbytes=0), machine())
    text = plan.to_json(indent=1)
    assert Plan.from_json(text) == plan
    data = json.loads(text)
    assert (data["type"], data["version"]) == ("Plan", 1)
    with pytest.raises(UsageError, match="version 7"):
        Plan.from_json(json.dumps({**data, "version": 7}))
    del data["transfers"][0]["wait"]
    with pytest.raises(UsageError, match=r"Plan.transfers\[0\]: fields missing 'wait'"):
        Plan.from_json(json.dumps(data))
    with pytest.raises(UsageError, match="'Facts' was asked for"):
        wire.from_json(Facts, text)
    with pytest.raises(UsageError, match="'Machine' was asked for"):
        wire.from_json(Machine, text)
