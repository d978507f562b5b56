"""The kinds of steps that a program may have. Within each, variant 0 is the simplest."""

from __future__ import annotations

import re
from collections.abc import Callable

from program_writer import DTYPES, SEQ, VOCABULARY, WIDTH, Step, Writer

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
        f"{made}.view(-1)[:1].zero_()" if w.of(made).is_contiguous() else f"{made}[..., :1].zero_()",
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
        # Not a scalar: AOTAutograd 2.13 forgets to change those of double precision.
        buffer = w.buffer((1,))
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
