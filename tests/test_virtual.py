"""The virtual device: copies as late as the waits allow, poison, and the ledger."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import fx, nn

from graphoffload import testing
from graphoffload.ordering.events import COMPUTE, D2H, H2D
from graphoffload.runtime.device import flat_bytes
from graphoffload.runtime.interpret import LedgerInterpreter, boxed
from graphoffload.runtime.ops import OFFLOAD, READY, RELEASE, RELOAD
from graphoffload.runtime.virtual import Ledger, VirtualDevice

CPU = torch.device("cpu")


def queue(device: VirtualDevice, stream: str, dest: torch.Tensor, src: torch.Tensor) -> None:
    device.wait(stream, device.record(COMPUTE))
    device.copy(stream, flat_bytes(dest), flat_bytes(src))


def test_a_copy_runs_only_when_something_waits_for_it() -> None:
    device = VirtualDevice()
    src, dest = torch.ones(4), torch.zeros(4)
    queue(device, D2H, dest, src)
    token = device.record(D2H)
    src.fill_(2)
    assert dest.tolist() == [0] * 4
    device.wait(COMPUTE, token)
    assert dest.tolist() == [2] * 4, "as late as possible: it read the source only now"


def test_a_wait_runs_what_came_before_the_token_and_no_more() -> None:
    device = VirtualDevice()
    dests = [torch.zeros(1) for _ in range(3)]
    tokens = []
    for dest in dests:
        queue(device, D2H, dest, torch.ones(1))
        tokens.append(device.record(D2H))
    device.wait(COMPUTE, tokens[1])
    assert [dest.item() for dest in dests] == [1, 1, 0]
    device.synchronize_copies()
    assert [dest.item() for dest in dests] == [1, 1, 1]


def test_a_wait_is_transitive() -> None:
    device = VirtualDevice()
    src, host, dest = torch.ones(4), torch.zeros(4), torch.zeros(4)
    queue(device, D2H, host, src)
    device.wait(H2D, device.record(D2H))
    queue(device, H2D, dest, host)
    device.wait(COMPUTE, device.record(H2D))
    assert dest.tolist() == [1] * 4


def test_without_the_wait_between_the_copy_streams_the_second_copy_comes_first() -> None:
    device = VirtualDevice()
    src, host, dest = torch.ones(4), torch.zeros(4), torch.ones(4)
    queue(device, D2H, host, src)
    queue(device, H2D, dest, host)
    device.wait(COMPUTE, device.record(H2D))
    assert dest.tolist() == [0] * 4


def test_a_copy_that_does_not_wait_for_compute_moves_poison() -> None:
    device = VirtualDevice()
    dest = torch.zeros(4)
    device.copy(D2H, flat_bytes(dest), flat_bytes(torch.ones(4)))
    device.synchronize_copies()
    assert dest.isnan().all()


def test_done_is_said_only_of_what_was_waited_for() -> None:
    device = VirtualDevice()
    first, second = device.record(D2H), device.record(D2H)
    assert not device.done(first)
    device.wait(COMPUTE, second)
    assert device.done(second)
    assert not device.done(first)
    device.synchronize(first)
    assert device.done(first)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
)
def test_poison_is_nan(dtype: torch.dtype) -> None:
    tensor = torch.zeros(8).to(dtype)
    VirtualDevice().spoil(tensor)
    assert (tensor.float() if tensor.element_size() == 1 else tensor).isnan().all()


def test_poison_of_bools_and_integers_is_a_value_that_stands_out() -> None:
    flags, numbers = torch.zeros(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64)
    VirtualDevice().spoil(flags)
    VirtualDevice().spoil(numbers)
    assert flags.tolist() == [True] * 4
    assert numbers.tolist() == [-1] * 4


def test_poison_stays_inside_the_extent_and_is_no_in_place_operation() -> None:
    whole = torch.zeros(4, 4)
    part = whole[1:3, 1:3]
    version = whole._version
    VirtualDevice().spoil(part)
    assert whole._version == version
    assert whole.flatten().isnan().nonzero().flatten().tolist() == list(range(5, 11))


def test_a_plain_device_copies_at_once_and_poisons_nothing() -> None:
    device = VirtualDevice(late=False)
    dest = torch.zeros(4)
    queue(device, D2H, dest, torch.ones(4))
    assert dest.tolist() == [1] * 4
    device.spoil(dest)
    assert dest.tolist() == [1] * 4
    token = device.record(D2H)
    device.wait(COMPUTE, token)


def test_the_hook_before_copies_names_the_stream() -> None:
    seen: list[str] = []
    with testing.virtual_device() as device:
        device.runtime.device.before_copy = seen.append
        src = torch.ones(4)
        host = OFFLOAD(src, "s")
        RELEASE(host, src, True)
        dest = RELOAD(host, CPU)
        READY(dest, host)
        assert dest.tolist() == [1] * 4
    assert seen == [D2H, H2D]


# The ledger


def test_the_ledger_counts_storages_once_and_only_while_they_live() -> None:
    ledger = Ledger()
    one = torch.zeros(256)
    assert ledger.tick("a", [one, one.view(16, 16), one[3:]]) == 1024
    two = torch.zeros(512)
    assert ledger.tick("b", [two]) == 3072
    del one
    assert ledger.tick("c", []) == 2048
    del two
    assert ledger.tick("d", []) == 0
    assert ledger.peak_nbytes == 3072
    assert [(sample.label, sample.nbytes) for sample in ledger.samples] == [
        ("a", 1024),
        ("b", 3072),
        ("c", 2048),
        ("d", 0),
    ]


def test_the_ledger_keeps_nothing_alive() -> None:
    ledger = Ledger()
    tensor = torch.zeros(4)
    gone = weakref.ref(tensor)
    ledger.tick("a", [tensor])
    del tensor
    assert gone() is None
    assert ledger.tick("b", []) == 0


def test_slots_are_not_device_memory_but_sources_in_flight_are() -> None:
    with testing.virtual_device() as device:
        src = torch.zeros(256)
        host = OFFLOAD(src, "s")
        assert device.ledger.tick("offload", [src, host]) == 1024
        RELEASE(host, src, False)
        del src
        assert device.ledger.tick("handed over", [host]) == 1024
        dest = RELOAD(host, CPU)
        assert device.ledger.tick("reload", [dest]) == 2048
        READY(dest, host)
        assert device.ledger.tick("ready", []) == 1024
        del dest
        assert device.ledger.tick("end", []) == 0


def test_resetting_forgets() -> None:
    ledger = Ledger()
    tensor = torch.zeros(4)
    ledger.tick("a", [tensor])
    ledger.reset()
    assert (ledger.peak_nbytes, ledger.samples) == (0, [])
    assert ledger.tick("b", []) == 0


# The interpreter


class Chain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        b = a.cos()
        c = b.view(-1)
        return c.exp()


def test_a_boxed_graph_frees_each_value_after_its_last_use() -> None:
    run = boxed(fx.symbolic_trace(Chain()))
    with testing.virtual_device() as device:
        args = [torch.zeros(16, 16)]
        result = run(args)
        assert args == []
        samples = {sample.label: sample.nbytes for sample in device.ledger.samples}
    assert torch.equal(result, torch.zeros(256).sin().cos().exp())
    one = 1024
    assert samples == {"inputs": one}  # symbolic_trace makes call_method nodes, which are no steps

    def chain(x: torch.Tensor) -> torch.Tensor:
        a = torch.ops.aten.sin.default(x)
        b = torch.ops.aten.cos.default(a)
        c = torch.ops.aten.view.default(b, [-1])
        return torch.ops.aten.exp.default(c)

    with testing.virtual_device() as device:
        boxed(fx.symbolic_trace(chain))([torch.zeros(16, 16)])
        samples = {sample.label: sample.nbytes // one for sample in device.ledger.samples}
    assert samples == {"inputs": 1, "sin_default": 2, "cos_default": 2, "view_default": 1, "exp_default": 2}
    assert device.peak_nbytes == 2 * one


def test_a_boxed_graph_says_so_and_runs_without_a_virtual_device() -> None:
    run = boxed(fx.symbolic_trace(Chain()))
    assert run._boxed_call is True
    assert run([torch.zeros(2, 2)]).shape == (4,)


def test_an_offload_in_a_graph_lowers_the_peak() -> None:
    class Program(nn.Module):
        def __init__(self, *, moves: bool) -> None:
            super().__init__()
            self.moves = moves

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = torch.ops.aten.sin.default(x)
            b = torch.ops.aten.cos.default(a)
            if self.moves:
                host = OFFLOAD(a, "a")
                RELEASE(host, a, True)
            c = torch.ops.aten.exp.default(b)
            d = torch.ops.aten.add.Tensor(b, c)
            if self.moves:
                a = RELOAD(host, CPU)
                READY(a, host)
            return torch.ops.aten.add.Tensor(a, d)

    x = torch.randn(64, 64)
    peaks, results = {}, {}
    for moves in (True, False):
        graph = fx.symbolic_trace(Program(moves=moves))
        with testing.virtual_device() as device:
            results[moves] = boxed(graph)([x.clone()])
            peaks[moves] = device.peak_nbytes // x.nbytes
        testing.check_log(device)
    assert torch.equal(results[True], results[False])
    assert peaks == {True: 3, False: 4}


def test_the_interpreter_lets_errors_through_as_they_are() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    graph = fx.Graph()
    graph.output(graph.call_function(fail, (graph.placeholder("x"),)))
    with pytest.raises(KeyError, match="mine"):
        LedgerInterpreter(fx.GraphModule(nn.Module(), graph), ledger=None).run(torch.zeros(1))
    gc.collect()
