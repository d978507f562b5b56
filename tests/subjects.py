"""Small models of the usual kinds, to be trained with and without offloading."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, VOCABULARY = 16, 32


@dataclass(frozen=True)
class Subject:
    """Make a module and its inputs, always the same. `random`: its operators draw random numbers."""

    name: str
    make: Callable[[], nn.Module]
    make_inputs: Callable[[], tuple[Any, ...]]
    random: bool = False

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    def inputs(self) -> tuple[Any, ...]:
        torch.manual_seed(1)
        return self.make_inputs()

    def __str__(self) -> str:
        return self.name


class Mlp(nn.Module):
    """Save products of nonlinear operators; `depth` layers alike."""

    def __init__(self, *, depth: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).sin().exp()
        return x


class Block(nn.Module):
    """Attend and feed forward, as a decoder layer does."""

    def __init__(self, *, width: int = WIDTH, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(attended), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class Decoder(nn.Module):
    """Embed, decode and project by the embedding itself; regions where `checkpointed`."""

    def __init__(self, *, depth: int = 2, dropout: float = 0.0, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(depth))
        self.checkpointed = checkpointed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), ids.roll(-1, 1).flatten())


class Convolutional(nn.Module):
    """Convolve with running statistics, channels last, and pool, which has int indices."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn(self.conv1(x)).relu()
        x = F.max_pool2d(self.conv2(x), 2)
        return self.head(x.flatten(1))


class Views(nn.Module):
    """Save a base and its view, parts of one storage, a padded and an expanded layout, and a boolean mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        base = self.linear(x).sin()
        a, b, c = base.chunk(3, dim=-1)
        row = base[:, :1].exp().expand(-1, base.shape[1])
        mask = a > 0
        mixed = (a * b.tanh() + c.t().sin().t()).masked_fill(mask, 0.5)
        padded = F.pad(mixed, (0, 3))[:, :-3]
        return (padded * padded.cos() + mixed * mask), (base * row)


def _ids(batch: int = 2, length: int = 8) -> tuple[torch.Tensor]:
    return (torch.randint(VOCABULARY, (batch, length)),)


def _rows(rows: int = 6, *, grad: bool = True) -> tuple[torch.Tensor]:
    return (torch.randn(rows, WIDTH).requires_grad_(grad),)


def _image() -> tuple[torch.Tensor]:
    return (torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_(),)


SUBJECTS = (
    Subject("mlp", functools.partial(Mlp, depth=2), _rows),
    Subject("views", Views, _rows),
    Subject("convolutional", Convolutional, _image),
    Subject("decoder", Decoder, _ids),
    Subject("decoder with dropout", functools.partial(Decoder, depth=1, dropout=0.3), _ids, random=True),
    Subject("decoder with regions", functools.partial(Decoder, checkpointed=True), _ids),
    Subject(
        "decoder with dropout in regions",
        functools.partial(Decoder, depth=1, dropout=0.3, checkpointed=True),
        _ids,
        random=True,
    ),
)
BY_NAME = {subject.name: subject for subject in SUBJECTS}
