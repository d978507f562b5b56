"""The eager path on a real device: the right gradients, whatever the speed of the copies, the order and the streams.

A stream is slowed by a kernel that only waits, and memory is overwritten as soon as it is freed, so what goes wrong without
a wait goes wrong every time. No assertion reads a clock.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from gpu_programs import (
    LONG,
    MIB,
    SHORT,
    assert_equal,
    assert_nothing_left,
    batch,
    chain,
    deterministic,
    gradients,
    network,
    saved_tensors,
    slow,
)
from striking import Striking, strike
from torch import nn

import graphoffload
from graphoffload import testing
from graphoffload.ordering.events import D2H, H2D
from graphoffload.policies import KeepAll, OffloadAll
from graphoffload.runtime.transfer import Runtime

pytestmark = [
    pytest.mark.gpu,
    # Gradients are added up on another stream than they are made on: torch says that this costs time.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]


# Gradients


@pytest.mark.parametrize("streams", [(), (D2H,), (H2D,), (D2H, H2D)], ids=["fast", "d2h", "h2d", "both"])
def test_gradients_are_equal_under_slow_copies(streams: tuple[str, ...], cuda: torch.device, runtime: Runtime) -> None:
    model = network(cuda)
    context = saved_tensors(model)
    slow(runtime, *streams)
    for step in range(4):
        x = batch(cuda, seed=step)
        assert_equal(gradients(model, x, context, seed=step), gradients(model, x, seed=step))
    stats = context.stats()
    assert stats.moved > 0
    assert stats.reloads > 0
    assert_nothing_left(runtime)


@pytest.mark.parametrize("seed", range(5))
def test_gradients_are_equal_under_random_delays_and_overwritten_memory(
    seed: int, cuda: torch.device, runtime: Runtime
) -> None:
    model = network(cuda, depth=2)
    context = saved_tensors(model)
    x = batch(cuda, seed=seed)
    want = gradients(model, x)
    with testing.slow_copies(runtime, seed=seed, max_seconds=0.002):
        for _ in range(4):
            striking = Striking(cuda)
            assert_equal(gradients(model, x, context, striking=striking), want)
            assert striking.strikes > 50
    assert context.stats().moved > 0


def test_overwriting_catches_a_source_that_is_freed_too_early(cuda: torch.device) -> None:
    """The tests above can fail: a context that waits for nothing gives wrong gradients under them."""
    stream = torch.Stream(device=cuda)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        stream.wait_stream(torch.accelerator.current_stream(cuda))
        with stream:
            torch.cuda._sleep(SHORT)
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            return host.copy_(tensor.detach(), non_blocking=True)

    def unpack(host: torch.Tensor) -> torch.Tensor:
        stream.synchronize()
        return host.to(cuda)

    x = batch(cuda).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        h = x * 2
        for _ in range(4):
            h = h.sin()
            strike(cuda, h.untyped_storage().nbytes())
    h.sum().backward()
    assert not torch.equal(x.grad, torch.autograd.grad(chain(x, 4).sum(), x)[0])


def test_the_order_of_return_is_followed_and_a_change_of_it_is_right(cuda: torch.device, runtime: Runtime) -> None:
    model = nn.ModuleList(network(cuda, depth=2, seed=seed) for seed in range(2))
    context = saved_tensors(model)
    slow(runtime, H2D)

    def first_to_last(x: torch.Tensor) -> torch.Tensor:
        return model[1](model[0](x))

    def last_to_first(x: torch.Tensor) -> torch.Tensor:
        return model[0](model[1](x))

    for step, forward in enumerate([first_to_last] * 3 + [last_to_first] * 2 + [first_to_last, last_to_first]):
        x = batch(cuda, seed=step)
        got = gradients(model, x, context, seed=step, forward=forward)
        assert_equal(got, gradients(model, x, seed=step, forward=forward))
    assert context.stats().prefetch_hits > 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first in first out", "last in first out"])
def test_two_micro_batches_in_flight(order: tuple[int, int], cuda: torch.device, runtime: Runtime) -> None:
    model = network(cuda, depth=2)
    model.eval()
    context = saved_tensors(model)
    slow(runtime, D2H, H2D)
    inputs = [batch(cuda, seed=seed) for seed in range(2)]
    for _ in range(3):
        found = []
        for use in (contextlib.nullcontext(), context):
            model.zero_grad(set_to_none=True)
            losses = []
            for x in inputs:
                with use:
                    losses.append(model(x).square().mean())
            for index in order:
                losses[index].backward()
            found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        assert_equal(found[1], found[0])
    del losses
    assert_nothing_left(runtime)


def test_backward_twice_in_parts_and_never(cuda: torch.device, runtime: Runtime) -> None:
    context = saved_tensors()
    x = batch(cuda).requires_grad_()
    want = torch.autograd.grad(chain(x).sum(), x)[0]
    slow(runtime, D2H, H2D)
    for _ in range(3):
        with context:
            one, two, never = chain(x), chain(x), chain(x)
        strike(cuda, x.untyped_storage().nbytes())
        for retain in (True, True, False):
            assert torch.equal(torch.autograd.grad(one.sum(), x, retain_graph=retain)[0], want)
            strike(cuda, x.untyped_storage().nbytes())
        assert torch.equal(torch.autograd.grad(two.sum(), x)[0], want)
        del one, two, never
    assert_nothing_left(runtime)


def test_second_order_gradients(cuda: torch.device, runtime: Runtime) -> None:
    def penalty(context: Any) -> torch.Tensor:
        x = batch(cuda).requires_grad_()
        with context:
            first = torch.autograd.grad(chain(x, 4).sum(), x, create_graph=True)[0]
            loss = first.square().sum()
        return torch.autograd.grad(loss, x)[0]

    slow(runtime, D2H, H2D)
    context = saved_tensors()
    want = penalty(contextlib.nullcontext())
    for _ in range(3):
        assert torch.equal(penalty(context), want)
    assert context.stats().moved > 0


def test_autocast(cuda: torch.device, runtime: Runtime) -> None:
    model = network(cuda)
    context = saved_tensors(model)
    slow(runtime, D2H, H2D)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(cuda.type, torch.bfloat16):
            return model(x)

    for step in range(3):
        x = batch(cuda, seed=step)
        got = gradients(model, x, context, seed=step, forward=forward)
        assert_equal(got, gradients(model, x, seed=step, forward=forward))
    assert context.stats().moved > 0


def test_flash_attention_in_bfloat16(cuda: torch.device, runtime: Runtime) -> None:
    """Its random state and its log-sum-exp are saved too, some of it on the host."""
    generator = torch.Generator(cuda).manual_seed(0)
    shape = (2, 4, 256, 64)
    leaves = [torch.randn(shape, device=cuda, generator=generator).bfloat16().requires_grad_() for _ in range(3)]

    def attend(context: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with context:
            query, key, value = (leaf * 1.5 for leaf in leaves)
            out = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    context = saved_tensors()
    slow(runtime, D2H, H2D)
    with deterministic():
        want = attend(contextlib.nullcontext())
        for _ in range(3):
            for got, expected in zip(attend(context), want, strict=True):
                assert torch.equal(got, expected)
    assert context.stats().moved > 0


# Changes in place


def test_a_kept_value_changed_in_place_raises(cuda: torch.device, runtime: Runtime) -> None:
    for policy in (KeepAll(), OffloadAll(min_nbytes=1 << 40)):
        x = batch(cuda).requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", graphoffload.GraphOffloadWarning)  # nothing moved, as meant
            with saved_tensors(policy=policy):
                h = x * 2
                y = h.sin()
        with torch.no_grad():
            h.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("where", ["inside", "outside", "on another stream"])
def test_a_moved_value_changed_in_place_keeps_its_old_value_or_raises(
    where: str, cuda: torch.device, runtime: Runtime
) -> None:
    context, other = saved_tensors(), torch.Stream(device=cuda)
    x = torch.randn(4 * MIB, device=cuda, requires_grad=True)
    want = torch.autograd.grad((x * 2).sin().sum(), x)[0]
    slow(runtime, D2H, cycles=LONG)  # the change overtakes a copy that nobody waits for
    raised = []
    for step in range(6):
        with context:
            h = x * 2
            y = h.sin()
            if where == "inside":
                h.detach().add_(1)
        if where == "outside":
            h.detach().add_(1)
        elif where == "on another stream":
            other.wait_stream(torch.accelerator.current_stream(cuda))
            with other:
                h.detach().add_(1)
            torch.accelerator.current_stream(cuda).wait_stream(other)
        try:
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)  # noqa: PT017  # any other is a fault
            raised.append(step)
        del y
    assert 0 not in raised, "the first forward waits for every copy"
    assert len(raised) <= 1, "a place that is changed is waited for from the next step on"


# Streams


def test_a_context_made_on_one_stream_and_used_on_others(cuda: torch.device, runtime: Runtime) -> None:
    made, used, backward = (torch.Stream(device=cuda) for _ in range(3))
    model, x = network(cuda, depth=2), batch(cuda)
    model.eval()
    want = gradients(model, x)
    torch.accelerator.synchronize(cuda)
    with made:
        context = saved_tensors(model)
    slow(runtime, D2H, H2D)
    for _ in range(3):
        torch.accelerator.synchronize(cuda)
        model.zero_grad(set_to_none=True)
        leaf = x.detach().clone().requires_grad_()
        used.wait_stream(torch.accelerator.current_stream(cuda))
        with used:
            torch.cuda._sleep(LONG)  # the copies out must wait for this stream, not for the one of the start
            with context:
                loss = model(leaf).square().mean()
        backward.wait_stream(used)
        with backward:
            loss.backward()
        backward.synchronize()
        got = {"loss": loss.detach(), "x": leaf.grad}
        got |= {name: parameter.grad for name, parameter in model.named_parameters()}
        assert_equal(got, want)
        assert torch.accelerator.current_stream(cuda) not in (made, used, backward)
    model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("care", ["record_stream", "wait_stream"])
def test_a_producer_on_a_side_stream(care: str, cuda: torch.device, runtime: Runtime) -> None:
    """Memory of the side stream is freed earlier than in plain PyTorch: what the program did to make that safe must do."""
    main, side = torch.accelerator.current_stream(cuda), torch.Stream(device=cuda)
    x = torch.randn(4 * MIB, device=cuda, requires_grad=True)
    want = torch.autograd.grad((x * 2).sin().sin().sum(), x)[0]
    context = saved_tensors()
    slow(runtime, D2H, cycles=LONG)
    torch.accelerator.synchronize(cuda)
    for _ in range(3):
        with context:
            side.wait_stream(main)
            with side:
                torch.cuda._sleep(LONG)
                h = x * 2
            main.wait_stream(side)
            if care == "record_stream":
                h.record_stream(main)
            y = h.sin().sin()
        del h
        if care == "wait_stream":
            side.wait_stream(main)
        with side:
            strike(cuda, x.untyped_storage().nbytes())
        strike(cuda, x.untyped_storage().nbytes())
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)
        del y


def test_packed_on_one_stream_and_unpacked_on_another(cuda: torch.device, runtime: Runtime) -> None:
    one, two = torch.Stream(device=cuda), torch.Stream(device=cuda)
    value = torch.randn(4 * MIB, device=cuda)
    context = saved_tensors()
    slow(runtime, D2H, H2D, cycles=LONG)
    torch.accelerator.synchronize(cuda)
    for _ in range(3):
        with one:
            torch.cuda._sleep(LONG)
            packed = context.pack(value + 1)
            strike(cuda, value.untyped_storage().nbytes())
        with two:
            back = context.unpack(packed) * 2
            strike(cuda, value.untyped_storage().nbytes())
        with one:
            again = context.unpack(packed) * 3
        torch.accelerator.synchronize(cuda)
        assert torch.equal(back, (value + 1) * 2)
        assert torch.equal(again, (value + 1) * 3)
