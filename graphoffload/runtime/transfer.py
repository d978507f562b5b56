"""Move storages to the host and back: the four operations of a transfer, and the order that makes them right.

Theory of operation. Three streams work at once: compute, and one copy stream each way. All order between them is made by
the waits below, each named by its reason (`Edge`) and each with its comment; nothing else is relied upon. Device memory is
freed by dropping the last reference after a wait, so that whoever gets it next, in the order of the compute stream, gets
it after the copy. Nothing is resized, and no tensor is recorded on a second stream.

A source that the compute stream does not wait for goes to the *in-flight queue*, oldest first out: it is dropped when its
copy is seen to have ended, when the bytes in flight pass the bound (compute then waits for the oldest), or at the slot's
own ready.

Whatever an exception, a dropped loss or a second backward leaves behind, a copy may still be touching. Such slots come
back as *orphans* through their owner's end, and are let go at the next call, behind a wait.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from graphoffload.errors import SlotError
from graphoffload.ordering.alphabet import reload as reload_resource
from graphoffload.ordering.events import COMPUTE, D2H, H2D
from graphoffload.planning.machine import IN_FLIGHT_NBYTES as IN_FLIGHT_NBYTES
from graphoffload.runtime.device import Device, extent_nbytes, flat_bytes, with_lazy_bits
from graphoffload.runtime.edges import Edge as Edge
from graphoffload.runtime.foreign import bring_foreign, hooks_may_read_hosts
from graphoffload.runtime.log import RuntimeLog
from graphoffload.runtime.memory import Token, later_of
from graphoffload.runtime.pinned import PinnedPool
from graphoffload.runtime.slots import Act, Reload, Slot, SlotOwner, State, Watch, find_owner, make_host_tensor
from graphoffload.runtime.stalls import Stalls
from graphoffload.runtime.stats import TransferStats


class Runtime:
    """Run the transfers of one device.

    Holds the two copy streams, the pool of host memory, the in-flight queue and, with `recording`, a log of events. It is
    kept by the callables compiled for it and by every live slot; when the last of them goes, the copies are waited for and
    the host memory is given back.
    """

    def __init__(
        self,
        device: Device,
        *,
        in_flight_nbytes: int | None = None,
        host_budget_nbytes: int | None = None,
        recording: bool = False,
    ) -> None:
        self.device = device
        self.in_flight_nbytes = IN_FLIGHT_NBYTES if in_flight_nbytes is None else in_flight_nbytes
        self.log = RuntimeLog() if recording else None
        self.pool = PinnedPool(device.chunks(), budget_nbytes=host_budget_nbytes, quiesce=device.synchronize_copies)
        self.orphans: deque[Slot] = deque()
        self._in_flight: dict[Slot, None] = {}  # oldest first
        self._counts: dict[str, int] = dict.fromkeys(set(TransferStats.__dataclass_fields__) - {"exposed_seconds"}, 0)
        self._stalls = Stalls(device)
        self._serials = itertools.count()
        self._slot_numbers = itertools.count()
        # One lock: forward runs on the user's threads and backward on autograd's, and they share the streams, the queue
        # and the pool. Re-entrant, since a `before_copy` hook may ask for the stats.
        self._lock = threading.RLock()
        # Not at exit: the process's end gives everything back, and tensors may outlive the interpreter's modules.
        weakref.finalize(self, _close, device, self.pool).atexit = False

    # The four operations

    def offload(self, src: torch.Tensor, storage: str, *, watch: Watch | None = None) -> torch.Tensor:
        """Start the copy of `src`'s extent to the host; return the host tensor, which owns the slot.

        The result has the size, stride and dtype of `src`, and its contents are there only once the copy has ended. With
        `watch` the slot notes whether the source was changed in place before the copy was waited for.
        """
        nbytes = extent_nbytes(src)
        if nbytes == 0:
            return with_lazy_bits(
                torch.empty_strided(src.size(), src.stride(), dtype=src.dtype, device="cpu"), like=src
            )
        self.device.refuse_capture()
        with self._lock:
            self._let_orphans_go()
            self._drop_seen()
            block = self.pool.take(nbytes)
            slot = Slot(f"{storage}#{next(self._slot_numbers)}", block, self.device.compute_stream())
            self._counts["slots"] += 1
            # From here on the owner's end cleans up, whatever is raised.
            owner = SlotOwner(self, slot)
            host, host_bytes = make_host_tensor(owner, like=src)
            self.device.spoil(host)
            if self.log is not None:
                self.log.produced(slot.name)
            # The copy must not start before the source is computed.
            self._wait(D2H, self._record(COMPUTE), Edge.PRODUCED)
            if block.after is not None:
                # An earlier slot's reload may still be reading this host memory. The host does not wait for it.
                self._wait(D2H, block.after, Edge.VACATED)
            # The copy reads the source until it has ended; the program may drop its own reference any time.
            slot.source, slot.source_version, slot.watch = src.detach(), src._version, watch
            slot.act(Act.OFFLOAD)
            self.device.copy(D2H, host_bytes, flat_bytes(src), cuts=block.cuts)
            if self.log is not None:
                self.log.offloaded(slot.name, begin=block.address, end=block.address + nbytes)
            slot.departed = self._record(D2H)
            self._counts["offloads"] += 1
            self._counts["offloaded_nbytes"] += nbytes
            return with_lazy_bits(host, like=src)

    def release(self, host: torch.Tensor, *, wait: bool, last: bool = True) -> None:
        """Let the device memory of the source go: behind a wait of the compute stream, or through the in-flight queue."""
        owner = find_owner(host)
        if owner is None:
            return  # an empty tensor, or a copy of a host tensor: no copy stream touches anything for it
        self.let_go(owner.slot, wait=wait, last=last)
        if hooks_may_read_hosts():
            # Autograd is about to show the host tensor to hooks of the user, and these may read it on the CPU at once.
            self.settle(owner.slot)

    def let_go(self, slot: Slot, *, wait: bool, last: bool) -> None:
        """Release the source of a slot whose host tensor nobody but graphoffload sees."""
        with self._lock:
            slot.act(Act.RELEASE if wait else Act.HAND_OVER)
            slot.spoils = last
            self._counts["releases"] += 1
            departed = _made(slot.departed, slot)
            if wait:
                # Compute gets the memory next, in its own order: it must not write before the copy has read.
                self._wait_to_free(slot.home, departed, Edge.DEPARTED)
                self._drop_source(slot)
            else:
                self._hand_over(slot)

    def reload(self, host: torch.Tensor) -> torch.Tensor:
        """Start the copy back; return its destination, to be read only after `ready`.

        The result has the size, stride and dtype of `host`, and storage offset 0.
        """
        owner = find_owner(host)
        if owner is None or owner.runtime is not self:
            with self._lock:
                self._counts["foreign_reloads"] += 1
            return bring_foreign(host, owner, self.device.device)
        self.device.refuse_capture()
        slot = owner.slot
        with self._lock:
            self._let_orphans_go()
            self._drop_seen()
            if not slot.allows(Act.RELOAD):
                slot.act(Act.RELOAD)  # raises
            departed = _made(slot.departed, slot)
            # Allocated on the consumer's stream, so that the allocator's own order covers its end.
            dest = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self.device.device)
            slot.reload_count += 1
            resource = f"{reload_resource(slot.name)}.{slot.reload_count}"
            coming = Reload(dest, resource, self.device.compute_stream())
            self.device.spoil(dest)
            if self.log is not None:
                self.log.allocated(slot.name, coming.resource)
            # The memory was somebody else's, in the order of compute, and may still be in use there. Recorded after the
            # allocation, since deterministic mode fills what it allocates.
            self._wait(H2D, self._record(COMPUTE), Edge.ALLOCATED)
            # The slot is whole only once its own copy out has ended; nothing else orders the two copy streams.
            self._wait(H2D, departed, Edge.COMPLETE)
            slot.act(Act.RELOAD)
            # The copy writes the destination until it has ended; an exception could drop the program's reference.
            slot.reloads[dest.data_ptr()] = coming
            self.device.copy(H2D, flat_bytes(dest), flat_bytes(host), cuts=slot.block.cuts)
            if self.log is not None:
                self.log.reloaded(slot.name, coming.resource)
            coming.arrived = slot.read = self._record(H2D)
            self._counts["reloads"] += 1
            self._counts["reloaded_nbytes"] += slot.nbytes
            # Given out as an alias, so that what the caller does to the tensor's metadata is not done to our reference.
            return with_lazy_bits(dest.detach(), like=host)

    def ready(self, dest: torch.Tensor, host: torch.Tensor) -> None:
        """Make compute wait until the reload into `dest` has ended."""
        owner = find_owner(host)
        if owner is None or owner.runtime is not self:
            return  # the foreign reload was complete, in the order of compute, when it returned
        slot = owner.slot
        with self._lock:
            coming = slot.reloads.get(dest.data_ptr())
            if coming is None:
                raise SlotError(
                    f"slot {slot.name} is {slot.state.value}: it has no reload into the tensor given to ready"
                )
            # Compute reads the memory next.
            self._wait(COMPUTE, _made(coming.arrived, slot), Edge.ARRIVED)
            if slot.source is not None:
                # That reload waited for the copy out, so compute has now waited for it too; the source's own compute
                # stream, if it is another one, has not.
                self._wait_at_home(slot.home, _made(slot.departed, slot))
                self._take_off_queue(slot)
                self._drop_source(slot)
                slot.act(Act.DROP)
            del slot.reloads[dest.data_ptr()]
            slot.act(Act.READY if slot.reloads else Act.LAST_READY)
            self._counts["readies"] += 1
            if self.log is not None:
                self.log.consumed(slot.name, coming.resource)

    # Beside the four

    def stats(self) -> TransferStats:
        """Return the counts so far; slots whose tensors are gone are let go first."""
        with self._lock:
            self._let_orphans_go()
            pool = self.pool.counts
            return TransferStats(
                exposed_seconds=self._stalls.seconds(),
                **{
                    **self._counts,
                    "host_nbytes": pool.in_use_nbytes,
                    "host_peak_nbytes": pool.in_use_peak_nbytes,
                    "pinned_nbytes": pool.pinned_nbytes,
                    "pinned_peak_nbytes": pool.pinned_peak_nbytes,
                    "pageable_nbytes": pool.pageable_nbytes,
                    "pageable_fallbacks": pool.pageable_fallbacks,
                },
            )

    def set_limits(self, *, in_flight_nbytes: int | None, host_budget_nbytes: int | None) -> None:
        """Set the bound on bytes in flight (None: the default) and on pinned memory (None: no bound), from now on."""
        with self._lock:
            self.in_flight_nbytes = IN_FLIGHT_NBYTES if in_flight_nbytes is None else in_flight_nbytes
            self.pool.budget_nbytes = host_budget_nbytes

    def reserve(self, sizes: Iterable[int]) -> None:
        """Pin enough host memory for slots of these bytes at one time, in one go, if it is not there yet."""
        with self._lock:
            self._let_orphans_go()
            self.pool.reserve(sizes)

    def trim(self) -> int:
        """Unpin the host memory that no slot is in, as far as it was pinned in pieces; return the bytes given back."""
        with self._lock:
            self._let_orphans_go()
            return self.pool.trim()

    def tidy(self) -> None:
        """Let go of what was only kept for copies that the host sees to have ended."""
        with self._lock:
            self._let_orphans_go()
            self._drop_seen()

    def synchronize(self) -> None:
        """Make the host wait for every copy, and let go of all that was only kept for copies."""
        with self._lock:
            self.device.synchronize_copies()
            self._let_orphans_go()
            while self._in_flight:
                self._drop_oldest(Edge.SEEN)

    def settle(self, slot: Slot) -> None:
        """Make the host wait until the copy into `slot` has ended."""
        self.device.synchronize(_made(slot.departed, slot).native)

    @property
    def sources_in_flight_nbytes(self) -> int:
        """Count the bytes of sources that only the in-flight queue keeps, as far as it knows."""
        return self._counts["in_flight_nbytes"]

    def drop_oldest(self) -> bool:
        """Make compute wait for the oldest copy in flight, and let its source go; False if there is none."""
        with self._lock:
            if not self._in_flight:
                return False
            self._counts["waits"] += 1
            self._drop_oldest(Edge.BOUNDED)
            return True

    def present_source(self, slot: Slot) -> torch.Tensor | None:
        """Return an alias of the source where it is still on the device and may be read on the current stream as it was."""
        with self._lock:
            if slot.source is None or not slot.is_intact() or slot.home != self.device.compute_stream():
                return None
            return slot.source.detach()

    def _hand_over(self, slot: Slot) -> None:
        self._drop_seen()
        self._in_flight[slot] = None
        counts = self._counts
        counts["in_flight_nbytes"] += slot.nbytes
        while counts["in_flight_nbytes"] > self.in_flight_nbytes:
            counts["waits"] += 1
            self._drop_oldest(Edge.BOUNDED)
        counts["in_flight_peak_nbytes"] = max(counts["in_flight_peak_nbytes"], counts["in_flight_nbytes"])

    def _drop_seen(self) -> None:
        while self._in_flight:
            oldest = next(iter(self._in_flight))
            if not self.device.done(_made(oldest.departed, oldest).native):
                return
            self._drop_oldest(Edge.SEEN)

    def _drop_oldest(self, edge: Edge) -> None:
        slot = next(iter(self._in_flight))
        # Compute gets the memory next, in its own order. Where the host has seen the end of the copy, all that it issues
        # from now on comes after it: a wait that costs nothing, and keeps the log honest.
        self._wait_to_free(slot.home, _made(slot.departed, slot), edge)
        self._take_off_queue(slot)
        self._drop_source(slot)
        slot.act(Act.DROP)

    def _take_off_queue(self, slot: Slot) -> None:
        del self._in_flight[slot]
        self._counts["in_flight_nbytes"] -= slot.nbytes

    def _drop_source(self, slot: Slot) -> None:
        source = slot.source
        if source is None:
            raise SlotError(f"slot {slot.name} has no source to drop")
        if self.log is not None:
            self.log.dropped(slot.name)
        if slot.watch is not None:
            # Compute has waited for the copy, so changes from now on come after it.
            slot.torn, slot.watch = not slot.is_intact(), None
        if slot.spoils:
            self.device.spoil(source)
        else:
            self.device.spoil_unshared(source)
        slot.source = None

    def _let_orphans_go(self) -> None:
        while self.orphans:
            slot = self.orphans.popleft()
            if slot.state is not State.EMPTY and slot.state is not State.HELD:
                self._counts["abandoned"] += 1
            for coming in slot.reloads.values():
                # Nobody will read it, but the copy may still write it; compute gets the memory next. A copy that was
                # interrupted has no token yet: a new one, on the same stream, covers it.
                arrived = coming.arrived or self._record(H2D)
                slot.read = later_of(slot.read, arrived)
                self._wait_to_free(coming.home, arrived, Edge.ABANDONED)
                if self.log is not None:
                    self.log.abandoned(slot.name, coming.resource)
            slot.reloads.clear()
            if slot.state is State.LEAVING:
                # As above, for the copy that may still read the source.
                self._wait_to_free(slot.home, slot.departed or self._record(D2H), Edge.ABANDONED)
                if self.log is not None:
                    self.log.dropped(slot.name)
                slot.source = slot.watch = None  # not spoiled: the release never came, so others may be using it
            slot.act(Act.ABANDON)  # a source in the queue stays there
            self._counts["slots"] -= 1
            if slot.block.pageable is not None:
                # This memory goes back to the system at once, and a copy may still be touching it.
                self.device.synchronize_copies()
            self.pool.give(slot.block, after=slot.read)

    def _record(self, stream: str) -> Token:
        token = Token(next(self._serials), self.device.record(stream))
        if self.log is not None:
            self.log.record(stream, token.serial)
        return token

    def _wait(self, stream: str, token: Token, edge: Edge) -> None:
        if stream == COMPUTE and edge is not Edge.SEEN:
            self._stalls.expect(token.native)
        self.device.wait(stream, token.native)
        if self.log is not None:
            self.log.wait(stream, token.serial, why=edge.value)

    def _wait_to_free(self, home: object, token: Token, edge: Edge) -> None:
        self._wait(COMPUTE, token, edge)
        self._wait_at_home(home, token)

    def _wait_at_home(self, home: object, token: Token) -> None:
        # Memory goes back to the stream that it was allocated on, which need not be the one that is current now: another
        # thread may be calling, or backward may run on a stream of its own.
        if home != self.device.compute_stream():
            self.device.wait_on(home, token.native)


def runtime_of(host: torch.Tensor) -> Runtime | None:
    """Return the runtime whose slot `host` lives in; None for any other memory."""
    owner = find_owner(host)
    return owner.runtime if owner is not None and isinstance(owner.runtime, Runtime) else None


def _made(token: Token | None, slot: Slot) -> Token:
    if token is None:
        raise SlotError(
            f"a copy of slot {slot.name} was interrupted while it was being started; the slot cannot be used"
        )
    return token


def _close(device: Any, pool: PinnedPool) -> None:
    # Copies may still touch the host memory, and device memory that went with the runtime.
    device.synchronize_copies()
    pool.close()
