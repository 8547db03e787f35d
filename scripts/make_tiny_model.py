"""Write models/tiny-llama: a random Llama that is small enough for tests, with milliseconds per token.

The bytes are always the same: the weights come from a seeded generator and the vocabulary from tiny_model_text.txt. The
model has 4 layers (`--layers`) and 8 heads (`--heads`) of 32 channels with 4 KV heads (`--kv-heads`). With 12 heads, 3
ranks can share them.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from model_files import (
    CHAT_TURNS,
    FloatArray,
    is_complete,
    new_directory,
    write_generation_config,
    write_json,
    write_tokenizer,
    write_weights,
)

DEFAULT_TARGET = Path(__file__).resolve().parent.parent / "models" / "tiny-llama"
SEED = 20_240_607
LAYERS = 4
HEADS = 8
KV_HEADS = 4
HEAD_DIM = 32
VOCABULARY = 512
# vLLM shares an embedding in rows of 64 among ranks. A vocabulary with more rows than tokens suits 1, 2, 3 and 4 ranks.
PADDED_VOCABULARY = 768
POSITIONS = 2_048
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The text that the vocabulary is made from. Another text makes another model.
TEXT_FILE = Path(__file__).with_name("tiny_model_text.txt")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model."""

    layers: int = LAYERS
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    positions: int = POSITIONS

    @property
    def hidden(self) -> int:
        return self.heads * HEAD_DIM

    @property
    def intermediate(self) -> int:
        return 2 * self.hidden

    @property
    def vocabulary(self) -> int:
        return PADDED_VOCABULARY if self.heads % 3 == 0 else VOCABULARY


def model_config(tokenizer: Tokenizer, shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": tokenizer.token_to_id("<|im_start|>"),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|im_end|>"),
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "head_dim": HEAD_DIM,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.positions,
        "mlp_bias": False,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }


def random_weights(shape: Shape) -> dict[str, FloatArray]:
    """Random weights that preserve the scale of inputs, so that the next token depends on the whole prompt."""
    generator = np.random.default_rng(SEED)
    hidden = shape.hidden

    def matrix(rows: int, columns: int, gain: float = 1.0) -> FloatArray:
        values = generator.standard_normal((rows, columns)) * (gain / math.sqrt(columns))
        return values.astype(np.float32)

    ones = np.ones(hidden, dtype=np.float32)
    embedding = generator.standard_normal((shape.vocabulary, hidden)).astype(np.float32)
    weights = {"model.embed_tokens.weight": embedding}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": ones,
            f"{prefix}.self_attn.q_proj.weight": matrix(shape.heads * HEAD_DIM, hidden),
            f"{prefix}.self_attn.k_proj.weight": matrix(shape.kv_heads * HEAD_DIM, hidden),
            f"{prefix}.self_attn.v_proj.weight": matrix(shape.kv_heads * HEAD_DIM, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, shape.heads * HEAD_DIM),
            f"{prefix}.post_attention_layernorm.weight": ones,
            f"{prefix}.mlp.gate_proj.weight": matrix(shape.intermediate, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(shape.intermediate, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, shape.intermediate),
        }
    weights["model.norm.weight"] = ones
    # A larger scale separates the logits, so that rounding does not change greedy decoding.
    weights["lm_head.weight"] = matrix(shape.vocabulary, hidden, gain=4.0)
    return weights


def build_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT_FILE.read_text(encoding="utf-8")], trainer)
    return tokenizer


def write_model(target: Path, shape: Shape) -> None:
    tokenizer = build_tokenizer()
    with new_directory(target) as directory:
        write_tokenizer(
            directory,
            tokenizer,
            special_tokens=SPECIAL_TOKENS,
            chat_template=CHAT_TURNS,
            max_length_tokens=shape.positions,
        )
        write_weights(directory, random_weights(shape), dtype="F32")
        write_generation_config(directory, tokenizer)
        write_json(directory / "config.json", model_config(tokenizer, shape))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--target", type=Path, default=DEFAULT_TARGET, help="model directory to write"
    )
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--heads", type=int, default=HEADS, help="query heads per layer")
    parser.add_argument("--kv-heads", type=int, default=KV_HEADS, help="KV heads per layer")
    parser.add_argument("--positions", type=int, default=POSITIONS, help="tokens of a context")
    arguments = parser.parse_args()
    target = arguments.target
    shape = Shape(
        arguments.layers, arguments.heads, arguments.kv_heads, positions=arguments.positions
    )
    if not is_complete(target):
        write_model(target, shape)
    print(f"[model] {target} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
