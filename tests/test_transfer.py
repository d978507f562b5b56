"""Transfers on the virtual device: every legal way to use them, every way to leave one half done, and each wait left out."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch

from graphoffload import testing
from graphoffload.errors import GraphOffloadWarning, OrderingError, SlotError
from graphoffload.ordering.events import D2H
from graphoffload.runtime.ops import OFFLOAD, READY, RELEASE, RELOAD
from graphoffload.runtime.transfer import IN_FLIGHT_NBYTES, Edge, Runtime
from graphoffload.runtime.virtual import VirtualDevice

CPU = torch.device("cpu")
N = 256
NBYTES = 4 * N


def tensor(seed: int, n: int = N) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def leave(src: torch.Tensor, *, wait: bool = True, storage: str = "s") -> torch.Tensor:
    host = OFFLOAD(src, storage)
    RELEASE(host, src, wait)
    return host


def back(host: torch.Tensor) -> torch.Tensor:
    dest = RELOAD(host, CPU)
    READY(dest, host)
    return dest


# The shape of a step


def test_contents_are_poison_until_the_waits_allow_them() -> None:
    with testing.virtual_device():
        src = tensor(0)
        host = OFFLOAD(src, "s")
        assert host.isnan().all()
        RELEASE(host, src, True)
        assert torch.equal(host, tensor(0))
        assert src.isnan().all()
        dest = RELOAD(host, CPU)
        assert dest.isnan().all()
        READY(dest, host)
        assert torch.equal(dest, tensor(0))


def test_a_source_handed_over_stays_until_its_own_ready() -> None:
    with testing.virtual_device() as device:
        src = tensor(0)
        host = leave(src, wait=False)
        assert torch.equal(src, tensor(0))
        assert device.stats().in_flight_nbytes == NBYTES
        dest = RELOAD(host, CPU)
        assert torch.equal(src, tensor(0))
        READY(dest, host)
        assert torch.equal(dest, tensor(0))
        assert src.isnan().all()
        assert device.stats().in_flight_nbytes == 0
    testing.check_log(device)


def test_several_forwards_before_their_backwards_in_any_order() -> None:
    with testing.virtual_device() as device:
        hosts = [leave(tensor(seed), wait=seed % 2 == 0) for seed in range(8)]
        for seed in (3, 0, 7, 1, 6, 2, 5, 4):
            assert torch.equal(back(hosts[seed]), tensor(seed))
    testing.check_log(device)


def test_a_second_backward_reads_the_same_slot() -> None:
    with testing.virtual_device() as device:
        host = leave(tensor(0))
        assert torch.equal(back(host), tensor(0))
        assert torch.equal(back(host), tensor(0))
    testing.check_log(device)


def test_two_reloads_of_one_slot_may_be_under_way() -> None:
    with testing.virtual_device() as device:
        host = leave(tensor(0), wait=False)
        one, two = RELOAD(host, CPU), RELOAD(host, CPU)
        READY(two, host)
        assert torch.equal(two, tensor(0))
        READY(one, host)
        assert torch.equal(one, tensor(0))
        assert torch.equal(back(host), tensor(0))
    testing.check_log(device)


@pytest.mark.parametrize("wait", [True, False])
def test_a_backward_that_never_comes_leaks_nothing(wait: bool) -> None:
    with testing.virtual_device() as device:
        for step in range(20):
            host = leave(tensor(step), wait=wait)
        del host
        stats = device.stats()
        assert (stats.slots, stats.host_nbytes) == (0, 0)
        device.runtime.synchronize()
        stats = device.stats()
        assert stats.in_flight_nbytes == 0
        assert stats.pinned_nbytes <= 4096
    testing.check_log(device)


def test_backward_may_come_after_the_virtual_device_is_gone() -> None:
    with testing.virtual_device():
        host, other = leave(tensor(0)), leave(tensor(1), wait=False)
    assert torch.equal(back(host), tensor(0))
    assert torch.equal(back(other), tensor(1))


def test_memory_comes_back_when_the_last_user_goes() -> None:
    with testing.virtual_device() as device:
        runtime = weakref.ref(device.runtime)
        host = leave(tensor(0))
    del device
    gc.collect()
    assert runtime() is not None
    assert torch.equal(host, tensor(0))
    del host
    gc.collect()
    assert runtime() is None


def test_a_view_of_the_host_tensor_keeps_the_slot() -> None:
    with testing.virtual_device() as device:
        view = leave(tensor(0)).view(16, -1)[3:]
        assert device.stats().slots == 1
        assert torch.equal(view.flatten(), tensor(0)[48:])
        del view
        assert device.stats().slots == 0


def test_a_default_device_of_the_user_changes_nothing() -> None:
    source = tensor(0)
    with testing.virtual_device(host_budget_nbytes=4096) as device, torch.device("meta"):
        host = leave(source)
        dest = back(host)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GraphOffloadWarning)
            device.runtime.set_limits(in_flight_nbytes=None, host_budget_nbytes=0)
            pageable = leave(dest)
    assert host.device == dest.device == pageable.device == CPU
    assert torch.equal(pageable, tensor(0))


# The in-flight queue


def test_bytes_in_flight_are_bounded_oldest_first() -> None:
    with testing.virtual_device(in_flight_nbytes=2 * NBYTES) as device:
        sources = [tensor(seed) for seed in range(5)]
        hosts = [leave(source, wait=False) for source in sources]
        assert [bool(source.isnan().all()) for source in sources] == [True, True, True, False, False]
        stats = device.stats()
        assert stats.in_flight_nbytes == stats.in_flight_peak_nbytes == 2 * NBYTES
        assert stats.waits == 3
        for seed, host in enumerate(hosts):
            assert torch.equal(back(host), tensor(seed))
        assert device.stats().in_flight_nbytes == 0
    testing.check_log(device)


def test_a_bound_of_zero_makes_every_hand_over_wait() -> None:
    with testing.virtual_device(in_flight_nbytes=0) as device:
        src = tensor(0)
        leave(src, wait=False)
        assert src.isnan().all()
        assert device.stats().in_flight_nbytes == 0
    testing.check_log(device)


def test_sources_go_when_their_copies_are_seen_to_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with testing.virtual_device() as device:
        first, second = tensor(0), tensor(1)
        host = leave(first, wait=False)
        monkeypatch.setattr(device.runtime.device, "done", lambda token: True)
        other = leave(second, wait=False)
        assert first.isnan().all()
        assert not second.isnan().any()
        assert torch.equal(host, tensor(0))
        assert torch.equal(back(other), tensor(1))
    testing.check_log(device)


def test_the_limits_can_be_set_later() -> None:
    runtime = Runtime(VirtualDevice())
    assert runtime.in_flight_nbytes == IN_FLIGHT_NBYTES
    runtime.set_limits(in_flight_nbytes=5, host_budget_nbytes=7)
    assert (runtime.in_flight_nbytes, runtime.pool.budget_nbytes) == (5, 7)
    runtime.set_limits(in_flight_nbytes=None, host_budget_nbytes=None)
    assert (runtime.in_flight_nbytes, runtime.pool.budget_nbytes) == (IN_FLIGHT_NBYTES, None)


# Exceptions at every point


def test_between_offload_and_release() -> None:
    with testing.virtual_device() as device:
        src = tensor(0)
        kept = weakref.ref(src)
        host = OFFLOAD(src, "s")
        del host  # as an exception would
        stats = device.stats()
        assert (stats.slots, stats.abandoned) == (0, 1)
        assert torch.equal(src, tensor(0)), "nobody released it"
        del src
        assert kept() is None
        assert torch.equal(back(leave(tensor(1))), tensor(1))
    testing.check_log(device)


def test_between_reload_and_ready() -> None:
    with testing.virtual_device() as device:
        host = leave(tensor(0), wait=False)
        RELOAD(host, CPU)
        del host
        stats = device.stats()
        assert (stats.slots, stats.abandoned, stats.host_nbytes) == (0, 1, 0)
        assert torch.equal(back(leave(tensor(1))), tensor(1))
    testing.check_log(device)


def test_the_destination_outlives_an_exception_until_its_copy_has_ended() -> None:
    with testing.virtual_device() as device:
        host = leave(tensor(0))
        storage = RELOAD(host, CPU).untyped_storage()
        gone = weakref.ref(storage)
        del storage
        assert gone() is not None
        assert torch.equal(back(host), tensor(0))
        del host
        assert device.stats().slots == 0
        assert gone() is None
    testing.check_log(device)


@pytest.mark.parametrize("failing", ["record", "wait", "copy"])
@pytest.mark.parametrize("operator", ["offload", "reload"])
def test_a_failing_device_leaves_the_runtime_usable(
    operator: str, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the device failed")

    with testing.virtual_device(recording=False) as device:
        src = tensor(0)
        host = leave(tensor(5))
        with monkeypatch.context() as patch:
            patch.setattr(device.runtime.device, failing, fail)
            with pytest.raises(RuntimeError, match="the device failed"):
                OFFLOAD(src, "s") if operator == "offload" else RELOAD(host, CPU)
        assert torch.equal(back(leave(src)), tensor(0))
        assert torch.equal(back(host), tensor(5))
        del host
        stats = device.stats()
        assert (stats.slots, stats.host_nbytes) == (0, 0)


def test_out_of_memory_in_reload_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with testing.virtual_device() as device:
        host = leave(tensor(0))
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty_strided", fail)
            with pytest.raises(torch.OutOfMemoryError):
                device.runtime.reload(host)
        assert torch.equal(back(host), tensor(0))
    testing.check_log(device)


# Wrong use is our fault, and says so


def test_releasing_twice_raises() -> None:
    with testing.virtual_device():
        src = tensor(0)
        host = leave(src)
        with pytest.raises(SlotError, match=r"s#0 is held: it cannot do 'release'"):
            RELEASE(host, src, True)


def test_reloading_before_the_release_raises() -> None:
    with testing.virtual_device():
        host = OFFLOAD(tensor(0), "s")
        with pytest.raises(SlotError, match="leaving"):
            RELOAD(host, CPU)


def test_a_ready_without_its_reload_raises() -> None:
    with testing.virtual_device():
        host = leave(tensor(0))
        with pytest.raises(SlotError, match="no reload into"):
            READY(tensor(1), host)
        dest = back(host)
        with pytest.raises(SlotError, match="no reload into"):
            READY(dest, host)


# Host tensors that hooks of the user replaced


@pytest.mark.parametrize("wait", [True, False])
def test_hooks_may_read_the_host_tensor_at_once(wait: bool) -> None:
    def pack(host: torch.Tensor) -> torch.Tensor:
        return host.clone()

    with testing.virtual_device() as device, torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        src = tensor(0)
        packed = pack(leave(src, wait=wait))
        assert torch.equal(packed, tensor(0))
        assert torch.equal(back(packed), tensor(0))
    assert device.stats().foreign_reloads == 1
    testing.check_log(device)


def test_without_hooks_a_hand_over_does_not_wait_for_the_host() -> None:
    with testing.virtual_device():
        assert leave(tensor(0), wait=False).isnan().all()


@pytest.mark.parametrize("layout", ["sliced", "expanded"])
def test_a_replaced_host_tensor_keeps_its_layout(layout: str) -> None:
    whole = torch.randn(6, 8)
    foreign = whole[:, 2:5] if layout == "sliced" else whole[:, :1].expand(6, 8)
    with testing.virtual_device():
        dest = back(foreign)
    assert torch.equal(dest, foreign)
    assert dest.stride() == foreign.stride()


def test_a_slot_of_another_runtime_is_copied_after_its_own_copy_out() -> None:
    with testing.virtual_device():
        host = leave(tensor(0), wait=False)
    other = Runtime(VirtualDevice())
    dest = other.reload(host)
    other.ready(dest, host)
    assert torch.equal(dest, tensor(0))


# More than one of everything


def test_two_runtimes_do_not_mix() -> None:
    one, two = Runtime(VirtualDevice()), Runtime(VirtualDevice())
    sources = [tensor(seed) for seed in range(4)]
    hosts = [(one, two)[seed % 2].offload(source, "s") for seed, source in enumerate(sources)]
    for seed, host in enumerate(hosts):
        (one, two)[seed % 2].release(host, wait=False)
    for seed, host in enumerate(hosts):
        runtime = (one, two)[seed % 2]
        dest = runtime.reload(host)
        runtime.ready(dest, host)
        assert torch.equal(dest, tensor(seed))
    assert one.stats().offloads == two.stats().offloads == 2


def test_memory_goes_back_behind_a_wait_of_the_stream_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    with testing.virtual_device(in_flight_nbytes=NBYTES) as device:
        waited: list[object] = []
        virtual = device.runtime.device
        monkeypatch.setattr(virtual, "wait_on", lambda stream, token: waited.append(stream))

        def on(stream: str) -> None:
            monkeypatch.setattr(virtual, "compute_stream", lambda: stream)

        on("A")
        first = leave(tensor(0), wait=False)
        on("B")
        second = leave(tensor(1), wait=False)  # the bound pushes the first source out
        assert waited == ["A"]
        on("C")
        back(second)
        assert waited == ["A", "B"]
        RELOAD(first, CPU)
        del first
        on("D")
        device.stats()  # lets the abandoned reload go
        assert waited == ["A", "B", "C"]
        third = OFFLOAD(tensor(2), "s")
        RELEASE(third, tensor(2), True)
        assert waited == ["A", "B", "C"], "nobody else to wait for"


def test_threads_share_a_runtime() -> None:
    wrong: list[object] = []

    def train(seed: int) -> None:
        try:
            for step in range(30):
                hosts = [leave(tensor(100 * seed + step + k, n=64 * (1 + k)), wait=k % 2 == 0) for k in range(3)]
                for k in (2, 1, 0):
                    if not torch.equal(back(hosts[k]), tensor(100 * seed + step + k, n=64 * (1 + k))):
                        wrong.append((seed, step, k))
                    hosts.pop()
        except Exception as error:  # noqa: BLE001  # a thread's error must reach the test
            wrong.append(error)

    with testing.virtual_device(in_flight_nbytes=1024) as device:
        threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        stats = device.stats()
        assert (stats.slots, stats.host_nbytes, stats.offloads) == (0, 0, 360)
    testing.check_log(device)


def test_no_reference_cycle_holds_memory() -> None:
    gc.collect()
    gc.disable()
    try:
        runtime = Runtime(VirtualDevice())
        src = tensor(0)
        host = runtime.offload(src, "s")
        runtime.release(host, wait=False)
        gone = weakref.ref(runtime)
        del src, host, runtime
        assert gone() is None
    finally:
        gc.enable()


# Host memory


def test_slots_are_reused_from_step_to_step() -> None:
    with testing.virtual_device() as device:
        for step in range(50):
            hosts = [leave(tensor(step + k, n=4096 * (1 + k)), wait=True) for k in range(4)]
            pinned = device.stats().pinned_nbytes
            for k in reversed(range(4)):
                assert torch.equal(back(hosts.pop()), tensor(step + k, n=4096 * (1 + k)))
        stats = device.stats()
        assert stats.pinned_nbytes == pinned == stats.pinned_peak_nbytes == stats.host_peak_nbytes
    testing.check_log(device)


def test_the_host_budget_makes_a_slot_pageable_and_says_so() -> None:
    with testing.virtual_device(host_budget_nbytes=4096) as device:
        first = leave(tensor(0, n=1024))
        with pytest.warns(GraphOffloadWarning, match="4096 bytes of host memory could not be pinned"):
            second = leave(tensor(1, n=1024), wait=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            third = leave(tensor(2, n=1024))  # said once
        for seed, host in enumerate((first, second, third)):
            assert torch.equal(back(host), tensor(seed, n=1024))
        stats = device.stats()
        assert (stats.pinned_nbytes, stats.pageable_nbytes, stats.pageable_fallbacks) == (4096, 8192, 2)
        del first, second, third, host
        assert device.stats().pageable_nbytes == 0
    testing.check_log(device)


def test_a_pageable_slot_abandoned_under_its_copy_is_safe() -> None:
    with testing.virtual_device(host_budget_nbytes=0) as device:
        with pytest.warns(GraphOffloadWarning):
            leave(tensor(0), wait=False)
        assert torch.equal(back(leave(tensor(1))), tensor(1))
        assert device.stats().pageable_nbytes == 0


def test_reserving_pins_once() -> None:
    with testing.virtual_device() as device:
        device.runtime.reserve([4096 * 4 * (1 + k) for k in range(4)])
        pinned = device.stats().pinned_nbytes
        hosts = [leave(tensor(k, n=4096 * (1 + k))) for k in range(4)]
        assert device.stats().pinned_nbytes == pinned
        assert device.runtime.pool.counts.growths == 1
        del hosts
        assert device.runtime.trim() == pinned
        assert device.stats().pinned_nbytes == 0


# Each wait, left out


def without(edge: Edge, device: testing.VirtualRun, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = device.runtime._wait

    def wait_for_the_others(stream: str, token: Any, why: Edge) -> None:
        if why is not edge:
            wait(stream, token, why)

    monkeypatch.setattr(device.runtime, "_wait", wait_for_the_others)


def steps(*, wait: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run a few steps with everything that transfers do; return what came back, with what should have."""
    results = []
    for seed in range(4):
        hosts = [leave(tensor(2 * seed), wait=wait), leave(tensor(2 * seed + 1), wait=wait)]
        late = RELOAD(hosts[0], CPU)
        dests = [RELOAD(host, CPU) for host in hosts]
        for k in (1, 0):
            READY(dests[k], hosts[k])
            results.append((dests[k].clone(), tensor(2 * seed + k)))
        del late  # never made ready
    return results


@pytest.mark.parametrize("wait", [True, False])
def test_with_all_waits_nothing_is_wrong(wait: bool) -> None:
    with testing.virtual_device(in_flight_nbytes=NBYTES) as device:
        assert all(torch.equal(got, expected) for got, expected in steps(wait=wait))
    testing.check_log(device)


@pytest.mark.parametrize(
    ("edge", "wait"),
    [
        (Edge.PRODUCED, True),
        (Edge.DEPARTED, True),
        (Edge.BOUNDED, False),
        (Edge.ALLOCATED, True),
        (Edge.ALLOCATED, False),
        (Edge.COMPLETE, False),
        (Edge.ARRIVED, True),
        (Edge.ARRIVED, False),
    ],
)
def test_each_wait_left_out_gives_poison_and_a_finding(edge: Edge, wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with testing.virtual_device(in_flight_nbytes=NBYTES) as device:
        without(edge, device, monkeypatch)
        results = steps(wait=wait)
        assert any(got.isnan().any() for got, _ in results)
        events = device.log
    with pytest.raises(OrderingError):
        testing.check_log(events)


@pytest.mark.parametrize("edge", [Edge.VACATED, Edge.ABANDONED])
def test_the_waits_that_only_a_later_slot_needs_are_found_by_the_checker(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    with testing.virtual_device() as device:
        without(Edge.ABANDONED, device, monkeypatch)
        if edge is Edge.VACATED:
            without(Edge.VACATED, device, monkeypatch)
        host = leave(tensor(0))
        RELOAD(host, CPU)  # an exception comes before its ready
        del host
        back(leave(tensor(1)))
        events = device.log
    with pytest.raises(OrderingError):
        testing.check_log(events)


def test_the_reload_waits_for_its_own_copy_even_when_compute_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with testing.virtual_device() as device:
        waits: list[tuple[str, Edge]] = []
        wait = device.runtime._wait
        monkeypatch.setattr(
            device.runtime,
            "_wait",
            lambda stream, token, edge: (waits.append((stream, edge)), wait(stream, token, edge)),
        )
        host = leave(tensor(0), wait=False)
        assert waits == [(D2H, Edge.PRODUCED)]
        assert torch.equal(back(host), tensor(0))
