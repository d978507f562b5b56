"""A small language of training programs, written out as Python source.

A program is a flat list of `Step`s. A step names its operands by small numbers, resolved against the values that are there
when it is written, so every list of steps is a program. The source is what is compiled and what a failure shows.
"""

from __future__ import annotations

import functools
import linecache
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

SEQ, WIDTH, VOCABULARY = 3, 4, 6
"""The sizes of a program beside its batch; batches differ from them, so that no dynamic size is equal to one by chance."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """Do one thing: `kind` is a key of `KINDS`, `pick` and `other` count back from the newest value, `variant` is a flavour."""

    kind: str
    pick: int = 0
    other: int = 0
    variant: int = 0
    body: tuple[Step, ...] = ()


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
        namespace = {"self": _Holder(x.dtype), "x": x, "ids": ids, "state": state}
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

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__dataclass_fields__)
        return f"Program({fields})\n{self.source}"


def _kinds(steps: tuple[Step, ...]) -> Iterator[str]:
    for step in steps:
        yield step.kind
        yield from _kinds(step.body)


class _Holder:
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


# ---------------------------------------------------------------------------------------------------------------------
# The kinds of steps. Within each, variant 0 is the simplest.
# ---------------------------------------------------------------------------------------------------------------------

UNARY = ("sin", "relu", "sigmoid", "tanh", "cos", "abs", "square", "neg")
BINARY = (
    "{a} + {b}",
    "{a} * {b}",
    "{a} - {b}",
    "{a} / ({b}.abs() + 1)",
    "torch.maximum({a}, {b})",
    "torch.addcmul({a}, {b}, {b})",
)


def _unary(w: Writer, step: Step) -> None:
    w.new(f"{w.pick(step.pick)}.{UNARY[step.variant % len(UNARY)]}()")


def _binary(w: Writer, step: Step) -> None:
    name = w.pick(step.pick)
    w.new(BINARY[step.variant % len(BINARY)].format(a=name, b=w.like(name, step.other)))


def _linear(w: Writer, step: Step) -> None:
    name = w.pick(step.pick)
    dtype, wide = w.of(name).dtype, w.width(name)
    rows = name if w.of(name).dim() > 1 else w.rows(name)
    if step.variant % 3 == 0:
        w.new(f"F.linear({rows}, {w.parameter((WIDTH, wide), step.other, dtype)})")
    elif step.variant % 3 == 1:
        w.new(f"{rows} @ {w.parameter((wide, WIDTH), step.other, dtype)}")
    else:
        weight = w.parameter((WIDTH, wide), step.other, dtype)
        w.new(f"F.linear({rows}, {weight}, {w.parameter((WIDTH,), step.other, dtype)})")


def _product(w: Writer, step: Step) -> None:
    name = w.new(w.rank3(w.pick(step.pick)))
    if step.variant % 2 == 0:
        w.new(f"{name}.transpose(-1, -2) @ {name} / 8")
    else:
        w.new(
            f"F.scaled_dot_product_attention({name}.unsqueeze(1), {name}.unsqueeze(1), {name}.unsqueeze(1)).squeeze(1)"
        )


def _view(w: Writer, step: Step) -> None:
    name = w.pick(step.pick)
    value = w.of(name)
    if value.dim() < 2:
        w.new(f"{name}.reshape(-1, 1)")
    elif value.dim() == 2:
        flavours = (
            "{v}.unsqueeze(1)",
            "{v}[:, 1:]" if value.shape[1] > 1 else "{v}.unsqueeze(-1)",
            "{v}.t().mul(2).t()",
        )
        w.new(flavours[step.variant % len(flavours)].format(v=name))
    else:
        end = "{v}.transpose(-1, -2)"
        flavours = (
            end,
            "{v}.reshape({v}.shape[0], -1)",
            "{v}[..., 1:]" if value.shape[-1] > 1 else end,
            "{v}[:, ::2]",
            "{v}.flatten(0, 1)",
            "{v}[..., :1].expand(*[-1] * ({v}.dim() - 1), 4)",
            "{v}.unsqueeze(1).expand(-1, 2, *[-1] * ({v}.dim() - 1))" if value.dim() < 4 else end,
            "F.pad({v}, (0, 2))[..., :-2]",
        )
        w.new(flavours[step.variant % len(flavours)].format(v=name))


def _parts(w: Writer, step: Step) -> None:
    name = w.new(w.rank3(w.pick(step.pick)))
    wide, long = w.of(name).shape[-1], w.of(name).shape[1]
    if step.variant % 3 == 0 and wide > 1:
        first, second = w.name(), w.name()
        w.line(f"{first}, {second} = {name}.split([1, {wide - 1}], -1)")
    elif step.variant % 3 == 1 and long > 1:
        first, second = w.name(), w.name()
        w.line(f"{first}, {second} = {name}.chunk(2, 1)")
    else:
        first = second = w.name()
        w.line(f"{first} = {name}.unbind(1)[-1]")
    w.values += sorted({first, second})


def _inplace(w: Writer, step: Step) -> None:
    name = w.pick(step.pick)
    made = w.new(f"{name} + {w.like(name, step.other)}")
    other = w.like(made, 1 + step.other % max(1, len(w.values) - 1))  # never itself: eager refuses that, and rightly
    flavours = (
        f"{made}.add_({other})",
        f"{made}.mul_({other})",
        f"{made}[..., :1].add_(1)" if w.of(made).dim() else f"{made}.add_(1)",
        f"{made}.copy_({other} * 2)",
        f"{made}.view(-1)[:1].zero_()",
        f"{made}.relu_()",
    )
    w.line(flavours[step.variant % len(flavours)])


def _state(w: Writer, step: Step) -> None:
    name = w.pick(step.pick)
    shape = tuple(w.of(name).shape)
    if step.variant % 4 == 0 and w.of(name).dim() == 3 and shape[1:] == (SEQ, WIDTH) and w.of(name).dtype == w.dtype:
        w.new(f"{name} + state")
        w.line(f"state.copy_({name}.detach())")
    elif step.variant % 4 == 1:
        w.new(f"{name} * state.clone().mean().to({name}.dtype)")
        w.line("state[:, :1].mul_(0.5)")
    elif step.variant % 4 == 2:
        buffer = w.buffer(())
        w.new(f"{name} * {buffer}.clone().to({name}.dtype)")
        w.line(f"{buffer}.copy_({name}.detach().mean())")
    else:
        buffer = w.buffer(shape[-1:])
        w.new(f"{name} + {buffer}.to({name}.dtype)")
        w.line(f"{buffer}.add_(1)")


def _norm(w: Writer, step: Step) -> None:
    name = w.pick(step.pick)
    wide, dtype = w.width(name), w.of(name).dtype
    rows = name if w.of(name).dim() > 1 else w.rows(name)
    if step.variant % 3 == 0:
        w.new(f"F.softmax({rows}, -1)")
    elif step.variant % 3 == 1:
        weight, bias = w.parameter((wide,), step.other, dtype), w.parameter((wide,), step.other + 1, dtype)
        w.new(f"F.layer_norm({rows}, ({wide},), {weight}, {bias})")
    else:
        w.new(f"F.log_softmax({rows}, -1)")


def _batch_norm(w: Writer, step: Step) -> None:
    name = w.pick(step.pick)
    rows = w.cast(w.rows(name), w.of(name).dtype, w.dtype)
    w.new(f"{w.norm(w.width(name))}({rows})")


def _dropout(w: Writer, step: Step) -> None:
    name = w.pick(step.pick)
    w.new(f"F.dropout({name}, {(0.5, 0.1)[step.variant % 2]}, True)")


def _embedding(w: Writer, step: Step) -> None:
    w.new(f"F.embedding(ids, {w.parameter((VOCABULARY, WIDTH), step.other, w.dtype)})")


def _mask(w: Writer, step: Step) -> None:
    name, mask = w.pick(step.pick), w.name()
    other = w.pick(step.other)
    w.line(f"{mask} = {name} > 0.1")
    first = w.new(f"{name}.masked_fill({mask}, 0.5)")
    if step.variant % 3 == 1:
        w.new(f"torch.where({mask}, {first}, {w.like(first, step.other)})")
    elif step.variant % 3 == 2 and w.of(other).shape == w.of(mask).shape:
        w.new(f"{other} * {mask}")


def _several(w: Writer, step: Step) -> None:
    name = w.pick(step.pick)
    rows = name if w.of(name).dim() > 1 else w.rows(name)
    first, second = w.name(), w.name()
    if step.variant % 3 == 0:
        w.line(f"{first}, {second} = {rows}.sort(-1)")
        w.values.append(first)
        w.new(f"{first}.gather(-1, {second})")
    elif step.variant % 3 == 1:
        w.line(f"{first}, {second} = torch.var_mean({rows}, -1, keepdim=True, correction=0)")
        w.values += [first, second]
    else:
        w.line(f"{first}, {second} = {rows}.max(-1, keepdim=True)")
        w.values.append(first)


def _cast(w: Writer, step: Step) -> None:
    dtype = list(DTYPES.values())[step.variant % 3]
    w.new(f"{w.pick(step.pick)}.to({dtype})")


def _no_grad(w: Writer, step: Step) -> None:
    name = w.pick(step.pick)
    if step.variant % 2 == 0:
        w.new(f"{name}.detach()")
    else:
        made = w.name()
        w.line(f"with torch.no_grad():\n    {made} = {name}.sin() * {name}")
        w.values.append(made)
    w.new(f"{name} * {w.values[-1]}")


def _join(w: Writer, step: Step) -> None:
    name = w.pick(step.pick)
    other = w.pick(step.other)
    same = w.of(other).shape == w.of(name).shape and w.of(other).dtype == w.of(name).dtype
    last = -1 if w.of(name).dim() else None
    parts = f"[{name}, {other if same else name}]"
    w.new(f"torch.stack({parts}, -1)" if step.variant % 2 or last is None else f"torch.cat({parts}, -1)")


def _region(w: Writer, step: Step) -> None:
    """Write the body as a function and call it through checkpoint; only its result is seen outside."""
    outer, lines, indent = list(w.values), w.lines, w.indent
    start = w.count
    w.lines, w.indent = [], indent + "    "
    for inner in step.body:
        KINDS[inner.kind](w, inner)
    if len(w.values) == len(outer):
        w.new(f"{w.pick(step.pick)}.sin()")
    body, w.lines, w.indent = w.lines, lines, indent
    result, w.values = w.values[-1], outer
    used = [name for name in dict.fromkeys(outer) if re.search(rf"\b{name}\b", "\n".join(body))]
    region = f"region{start}"
    arguments = ", ".join([*used])
    w.lines += [f"{indent}def {region}({arguments}):", *body, f"{indent}    return {result}"]
    context = ("", ", context_fn=save_products", ", context_fn=save_nothing")[step.variant % 3]
    made = w.name()
    call = f"{indent}{made} = checkpoint({', '.join([region, *used])}, use_reentrant=False{context})"
    w.lines.append(call)
    w.namespace[made] = w.of(result)
    w.values.append(made)


KINDS: dict[str, Callable[[Writer, Step], None]] = {
    "unary": _unary,
    "binary": _binary,
    "linear": _linear,
    "view": _view,
    "norm": _norm,
    "mask": _mask,
    "product": _product,
    "parts": _parts,
    "inplace": _inplace,
    "dropout": _dropout,
    "embedding": _embedding,
    "several": _several,
    "join": _join,
    "cast": _cast,
    "no_grad": _no_grad,
    "state": _state,
    "batch_norm": _batch_norm,
    "region": _region,
}

REGION_KINDS = tuple(kind for kind in KINDS if kind not in ("state", "batch_norm", "region"))
"""What a region may hold: eager runs a region twice, so nothing that changes memory which outlives it."""

RANDOM_KINDS = frozenset({"dropout"})


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
