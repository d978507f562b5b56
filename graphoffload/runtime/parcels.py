"""The values that autograd gets in place of tensors: kept ones that watch over changes, and shares of a parcel that moves.

A *parcel* is one storage, or the part of it that a small view shows, on its way to the host and back. It owns the host
tensor, and so the slot; every packed value on that storage holds the parcel, and nothing else does. There is no table of
what is packed: when autograd drops the last value, by running backward, by dropping the graph, or by an exception, the
parcel and its slot go with it.

What comes back lives in ordinary memory of the compute stream: whoever holds a tensor on it, autograd, a gradient that is a
view of it, or the user, keeps it, and the allocator gives it to nobody else before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from graphoffload._torch import StorageWeakRef, disable_dispatch_modes, dispatch_modes_are_active
from graphoffload.errors import SlotError
from graphoffload.runtime.device import extent_nbytes
from graphoffload.runtime.foresight import Episode as AnyEpisode
from graphoffload.runtime.room import Moment, Room
from graphoffload.runtime.slots import Slot, Watch, find_owner

_WHOLE = 4
"""A view moves its whole storage if it shows at least one part in this many of it; the views that follow then come along."""
_ALIGNMENT = 512
"""Parts begin at multiples of this, so that a tensor keeps its alignment, on which kernels choose how to compute."""


Episode: TypeAlias = "AnyEpisode[Parcel, Moment]"


class Kept:
    """Hold a tensor that stays, and see at unpack whether it was changed in place: hooks switch autograd's own check off.

    What has a history is held detached, for autograd would never free a value that holds itself; a leaf is held as it is,
    as autograd does without hooks. `place`: where in the episode it was packed, for a large one that was not unpacked yet.
    """

    __slots__ = ("__weakref__", "episode", "maker", "place", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, *, episode: Episode | None, place: int | None) -> None:
        maker = tensor.grad_fn
        self.maker = None if maker is None else f"output {tensor.output_nr} of {maker.name()}"
        self.tensor = tensor if maker is None else tensor.detach()
        self.version = tensor._version
        self.episode = episode
        self.place = place

    def get(self) -> torch.Tensor:
        """Return the tensor; raise what autograd raises if it was changed in place."""
        if self.tensor._version != self.version:
            what = f"{self.tensor.type()} {list(self.tensor.shape)}"
            raise changed_in_place(what, self.version, self.tensor._version, self.maker)
        return self.tensor


class Share:
    """Hold a parcel, and say which tensor on it was packed."""

    __slots__ = (
        "came",
        "dtype",
        "episode",
        "is_conj",
        "is_neg",
        "maker",
        "offset",
        "parcel",
        "place",
        "rebuild",
        "size",
        "stride",
    )

    def __init__(
        self,
        parcel: Parcel,
        tensor: torch.Tensor,
        *,
        episode: Episode,
        place: int,
        rebuild: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        maker = tensor.grad_fn
        self.maker = None if maker is None else f"output {tensor.output_nr} of {maker.name()}"
        self.parcel = parcel
        self.episode = episode
        self.place = place
        self.rebuild = rebuild
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset() - parcel.begin // tensor.element_size()
        self.is_conj = tensor.is_conj()
        self.is_neg = tensor.is_neg()
        self.came = False
        parcel.awaited += 1

    def changed_in_place(self) -> RuntimeError:
        """Return the error for a source that was changed before its copy had ended."""
        watch = self.parcel.watch
        like = torch.empty(0, dtype=self.dtype, device=self.parcel.room.runtime.device.device)
        return changed_in_place(f"{like.type()} {list(self.size)}", watch.version, watch.now(), self.maker)

    def on(self, memory: torch.Tensor) -> torch.Tensor:
        """Return this tensor on the parcel's bytes: the size, stride, offset, type and lazy bits that were packed."""
        # By views, so that autograd's count of changes in place is one for all shares: see Parcel.take.
        whole = memory.numel() // self.dtype.itemsize * self.dtype.itemsize
        bytes_ = memory.narrow(0, 0, whole).view(self.dtype)
        # Memory that never left still lies in the storage that it is a part of.
        tensor = bytes_.as_strided(self.size, self.stride, bytes_.storage_offset() + self.offset)
        if self.is_conj:
            tensor = tensor.conj()
        if self.is_neg:
            tensor = torch.ops.aten._neg_view.default(tensor)
        return tensor if self.rebuild is None else self.rebuild(tensor)


class Parcel:
    """Move [begin, end) of one storage to the host when made, and bring it back when asked.

    `awaited` counts the shares that were not unpacked yet; the memory that came back is kept here for the others, and let
    go with the last. `ahead`: a reload was started that nobody has asked for.
    """

    __slots__ = (
        "__weakref__",
        "_dest",
        "_guard",
        "_home",
        "_is_ready",
        "_version",
        "ahead",
        "awaited",
        "begin",
        "end",
        "episode",
        "host",
        "identity",
        "place",
        "room",
        "slot",
        "watch",
    )

    def __init__(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        room: Room,
        *,
        watched: tuple[torch.Tensor, ...],
        episode: Episode,
        place: int,
        wait: bool,
    ) -> None:
        """Copy out what the tensor shows, of its whole storage if that is not much more.

        `watched` tell of changes in place: the tensor itself, and what wraps it.
        """
        self.ahead = False  # first, since what is half made ends as well
        self.begin, self.end = _range(tensor, storage.nbytes())
        self.room = room
        self.episode = episode
        self.place = place
        self.watch = Watch.over(*watched)
        # The storage's address must not come to mean another storage while this parcel can be found by it.
        self.identity = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.awaited = 0
        self._dest: torch.Tensor | None = None
        self._home: object = None
        self._is_ready = False
        self._guard: Watch | None = None
        self._version = 0
        runtime = room.runtime
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        flat.set_(storage, self.begin, (self.end - self.begin,), (1,))
        self.host = runtime.offload(flat, "saved", watch=self.watch)
        owner = find_owner(self.host)
        if owner is None:
            raise SlotError("an offloaded storage has no slot")
        self.slot: Slot = owner.slot
        # Others may go on reading the source; it is spoiled only where nobody can.
        runtime.let_go(self.slot, wait=wait, last=False)

    @property
    def nbytes(self) -> int:
        """Count the bytes that move."""
        return self.end - self.begin

    @property
    def is_coming(self) -> bool:
        """Say whether a reload is under way or the memory is back."""
        return self._dest is not None

    def take(self) -> bool:
        """Take hold of the bytes if they are on the device or on their way to the current stream; say whether they are."""
        if self._dest_here() is None:
            self._dest = self.room.runtime.present_source(self.slot)
            self._home, self._is_ready = self.room.runtime.device.compute_stream(), True
            # The program still has this memory, and may change it while other shares wait for it.
            self._guard = self.slot.watch
            self._version = 0 if self._dest is None else self._dest._version
        return self._dest is not None

    def has_source(self) -> bool:
        """Say whether the source is still on the device, unchanged, to be read on the current stream."""
        return self.room.runtime.present_source(self.slot) is not None

    def covers(self, tensor: torch.Tensor, version: int) -> bool:
        """Say whether the tensor, on the same storage, lies inside what moved, as it was then."""
        begin = tensor.storage_offset() * tensor.element_size()
        return self.watch.version == version and self.begin <= begin and begin + extent_nbytes(tensor) <= self.end

    def was_changed(self) -> bool:
        """Say whether the source was changed in place since it was packed."""
        return not self.watch.holds()

    def start(self) -> None:
        """Start the reload."""
        runtime = self.room.runtime
        self._dest = runtime.reload(self.host)
        runtime.device.see("coming", (self._dest,))
        self._home = runtime.device.compute_stream()
        self._is_ready = False
        self._guard, self._version = None, self._dest._version

    def memory(self) -> torch.Tensor:
        """Return the bytes on the device, to be read on the current stream; `take` or `start` came before."""
        if self._dest is None:
            raise SlotError(f"slot {self.slot.name} was asked for before its reload was started")
        if not self._is_ready:
            self.room.runtime.ready(self._dest, self.host)
            self._is_ready = True
        return self._dest

    def _dest_here(self) -> torch.Tensor | None:
        # Memory belongs to the order of one stream: a consumer on another has a reload of its own. So has one that comes
        # after somebody changed the memory in place: what the host holds is what was packed.
        if self._dest is None or self._home != self.room.runtime.device.compute_stream():
            return None
        if self._dest._version != self._version or not (self._guard is None or self._guard.holds()):
            return None
        return self._dest

    def is_torn(self) -> bool:
        """Say whether the source was changed in place while the copy out may have been reading it."""
        return self.slot.torn or not self.slot.is_intact()

    def let_go(self) -> None:
        """Let go of the memory that came back: nobody is waiting for it any more."""
        self._dest = None

    def __del__(self) -> None:
        if self.ahead:
            self.room.given_up.append(self.nbytes)  # only a note: this may run anywhere, under any lock


def _range(tensor: torch.Tensor, storage_nbytes: int) -> tuple[int, int]:
    begin = int(tensor.storage_offset()) * tensor.element_size()
    extent = extent_nbytes(tensor)
    if extent * _WHOLE >= storage_nbytes:
        return 0, storage_nbytes
    return begin // _ALIGNMENT * _ALIGNMENT, begin + extent


def changed_in_place(what: str, saved: int, now: int, maker: str | None) -> RuntimeError:
    """Return autograd's own error for a saved tensor that was changed in place."""
    which = "" if maker is None else f", which is {maker},"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{what}]{which} is at version {now}; expected version {saved} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


@contextlib.contextmanager
def unseen() -> Iterator[Any]:
    """Hide what is done inside from TorchDispatchModes of the program: our copies are not part of it."""
    if dispatch_modes_are_active():
        with disable_dispatch_modes():
            yield
    else:
        yield
