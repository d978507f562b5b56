"""Scenarios about when backward is called: not at all, later, twice, in another order, or after an exception."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from requirements import needs_cpp_compiler
from subjects import BY_NAME, Mlp
from torch import nn
from training import Compiler, assert_same_bits, assert_trains_as_eager, fresh, fresh_inputs, outcome, train_step

import graphoffload
from graphoffload.errors import GraphOffloadWarning
from graphoffload.planning.policy import OffloadAll
from graphoffload.testing import check_log, virtual_device

EVERYTHING = OffloadAll(min_nbytes=0)
COMPILERS = ["aot_eager", pytest.param("inductor", marks=needs_cpp_compiler)]


@pytest.fixture
def device():
    with virtual_device() as device:
        yield device
        check_log(device)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Mlp()


def rows(seed):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def plain_gradients(model, *seeds):
    """Return what eager adds up over these inputs."""
    twin = fresh(model)
    for seed in seeds:
        twin(rows(seed)).sum().backward()
    return outcome((), module=twin)


def gradients(model):
    return outcome((), module=model)


def assert_empty(device):
    """Raise unless every slot is gone and the host memory is free again (law 8)."""
    gc.collect()
    stats = device.stats()
    assert stats.slots == 0
    assert stats.host_nbytes == 0
    assert stats.in_flight_nbytes == 0


def assert_next_step_is_right(run, model, device):
    model.zero_grad()
    run(rows(9)).sum().backward()
    assert_same_bits(gradients(model), plain_gradients(model, 9))
    assert_empty(device)


# --- rank 11: never unpacked -----------------------------------------------------------------------------------------------


def test_backward_is_never_called(model, device):
    """Rank 11: the loss is dropped; slots go with it, and the next step is right."""
    run = Compiler(EVERYTHING)(model)
    for seed in range(3):
        loss = run(rows(seed)).sum()
        assert device.stats().slots > 0
        del loss
        assert_empty(device)
    pinned = device.stats().pinned_nbytes
    assert_next_step_is_right(run, model, device)
    assert device.stats().pinned_nbytes == pinned


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused, self.frozen = Mlp(depth=1), Mlp(depth=1), Mlp(depth=1)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.used(self.frozen(x)), self.unused(x)


def test_a_branch_that_nobody_uses(device):
    """Rank 11: one of two outputs is dropped, and a tower is frozen."""
    torch.manual_seed(0)
    model = Branches()
    plain, x = fresh(model), rows(0)
    plain(rows(0))[0].sum().backward()
    run = Compiler(EVERYTHING)(model)
    run(x)[0].sum().backward()
    have, want = gradients(model), gradients(plain)
    for name, tensor in want.items():
        # Compiled backward gives zeros where eager gives nothing: AOTAutograd knows no unused branch.
        mine = have[name]
        assert torch.equal(mine, tensor) if tensor is not None else mine is None or not mine.any(), name
    assert_empty(device)


def test_inference_in_between(model, device):
    """Rank 11: no_grad, inference_mode and eval between forward and backward take no slot and do no harm."""
    run = Compiler(EVERYTHING, fullgraph=False)(model)
    loss = run(rows(0)).sum()
    held = device.stats().slots
    with torch.no_grad():
        assert torch.equal(run(rows(1)), fresh(model)(rows(1)))
    with torch.inference_mode():
        run(rows(2).detach())
    model.eval()
    with torch.no_grad():
        run(rows(3))
    model.train()
    assert device.stats().slots == held
    loss.backward()
    assert_same_bits(gradients(model), plain_gradients(model, 0))
    assert_empty(device)


# --- rank 12: exceptions ---------------------------------------------------------------------------------------------------


class Trouble:
    """Raise on demand from inside an operator."""

    in_forward = in_backward = False


@torch.library.custom_op("graphoffload_tests::trouble", mutates_args=())
def trouble(x: torch.Tensor) -> torch.Tensor:
    if Trouble.in_forward:
        raise ArithmeticError("trouble in forward")
    return x.clone()


@torch.library.custom_op("graphoffload_tests::trouble_backward", mutates_args=())
def trouble_backward(x: torch.Tensor) -> torch.Tensor:
    if Trouble.in_backward:
        raise ArithmeticError("trouble in backward")
    return x.clone()


trouble.register_fake(torch.empty_like)
trouble_backward.register_fake(torch.empty_like)
trouble.register_autograd(lambda ctx, grad: trouble_backward(grad))


class Troubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Mlp(depth=2), Mlp(depth=2)

    def forward(self, x):
        return self.second(trouble(self.first(x)))


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("where", ["in_forward", "in_backward"])
def test_an_exception_in_the_middle(device, monkeypatch, where, compiler):
    """Rank 12: the error is the user's own, everything is given back, and the next step is right."""
    torch.manual_seed(0)
    model = Troubled()
    run = Compiler(EVERYTHING, compiler=compiler)(model)
    run(rows(0)).sum().backward()
    model.zero_grad()
    monkeypatch.setattr(Trouble, where, True)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="trouble"):
            run(rows(1)).sum().backward()
        assert_empty(device)
    monkeypatch.setattr(Trouble, where, False)
    model.zero_grad()
    run(rows(2)).sum().backward()
    if compiler == "aot_eager":
        assert_same_bits(gradients(model), plain_gradients(model, 2))
    else:
        again = {name: None if one is None else one.clone() for name, one in gradients(model).items()}
        model.zero_grad()
        run(rows(2)).sum().backward()
        assert_same_bits(gradients(model), again)
    assert_empty(device)


def test_no_host_memory(model):
    """Rank 12: when host memory cannot be pinned, pageable memory is used, which is said, and all is right."""
    want = plain_gradients(model, 0)
    with virtual_device(host_budget_nbytes=300) as device:
        run = Compiler(EVERYTHING)(model)
        with pytest.warns(GraphOffloadWarning, match="could not be pinned"):
            run(rows(0)).sum().backward()
        check_log(device)
        assert device.stats().pinned_peak_nbytes <= 300
        assert device.stats().pageable_fallbacks > 0
        assert_empty(device)
    assert_same_bits(gradients(model), want)


# --- rank 23: order and multiplicity -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_several_forwards_before_their_backwards(model, device, order, compiler):
    """Rank 23: micro-batches in flight, their backwards first in first out, last in first out, or neither."""
    run = Compiler(EVERYTHING, compiler=compiler)(model)
    losses = [run(rows(seed)).sum() for seed in range(3)]
    assert device.stats().slots > 0
    for index in order:
        losses[index].backward()
        losses[index] = None
    assert_empty(device)
    if compiler == "aot_eager":
        assert_same_bits(gradients(model), plain_gradients(model, *order))
    else:
        for name, tensor in plain_gradients(model, *order).items():
            if tensor is not None:
                torch.testing.assert_close(gradients(model)[name], tensor)


def test_gradient_accumulation(model, device):
    """Rank 23: gradients add up over micro-batches, then an optimizer steps, over and over."""
    plain = fresh(model)
    run = Compiler(EVERYTHING)(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(3):
        for micro in range(2):
            run(rows(10 * step + micro)).sum().backward()
            plain(rows(10 * step + micro)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_bits(
            outcome((), module=model) | {"gradient": torch.ones(())},
            outcome((), module=plain) | {"gradient": torch.ones(())},
        )
    assert_empty(device)


class Shared(nn.Module):
    """One layer called several times, another skipped now and then."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = Mlp(depth=1), Mlp(depth=1)

    def forward(self, x, *, skip=False):
        x = self.layer(self.layer(x))
        return self.layer(x if skip else self.other(x))


def test_a_layer_that_is_called_twice():
    """Rank 23: the same layer three times in one graph."""
    torch.manual_seed(0)
    assert assert_trains_as_eager(Shared(), [rows(0)]).moved


def test_a_layer_that_is_skipped():
    """Rank 23: a layer that takes part in some steps only; keyword arguments choose."""
    torch.manual_seed(0)
    model = Shared()
    plain = fresh(model)
    compile_ = Compiler(EVERYTHING)
    with virtual_device() as device:
        run = compile_(model)
        for step, skip in enumerate((False, True, False)):
            have = train_step(run, [rows(step)], {"skip": skip}, module=model)
            assert_same_bits(have, train_step(plain, [rows(step)], {"skip": skip}, module=plain))
        check_log(device)
    assert len(compile_.plans) == 2


def test_retain_graph(model, device):
    """Backward twice through one forward, as plain AOT allows."""
    run = Compiler(EVERYTHING)(model)
    loss = run(rows(0)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    del loss
    assert_same_bits(gradients(model), plain_gradients(model, 0, 0))
    assert_empty(device)


@needs_cpp_compiler
def test_retain_graph_under_inductor(model, device):
    """Inductor may give saved buffers away to backward, and then refuses a second one; if it does not, it must be right."""
    run = Compiler(EVERYTHING, compiler="inductor")(model)
    x = rows(0)
    loss = run(x).sum()
    try:
        loss.backward(retain_graph=True)
    except RuntimeError as error:
        refusal = str(error)
    else:
        refusal = None
        once = x.grad.clone()
        loss.backward()
        assert torch.equal(x.grad, once * 2)
    assert refusal is None or "retain_graph" in refusal
    del loss
    assert_empty(device)


# --- two models, and threads -------------------------------------------------------------------------------------------------


def test_two_models_in_one_process(device):
    """Their slots come from one pool and do not meet, whichever order the steps take."""
    first, second = BY_NAME["mlp"], BY_NAME["convolutional"]
    one, other = first.module(), second.module()
    run_one, run_other = torch.compile(one, backend=_backend()), torch.compile(other, backend=_backend())
    loss_one = run_one(*first.inputs()).sum()
    loss_other = run_other(*second.inputs()).sum()
    loss_one.backward()
    loss_other.backward()
    for subject, model in ((first, one), (second, other)):
        plain = subject.module()
        plain(*subject.inputs()).sum().backward()
        assert_same_bits(gradients(model), gradients(plain))
    del loss_one, loss_other
    assert_empty(device)


def _backend():
    return graphoffload.backend(EVERYTHING, compiler="aot_eager")


def test_two_threads(device):
    """Two threads train two models through one runtime at the same time; each is right in every step."""
    torch._dynamo.reset()
    models = [BY_NAME["mlp"].module() for _ in range(2)]
    # Dynamo traces in one thread at a time; what runs at the same time are the compiled steps.
    runs = [torch.compile(model, backend=_backend()) for model in models]
    for run, model in zip(runs, models, strict=True):
        run(rows(0)).sum().backward()
        model.zero_grad()
    wrong = []
    barrier = threading.Barrier(2)

    def train(index):
        try:
            barrier.wait()
            for step in range(20):
                models[index].zero_grad()
                runs[index](rows(100 * index + step)).sum().backward()
                assert_same_bits(gradients(models[index]), plain_gradients(models[index], 100 * index + step))
        except BaseException as error:  # noqa: BLE001 - reported below, in the main thread
            wrong.append(error)

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise wrong[0]
    assert_empty(device)


def test_inputs_of_one_call_do_not_reach_another(model, device):
    """The same compiled model, called with other inputs while the first call's values are on the host."""
    run = Compiler(EVERYTHING)(model)
    x, y = rows(0), rows(1)
    first, second = run(x).sum(), run(y).sum()
    second.backward()
    first.backward()
    plain = fresh(model)
    plain_x, plain_y = fresh_inputs(x), fresh_inputs(y)
    plain(plain_x).sum().backward()
    plain(plain_y).sum().backward()
    assert torch.equal(x.grad, plain_x.grad)
    assert torch.equal(y.grad, plain_y.grad)
