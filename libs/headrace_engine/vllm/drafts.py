"""Draft models: which layers of an engine are theirs, and their identity. Depends on vLLM's internals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from headrace_engine.vllm.model_folder import read_model_folder

if TYPE_CHECKING:
    from vllm.config import VllmConfig

METHODS: Final = ("draft_model", "eagle", "eagle3", "mtp")
"""vLLM's methods that draft with a model, and the KV of that is handed over."""
# Of vLLM's names of layers. Other drafts continue the numbers of the target's layers.
_PREFIXES: Final = ("draft_model.", "mtp.")


@dataclass(frozen=True, slots=True)
class DraftModel:
    """The draft model of an engine. `kv_head_count` counts its KV heads over all ranks, without replicas."""

    kv_head_count: int
    target_layer_count: int

    def has(self, layer_name: str) -> bool:
        """Whether a layer with a cache is the draft's."""
        from vllm.model_executor.models.utils import extract_layer_index

        if layer_name.startswith(_PREFIXES):
            return True
        return bool(extract_layer_index(layer_name) >= self.target_layer_count)


def draft_model(vllm_config: VllmConfig) -> DraftModel | None:
    """None for an engine that drafts nothing, or without a KV cache of the draft's own."""
    speculation = vllm_config.speculative_config
    if speculation is None or not speculation.uses_draft_kv_cache():
        return None
    return DraftModel(
        kv_head_count=speculation.draft_model_config.get_total_num_kv_heads(),
        target_layer_count=vllm_config.model_config.get_total_num_hidden_layers(),
    )


def find_draft(speculation: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """vLLM's speculative_config with the folder of its draft model, and that model's identity.

    The identity is empty for drafts without a model. A model on a hub ("hf:OWNER/NAME") is downloaded. Raises
    ConfigError.
    """
    found = dict(speculation)
    if found.get("method") not in METHODS:
        return found, ""
    if "model" not in found:
        return found, found["method"]
    folder = read_model_folder(found["model"], 0)
    return found | {"model": str(folder.path)}, f"{found['method']}:{folder.fingerprint}"
