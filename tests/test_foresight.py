"""Foresight: programs are known by what they pack, and come back as they did the last time."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphoffload.runtime.foresight import REMEMBERED, Episode, Foresight


@dataclass(eq=False)
class Thing:
    """Stand in for a parcel: foresight asks nothing else of one."""

    name: str
    is_coming: bool = False


class Forward:
    """Pack things under keys, and unpack them by name."""

    def __init__(self, foresight: Foresight[Thing, str], keys: str) -> None:
        self.episode: Episode[Thing, str] = foresight.begin()
        self.things = [Thing(f"{key}{self.episode.enter(key)}") for key in keys]
        for place, thing in enumerate(self.things):
            self.episode.parcels[place] = weakref.ref(thing)

    def unpack(self, place: int) -> list[str]:
        """Unpack one place; return the names of what is expected next."""
        self.episode.close()
        if place not in self.episode.came:
            self.episode.note(place)
        self.things[place].is_coming = True
        return [thing.name for _, thing, _ in self.episode.upcoming()]


def test_an_unknown_program_is_expected_to_come_back_last_in_first_out():
    assert Forward(Foresight(), "abc").unpack(2) == ["b1", "a0"]


def test_a_program_is_expected_to_come_back_as_it_did_the_last_time():
    foresight: Foresight[Thing, str] = Foresight()
    first = Forward(foresight, "abc")
    for place in (1, 0, 2):
        first.unpack(place)
    assert Forward(foresight, "abc").unpack(1) == ["a0", "c2"]


def test_a_new_order_is_learnt_again():
    foresight: Foresight[Thing, str] = Foresight()
    for order in ((2, 1, 0), (0, 1, 2)):
        forward = Forward(foresight, "abc")
        for place in order:
            forward.unpack(place)
    assert Forward(foresight, "abc").unpack(0) == ["b1", "c2"]


def test_programs_are_told_apart_by_their_keys():
    foresight: Foresight[Thing, str] = Foresight()
    for keys, order in (("ab", (0, 1)), ("ba", (1, 0)), ("abb", (1, 2, 0))):
        forward = Forward(foresight, keys)
        for place in order:
            forward.unpack(place)
    assert Forward(foresight, "ab").unpack(0) == ["b1"]
    assert Forward(foresight, "ba").unpack(1) == ["b0"]
    assert Forward(foresight, "abb").unpack(1) == ["b2", "a0"]


def test_what_is_gone_or_on_its_way_is_not_expected():
    forward = Forward(Foresight(), "abcd")
    forward.things[1].is_coming = True
    forward.things[2] = Thing("another")  # the first one is gone
    assert forward.unpack(3) == ["a0"]
    assert not forward.episode.is_over()
    forward.unpack(0)
    assert not forward.episode.is_over()
    forward.unpack(1)
    assert forward.episode.is_over()


def test_the_very_next_is_the_one_that_no_other_is_on_its_way_before():
    forward = Forward(Foresight(), "abcd")
    assert forward.unpack(3) == ["c2", "b1", "a0"]
    assert [is_next for *_, is_next in forward.episode.upcoming()] == [True, False, False]
    forward.things[2].is_coming = True
    assert [is_next for *_, is_next in forward.episode.upcoming()] == [False, False]
    forward.unpack(2)
    assert [is_next for *_, is_next in forward.episode.upcoming()] == [True, False]


def test_what_was_learnt_of_a_place_is_known_while_the_same_beginning_is_packed():
    foresight: Foresight[Thing, str] = Foresight()
    for keys, late in (("abc", 1), ("abz", 2)):
        forward = Forward(foresight, keys)
        forward.unpack(0)
        assert forward.episode.program is not None
        forward.episode.program.late.add(late)
    episode = foresight.begin()
    for key in "ab":
        episode.enter(key)
    # The latest program that begins so is taken for it,
    assert (episode.is_late(1), episode.is_late(2)) == (False, True)
    # until a pack says otherwise.
    episode.enter("c")
    assert (episode.is_late(1), episode.is_late(2)) == (True, False)
    episode.enter("x")
    assert not episode.is_late(1)


def test_only_so_many_programs_are_remembered_and_the_latest_used_stay():
    foresight: Foresight[Thing, str] = Foresight()
    names = [chr(ord("b") + number) for number in range(REMEMBERED + 3)]
    for name in names:
        Forward(foresight, name).unpack(0)
        Forward(foresight, "a").unpack(0)
    known = [name for name in ["a", *names] if foresight.beginning_with([name]) is not None]
    assert known == ["a", *names[-(REMEMBERED - 1) :]]


@pytest.mark.parametrize("place", [None, 0, 2])
def test_moments_until_a_place_are_those_of_the_last_time(place: int | None):
    foresight: Foresight[Thing, str] = Foresight()
    for step in "xy":
        forward = Forward(foresight, "abc")
        for now in (1, 2, 0):
            forward.episode.close()
            forward.episode.note(now)
            forward.episode.look(now, f"{step}{now}")
            if step == "y":
                break
    # The second time, at its first unpack: place 2 is asked for next, place 0 last.
    want = {None: ["x1"], 2: ["x1"], 0: ["x1", "x2"]}[place]
    assert list(forward.episode.until(place)) == want


@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=5), st.randoms()), max_size=6))
def test_whatever_was_seen_all_that_is_alive_and_not_back_can_be_found(forwards: list[tuple[str, object]]):
    """Nothing that is expected is expected twice, and nothing but parcels of the episode itself."""
    foresight: Foresight[Thing, str] = Foresight()
    for keys, chance in forwards:
        forward = Forward(foresight, keys)
        order = list(range(len(keys)))
        chance.shuffle(order)  # type: ignore[attr-defined]
        left = set(order)
        for place in order:
            expected = forward.unpack(place)
            left.discard(place)
            assert len(expected) == len(set(expected))
            assert set(expected) <= {forward.things[other].name for other in left}
        assert forward.episode.is_over()
