"""Write models/tiny-llama-adapters: random LoRA adapters "poet" and "coder" of models/tiny-llama, in PEFT's format.

The bytes are always the same, because the weights come from a seeded generator. Both adapters change every projection,
so that also the KV cache differs from the model's own.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np

from make_tiny_model import HEAD_DIM, SEED, Shape
from model_files import FloatArray, new_directory, write_json, write_weights

DEFAULT_TARGET = Path(__file__).resolve().parent.parent / "models" / "tiny-llama-adapters"
NAMES = ("poet", "coder")
RANK = 8
# Changes tokens surely, and keeps the scale of the model's inputs.
GAIN = 0.5


def projections(shape: Shape) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each projection of a layer."""
    hidden, intermediate = shape.hidden, shape.intermediate
    kv = shape.kv_heads * HEAD_DIM
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, intermediate),
        "mlp.up_proj": (hidden, intermediate),
        "mlp.down_proj": (intermediate, hidden),
    }


def random_weights(shape: Shape, seed: int) -> dict[str, FloatArray]:
    """Two matrices for each projection. Their product has the gain of GAIN."""
    generator = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float) -> FloatArray:
        values = generator.standard_normal((rows, columns)) * (gain / math.sqrt(columns))
        return values.astype(np.float32)

    weights: dict[str, FloatArray] = {}
    for layer in range(shape.layers):
        for name, (inputs, outputs) in projections(shape).items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{path}.lora_A.weight"] = matrix(RANK, inputs, 1.0)
            weights[f"{path}.lora_B.weight"] = matrix(outputs, RANK, GAIN)
    return weights


def write_adapter(directory: Path, shape: Shape, seed: int) -> None:
    directory.mkdir()
    write_weights(directory, random_weights(shape, seed), dtype="F32")
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
    write_json(
        directory / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": RANK,
            # The product is not scaled.
            "lora_alpha": RANK,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": [name.rpartition(".")[2] for name in projections(shape)],
        },
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=DEFAULT_TARGET, help="directory to write")
    target = parser.parse_args().target
    if not all((target / name / "adapter_config.json").is_file() for name in NAMES):
        with new_directory(target) as directory:
            for number, name in enumerate(NAMES, 1):
                write_adapter(directory / name, Shape(), SEED + number)
    print(f"[model] {target} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
