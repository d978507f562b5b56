"""A small language of training programs, written out as Python source.

A program is a flat list of `Step`s. A step names its operands by small numbers, resolved against the values that are there
when it is written, so every list of steps is a program. The source is what is compiled and what a failure shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from program_kinds import KINDS
from program_writer import DTYPES, SEQ, VOCABULARY, WIDTH, Holder, Step, Writer
from torch import nn

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Program:
    """Hold one program.

    `outputs` are pairs (pick, flavour) of what is returned beside the sum of the newest value that has a gradient.
    `dynamic` asks to compile it with symbolic sizes. `input_grad` says whether the
    float input requires a gradient, as in the middle of a network, or does not, as at its start.
    """

    steps: tuple[Step, ...]
    outputs: tuple[tuple[int, int], ...] = ()
    dtype: str = "float32"
    batch: int = 2
    dynamic: bool = False
    input_grad: bool = True

    @cached_property
    def writer(self) -> Writer:
        """Write the program, once."""
        x, ids, state = self.inputs()
        namespace = {"self": Holder(x.dtype), "x": x, "ids": ids, "state": state}
        writer = Writer(namespace, dtype=x.dtype)
        if not self.input_grad:
            writer.new(f"x + {writer.parameter((WIDTH,), 0, x.dtype)}")
        for step in self.steps:
            KINDS[step.kind](writer, step)
        outputs = [_output(writer, *output) for output in self.outputs]
        # A program that has no gradient would say nothing about saved values.
        outputs.append(_trained(writer))
        writer.lines.append(f"    return ({', '.join(outputs)},)")
        return writer

    @property
    def source(self) -> str:
        """Return the text of the program's `forward(self, x, ids, state)`."""
        return self.writer.text

    @property
    def kinds(self) -> frozenset[str]:
        """Return the kinds of the steps, those inside regions too."""
        return frozenset(_kinds(self.steps))

    def module(self) -> nn.Module:
        """Make the module, always with the same parameters and buffers."""
        return self.writer.module()

    def inputs(self, *, batch: int | None = None) -> Inputs:
        """Make the inputs (x, ids, state), always the same for one batch size."""
        batch = batch or self.batch
        generator = torch.Generator().manual_seed(batch)
        shape = (batch, SEQ, WIDTH)
        x = torch.randn(shape, generator=generator).to(DTYPES[self.dtype]).requires_grad_(self.input_grad)
        ids = torch.randint(VOCABULARY, shape[:2], generator=generator)
        return x, ids, torch.randn(shape, generator=generator).to(x.dtype)


def _kinds(steps: tuple[Step, ...]) -> Iterator[str]:
    for step in steps:
        yield step.kind
        yield from _kinds(step.body)


def _output(w: Writer, back: int, flavour: int) -> str:
    name = w.pick(back)
    if name == "x":
        return "x * 1"
    rank = w.of(name).dim()
    flavours = (
        name,
        f"{name}[..., :1]" if rank else name,
        f"{name}.transpose(0, -1)" if rank else name,
        f"{name} > 0",
        f"{name}.sum()",
    )
    return flavours[flavour % len(flavours)]


def _trained(w: Writer) -> str:
    """Return a scalar of the newest value that has a gradient, through operators that save something."""
    return next(f"{name}.sin().square().sum()" for name in reversed(w.values) if w.of(name).requires_grad)
