"""Write models/tiny-*: small random models with layers other than plain attention.

They cover every kind of cache: multi-head latent attention, sliding windows, chunked local attention, short
convolutions, gated delta nets and state spaces. The bytes are always the same, because the weights come from a seeded
generator.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.lfm2 import Lfm2Config
from transformers.models.llama4 import Llama4TextConfig
from transformers.models.mamba2 import Mamba2Config
from transformers.models.qwen3_next import Qwen3NextConfig

from make_tiny_model import POSITIONS, SEED, SPECIAL_TOKENS, VOCABULARY, build_tokenizer
from model_files import (
    CHAT_TURNS,
    is_complete,
    new_directory,
    write_generation_config,
    write_tokenizer,
)

MODELS = Path(__file__).resolve().parent.parent / "models"
HIDDEN = 128
# Separates the logits, so that rounding does not change greedy decoding.
LOGITS_GAIN = 4.0

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
# One latent vector per token. Kernels support one size only.
LATENT: dict[str, Any] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "q_lora_rank": 64,
}
# Grouped heads, of which every other layer attends to a window of 64 tokens.
WINDOW_TOKENS = 64
WINDOWED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": WINDOW_TOKENS,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def deepseek_v2(heads: int = 2) -> PreTrainedConfig:
    """MLA with experts."""
    return DeepseekV2Config(
        **COMMON,
        **LATENT | {"num_attention_heads": heads, "num_key_value_heads": heads},
        num_hidden_layers=2,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=HIDDEN,
        n_group=1,
        topk_group=1,
    )


def deepseek_v3() -> PreTrainedConfig:
    """MLA with dense layers."""
    return DeepseekV3Config(
        **COMMON,
        **LATENT,
        num_hidden_layers=3,
        first_k_dense_replace=3,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        num_nextn_predict_layers=0,
    )


def gemma3() -> PreTrainedConfig:
    """Sliding windows."""
    return Gemma3TextConfig(**COMMON, **WINDOWED, query_pre_attn_scalar=32)


def gpt_oss() -> PreTrainedConfig:
    """Sliding windows with attention sinks, and experts."""
    return GptOssConfig(**COMMON, **WINDOWED, num_local_experts=4, num_experts_per_tok=2)


def llama4() -> PreTrainedConfig:
    """Chunked local attention, with dense layers."""
    return Llama4TextConfig(
        **COMMON,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size_mlp=2 * HIDDEN,
        attention_chunk_size=WINDOW_TOKENS,
        no_rope_layers=[1, 0, 1, 0],
        layer_types=["chunked_attention", "full_attention"] * 2,
        moe_layers=[],
        interleave_moe_layer_step=0,
    )


def lfm2() -> PreTrainedConfig:
    """Short convolutions between attention layers."""
    return Lfm2Config(
        **COMMON | {"tie_word_embeddings": True},
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention", "conv", "conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
        # Every published model has these fields, although the class does not.
        block_dim=HIDDEN,
        conv_dim=HIDDEN,
        conv_dim_out=HIDDEN,
    )


def qwen3_next(layers: int = 4) -> PreTrainedConfig:
    """Gated delta nets, one attention layer in four."""
    return Qwen3NextConfig(
        **COMMON,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=HIDDEN,
        shared_expert_intermediate_size=HIDDEN,
    )


def mamba2(groups: int = 1) -> PreTrainedConfig:
    """State spaces without attention. Heads of a group share inputs."""
    values = {name: value for name, value in COMMON.items() if name != "intermediate_size"}
    return Mamba2Config(
        **values,
        num_hidden_layers=3,
        num_heads=8,
        head_dim=32,
        expand=2,
        state_size=32,
        n_groups=groups,
    )


ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "tiny-deepseek-v2": deepseek_v2,
    # Two ranks have two heads each: with one, vLLM's decode step fails.
    "tiny-deepseek-wide": lambda: deepseek_v2(heads=4),
    "tiny-deepseek-v3": deepseek_v3,
    "tiny-gemma3": gemma3,
    "tiny-gpt-oss": gpt_oss,
    "tiny-llama4": llama4,
    "tiny-lfm2": lfm2,
    "tiny-qwen3-next": qwen3_next,
    # Two pipeline stages have an attention layer each: without one, vLLM does not start.
    "tiny-qwen3-next-deep": lambda: qwen3_next(layers=8),
    "tiny-mamba2": mamba2,
    "tiny-mamba2-groups": lambda: mamba2(groups=2),
}


def spread_weights(model: PreTrainedModel) -> None:
    """Scales each matrix to preserve the scale of its input, so that the next token depends on the whole prompt."""
    generator = torch.Generator().manual_seed(SEED)
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with torch.no_grad():
        for name, weights in model.named_parameters():
            gain = 1.0 / math.sqrt(weights.shape[-1])
            if name == "model.embedding_norm.weight":
                weights.fill_(LOGITS_GAIN)
            elif weights.dim() < 2:
                continue
            elif "embed" in name:
                # With tied embeddings, a larger scale would make each token predict itself.
                weights.normal_(std=gain if is_tied else 1.0, generator=generator)
            else:
                gain *= LOGITS_GAIN if name == "lm_head.weight" else 1.0
                weights.normal_(std=gain, generator=generator)


def write_model(target: Path, config: PreTrainedConfig) -> None:
    """Writes the folder of one model."""
    torch.manual_seed(SEED)
    tokenizer = build_tokenizer()
    for name, token in (("bos", "<|im_start|>"), ("eos", "<|im_end|>"), ("pad", "<|im_end|>")):
        setattr(config, f"{name}_token_id", tokenizer.token_to_id(token))
    model = AutoModelForCausalLM.from_config(config)
    spread_weights(model)
    with new_directory(target) as directory:
        model.save_pretrained(directory)
        write_tokenizer(
            directory,
            tokenizer,
            special_tokens=SPECIAL_TOKENS,
            chat_template=CHAT_TURNS,
            max_length_tokens=POSITIONS,
        )
        write_generation_config(directory, tokenizer)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=MODELS, help="directory to write into")
    folder = parser.parse_args().models
    for name, make_config in ARCHITECTURES.items():
        target = folder / name
        if not is_complete(target):
            write_model(target, make_config())
        print(f"[model] {target} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
