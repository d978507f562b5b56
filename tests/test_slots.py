"""Slots: the table of states, and who owns them."""

from __future__ import annotations

import gc
from collections import deque

import pytest
import torch

from graphoffload.errors import SlotError
from graphoffload.runtime.chunks import RegisteredChunks
from graphoffload.runtime.pinned import PinnedPool
from graphoffload.runtime.slots import TABLE, Act, Slot, SlotOwner, State, find_owner, is_slot, make_host_tensor


class Keeper:
    """Stand in for a runtime."""

    def __init__(self) -> None:
        self.orphans: deque[Slot] = deque()
        self.pool = PinnedPool(RegisteredChunks(reserve_nbytes=1 << 24))

    def settle(self, slot: Slot) -> None:
        raise NotImplementedError


def slot_in(keeper: Keeper, nbytes: int = 4096) -> Slot:
    return Slot("s#0", keeper.pool.take(nbytes), None)


def host_of(keeper: Keeper, like: torch.Tensor) -> torch.Tensor:
    slot = slot_in(keeper, like.untyped_storage().nbytes())
    return make_host_tensor(SlotOwner(keeper, slot), like=like)[0]


def test_every_pair_outside_the_table_raises_and_changes_nothing() -> None:
    keeper = Keeper()
    for state in State:
        for act in Act:
            slot = slot_in(keeper)
            slot.state = state
            if (state, act) in TABLE:
                assert slot.allows(act)
                slot.act(act)
                assert slot.state is TABLE[state, act]
            else:
                assert not slot.allows(act)
                with pytest.raises(SlotError, match=f"s#0 is {state.value}: it cannot do '{act.value}'"):
                    slot.act(act)
                assert slot.state is state


def test_every_state_can_be_reached_and_left_for_empty() -> None:
    reached = {State.EMPTY}
    while True:
        more = reached | {then for (state, _), then in TABLE.items() if state in reached}
        if more == reached:
            break
        reached = more
    assert reached == set(State)
    ends = {State.EMPTY}
    while True:
        more = ends | {state for (state, _), then in TABLE.items() if then in ends}
        if more == ends:
            break
        ends = more
    assert ends == set(State)


def test_the_host_tensor_may_go_in_every_state_but_after_it_went() -> None:
    assert {state for state in State if (state, Act.ABANDON) in TABLE} == set(State) - {State.ADRIFT}


def test_the_last_tensor_on_the_memory_ends_the_slot() -> None:
    keeper = Keeper()
    host = host_of(keeper, torch.empty(8, 4))
    owner = find_owner(host)
    assert owner is not None
    slot = owner.slot
    del owner
    views = [host[2:], host.t(), host.view(torch.int32), host.untyped_storage()]
    del host
    gc.collect()
    assert not keeper.orphans
    views.pop()
    views.pop()
    views.pop()
    assert not keeper.orphans
    assert is_slot(views[0])
    views.pop()
    assert list(keeper.orphans) == [slot]


def test_the_end_is_noted_without_garbage_collection() -> None:
    keeper = Keeper()
    gc.collect()
    gc.disable()
    try:
        host = host_of(keeper, torch.empty(8))
        del host
        assert len(keeper.orphans) == 1
    finally:
        gc.enable()


def test_an_address_leads_to_a_slot_only_while_a_tensor_is_there() -> None:
    keeper = Keeper()
    host = host_of(keeper, torch.empty(8))
    assert is_slot(host)
    address = host.data_ptr()
    del host
    again = (torch.empty(0), torch.empty(8))
    assert not any(is_slot(tensor) for tensor in again)
    keeper.pool.give(keeper.orphans.popleft().block)
    host = host_of(keeper, torch.empty(8))
    assert host.data_ptr() == address, "the same memory, another slot"
    assert is_slot(host)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_the_host_tensor_is_like_its_source(dtype: torch.dtype) -> None:
    keeper = Keeper()
    like = torch.zeros(6, 8).to(dtype)[:, 1:4]
    host = host_of(keeper, like)
    assert (host.size(), host.stride(), host.dtype, host.storage_offset()) == ((6, 3), (8, 1), dtype, 0)
    host.copy_(torch.ones(6, 3).to(dtype))
    assert bool((host == 1).all())
