"""Writes tiny models with few different tokens in their answers, and random heads that draft for them.

So a random head is right now and then. What it has read of its KV decides when.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from model_files import WEIGHTS_FILE, FloatArray, write_json, write_weights

TOKENS = 4
"""Different tokens of an answer."""
SEED = 20_240_607
FIRST_TOKEN = 100


def read_weights(folder: Path) -> dict[str, FloatArray]:
    """The tensors of a model in float32."""
    data = (folder / WEIGHTS_FILE).read_bytes()
    head_bytes = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + head_bytes])
    header.pop("__metadata__", None)
    tensors: dict[str, FloatArray] = {}
    for name, entry in header.items():
        start, end = (8 + head_bytes + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(data[start:end], np.float32).reshape(entry["shape"])
    return tensors


class Heads:
    """Writes models into a folder, from one with plain attention or latent attention."""

    def __init__(self, source: Path, folder: Path) -> None:
        self._source, self._folder = source, folder
        self._config: dict[str, Any] = json.loads((source / "config.json").read_text())
        self._weights = read_weights(source)
        self._weights["lm_head.weight"] = self._narrow(self._weights["lm_head.weight"])
        self._random = np.random.default_rng(SEED)

    def target(self, name: str = "target", more: dict[str, FloatArray] | None = None) -> str:
        """The model itself."""
        return self._write(name, {**self._weights, **(more or {})}, self._config)

    def eagle(self) -> str:
        """A head that gets the hidden state of the model's last layer."""
        hidden = self._config["hidden_size"]
        weights = {"fc.weight": self._matrix(hidden, 2 * hidden), **self._layer("layers.0.")}
        del weights["layers.0.input_layernorm.weight"]
        return self._write("eagle", weights, self._config | {"num_hidden_layers": 1})

    def eagle3(self) -> str:
        """A head that gets hidden states of three layers."""
        hidden = self._config["hidden_size"]
        weights = {"fc.weight": self._matrix(hidden, 3 * hidden), **self._layer("midlayer.")}
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = len(weights[f"midlayer.self_attn.{name}.weight"])
            weights[f"midlayer.self_attn.{name}.weight"] = self._matrix(rows, 2 * hidden)
        ones = np.ones(hidden, np.float32)
        weights |= {"midlayer.hidden_norm.weight": ones, "norm.weight": ones}
        weights["lm_head.weight"] = self._weights["lm_head.weight"]
        changes = {"num_hidden_layers": 1, "draft_vocab_size": self._config["vocab_size"]}
        return self._write("eagle3", weights, self._config | changes)

    def with_mtp(self) -> str:
        """The model, with a layer of its own that predicts one token more."""
        hidden = self._config["hidden_size"]
        number = self._config["num_hidden_layers"]
        layer = f"model.layers.{number}."
        ones = np.ones(hidden, np.float32)
        self._config |= {"num_nextn_predict_layers": 1, "first_k_dense_replace": number + 1}
        return self.target(
            "with-mtp",
            {
                **self._layer(layer),
                f"{layer}embed_tokens.weight": self._weights["model.embed_tokens.weight"],
                f"{layer}enorm.weight": ones,
                f"{layer}hnorm.weight": ones,
                f"{layer}eh_proj.weight": self._matrix(hidden, 2 * hidden),
                f"{layer}shared_head.norm.weight": ones,
                f"{layer}shared_head.head.weight": self._weights["lm_head.weight"],
            },
        )

    def _narrow(self, head: FloatArray) -> FloatArray:
        """Only a few tokens have logits other than 0."""
        found = np.zeros_like(head)
        kept = slice(FIRST_TOKEN, FIRST_TOKEN + TOKENS)
        found[kept] = head[kept]
        return found

    def _layer(self, prefix: str) -> dict[str, FloatArray]:
        """A layer of the shape of the model's first one."""
        first = "model.layers.0."
        return {
            prefix + name.removeprefix(first): tensor
            if tensor.ndim < 2
            else self._matrix(*tensor.shape)
            for name, tensor in self._weights.items()
            if name.startswith(first)
        }

    def _matrix(self, rows: int, columns: int) -> FloatArray:
        found = self._random.normal(scale=1 / math.sqrt(columns), size=(rows, columns))
        return found.astype(np.float32)

    def _write(self, name: str, weights: dict[str, FloatArray], config: dict[str, Any]) -> str:
        target = self._folder / name
        shutil.copytree(self._source, target)
        write_weights(target, weights, dtype="F32")
        write_json(target / "config.json", config)
        return str(target)
