"""Ask what a Llama of eight billion parameters would save and move in one training step, on a laptop without a GPU.

The model is made on "meta", so its parameters take no memory; nothing is run.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import graphoffload
from graphoffload import policies
from graphoffload.planning.table import plan_table, plan_totals


def main() -> None:
    """Explain two layers of the real width (all 32 take minutes to trace, and repeat)."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    tokens = torch.zeros(1, 8192, dtype=torch.int64, device="meta")
    explanation = graphoffload.explain(
        model, input_ids=tokens, labels=tokens, policy=policies.OffloadHidden(), machine="h200"
    )
    for plan in explanation.plans:
        print(plan_table(plan, biggest=12))
        print()
        print(plan_totals(plan))


if __name__ == "__main__":
    main()
