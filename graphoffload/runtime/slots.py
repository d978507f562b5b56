"""Hold one storage's host memory, and say what may happen to it next.

Theory of operation. A slot is born EMPTY when its host memory is taken. *Offload* starts the copy out (LEAVING); the slot
keeps the source alive, since the copy reads it. The *release* of the source either waits for the copy and lets go (HELD),
or hands the source to the runtime's queue (HANDED_OVER), which *drops* it once a wait has made that safe. A *reload* makes
the slot COMING until the *ready* of the last reload under way; several may be under way at once, since a graph may be run
backward twice. A reload may start before the source was dropped: the slot is CROSSING then, and its first ready drops the
source, for that wait covers the copy out as well. When nobody can reach the host tensor any more the slot is
*abandoned*: EMPTY at once, or, while the queue still holds the source, ADRIFT until that is dropped.

The table below is all there is; anything else is our fault and raises `SlotError`.

Ownership. The host tensor's storage owns the slot: the storage was made from a ctypes array over the slot's memory, torch
keeps the array, the array keeps a `SlotOwner`, and so the slot is abandoned exactly when the last tensor on that memory
goes. The only way from a tensor back to its slot is a process-wide *weak* map from address to owner, whose entries end with
the memory they name.
"""

from __future__ import annotations

import ctypes
import enum
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch

from graphoffload.errors import SlotError
from graphoffload.runtime.memory import Block, Token


class State(enum.Enum):
    """Name what a slot is doing."""

    __hash__ = object.__hash__  # members are singletons; the inherited one costs a call in Python

    EMPTY = "empty"
    LEAVING = "leaving"
    HANDED_OVER = "handed over"
    HELD = "held"
    CROSSING = "crossing"
    COMING = "coming"
    ADRIFT = "adrift"


class Act(enum.Enum):
    """Name what can happen to a slot."""

    __hash__ = object.__hash__

    OFFLOAD = "offload"
    RELEASE = "release"
    HAND_OVER = "hand over"
    DROP = "drop"
    RELOAD = "reload"
    READY = "ready"
    LAST_READY = "last ready"
    ABANDON = "abandon"


TABLE: dict[tuple[State, Act], State] = {
    (State.EMPTY, Act.OFFLOAD): State.LEAVING,
    (State.LEAVING, Act.RELEASE): State.HELD,
    (State.LEAVING, Act.HAND_OVER): State.HANDED_OVER,
    (State.HANDED_OVER, Act.DROP): State.HELD,
    (State.HANDED_OVER, Act.RELOAD): State.CROSSING,
    (State.HELD, Act.RELOAD): State.COMING,
    (State.CROSSING, Act.RELOAD): State.CROSSING,
    (State.CROSSING, Act.DROP): State.COMING,
    (State.COMING, Act.RELOAD): State.COMING,
    (State.COMING, Act.READY): State.COMING,
    (State.COMING, Act.LAST_READY): State.HELD,
    # The host tensor may go at any time: backward is never called, or somebody raised.
    (State.EMPTY, Act.ABANDON): State.EMPTY,
    (State.LEAVING, Act.ABANDON): State.EMPTY,
    (State.HELD, Act.ABANDON): State.EMPTY,
    (State.COMING, Act.ABANDON): State.EMPTY,
    (State.HANDED_OVER, Act.ABANDON): State.ADRIFT,
    (State.CROSSING, Act.ABANDON): State.ADRIFT,
    (State.ADRIFT, Act.DROP): State.EMPTY,
}


def version_of(*tensors: torch.Tensor) -> int:
    """Count the changes in place that autograd knows of, over all the given tensors; it only grows."""
    return sum(tensor._version for tensor in tensors)


@dataclass(frozen=True, slots=True)
class Watch:
    """Tell whether a source was changed in place since it was saved: autograd counts such changes.

    `probes` share the counters of the source and of what wraps it, but hold none of its memory, so they may live on after it
    was let go. The version is the sum of the counts, which only grows.
    """

    probes: tuple[torch.Tensor, ...]
    version: int

    @classmethod
    def over(cls, *tensors: torch.Tensor) -> Watch:
        """Watch over these tensors from now on."""
        return cls(tuple(_probe(tensor) for tensor in tensors), version_of(*tensors))

    def now(self) -> int:
        """Return the present version."""
        return version_of(*self.probes)

    def holds(self) -> bool:
        """Say whether nobody has changed the source since."""
        return self.now() == self.version


def _probe(tensor: torch.Tensor) -> torch.Tensor:
    probe = tensor.detach()
    if type(tensor) is torch.Tensor:  # a wrapper has no memory of its own, and what it wraps is watched as well
        probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe


@dataclass(slots=True)
class Reload:
    """Describe one reload under way: the memory being written, its compute stream, and the token of the copy."""

    dest: torch.Tensor
    resource: str
    home: object
    arrived: Token | None = None


@dataclass(eq=False, slots=True)
class Slot:
    """Hold the host memory of one storage, and everything that its copies under way still touch.

    `source` is kept until the copy out has ended, each `Reload.dest` until its copy in has: an exception between two
    operators must not free memory that a copy stream is using. `departed` is the token of the copy out. `read` is the
    latest copy out of the slot's memory; whoever uses the memory next waits for it. `home` is the compute stream in whose
    order the source's memory is used again. `spoils`: nobody reads the source after its release, so what is there then may
    be overwritten. `watch`, where given, tells whether the source was changed while the copy was under way: then the slot is
    `torn`, for nobody knows which bytes it holds.
    """

    name: str
    block: Block
    home: object
    state: State = State.EMPTY
    source: torch.Tensor | None = None
    departed: Token | None = None
    read: Token | None = None
    reloads: dict[int, Reload] = field(default_factory=dict)
    reload_count: int = 0
    spoils: bool = True
    watch: Watch | None = None
    source_version: int = 0
    torn: bool = False

    def is_intact(self) -> bool:
        """Say whether nobody is known to have changed the source, by itself or through the alias that was read from."""
        unwatched = self.watch is None or self.source is None
        return unwatched or (self.watch.holds() and self.source._version == self.source_version)  # type: ignore[union-attr]

    @property
    def nbytes(self) -> int:
        """Count the bytes that the slot holds."""
        return self.block.nbytes

    def act(self, act: Act) -> None:
        """Move to the state that the table gives; raise `SlotError` if it gives none."""
        state = TABLE.get((self.state, act))
        if state is None:
            raise SlotError(f"slot {self.name} is {self.state.value}: it cannot do {act.value!r}")
        self.state = state

    def allows(self, act: Act) -> bool:
        """Say whether the table has an answer for `act`."""
        return (self.state, act) in TABLE


class SlotKeeper(Protocol):
    """Name what a slot's owner needs of the runtime."""

    orphans: deque[Slot]

    def settle(self, slot: Slot) -> None:
        """Make the host wait until the copy into `slot` has ended."""


class SlotOwner:
    """Live as long as the storage of the host tensor does, and report the end to the runtime.

    It keeps the runtime, and so the pool that the memory belongs to, alive.
    """

    __slots__ = ("__weakref__", "runtime", "slot")

    def __init__(self, runtime: SlotKeeper, slot: Slot) -> None:
        self.runtime = runtime
        self.slot = slot

    def __del__(self) -> None:
        # This runs wherever the last reference goes: in any thread, inside garbage collection, under our own lock. So it
        # only leaves a note (appending to a deque is atomic); the runtime acts on it at its next call.
        self.runtime.orphans.append(self.slot)


_OWNERS: weakref.WeakValueDictionary[int, SlotOwner] = weakref.WeakValueDictionary()


def make_host_tensor(owner: SlotOwner, *, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a CPU tensor over the slot's memory, with size, stride and dtype of `like`, and its bytes."""
    block = owner.slot.block
    memory = (ctypes.c_char * block.nbytes).from_address(block.address)
    memory.owner = owner  # type: ignore[attr-defined]
    _OWNERS[block.address] = owner
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    host = torch.empty(0, dtype=like.dtype, device="cpu").set_(flat.untyped_storage(), 0, like.size(), like.stride())
    return host, flat


def find_owner(host: torch.Tensor) -> SlotOwner | None:
    """Return the owner of the slot that `host` lives in; None for any other memory."""
    # An address can only be found while a tensor on that memory is alive, and then it is the slot's: the entry ends with
    # the last such tensor, and the memory is not used again, nor returned to the system, before that was noted.
    return _OWNERS.get(host.untyped_storage().data_ptr())


def is_slot(tensor: torch.Tensor) -> bool:
    """Say whether the tensor lives in a slot."""
    return find_owner(tensor) is not None
