"""Workload W2: LoRA (r = 16 on all projections) on 32 layers of W1's shape, 1 x 32768 tokens, activation checkpointing.

Only the layers' inputs are saved for backward, so that their 8.6 GB are what an offloading context can move. Needs peft.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from workload import SMALL, Shape, build

SHAPE = dataclasses.replace(Shape(), layers=32, batch=1, tokens=32768)
SMALL_SHAPE = dataclasses.replace(SMALL, layers=4, batch=1, tokens=512)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def build_lora(
    shape: Shape, *, device: torch.device, checkpoint_layers: bool = True, seed: int = 0
) -> tuple[nn.Module, torch.Tensor]:
    """Return (model, token ids [batch, tokens]); the base is frozen bf16, the adapters are float32 as peft makes them."""
    from peft import LoraConfig, get_peft_model

    model, ids = build(shape, device=device, checkpoint_layers=checkpoint_layers, seed=seed)
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=list(PROJECTIONS)))
    return adapted.base_model.model, ids
