"""The runtime on a real device: the four edges under slowed copies, memory that is really freed, and exact pinning.

A stream is slowed by a kernel that only waits, so what goes wrong without a wait goes wrong every time, and no assertion
reads a clock.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from gpu_programs import LONG, MIB, SHORT, slow
from layouts import layouts

from graphoffload import testing
from graphoffload.errors import GraphOffloadWarning, UsageError
from graphoffload.ordering.events import D2H, H2D
from graphoffload.runtime import ops
from graphoffload.runtime.device import AcceleratorDevice
from graphoffload.runtime.measure import measure_machine
from graphoffload.runtime.ops import OFFLOAD, READY, RELEASE, RELOAD
from graphoffload.runtime.transfer import Runtime

pytestmark = pytest.mark.gpu


@pytest.fixture
def runtime(gpu: torch.device) -> Iterator[Runtime]:
    made = Runtime(AcceleratorDevice(gpu), recording=True)
    with ops.installed(gpu, made):
        yield made
        made.synchronize()
        testing.check_log(made)


def tensor(seed: int, device: torch.device, n: int = MIB) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(n, device=device, generator=generator)


def leave(src: torch.Tensor, *, wait: bool = True) -> torch.Tensor:
    host = OFFLOAD(src, "s")
    RELEASE(host, src, wait)
    return host


def back(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    dest = RELOAD(host, device)
    READY(dest, host)
    return dest


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("name", [name for name in layouts(torch.device("cpu")) if name != "float8"])  # not comparable
def test_a_round_trip_keeps_values_and_layout(name: str, wait: bool, gpu: torch.device, runtime: Runtime) -> None:
    src = layouts(gpu)[name]
    expected = src.clone()
    dest = back(leave(src, wait=wait), gpu)
    assert (dest.device, dest.dtype, dest.is_conj()) == (gpu, src.dtype, src.is_conj())
    assert (dest.size(), dest.stride()) == (src.size(), src.stride())
    assert torch.equal(dest, expected)


def test_the_host_memory_is_pinned(cuda: torch.device, runtime: Runtime) -> None:
    host = leave(tensor(0, cuda))
    torch.accelerator.synchronize(cuda)
    assert host.is_pinned()
    assert torch.equal(host, tensor(0, cuda).cpu())
    assert runtime.stats().pageable_fallbacks == 0


# The four edges, each with the stream slowed that would lose the race


def test_the_copy_out_waits_for_the_producer(cuda: torch.device, runtime: Runtime) -> None:
    src = torch.zeros(MIB, device=cuda)
    value = tensor(0, cuda)
    torch.accelerator.synchronize(cuda)
    torch.cuda._sleep(LONG)
    src.copy_(value)
    assert torch.equal(back(leave(src), cuda), value)


@pytest.mark.parametrize("wait", [True, False])
def test_the_source_is_not_overwritten_under_a_slow_copy_out(wait: bool, cuda: torch.device, runtime: Runtime) -> None:
    runtime.set_limits(in_flight_nbytes=6 * MIB, host_budget_nbytes=None)  # less than two sources
    slow(runtime, D2H, cycles=LONG)
    hosts = []
    for seed in range(4):
        src = tensor(seed, cuda)
        hosts.append(leave(src, wait=wait))
        del src
        torch.full((MIB,), float("nan"), device=cuda)  # whoever gets the memory next writes at once
    runtime.device.before_copy = None
    for seed in reversed(range(4)):
        assert torch.equal(back(hosts[seed], cuda), tensor(seed, cuda))


def test_the_reload_waits_for_its_own_slow_copy_out(cuda: torch.device, runtime: Runtime) -> None:
    slow(runtime, D2H, cycles=LONG)
    host = leave(tensor(0, cuda), wait=False)
    assert torch.equal(back(host, cuda), tensor(0, cuda))


def test_the_reload_does_not_overwrite_what_compute_still_reads(cuda: torch.device, runtime: Runtime) -> None:
    n = 4 * MIB  # 16 MiB: the allocator keeps a segment for each
    host = leave(tensor(0, cuda, n=n))
    torch.accelerator.synchronize(cuda)
    torch.cuda.empty_cache()
    old = tensor(1, cuda, n=n)
    address = old.data_ptr()
    torch.cuda._sleep(LONG)
    copy = old.clone()
    del old
    dest = RELOAD(host, cuda)
    READY(dest, host)
    assert dest.data_ptr() == address, "the race was not tried"
    assert torch.equal(copy, tensor(1, cuda, n=n))
    assert torch.equal(dest, tensor(0, cuda, n=n))


def test_compute_waits_for_the_slow_reload(cuda: torch.device, runtime: Runtime) -> None:
    host = leave(tensor(0, cuda))
    slow(runtime, H2D, cycles=LONG)
    assert torch.equal(back(host, cuda) * 2, tensor(0, cuda) * 2)


def test_the_next_slot_waits_for_the_reload_that_still_reads_its_memory(cuda: torch.device, runtime: Runtime) -> None:
    host = leave(tensor(0, cuda))
    torch.accelerator.synchronize(cuda)
    address = host.data_ptr()
    slow(runtime, H2D, cycles=LONG)
    with torch.Stream(device=cuda):  # this consumer's wait does not order the main stream
        dest = back(host, cuda)
    del host
    other = leave(tensor(1, cuda))
    assert other.data_ptr() == address
    torch.accelerator.synchronize(cuda)
    assert torch.equal(dest, tensor(0, cuda))
    assert torch.equal(back(other, cuda), tensor(1, cuda))


def test_a_source_dropped_from_another_stream_is_safe(cuda: torch.device, runtime: Runtime) -> None:
    runtime.set_limits(in_flight_nbytes=5 * MIB, host_budget_nbytes=None)  # one source
    slow(runtime, D2H, cycles=LONG)
    one, two = torch.Stream(device=cuda), torch.Stream(device=cuda)
    with one:
        host = leave(tensor(0, cuda), wait=False)
    with two:
        leave(tensor(1, cuda), wait=False)  # makes room: the first source is dropped here
    with one:
        torch.full((MIB,), float("nan"), device=cuda)
    torch.accelerator.synchronize(cuda)
    assert torch.equal(host, tensor(0, cuda).cpu())


def test_the_compute_stream_is_looked_up_at_every_use(cuda: torch.device, runtime: Runtime) -> None:
    forward, backward = torch.Stream(device=cuda), torch.Stream(device=cuda)
    torch.accelerator.synchronize(cuda)
    value = tensor(0, cuda)
    torch.accelerator.synchronize(cuda)
    with forward:
        torch.cuda._sleep(LONG)
        src = value + 1
        host = leave(src, wait=False)
    slow(runtime, H2D, cycles=LONG)
    with backward:
        result = back(host, cuda) * 2
    backward.synchronize()
    assert torch.equal(result, (value + 1) * 2)
    assert torch.accelerator.current_stream(cuda) not in (forward, backward)


# What is left behind


def test_an_exception_between_offload_and_release_under_a_slow_copy(cuda: torch.device, runtime: Runtime) -> None:
    slow(runtime, D2H, cycles=LONG)
    src = tensor(0, cuda)
    OFFLOAD(src, "s")
    del src
    runtime.device.before_copy = None
    host = leave(tensor(1, cuda))
    assert torch.equal(back(host, cuda), tensor(1, cuda))
    assert runtime.stats().abandoned == 1


def test_an_exception_between_reload_and_ready_under_a_slow_copy(cuda: torch.device, runtime: Runtime) -> None:
    host = leave(tensor(0, cuda))
    slow(runtime, H2D, cycles=LONG)
    RELOAD(host, cuda)
    del host
    runtime.device.before_copy = None
    other = leave(tensor(1, cuda))
    filled = torch.full((MIB,), 3.0, device=cuda)
    assert torch.equal(back(other, cuda), tensor(1, cuda))
    assert bool((filled == 3).all())
    assert runtime.stats().abandoned == 1


def test_hooks_may_read_the_host_tensor_at_once(cuda: torch.device, runtime: Runtime) -> None:
    slow(runtime, D2H, cycles=LONG)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda packed: packed):
        packed = leave(tensor(0, cuda), wait=False).clone()
    assert torch.equal(packed, tensor(0, cuda).cpu())
    assert torch.equal(back(packed, cuda), tensor(0, cuda))


def test_capture_is_refused(cuda: torch.device, runtime: Runtime) -> None:
    src = tensor(0, cuda)
    torch.accelerator.synchronize(cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        src.add_(0)  # torch warns of an empty graph
        with pytest.raises(UsageError, match="CUDA graph capture"):
            OFFLOAD(src, "s")
    torch.accelerator.synchronize(cuda)
    assert torch.equal(back(leave(src), cuda), tensor(0, cuda))


# Memory


def test_device_memory_is_freed_at_the_release(cuda: torch.device, runtime: Runtime) -> None:
    src = tensor(0, cuda, n=8 * MIB)
    before = torch.cuda.memory_allocated(cuda)
    host = OFFLOAD(src, "s")
    RELEASE(host, src, True)
    del src
    assert torch.cuda.memory_allocated(cuda) == before - 32 * MIB
    dest = back(host, cuda)
    assert torch.cuda.memory_allocated(cuda) == before
    del dest
    assert torch.cuda.memory_allocated(cuda) == before - 32 * MIB


def test_memory_is_flat_while_the_host_runs_ahead(cuda: torch.device, runtime: Runtime) -> None:
    runtime.set_limits(in_flight_nbytes=16 * MIB, host_budget_nbytes=None)
    slow(runtime, D2H, cycles=SHORT)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(cuda)
    seen = []
    for step in range(50):
        hosts = [leave(tensor(step + k, cuda), wait=False) for k in range(8)]
        for host in reversed(hosts):
            back(host, cuda)
        del hosts, host
        seen.append((torch.cuda.memory_allocated(cuda), runtime.stats().pinned_nbytes))
        # Four sources in flight, one being made, one coming back, and what segments of 20 MiB round up.
        assert torch.cuda.memory_reserved(cuda) - before <= 64 * MIB
    assert len(set(seen)) == 1, seen
    stats = runtime.stats()
    assert stats.in_flight_peak_nbytes <= 16 * MIB
    assert stats.pinned_peak_nbytes <= 1.05 * stats.host_peak_nbytes


def test_two_hundred_steps_of_varying_sizes_pin_within_the_law(gpu: torch.device, runtime: Runtime) -> None:
    generator = torch.Generator().manual_seed(0)
    for step in range(200):
        sizes = (torch.rand(6, generator=generator) * MIB + MIB).int().tolist()
        hosts = [leave(tensor(step + k, gpu, n=n)) for k, n in enumerate(sizes)]
        for k in reversed(range(len(sizes))):
            dest = back(hosts.pop(), gpu)
            if step % 20 == 0:
                assert torch.equal(dest, tensor(step + k, gpu, n=sizes[k]))
    stats = runtime.stats()
    assert stats.pageable_fallbacks == 0
    if gpu.type == "cuda":
        assert stats.pinned_peak_nbytes <= 1.05 * stats.host_peak_nbytes


def test_a_block_over_two_pinned_chunks_is_right(cuda: torch.device, runtime: Runtime) -> None:
    hosts = [leave(tensor(k, cuda)) for k in range(3)]
    del hosts
    growths = runtime.pool.counts.growths
    host = leave(tensor(7, cuda, n=3 * MIB))
    assert runtime.pool.counts.growths == growths == 3, "the memory of three chunks serves one slot"
    assert torch.equal(back(host, cuda), tensor(7, cuda, n=3 * MIB))


def test_pinned_memory_goes_with_the_runtime(cuda: torch.device) -> None:
    made = Runtime(AcceleratorDevice(cuda))
    host = made.offload(tensor(0, cuda), "s")
    made.release(host, wait=False)
    address = host.data_ptr()
    del host, made
    gc.collect()
    torch.accelerator.synchronize(cuda)
    # Registered memory could not be registered again; what was given back can.
    again = Runtime(AcceleratorDevice(cuda))
    host = again.offload(tensor(1, cuda), "s")
    again.release(host, wait=True)
    dest = again.reload(host)
    again.ready(dest, host)
    assert torch.equal(dest, tensor(1, cuda))
    assert again.stats().pageable_fallbacks == 0
    assert address != 0


def test_the_budget_makes_slots_pageable_and_right(gpu: torch.device) -> None:
    made = Runtime(AcceleratorDevice(gpu), host_budget_nbytes=0, recording=True)
    with pytest.warns(GraphOffloadWarning, match="could not be pinned"):
        host = made.offload(tensor(0, gpu), "s")
    made.release(host, wait=False)
    dest = made.reload(host)
    made.ready(dest, host)
    assert torch.equal(dest, tensor(0, gpu))
    testing.check_log(made)


def test_a_failed_pin_does_not_show_up_in_later_kernels(cuda: torch.device) -> None:
    device = AcceleratorDevice(cuda)
    assert not device._register(4096, 1)  # nothing is mapped there
    assert torch.ones(4, device=cuda).sum().item() == 4
    torch.accelerator.synchronize(cuda)


# Together


@pytest.mark.parametrize("seed", range(5))
def test_random_delays_change_nothing(seed: int, cuda: torch.device, runtime: Runtime) -> None:
    runtime.set_limits(in_flight_nbytes=9 * MIB, host_budget_nbytes=None)
    with testing.slow_copies(runtime, seed=seed, max_seconds=0.003):
        for step in range(10):
            hosts = [leave(tensor(step + k, cuda), wait=k % 2 == 0) for k in range(6)]
            dests = [RELOAD(host, cuda) for host in hosts[3:]]
            for k, dest in zip(range(3, 6), dests, strict=True):
                READY(dest, hosts[k])
                assert torch.equal(dest, tensor(step + k, cuda))
            for k in (2, 0, 1):
                assert torch.equal(back(hosts[k], cuda), tensor(step + k, cuda))


def test_threads_with_streams_of_their_own(cuda: torch.device, runtime: Runtime) -> None:
    wrong: list[object] = []

    def train(seed: int) -> None:
        try:
            with torch.Stream(device=cuda):
                for step in range(20):
                    value = tensor(1000 * seed + step, cuda)
                    host = leave(value.clone(), wait=step % 2 == 0)
                    if not torch.equal(back(host, cuda), value):
                        wrong.append((seed, step))
        except Exception as error:  # noqa: BLE001  # a thread's error must reach the test
            wrong.append(error)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_opcheck_passes_on_the_device(gpu: torch.device) -> None:
    src = torch.randn(4, 6, device=gpu).t()
    host = OFFLOAD(src, "s")
    RELEASE(host, src, True)
    torch.library.opcheck(OFFLOAD, (src, "s"))
    torch.library.opcheck(RELEASE, (host, src, True))
    torch.library.opcheck(RELOAD, (host, gpu))
    torch.library.opcheck(READY, (RELOAD(host, gpu), host))


def test_the_machine_can_be_measured(gpu: torch.device) -> None:
    machine = measure_machine(gpu)
    assert machine.name
    assert machine.duplex_bytes_per_second is not None
    slowest = min(machine.d2h_bytes_per_second, machine.h2d_bytes_per_second)
    assert machine.memory_bytes_per_second > machine.duplex_bytes_per_second * 0.9
    assert slowest > 1e8
    assert dict(machine.flops_per_second)
    assert 0 < machine.copy_latency_seconds < 1
    assert measure_machine().name == machine.name
