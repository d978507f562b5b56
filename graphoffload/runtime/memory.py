"""Name host memory: chunks that are pinned in one go, blocks that slots live in, and the copies to wait for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Token:
    """Name a point on a stream; `serial` rises in the order of recording."""

    serial: int
    native: object


def later_of(one: Token | None, two: Token | None) -> Token | None:
    """Return the later of two tokens of one stream; it implies the earlier."""
    if one is None or two is None:
        return one or two
    return one if one.serial >= two.serial else two


@dataclass(frozen=True, slots=True)
class Chunk:
    """Describe host memory that was pinned in one go; `owner` keeps it alive where torch owns it."""

    address: int
    nbytes: int
    owner: object = None


class ChunkSource(Protocol):
    """Name the operations that the pool needs of whoever provides host memory."""

    def grow(self, nbytes: int, *, after: int | None) -> Chunk | None:
        """Return pinned memory of at least `nbytes`, directly behind address `after` if that can be; None: it failed."""

    def shrink(self, chunk: Chunk) -> None:
        """Give a chunk back."""

    def close(self) -> None:
        """Give everything back that is not a chunk any more."""


@dataclass(slots=True)
class Block:
    """Describe the host memory of one slot: `nbytes` at `address`.

    `size` is what it takes from the pool. `after` is the last copy out of this memory by an earlier slot, which the first
    copy into it has to wait for. `pageable` owns the memory when it is not the pool's.
    """

    address: int
    nbytes: int
    size: int
    cuts: tuple[int, ...] = ()
    after: Token | None = None
    pageable: torch.Tensor | None = None
