"""Law 8: any legal sequence of calls leaves every slot empty at the end of a step, and every value right."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from graphoffload import testing
from graphoffload.errors import SlotError
from graphoffload.runtime.slots import TABLE, Act, State, find_owner
from graphoffload.runtime.transfer import Runtime
from graphoffload.runtime.virtual import VirtualDevice

SIZES = (1, 127, 1024, 5000)
BOUND = 3000


@dataclass(eq=False)
class Model:
    """Hold what the test knows about one transfer: the simple model that the runtime must agree with."""

    host: torch.Tensor
    source: torch.Tensor
    expected: torch.Tensor
    released: bool = False
    waited: bool = False
    coming: list[torch.Tensor] = field(default_factory=list)
    arrived: bool = False


class Transfers(RuleBasedStateMachine):
    """Call the four operators in any legal order, and let go of anything at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.runtime = Runtime(VirtualDevice(), in_flight_nbytes=BOUND, recording=True)
        self.models: list[Model] = []
        self.seed = 0

    def pick(self, index: int, models: list[Model]) -> Model:
        return models[index % len(models)]

    @rule(n=st.sampled_from(SIZES), transposed=st.booleans())
    def offload(self, n: int, transposed: bool) -> None:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        source = torch.randn(n, 2, generator=generator)
        source = source.t() if transposed else source
        expected = source.clone()
        self.models.append(Model(self.runtime.offload(source, "s"), source, expected))

    @precondition(lambda self: any(not model.released for model in self.models))
    @rule(index=st.integers(0, 9), wait=st.booleans())
    def release(self, index: int, wait: bool) -> None:
        model = self.pick(index, [model for model in self.models if not model.released])
        self.runtime.release(model.host, wait=wait)
        model.released, model.waited = True, wait
        if wait:
            assert torch.equal(model.host, model.expected)
            assert model.source.isnan().all()

    @precondition(lambda self: any(model.released for model in self.models))
    @rule(index=st.integers(0, 9))
    def reload(self, index: int) -> None:
        model = self.pick(index, [model for model in self.models if model.released])
        model.coming.append(self.runtime.reload(model.host))

    @precondition(lambda self: any(model.coming for model in self.models))
    @rule(index=st.integers(0, 9), which=st.integers(0, 3))
    def ready(self, index: int, which: int) -> None:
        model = self.pick(index, [model for model in self.models if model.coming])
        dest = model.coming.pop(which % len(model.coming))
        self.runtime.ready(dest, model.host)
        model.arrived = True
        assert torch.equal(dest, model.expected)
        assert dest.stride() == model.expected.stride()
        assert model.source.isnan().all(), "its own ready drops the source at the latest"

    @precondition(lambda self: self.models)
    @rule(index=st.integers(0, 9))
    def lose_the_host_tensor(self, index: int) -> None:
        """Drop everything, as an exception or an unused branch does."""
        self.models.remove(self.pick(index, self.models))

    @precondition(lambda self: any(model.coming for model in self.models))
    @rule(index=st.integers(0, 9))
    def lose_the_destination(self, index: int) -> None:
        model = self.pick(index, [model for model in self.models if model.coming])
        model.coming.pop()

    @precondition(lambda self: self.models)
    @rule(index=st.integers(0, 9), act=st.sampled_from([Act.RELEASE, Act.HAND_OVER, Act.RELOAD, Act.READY]))
    def try_what_is_not_legal(self, index: int, act: Act) -> None:
        model = self.pick(index, self.models)
        owner = find_owner(model.host)
        assert owner is not None
        before = owner.slot.state
        if (before, act) in TABLE:
            return
        calls = {
            Act.RELEASE: lambda: self.runtime.release(model.host, wait=True),
            Act.HAND_OVER: lambda: self.runtime.release(model.host, wait=False),
            Act.RELOAD: lambda: self.runtime.reload(model.host),
            Act.READY: lambda: self.runtime.ready(torch.zeros(3), model.host),
        }
        with pytest.raises(SlotError):
            calls[act]()
        assert owner.slot.state is before

    @rule()
    def trim(self) -> None:
        self.runtime.trim()

    @invariant()
    def the_counts_agree_with_the_model(self) -> None:
        stats = self.runtime.stats()
        assert stats.slots == len(self.models)
        assert stats.host_nbytes == sum(model.expected.nbytes for model in self.models)
        assert stats.in_flight_nbytes <= BOUND
        assert stats.pageable_fallbacks == 0

    @invariant()
    def the_states_agree_with_the_model(self) -> None:
        for model in self.models:
            owner = find_owner(model.host)
            assert owner is not None
            state = owner.slot.state
            assert (state is State.LEAVING) == (not model.released)
            assert state in (State.COMING, State.CROSSING) or not model.coming

    def teardown(self) -> None:
        self.models.clear()
        self.runtime.synchronize()
        stats = self.runtime.stats()
        assert (stats.slots, stats.host_nbytes, stats.in_flight_nbytes) == (0, 0, 0)
        self.runtime.trim()
        assert self.runtime.stats().pinned_nbytes == 0
        testing.check_log(self.runtime)


Transfers.TestCase.settings = settings(stateful_step_count=40)
TestTransfers = Transfers.TestCase
