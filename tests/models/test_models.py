"""Models of transformers, small and with random weights: trained with everything offloaded they stay equal to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from requirements import needs_cpp_compiler
from torch import nn
from training import Compiler, Outcome, assert_same_bits, fresh, is_finite, outcome

from graphoffload.planning.policy import OffloadAll
from graphoffload.testing import check_log, virtual_device

transformers = pytest.importorskip("transformers")

EVERYTHING = OffloadAll(min_nbytes=0)
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 64}


@dataclass(frozen=True)
class Architecture:
    """Make a model from a config, and a batch for it; nothing is downloaded."""

    name: str
    config: str
    model: str
    batch: Callable[[], dict[str, torch.Tensor]]
    settings: dict[str, Any] = field(default_factory=dict)

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.settings)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model.train()

    def __str__(self) -> str:
        return self.name


def tokens(length: int = 12) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def images() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": torch.tensor([0, 1])}


ARCHITECTURES = (
    Architecture(
        "llama", "LlamaConfig", "LlamaForCausalLM", tokens, {**SMALL, "num_key_value_heads": 1, "use_cache": False}
    ),
    Architecture(
        "gpt2",
        "GPT2Config",
        "GPT2LMHeadModel",
        tokens,
        {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 64, "use_cache": False},
    ),
    Architecture(
        "mixtral",
        "MixtralConfig",
        "MixtralForCausalLM",
        tokens,
        {
            **SMALL,
            "num_hidden_layers": 1,
            "num_key_value_heads": 1,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "use_cache": False,
            "experts_implementation": "batched_mm",
        },
    ),
    Architecture(
        "vit",
        "ViTConfig",
        "ViTForImageClassification",
        images,
        {**SMALL, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8},
    ),
    Architecture(
        "t5",
        "T5Config",
        "T5ForConditionalGeneration",
        tokens,
        {
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 48,
            "num_layers": 1,
            "num_heads": 2,
            "vocab_size": 64,
            "use_cache": False,
            "decoder_start_token_id": 0,
        },
    ),
)


def train(
    model: nn.Module, run: Callable[..., Any], batch: dict[str, torch.Tensor], *, optimizer: str
) -> list[Outcome]:
    """Train two steps; return loss, gradients, parameters and buffers of each."""
    stepper = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer](model.parameters(), lr=0.01)
    results = []
    for step in range(2):
        torch.manual_seed(step)
        loss = run(**batch).loss
        loss.backward()
        results.append(outcome(loss, module=model))
        stepper.step()
        stepper.zero_grad()
    return results


def shallow(architecture: Architecture) -> Architecture:
    """Return it with one layer: Inductor takes its time on a CPU."""
    layers = {name: 1 for name in ("num_hidden_layers", "n_layer") if name in architecture.settings}
    return replace(architecture, settings={**architecture.settings, **layers})


def assert_trains_alike(architecture: Architecture, compiler: str, optimizer: str) -> None:
    """Compare with the model uncompiled or, under Inductor, whose kernels round in their own way, with Inductor alone."""
    model, batch = architecture.make(), architecture.batch()
    plain = fresh(model)
    torch._dynamo.reset()
    # Dropout draws other numbers when compiled, so the plain run is compiled too, by torch alone.
    want = train(plain, torch.compile(plain, backend=compiler), batch, optimizer=optimizer)
    compile_ = Compiler(EVERYTHING, compiler=compiler, fullgraph=False)
    with virtual_device() as device:
        have = train(model, compile_(model), batch, optimizer=optimizer)
        check_log(device)
        assert compile_.moved > 0
        assert device.stats().offloads >= compile_.moved
        assert device.stats().slots == 0
    for one, other in zip(have, want, strict=True):
        assert is_finite(other)
        assert_same_bits(one, other)


pytestmark = [
    # Where a model breaks its graph, Dynamo looks at the `.grad` of the next graph's inputs, and hides the warning from all
    # but those who make it an error; and the small graph in between may have nothing that can move.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:graphoffload was asked to offload and moves nothing"),
]


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_under_plain_aot(architecture):
    assert_trains_alike(architecture, "aot_eager", "adamw")


@needs_cpp_compiler
@pytest.mark.parametrize("architecture", ARCHITECTURES[:2], ids=str)
def test_under_inductor(architecture):
    assert_trains_alike(shallow(architecture), "inductor", "sgd")
