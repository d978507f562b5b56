"""The public test tools raise when something is wrong, and only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphoffload import testing
from graphoffload.errors import OrderingError, UsageError
from graphoffload.ordering.events import COMPUTE, D2H, Event
from graphoffload.runtime.ops import OFFLOAD, READY, RELEASE, RELOAD
from graphoffload.runtime.transfer import Runtime
from graphoffload.runtime.virtual import VirtualDevice

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.linear(x))).relu()


def changed(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *inputs: change(model(*inputs))


class Scaled(torch.autograd.Function):
    """Leave the output as it is and spoil the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 1.0000002


def test_a_program_equals_itself_with_dropout_buffers_and_several_steps() -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(8, 4, requires_grad=True)
    testing.assert_same_gradients(net, changed(net, lambda y: y), x, steps=3)


def test_the_comparison_leaves_everything_as_it_was() -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(8, 4, requires_grad=True)
    gradient = torch.ones(4, 4)
    net.linear.weight.grad = gradient
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    testing.assert_same_gradients(net, net, x, steps=2)
    assert net.linear.weight.grad is gradient
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert x.grad is None


def test_everything_is_left_as_it_was_even_when_the_program_raises() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise KeyError

    net = Net()
    mean = net.norm.running_mean.clone()
    with pytest.raises(KeyError):
        testing.assert_same_gradients(net, fail, torch.randn(8, 4))
    assert torch.equal(net.norm.running_mean, mean)


def test_a_different_output_is_named() -> None:
    net = Net()
    with pytest.raises(AssertionError, match=r"output 0 of step 0: \d+ of 32 elements differ, first at \("):
        testing.assert_same_gradients(net, changed(net, lambda y: y + 1e-6), torch.randn(8, 4))


def test_a_gradient_that_differs_in_the_last_bit_is_named() -> None:
    net, x = nn.Linear(4, 4), torch.randn(8, 4, requires_grad=True)
    with pytest.raises(AssertionError) as caught:
        testing.assert_same_gradients(net, changed(net, Scaled.apply), x)
    message = str(caught.value)
    assert "gradient of weight: " in message
    assert "gradient of input 0: " in message
    assert "output 0" not in message


def test_a_fault_of_a_later_step_shows() -> None:
    calls = []

    def late(y: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return y + 1 if len(calls) == 3 else y

    net = nn.Linear(4, 4)
    with pytest.raises(AssertionError, match="output 0 of step 2"):
        testing.assert_same_gradients(net, changed(net, late), torch.randn(8, 4), steps=3)


def test_poison_is_pointed_out() -> None:
    net = nn.Linear(4, 4)
    with pytest.raises(AssertionError, match="32 more NaNs, the mark of memory that was read too early"):
        testing.assert_same_gradients(net, changed(net, lambda y: y * float("nan")), torch.randn(8, 4))


def test_equal_nans_are_equal() -> None:
    def nan(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, float("nan")])

    testing.assert_same_gradients(nan, nan, torch.randn(3, 2, requires_grad=True))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda y: y.double(), "dtype"),
        (lambda y: y.t(), "stride"),
        (lambda y: y[:3], "shape"),
    ],
)
def test_dtype_shape_and_stride_count(change: Callable[[torch.Tensor], torch.Tensor], what: str) -> None:
    net = nn.Linear(4, 4)
    with pytest.raises(AssertionError, match=f"output 0 of step 0: {what}"):
        testing.assert_same_gradients(net, changed(net, change), torch.randn(4, 4))


def test_a_missing_gradient_is_named() -> None:
    net = nn.Linear(4, 4)
    with pytest.raises(AssertionError, match=r"only one of the two programs has gradient of bias, gradient of weight"):
        testing.assert_same_gradients(net, changed(net, torch.Tensor.detach), torch.randn(4, 4))


def test_a_buffer_that_was_not_updated_is_named() -> None:
    net = Net()

    def without_update(x: torch.Tensor) -> torch.Tensor:
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        return torch.func.functional_call(net, buffers, (x,))

    with pytest.raises(AssertionError, match=r"buffer norm.running_mean"):
        testing.assert_same_gradients(net, without_update, torch.randn(8, 4))


def test_an_input_that_only_one_program_changes_is_named() -> None:
    with pytest.raises(AssertionError, match="input 0"):
        testing.assert_same_gradients(lambda x: x + 1, lambda x: x.add_(1), torch.randn(4))


def test_functions_and_nested_inputs_are_taken() -> None:
    def program(inputs: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
        return {"y": inputs["x"].sin() * scale, "z": inputs["x"].to(torch.bfloat16)}

    testing.assert_same_gradients(program, program, {"x": torch.randn(3, requires_grad=True)}, 2.0)


# The log


def test_a_log_can_be_checked_in_three_forms() -> None:
    with testing.virtual_device() as device:
        src = torch.randn(64)
        host = OFFLOAD(src, "s")
        RELEASE(host, src, True)
        dest = RELOAD(host, CPU)
        READY(dest, host)
    testing.check_log(device)
    testing.check_log(device.runtime)
    testing.check_log(device.log)
    labels = [event.label for event in device.log if event.kind == "run"]
    assert labels == ["produce s#0", "offload s#0", "release s#0", "allocate for s#0", "reload s#0", "ready s#0"]


def test_a_race_in_a_log_raises_and_shows_the_events() -> None:
    events = (
        Event(COMPUTE, "run", "produce", allocs=("device:s",)),
        Event(D2H, "run", "offload", reads=("device:s",), writes=("host:s",)),
    )
    with pytest.raises(OrderingError, match="offload"):
        testing.check_log(events)


def test_a_runtime_without_a_log_cannot_be_checked() -> None:
    with pytest.raises(UsageError, match="recording=True"):
        testing.check_log(Runtime(VirtualDevice()))
    with testing.virtual_device(recording=False) as device:
        assert device.log == ()
        with pytest.raises(UsageError, match="recording=True"):
            testing.check_log(device)


# Delays


def test_slow_copies_take_the_hook_and_give_it_back() -> None:
    with testing.virtual_device() as device:
        hooked = device.runtime.device
        with testing.slow_copies("cpu", seed=0):
            inside = hooked.before_copy
            assert inside is not None
            src = torch.ones(4)
            host = OFFLOAD(src, "s")
            RELEASE(host, src, True)
            assert host.tolist() == [1] * 4
        assert hooked.before_copy is None
        with pytest.raises(KeyError), testing.slow_copies(device.runtime, seed=0):
            raise KeyError
        assert hooked.before_copy is None
