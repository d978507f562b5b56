"""Write a program as Python source, line by line, and make the module that runs it."""

from __future__ import annotations

import functools
import linecache
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

SEQ, WIDTH, VOCABULARY = 3, 4, 6
"""The sizes of a program beside its batch; batches differ from them, so that no dynamic size is equal to one by chance."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Step:
    """Do one thing: `kind` is a key of `KINDS`, `pick` and `other` count back from the newest value, `variant` is a flavour."""

    kind: str
    pick: int = 0
    other: int = 0
    variant: int = 0
    body: tuple[Step, ...] = ()


class Holder:
    """Stand for the module while its program is written."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


@dataclass
class Writer:
    """Write a program line by line; each line is also run on small tensors, so that the next one knows every shape."""

    namespace: dict[str, Any]
    dtype: torch.dtype
    lines: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=lambda: ["x"])
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    buffers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    norms: dict[str, int] = field(default_factory=dict)
    indent: str = "    "
    count: int = 0

    @property
    def text(self) -> str:
        return "\n".join(["def forward(self, x, ids, state):", *self.lines, ""])

    def line(self, text: str) -> None:
        self.lines += [self.indent + part for part in text.splitlines()]
        exec(text, GLOBALS, self.namespace)

    def name(self) -> str:
        self.count += 1
        return f"v{self.count - 1}"

    def new(self, expression: str) -> str:
        """Write `v = expression` and make it a value that later steps may pick."""
        name = self.name()
        self.line(f"{name} = {expression}")
        self.values.append(name)
        return name

    def pick(self, back: int) -> str:
        return self.values[-1 - back % len(self.values)]

    def of(self, name: str) -> torch.Tensor:
        return self.namespace[name]  # type: ignore[no-any-return]

    def like(self, name: str, back: int) -> str:
        """Return an expression that broadcasts with `name` in its dtype: another value, or the mean of one."""
        mine, other = self.of(name), self.pick(back)
        expression = other if self.of(other).shape == mine.shape else f"{other}.mean()"
        return self.cast(expression, self.of(other).dtype, mine.dtype)

    def cast(self, expression: str, have: torch.dtype, want: torch.dtype) -> str:
        return expression if have == want else f"{expression}.to({want})"

    def rank3(self, name: str) -> str:
        """Return an expression of `name` as [batch, sequence, width], whatever its rank."""
        rank = self.of(name).dim()
        if rank <= 2:
            return f"{name}.unsqueeze(1)" if rank == 2 else f"{name}.reshape(-1, 1, 1)"
        return name if rank == 3 else f"{name}.flatten(1, -2)"

    def rows(self, name: str) -> str:
        """Return an expression of `name` as [rows, width]."""
        rank = self.of(name).dim()
        return name if rank == 2 else f"{name}.reshape(-1, 1)" if rank < 2 else f"{name}.flatten(0, -2)"

    def width(self, name: str) -> int:
        return self.of(name).shape[-1] if self.of(name).dim() > 1 else 1

    def parameter(self, shape: tuple[int, ...], choice: int, dtype: torch.dtype) -> str:
        """Return a parameter of this shape: one that is in use already (tied weights), or a new one."""
        tied = [name for name, other in self.parameters.items() if other == shape]
        if choice % (len(tied) + 1) < len(tied):
            return self.cast(f"self.{tied[choice % (len(tied) + 1)]}", self.dtype, dtype)
        name = f"w{len(self.parameters)}"
        self.parameters[name] = shape
        value = torch.full(shape, 0.25, dtype=self.dtype, requires_grad=True)
        setattr(self.namespace["self"], name, value)
        return self.cast(f"self.{name}", self.dtype, dtype)

    def buffer(self, shape: tuple[int, ...]) -> str:
        name = f"b{len(self.buffers)}"
        self.buffers[name] = shape
        setattr(self.namespace["self"], name, torch.full(shape, 0.25, dtype=self.dtype))
        return f"self.{name}"

    def norm(self, channels: int) -> str:
        name = f"bn{len(self.norms)}"
        self.norms[name] = channels
        setattr(self.namespace["self"], name, nn.BatchNorm1d(channels).to(self.dtype))
        return f"self.{name}"

    def module(self) -> nn.Module:
        filename = f"<program {abs(hash(self.text)):x}>"
        linecache.cache[filename] = (len(self.text), None, self.text.splitlines(keepends=True), filename)
        scope = dict(GLOBALS)
        exec(compile(self.text, filename, "exec"), scope)
        made: nn.Module = type("Generated", (nn.Module,), {"forward": scope["forward"]})()
        generator = torch.Generator().manual_seed(len(self.text))
        for name, shape in self.parameters.items():
            made.register_parameter(name, nn.Parameter((torch.randn(shape, generator=generator) / 2).to(self.dtype)))
        for name, shape in self.buffers.items():
            made.register_buffer(name, torch.randn(shape, generator=generator).to(self.dtype))
        for name, channels in self.norms.items():
            made.add_module(name, nn.BatchNorm1d(channels).to(self.dtype))
        return made


def _save_products(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def _save_nothing(_ctx: Any, _op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


GLOBALS: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "checkpoint": checkpoint,
    "save_products": functools.partial(create_selective_checkpoint_contexts, _save_products),
    "save_nothing": functools.partial(create_selective_checkpoint_contexts, _save_nothing),
}
