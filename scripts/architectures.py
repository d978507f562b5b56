"""Build tiny models of many architectures of transformers and timm, from their config classes, with random weights.

Nothing is downloaded. Sizes are set through the names that config classes share (`hidden_size`, `d_model`, …); what an
architecture needs besides stands in its row of `TRANSFORMERS` or `TIMM`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

BATCH, TOKENS, VOCABULARY, IMAGE, CLASSES = 2, 16, 96, 32, 4

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "embed_dim": 16,
    "embedding_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "intermediate_size": 64,
    "ffn_hidden_size": 64,
    "d_ff": 64,
    "d_inner": 64,
    "n_inner": 64,
    "ffn_dim": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 4,
    "head_dim": 8,
    "d_kv": 8,
    "d_head": 8,
    "rotary_dim": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "max_source_positions": 32,
    "max_target_positions": 64,
    "image_size": IMAGE,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "use_cache": False,
}


@dataclass(frozen=True)
class Row:
    """Hold one architecture: where it comes from, what its model class is called, and which inputs it takes."""

    name: str
    source: str
    model: str
    config: str = ""
    kind: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def _causal(prefix: str, **options: Any) -> Row:
    return Row(prefix, "transformers", f"{prefix}ForCausalLM", f"{prefix}Config", "tokens", options)


def _masked(prefix: str, **options: Any) -> Row:
    return Row(prefix, "transformers", f"{prefix}ForMaskedLM", f"{prefix}Config", "tokens", options)


def _seq2seq(prefix: str, **options: Any) -> Row:
    return Row(prefix, "transformers", f"{prefix}ForConditionalGeneration", f"{prefix}Config", "pairs", options)


def _image(prefix: str, **options: Any) -> Row:
    return Row(prefix, "transformers", f"{prefix}ForImageClassification", f"{prefix}Config", "image", options)


def _towers(prefix: str, **options: Any) -> Row:
    return Row(prefix, "transformers", f"{prefix}Model", f"{prefix}Config", "towers", options)


def _speech(prefix: str, **options: Any) -> Row:
    small = {"conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2}
    small |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16}
    model = f"{prefix}ForSequenceClassification"
    return Row(prefix, "transformers", model, f"{prefix}Config", "speech", small | options)


def _timm(name: str, **options: Any) -> Row:
    return Row(name, "timm", name, kind="image", options=options)


_TOWER_SIZES = {
    "text_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 0,
    },
    "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"image_size": IMAGE, "patch_size": 8},
}

TRANSFORMERS: tuple[Row, ...] = (
    _causal("Llama"),
    Row("GPT2", "transformers", "GPT2LMHeadModel", "GPT2Config", "tokens"),
    _causal("GPTNeo", attention_types=[[["global", "local"], 1]], window_size=8),
    _causal("GPTNeoX"),
    _causal("GPTJ"),
    _causal("GPTBigCode"),
    _causal("OPT", word_embed_proj_dim=32),
    _causal("Bloom"),
    _causal("Falcon"),
    _causal("Mpt", max_seq_len=64),
    _causal("Mistral"),
    _causal("Mixtral"),
    _causal("Qwen2"),
    _causal("Qwen2Moe", decoder_sparse_step=1),
    _causal("Qwen3"),
    _causal("Qwen3Moe", decoder_sparse_step=1),
    _causal("Gemma"),
    _causal("Gemma2", query_pre_attn_scalar=8),
    _causal("Gemma3", config="Gemma3TextConfig", query_pre_attn_scalar=8),
    _causal("Phi"),
    _causal("Phi3"),
    _causal("Olmo"),
    _causal("Olmo2"),
    _causal("Olmoe"),
    _causal("StableLm"),
    _causal("Starcoder2"),
    _causal("Cohere"),
    _causal("Granite"),
    _causal("GraniteMoe"),
    _causal("Nemotron", head_dim=8, num_key_value_heads=2),
    _causal("Glm"),
    _causal("SmolLM3"),
    _causal("GptOss", sliding_window=8),
    _causal("CodeGen"),
    _causal("Mamba", time_step_rank=4, state_size=4),
    _causal("Mamba2", num_heads=8, n_groups=1, state_size=8, chunk_size=8),
    _causal("Rwkv", attention_hidden_size=32, context_length=64),
    _causal("XGLM", attention_heads=4),
    _causal("BioGpt"),
    _masked("Bert"),
    _masked("Roberta"),
    _masked("DistilBert", dim=32, hidden_dim=64),
    _masked("Electra"),
    _masked("Deberta"),
    _masked("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    _masked("Albert"),
    _masked("MPNet"),
    _masked("ModernBert", global_attn_every_n_layers=2, local_attention=8),
    _masked("RoFormer"),
    _masked("ConvBert"),
    _masked("FNet"),
    _masked("Nystromformer", num_landmarks=TOKENS, segment_means_seq_len=TOKENS),
    Row("XLNet", "transformers", "XLNetLMHeadModel", "XLNetConfig", "tokens"),
    _seq2seq("T5"),
    _seq2seq("MT5"),
    _seq2seq("Bart"),
    _seq2seq("MBart"),
    _seq2seq("Pegasus"),
    _seq2seq("LED", attention_window=8),
    Row("Marian", "transformers", "MarianMTModel", "MarianConfig", "pairs"),
    Row("Whisper", "transformers", "WhisperForConditionalGeneration", "WhisperConfig", "spectrum"),
    _image("ViT", patch_size=8),
    _image("DeiT", patch_size=8),
    _image("Beit", patch_size=8),
    _image("Dinov2", patch_size=8),
    _image("Swin", patch_size=4, depths=[1, 1], num_heads=[2, 2], window_size=4),
    _image("Swinv2", patch_size=4, depths=[1, 1], num_heads=[2, 2], window_size=4),
    _image("ConvNext", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    _image("ConvNextV2", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    _image("ResNet", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]),
    _image("RegNet", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], groups_width=8),
    _image("PoolFormer", hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1]),
    _image("MobileViT", image_size=64, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32]),
    _image(
        "Segformer",
        hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 2],
        decoder_hidden_size=16,
    ),
    _towers("CLIP", projection_dim=16, **_TOWER_SIZES),
    _towers("Siglip", **_TOWER_SIZES),
    _speech("Wav2Vec2"),
    _speech("Hubert"),
    _speech("WavLM"),
    _speech("SEW", squeeze_factor=1),
)

TIMM: tuple[Row, ...] = (
    _timm("resnet10t"),
    _timm("resnext26ts"),
    _timm("regnetx_002"),
    _timm("densenet121"),
    _timm("mobilenetv3_small_050"),
    _timm("efficientnet_lite0"),
    _timm("tinynet_e"),
    _timm("ghostnet_050"),
    _timm("repvgg_a0"),
    _timm("convnext_atto"),
    _timm("convnextv2_atto"),
    _timm("edgenext_xx_small"),
    _timm("mobilevit_xxs"),
    _timm("mobileone_s0"),
    _timm("poolformer_s12"),
    _timm("fastvit_t8"),
    _timm("vit_tiny_patch16_224", img_size=64, depth=2),
    _timm("eva02_tiny_patch14_224", img_size=56, depth=2),
    _timm("beit_base_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=4),
    _timm("cait_xxs24_224", img_size=64, depth=2),
    _timm("xcit_nano_12_p16_224", img_size=64, depth=2),
    _timm("mixer_s32_224", img_size=64),
    _timm("gmlp_ti16_224", img_size=64),
    _timm("resmlp_12_224", img_size=64),
    _timm("swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=24, depths=(1, 1, 1, 1)),
    _timm("pit_ti_224", img_size=64),
    _timm("inception_next_atto"),
    _timm("mobilenetv4_conv_small"),
)

ROWS: tuple[Row, ...] = TRANSFORMERS + TIMM


def row_named(name: str) -> Row:
    """Find a row; raises KeyError."""
    return {row.name: row for row in ROWS}[name]


def build(row: Row, *, seed: int = 0) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Build one model in training mode and its inputs; the same seed gives the same weights and inputs."""
    torch.manual_seed(seed)
    model = _build_timm(row) if row.source == "timm" else _build_transformers(row)
    generator = torch.Generator().manual_seed(seed + 1)
    return model.train(), _INPUTS[row.kind](model, generator)


def has_dropout(model: torch.nn.Module) -> bool:
    """Tell whether the model draws random numbers in training, so that eager may draw others than a compiled graph."""
    config = getattr(model, "config", None)
    named = vars(config).items() if config is not None else ()
    rates = [value for name, value in named if ("drop" in name or name.endswith("_p")) and isinstance(value, float)]
    rates += [
        float(getattr(module, "p", 0) or 0) for module in model.modules() if "drop" in type(module).__name__.lower()
    ]
    rates += [float(getattr(module, "drop_prob", 0) or 0) for module in model.modules()]
    return any(rate > 0 for rate in rates)


def _build_transformers(row: Row) -> torch.nn.Module:
    import transformers

    options = dict(row.options)
    config_class = getattr(transformers, options.pop("config", row.config))
    known = inspect.signature(config_class.__init__).parameters
    sizes = {name: value for name, value in SIZES.items() if name in known and known[name].default is not None}
    config = config_class(**(sizes | options))
    if row.kind in ("image", "speech"):
        config.num_labels = CLASSES
    if row.kind == "pairs" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    model: torch.nn.Module = getattr(transformers, row.model)(config)
    if hasattr(model, "set_experts_implementation"):
        # The default for mixtures of experts has a backward on the CPU that torch.compile cannot trace.
        model.set_experts_implementation("batched_mm")
    return model


def _build_timm(row: Row) -> torch.nn.Module:
    import timm

    model: torch.nn.Module = timm.create_model(row.model, pretrained=False, num_classes=CLASSES, **row.options)
    return model


def _tokens(_model: torch.nn.Module, generator: torch.Generator) -> dict[str, Any]:
    ids = torch.randint(3, VOCABULARY, (BATCH, TOKENS), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _pairs(_model: torch.nn.Module, generator: torch.Generator) -> dict[str, Any]:
    ids = torch.randint(3, VOCABULARY, (BATCH, TOKENS), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(3, VOCABULARY, (BATCH, TOKENS // 2), generator=generator)}


def _pixels(model: torch.nn.Module, generator: torch.Generator) -> dict[str, Any]:
    config = getattr(model, "config", None)
    if config is None:  # timm: its models take the image alone
        side = getattr(getattr(model, "patch_embed", None), "img_size", (64, 64))
        return {"x": torch.randn(BATCH, 3, *side, generator=generator)}
    size = getattr(config, "image_size", IMAGE)
    image = torch.randn(BATCH, 3, size, size, generator=generator)
    return {"pixel_values": image, "labels": torch.randint(CLASSES, (BATCH,), generator=generator)}


def _text_and_image(_model: torch.nn.Module, generator: torch.Generator) -> dict[str, Any]:
    ids = torch.randint(3, VOCABULARY, (BATCH, TOKENS), generator=generator)
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator),
        "return_loss": True,
    }


def _sound(_model: torch.nn.Module, generator: torch.Generator) -> dict[str, Any]:
    sound = torch.randn(BATCH, 1600, generator=generator)
    return {"input_values": sound, "labels": torch.randint(CLASSES, (BATCH,), generator=generator)}


def _spectrum(_model: torch.nn.Module, generator: torch.Generator) -> dict[str, Any]:
    features = torch.randn(BATCH, 80, 64, generator=generator)
    return {"input_features": features, "labels": torch.randint(3, VOCABULARY, (BATCH, 8), generator=generator)}


_INPUTS: Mapping[str, Callable[[torch.nn.Module, torch.Generator], dict[str, Any]]] = {
    "tokens": _tokens,
    "pairs": _pairs,
    "image": _pixels,
    "towers": _text_and_image,
    "speech": _sound,
    "spectrum": _spectrum,
}
