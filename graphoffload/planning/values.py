"""Facts: what is known about a training graph before anything is decided or rewritten.

Pure data. A *saved value* is a tensor that crosses from forward to backward; a *storage* is memory that one or more
values share, and is what moves and what is counted; a *step* is one node of the forward or of the backward graph.

Positions: forward step `i` has position `i`; backward step `j` has position `len(facts.forward) + j`. Position -1 is
"before forward begins". A life `[born, dies]` is inclusive at both ends: memory is there while step `dies` runs and is
gone when step `dies + 1` starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

Size = int | str
"""A size: an int, or, where it is symbolic, the text of its sympy expression."""


@dataclass(frozen=True)
class Step:
    """Describe one node of the timeline.

    `flops` counts multiply and add separately. `nbytes` is the traffic through device memory (reads plus writes), already
    aware of fusion when the downstream compiler fuses. `seconds` is a measured time, or None to estimate by the roofline.
    A step with neither flops nor traffic (a view, a getitem) launches nothing and is estimated to take no time.
    """

    name: str
    op: str
    flops: int = 0
    nbytes: int = 0
    dtype: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class Value:
    """Describe one saved value: a tensor that crosses from forward to backward.

    `name` is its node in the forward graph. `nbytes` is its own extent, `storage_nbytes` that of the storage it lives in;
    None where the size is unknown before running. `birth`, `last_forward_use`, `first_backward_use` are positions, None
    where unknown (eager). `tag` is the name of the `CheckpointPolicy` member the user's code put on it. `label` is the
    name the user gave it.
    """

    name: str
    storage: str
    op: str
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    storage_offset: Size
    dtype: str
    nbytes: int | None
    storage_nbytes: int | None
    nbytes_expr: str | None = None
    module_path: str = ""
    source: str = ""
    label: str = ""
    region: int | None = None
    tag: str | None = None
    birth: int | None = None
    last_forward_use: int | None = None
    first_backward_use: int | None = None


@dataclass(frozen=True)
class Storage:
    """Describe the memory that one or more saved values share: the unit that moves and that is counted.

    `name` is the forward node that made the memory. `carrier` is the forward node whose tensor covers all members and
    which an offload would read; it exists once step `carried_at` has run. `last_forward_use` counts uses through views.
    All four times are positions (see the module). `immovable` holds every reason why it may not move; empty: it may.

    `held`: the caller holds this memory too (a parameter, an input or an output that is also saved, or a view of one), so
    it lives from `birth` (-1 where it was there before forward) through the last position, whatever the plan does. A held
    storage is always immovable. Its memory appears here only, never in `Facts.buffers` as well.
    """

    name: str
    nbytes: int | None
    dtype: str
    device: str
    members: tuple[str, ...]
    carrier: str
    birth: int
    carried_at: int
    last_forward_use: int
    first_backward_use: int
    last_backward_use: int
    nbytes_expr: str | None = None
    immovable: tuple[str, ...] = ()
    held: bool = False


@dataclass(frozen=True)
class Buffer:
    """Describe the life on the device of one storage that is *not* a saved value.

    `kind` is one of "parameter", "input", "output", "gradient", "tangent", "transient".
    """

    name: str
    nbytes: int
    kind: str
    born: int
    dies: int


@dataclass(frozen=True)
class Facts:
    """Hold all that planning may know about one (forward, backward) pair.

    `values` and `storages` are in order of birth; every value's `storage` names one of `storages`, and every storage lists
    its values in `members`. `buffers` are all other lives: memory is in `storages` or in `buffers`, never in both, so that
    the sum of all lives counts every byte once. A life that the caller ends at an unknown time (parameters, inputs,
    outputs, gradients of leaves) dies at the last position. `recomputed_nbytes` counts the storages that backward computes
    again rather than reads. `fused` says whether the downstream compiler fuses (it affects `Step.nbytes` and `buffers`).
    """

    values: tuple[Value, ...]
    storages: tuple[Storage, ...]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    buffers: tuple[Buffer, ...] = ()
    recomputed_nbytes: int = 0
    device: str = ""
    fused: bool = False

    @cached_property
    def value_by_name(self) -> dict[str, Value]:
        """Map a value's name to the value."""
        return {value.name: value for value in self.values}

    @cached_property
    def storage_by_name(self) -> dict[str, Storage]:
        """Map a storage's name to the storage."""
        return {storage.name: storage for storage in self.storages}

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """List forward then backward steps; the index is the position."""
        return self.forward + self.backward

    @cached_property
    def forward_index(self) -> dict[str, int]:
        """Map a forward step's name to its index, which is its position."""
        return {step.name: index for index, step in enumerate(self.forward)}

    @cached_property
    def backward_index(self) -> dict[str, int]:
        """Map a backward step's name to its index in backward (a recomputed node has its forward name there too)."""
        return {step.name: index for index, step in enumerate(self.backward)}
