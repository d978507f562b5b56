"""Train a small language model without a compiler, with what backward needs on the host, and say what moved.

Runs on an accelerator where there is one, and on the virtual device elsewhere.
"""

import contextlib
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import graphoffload
from graphoffload import policies
from graphoffload.testing import virtual_device


def train(
    model: torch.nn.Module, tokens: torch.Tensor, around: contextlib.AbstractContextManager[object]
) -> list[torch.Tensor]:
    """Train some steps, each forward inside `around`; return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        with around:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def main() -> None:
    """Train twice from the same weights, with offloading and without, and compare the losses to the bit."""
    # Sums in a fixed order, so that the two can be compared. CUDA's matrix products need the variable for it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=256,
        use_cache=False,
    )
    tokens = torch.randint(0, 256, (2, 128), generator=torch.Generator().manual_seed(0)).to(device)

    def fresh() -> torch.nn.Module:
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to(device).train()

    plain = train(fresh(), tokens, contextlib.nullcontext())
    with virtual_device() if accelerator is None else contextlib.nullcontext():
        model = fresh()
        policy = policies.FirstOf(
            policies.ByName(modules="lm_head", action=graphoffload.Action.KEEP),
            policies.OffloadAll(min_nbytes="16kB"),
        )
        offload = graphoffload.saved_tensors(policy, model=model)
        losses = train(model, tokens, offload)
    print(offload.stats())
    for step, (one, other) in enumerate(zip(plain, losses, strict=True)):
        print(f"step {step}: loss {one:.6f} kept, {other:.6f} offloaded")
        assert torch.equal(one, other)
    assert offload.stats().moved_nbytes > 0


if __name__ == "__main__":
    main()
