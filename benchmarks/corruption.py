"""Overwrite memory as soon as it is freed: between the modules of forward and between the nodes of backward.

At each place blocks of the sizes that were last in use are allocated on the compute stream, filled with NaN and freed, so
that memory which a copy or a later node still needs, and which was given back too early, is seen to be wrong at once.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

SMALL_SIZES = (512, 4096, 65536, 1 << 20)


class Corruptor:
    """Fill freed memory with NaN. `seed` fixes which sizes are taken at each place."""

    def __init__(self, device: torch.device, *, seed: int, blocks: int = 2, most_sizes: int = 6) -> None:
        self.places = 0
        self._device = device
        self._chance = random.Random(seed)
        self._blocks = blocks
        self._sizes: deque[int] = deque(maxlen=most_sizes)

    def see(self, tensors: Iterable[object]) -> None:
        """Note the sizes of tensors: blocks of these sizes are freed soon."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.device == self._device:
                nbytes = tensor.untyped_storage().nbytes()
                if nbytes and nbytes not in self._sizes:
                    self._sizes.append(nbytes)

    def strike(self) -> None:
        """Allocate, fill and free. All blocks are held at one time, so that they are different memory."""
        self.places += 1
        sizes = [*self._sizes, self._chance.choice(SMALL_SIZES)]
        sizes = self._chance.sample(sizes, k=max(1, len(sizes) - 1))
        blocks = [
            torch.empty(nbytes, dtype=torch.uint8, device=self._device) for nbytes in sizes for _ in range(self._blocks)
        ]
        for block in blocks:
            block.fill_(0xFF)  # NaN in every floating point format that has one

    @contextlib.contextmanager
    def between_modules(self) -> Iterator[None]:
        """Strike after every module that runs inside the block, also where backward recomputes."""

        def after(_module: nn.Module, _inputs: object, output: object) -> None:
            self.see(_flat(output))
            self.strike()

        handle = nn.modules.module.register_module_forward_hook(after)
        try:
            yield
        finally:
            handle.remove()

    def between_nodes(self, root: torch.Tensor) -> None:
        """Strike before and after every node of the backward that starts at `root`."""

        def before(gradients: tuple[Any, ...]) -> None:
            self.see(gradients)
            self.strike()

        def after(inputs: tuple[Any, ...], _outputs: tuple[Any, ...]) -> None:
            self.see(inputs)
            self.strike()

        for node in _nodes(root):
            node.register_prehook(before)
            node.register_hook(after)


def _nodes(root: torch.Tensor) -> list[Any]:
    """Return the nodes of a graph, without those that only add to a leaf's gradient."""
    found: dict[Any, None] = {}
    waiting: list[Any] = [root.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found and not hasattr(node, "variable"):
            found[node] = None
            waiting.extend(following for following, _ in node.next_functions)
    return list(found)


def _flat(output: object) -> list[object]:
    if isinstance(output, dict):
        output = tuple(output.values())
    return list(output) if isinstance(output, (tuple, list)) else [output]
