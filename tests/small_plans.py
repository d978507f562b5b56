"""Make small plans, by hand or by Hypothesis; forward steps are named f0, f1, …, backward steps b0, b1, …."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from tight import plan_of_transfers

from graphoffload.planning.plan import Plan, Transfer
from graphoffload.planning.values import Facts, Step, Storage


@dataclass(frozen=True)
class Move:
    """Describe one transfer: forward positions count from 0, backward ones too. `carried` -1 is an input of forward."""

    storage: str
    carried: int
    last_use: int
    released: int
    reloaded: int
    ready: int
    first: int
    last: int
    wait: bool = True


def plan_of(*moves: Move, forward: int = 8, backward: int = 8) -> Plan:
    """Return a plan of these transfers, valid or not; its times and totals are zero, as ordering does not look at them."""
    facts = Facts(
        values=(),
        storages=tuple(_storage(move, forward) for move in moves),
        forward=tuple(Step(f"f{i}", "op") for i in range(forward)),
        backward=tuple(Step(f"b{i}", "op") for i in range(backward)),
    )
    return plan_of_transfers(facts, tuple(_transfer(move) for move in moves))


def _carrier(move: Move) -> str:
    return f"f{move.carried}" if move.carried >= 0 else f"input_{move.storage}"


def _storage(move: Move, forward: int) -> Storage:
    return Storage(
        name=move.storage,
        nbytes=4,
        dtype="float32",
        device="cuda",
        members=(),
        carrier=_carrier(move),
        birth=move.carried,
        carried_at=move.carried,
        last_forward_use=move.last_use,
        first_backward_use=forward + move.first,
        last_backward_use=forward + move.last,
    )


def _transfer(move: Move) -> Transfer:
    return Transfer(
        storage=move.storage,
        carrier=_carrier(move),
        nbytes=4,
        offload_after=_carrier(move),
        release_after=f"f{move.released}" if move.released >= 0 else _carrier(move),
        wait=move.wait,
        reload_before=f"b{move.reloaded}",
        ready_before=f"b{move.ready}",
        offload_start=0.0,
        offload_end=0.0,
        released=0.0,
        reload_start=0.0,
        reload_end=0.0,
        needed=0.0,
    )


@st.composite
def plans(draw: st.DrawFn, *, steps: int = 7, most: int = 5) -> Plan:
    """Draw a plan that is right: each part of each transfer is where it may be, and nothing else is promised."""
    carriers = draw(st.lists(st.integers(-1, steps - 1), min_size=1, max_size=most, unique_by=lambda at: at))
    moves = []
    for number, carried in enumerate(carriers):
        last_use, released = sorted(draw(st.tuples(*[st.integers(carried, steps - 1)] * 2)))
        reloaded, ready, first, last = sorted(draw(st.tuples(*[st.integers(0, steps - 1)] * 4)))
        wait = draw(st.booleans())
        moves.append(Move(f"s{number}", carried, last_use, released, reloaded, ready, first, last, wait))
    return plan_of(*moves, forward=steps, backward=steps)


@st.composite
def plans_for(draw: st.DrawFn, facts: Facts) -> Plan:
    """Draw a plan of real facts that is right: some of the movable storages, in any order, each part anywhere it may be."""
    movable = [storage for storage in facts.storages if not storage.immovable]
    chosen = draw(st.permutations(movable)) if movable else []
    transfers = []
    for storage in chosen[: draw(st.integers(0, len(chosen)))] or chosen[:1]:
        begin = len(facts.forward)
        released = draw(st.integers(max(storage.last_forward_use, storage.carried_at), begin - 1))
        reloaded, ready = sorted(draw(st.tuples(*[st.integers(begin, storage.first_backward_use)] * 2)))
        transfers.append(
            Transfer(
                storage=storage.name,
                carrier=storage.carrier,
                nbytes=storage.nbytes or 0,
                offload_after=storage.carrier,
                release_after=facts.steps[released].name,
                wait=draw(st.booleans()),
                reload_before=facts.steps[reloaded].name,
                ready_before=facts.steps[ready].name,
                offload_start=0.0,
                offload_end=0.0,
                released=0.0,
                reload_start=0.0,
                reload_end=0.0,
                needed=0.0,
            )
        )
    return plan_of_transfers(facts, tuple(transfers))
