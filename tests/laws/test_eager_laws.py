"""Laws 4, 8 and 12 of the eager path, over generated programs: see `strategies.programs`.

The programs are those of the compiled path, run as they are, with their saved tensors on the virtual device: copies at the
latest moment that the waits allow, and memory that nobody may read any more poisoned.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, note, settings
from hypothesis import strategies as st
from program_writer import Step
from programs import Inputs, Program
from strategies import programs
from torch import nn
from training import Outcome, assert_same_bits, is_finite, outcome, train_step, weighted_sum

import graphoffload
from graphoffload.errors import GraphOffloadWarning
from graphoffload.planning.machine import Machine
from graphoffload.planning.policy import FirstOf, Never, OffloadAll, OffloadBytes, Only, Policy
from graphoffload.testing import VirtualRun, check_log, virtual_device

EVERYTHING = OffloadAll(min_nbytes=0)
VIRTUAL = Machine.named("virtual")
STEPS = 3  # the first learns, the second follows, the third follows what followed

# A program that overflows, and a sequence of calls that plain autograd refuses, say nothing; that is no fault of a law.
laws = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])

policies = st.one_of(
    st.just(EVERYTHING),
    st.builds(OffloadBytes, st.integers(0, 600), min_nbytes=st.just(0)),
    st.just(Only(EVERYTHING, dtypes=("float32", "bool"))),
    st.just(FirstOf(Never(OffloadAll(min_nbytes=100)), EVERYTHING)),
)
machines = st.builds(
    VIRTUAL.with_budgets,
    host_budget=st.sampled_from((None, None, 0, 100, 2000)),
    in_flight=st.sampled_from((None, None, 0, 100, 500)),
)


# --- running programs --------------------------------------------------------------------------------------------------


def sources_of(device: VirtualRun) -> list[int]:
    """Return a list that takes down the address of each storage which is copied out from now on."""
    sources: list[int] = []
    offload = device.runtime.offload

    def recording(src: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        sources.append(src.untyped_storage().data_ptr())
        return offload(src, *args, **kwargs)

    device.runtime.offload = recording  # type: ignore[method-assign]
    return sources


@contextlib.contextmanager
def offloading(machine: Machine) -> Iterator[VirtualRun]:
    """Run the block on a virtual device; judge the log and the slots once all that the block made is gone."""
    with virtual_device() as device, warnings.catch_warnings():
        # A small program may well have nothing that can move.
        warnings.simplefilter("ignore", GraphOffloadWarning)
        yield device
        check_log(device)
        # Law 8: every slot is empty at the end, without Python's help in collecting cycles.
        stats = device.stats()
        assert (stats.slots, stats.host_nbytes) == (0, 0)
        assert stats.offloads == stats.releases
        device.runtime.synchronize()
        assert device.stats().in_flight_nbytes == 0
        if machine.host_budget_nbytes is not None:
            # Law 4.
            assert stats.host_peak_nbytes <= machine.host_budget_nbytes
            assert stats.pageable_fallbacks == 0


def reference(program: Program) -> list[Outcome]:
    """Train some steps without offloading; skip programs whose numbers overflow, since NaN is what shows poison."""
    note(program.source)
    module, inputs = program.module(), program.inputs()
    results = [train_step(module, inputs, module=module, seed=step) for step in range(STEPS)]
    assume(all(is_finite(result) for result in results))
    return results


# --- law 12: the same bits ---------------------------------------------------------------------------------------------


@laws
@given(programs(), policies, machines, st.booleans())
def test_offloading_changes_no_bit(program: Program, policy: Policy, machine: Machine, inside: bool):
    """Laws 4, 8 and 12: step by step as plain eager, with backward inside the block or after it, under small budgets too."""
    want = reference(program)
    with offloading(machine) as device:
        module, inputs = program.module(), program.inputs()
        saving = graphoffload.saved_tensors(policy, model=module, machine=machine)

        def forward(*args: Any) -> Any:
            with saving:
                return module(*args)

        for step in range(STEPS):
            with saving if inside else contextlib.nullcontext():
                have = train_step(module if inside else forward, inputs, module=module, seed=step)
            assert_same_bits(have, want[step])
        stats, counts = saving.stats(), device.stats()
        assert stats.moved == counts.offloads
        assert stats.moved_nbytes == counts.offloaded_nbytes
        assert stats.reloads == counts.reloads
        assert stats.host_nbytes == 0


@laws
@given(programs(), st.booleans())
def test_no_parameter_moves(program: Program, known: bool):
    """Whatever moves lies in no parameter's and in no buffer's storage; views, ties and casts that are none count too."""
    want = reference(program)
    with offloading(VIRTUAL) as device:
        module, inputs = program.module(), program.inputs()
        # Without the model a parameter is known by its type, and a buffer is like any other tensor.
        owned = (*module.parameters(), *(module.buffers() if known else ()))
        moved = sources_of(device)
        with graphoffload.saved_tensors(EVERYTHING, model=module if known else None, machine=VIRTUAL) as saving:
            assert_same_bits(train_step(module, inputs, module=module), want[0])
        assert not set(moved) & {tensor.untyped_storage().data_ptr() for tensor in owned}
        assert len(moved) == saving.stats().moved
        # And nothing else stays.
        kept = {reason for reason, nbytes in saving.stats().kept_nbytes_by_reason.items() if nbytes}
        assert kept <= {"it is the memory of a parameter or buffer"}


# --- any order of calls ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """Do one thing with a module: `what` is "forward", "backward", "again" or "drop"; `pick` chooses among what is in flight.

    "again" runs backward and keeps the graph, so that another may follow. `inside`: under the context, even so backward.
    """

    what: str
    pick: int = 0
    inside: bool = True
    batch: int | None = None


calls = st.lists(
    st.builds(
        Call,
        what=st.sampled_from(("forward", "backward", "forward", "again", "drop")),
        pick=st.integers(0, 5),
        inside=st.booleans(),
        batch=st.sampled_from((None, None, None, 3)),
    ),
    min_size=2,
    max_size=9,
).map(lambda drawn: (Call("forward"), *drawn))


def play(
    program: Program,
    sequence: Sequence[Call],
    module: nn.Module,
    context: Callable[[], contextlib.AbstractContextManager[Any]],
) -> list[Outcome]:
    """Make the calls in turn and copy what each left behind; what is in flight at the end is dropped without a backward."""
    results: list[Outcome] = []
    flying: list[tuple[Inputs, Any, torch.Tensor]] = []
    for index, call in enumerate(sequence):
        torch.manual_seed(index)
        if call.what == "forward":
            inputs = program.inputs(batch=call.batch)
            with context():
                outputs = module(*inputs)
            total = weighted_sum(outputs)
            assert total is not None
            flying.append((inputs, outputs, total))
        elif flying:
            inputs, outputs, total = flying[call.pick % len(flying)]
            if call.what != "again":
                flying.pop(call.pick % len(flying))
            if call.what != "drop":
                with context() if call.inside else contextlib.nullcontext():
                    total.backward(retain_graph=call.what == "again")
        else:
            continue
        results.append(outcome(outputs, inputs=inputs, module=module))
        del inputs, outputs, total
    return results


SEVERAL_IN_FLIGHT = (
    Call("forward"),
    Call("forward", batch=3),
    Call("forward"),
    Call("again", 1, inside=False),
    Call("backward", 0),
    Call("backward", 0),
    Call("drop"),
    Call("forward"),
    Call("backward"),
)
REFUSALS = (
    "modified by an inplace operation",  # a later forward has changed what an earlier one saved
    "Trying to backward an extra time",  # selective checkpointing allows one backward
)
CHAIN = Program(
    (Step("linear"), Step("unary"), Step("norm", variant=1), Step("region", body=(Step("binary", 0, 1, 1),)))
)


@laws
@given(programs(), calls, policies, machines)
@example(CHAIN, SEVERAL_IN_FLIGHT, EVERYTHING, VIRTUAL)
def test_any_order_of_calls(program: Program, sequence: tuple[Call, ...], policy: Policy, machine: Machine):
    """Law 8 and 12: several forwards in flight, backward in any order, twice, never; inside the block and outside."""
    note(program.source)
    try:
        want = play(program, sequence, program.module(), contextlib.nullcontext)
    except RuntimeError as refused:
        # Plain autograd has no result to compare with.
        assume(not any(refusal in str(refused) for refusal in REFUSALS))
        raise
    assume(all(is_finite(result) for result in want))
    with offloading(machine):
        module = program.module()
        saving = graphoffload.saved_tensors(policy, model=module, machine=machine)
        have = play(program, sequence, module, lambda: saving)
        assert len(have) == len(want)
        for index, (mine, plain) in enumerate(zip(have, want, strict=True)):
            note(f"call {index}: {sequence[index]}")
            assert_same(mine, plain)


def assert_same(have: Outcome, want: Outcome) -> None:
    if any(name.startswith("gradient") and one is not None for name, one in want.items()):
        assert_same_bits(have, want)
    else:
        # Before the first backward there is no gradient, and nothing else to be wrong but the outputs.
        assert have.keys() == want.keys()
        assert all(torch.equal(have[name], one) for name, one in want.items() if one is not None)


class Stopped(Exception):  # noqa: N818
    """Stop where it is raised."""


def broken_step(module: nn.Module, inputs: Inputs, *, in_backward: bool, leaf: int) -> None:
    """Run a step that does not end: it stops after forward, or when backward comes to one of the leaves."""

    def stop(_gradient: torch.Tensor) -> None:
        raise Stopped

    total = weighted_sum(module(*inputs))
    assert total is not None
    if in_backward:
        leaves = [one for one in (*module.parameters(), *inputs) if one.requires_grad]
        leaves[leaf % len(leaves)].register_hook(stop)
        total.backward()
    raise Stopped  # after forward, or where no gradient comes to that leaf


@laws
@given(programs(), policies, st.booleans(), st.integers(0, 3))
def test_an_exception_leaves_nothing_behind(program: Program, policy: Policy, in_backward: bool, leaf: int):
    """Law 8 when a forward or a backward does not end: the step after it is right, and every slot is empty at the end."""
    want = reference(program)
    with offloading(VIRTUAL):
        module, inputs = program.module(), program.inputs()
        saving = graphoffload.saved_tensors(policy, model=module, machine=VIRTUAL)
        for _ in range(2):
            with pytest.raises(Stopped), saving:
                broken_step(program.module(), program.inputs(), in_backward=in_backward, leaf=leaf)
        with saving:
            assert_same_bits(train_step(module, inputs, module=module), want[0])
