"""Workload W1: a Llama-shaped model whose head never sets the peak, so that what is saved for backward does.

8 layers, hidden 4096, MLP 14336, 32 heads and 8 key/value heads, vocabulary 32000, bf16, 2 x 8192 tokens, random weights and
tokens. The head's loss is computed in eight checkpointed chunks. A step is forward and backward; there is no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """Sizes of the workload."""

    layers: int = 8
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    key_value_heads: int = 8
    vocabulary: int = 32000
    batch: int = 2
    tokens: int = 8192


SMALL = Shape(layers=2, hidden=256, intermediate=512, heads=4, key_value_heads=2, vocabulary=512, batch=2, tokens=256)


def causal_attention(
    _module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend without a mask tensor: under torch.compile a boolean mask would take SDPA off its flash path."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
    )
    return out.transpose(1, 2).contiguous(), None


def build(
    shape: Shape, *, device: torch.device, checkpoint_layers: bool = False, seed: int = 0
) -> tuple[nn.Module, torch.Tensor]:
    """Return (model, token ids [batch, tokens]) on the device, bf16, with random weights."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    AttentionInterface.register("graphoffload_causal", causal_attention)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.tokens,
        use_cache=False,
        tie_word_embeddings=False,
        attn_implementation="graphoffload_causal",
    )
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.train()
    if checkpoint_layers:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(0, shape.vocabulary, (shape.batch, shape.tokens), device=device)
    return model, ids


def loss_of(body: Callable[..., object], head: nn.Module, ids: torch.Tensor, *, chunks: int = 8) -> torch.Tensor:
    """Return the mean token loss (scalar); `body` is the model without its head, compiled or not."""
    hidden = body(input_ids=ids).last_hidden_state  # type: ignore[attr-defined]

    def part(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(head(states).float(), targets, reduction="sum")

    pieces = zip(hidden.flatten(0, 1).chunk(chunks), ids.flatten().chunk(chunks), strict=True)
    total = torch.stack([checkpoint(part, states, targets, use_reentrant=False) for states, targets in pieces]).sum()
    return total / ids.numel()
