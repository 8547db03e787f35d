"""The profile of a worker, computed from a model's config.json and from published peak rates. Pure.

`headrace profile` measures what this computes. A step reads all weights, of a mixture's experts too, and computes its
tokens after that. Parts that a device can overlap are added, so steps are rather too long.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, RootModel

from headrace_common.errors import ConfigError
from headrace_common.time_model.model import HandoverTimes, StepTimes
from headrace_kv.model_layout import DTYPE_BYTES, ModelConfig, kv_layout, prompt_bytes
from headrace_planner.settings import WorkerProfile, read_json

_STEP_TOKENS: Final = 8_192
_SEQUENCES: Final = 256
# The default of Headrace and of vLLM.
_MEMORY_SHARE: Final = 0.9
_MEMORY_RATE_SHARE: Final = 0.7
_COMPUTE_RATE_SHARE: Final = 0.45
_NETWORK_RATE_SHARE: Final = 0.9
_ACTIVATION_BYTES: Final = 2 << 30
_STEP_OVERHEAD_S: Final = 1e-3
_ALL_REDUCE_S: Final = 1e-5
_HANDOVER_S: Final = 5e-3
_COUNT: Final = 100
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Accelerator(BaseModel):
    """A device by its published figures. Rates are those of dense matrices.

    `link_gb_per_s` is what one device sends to the others of its machine, which has `machine_devices`. A rate of 0 for
    fp8 means that it computes such weights at the rate of bf16.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    memory_gb: _Rate
    memory_tb_per_s: _Rate
    bf16_tflop_per_s: _Rate
    fp8_tflop_per_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    link_gb_per_s: _Rate
    machine_devices: Annotated[int, Field(ge=1, le=1_024)] = 8


_FIGURES: Final = tuple(Accelerator.model_fields)
ACCELERATORS: Final = {
    name: Accelerator.model_validate(dict(zip(_FIGURES, (name, *numbers), strict=False)))
    for name, numbers in {
        "H100": (80, 3.35, 989, 1_979, 450),
        "H200": (141, 4.8, 989, 1_979, 450),
        "B200": (180, 8.0, 2_250, 4_500, 900),
        "A100": (80, 2.039, 312, 0, 300),
        "L40S": (48, 0.864, 362, 733, 32),
    }.items()
}
"""From NVIDIA's data sheets: SXM modules, of the A100 that with 80 GB. The L40S has PCIe."""


def accelerator_of(text: str) -> Accelerator:
    """That of this name, in any case, or of a JSON file. Raises ConfigError with the names."""
    if not Path(text).is_file() and text.upper() not in ACCELERATORS:
        names = ", ".join(ACCELERATORS)
        raise ConfigError(f"--accelerator {text} is not known: name a JSON file, or {names}")
    return ACCELERATORS.get(text.upper()) or read_json(Path(text), Accelerator)


def read_model(path: Path) -> ModelConfig:
    """The config.json of a file or a folder. Raises ConfigError."""
    content = read_json(path / "config.json" if path.is_dir() else path, RootModel[dict[str, Any]])
    return ModelConfig.of(content.root)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """The parameters that a token uses, the bytes of all, and operations for each token before it."""

    active_parameters: float
    weight_bytes: float
    pair_operations: float


def work_of(config: ModelConfig) -> ModelWork:
    """The work of a model, without attention within windows. Raises ConfigError for a quantization not known."""
    hidden, heads = config.count("hidden_size"), config.heads
    query = value = config.head_dim
    attention = 2 * hidden * query * (heads + config.kv_heads)
    if config.is_latent:
        plain, rope = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
        query, value = plain + rope, config.count("v_head_dim")
        latent, rank = config.count("kv_lora_rank"), config.count("q_lora_rank", default=0)
        attention = rank * (hidden + heads * query) if rank else hidden * heads * query
        attention += heads * value * hidden + hidden * (latent + rope)
        attention += latent * heads * (plain + value)
    embedding = hidden * config.count("vocab_size")
    total = active = float(embedding)
    pairs = 0.0
    for number, kind in enumerate(config.layer_types):
        layer, used = _mlp(config, number, hidden)
        # Layers with states have about as many parameters as attention with a key and a value for each head.
        mixing = attention if kind.endswith("_attention") else 4 * hidden * hidden
        total, active = total + mixing + layer, active + mixing + used
        pairs += 2 * heads * (query + value) if kind == "full_attention" else 0
    stored = total + (0 if config.fields.get("tie_word_embeddings") else embedding)
    return ModelWork(active, stored * _weight_bytes(config), pairs)


def _mlp(config: ModelConfig, layer: int, hidden: int) -> tuple[float, float]:
    """Parameters of a layer's MLP, and those that a token uses."""
    dense = 3.0 * hidden * config.count("intermediate_size", default=0)
    experts = config.count("n_routed_experts", "num_local_experts", "num_experts", default=0)
    if not experts or layer < config.count("first_k_dense_replace", default=0):
        return dense, dense
    width = config.count("moe_intermediate_size", "intermediate_size")
    shared = width * config.count("n_shared_experts", default=0)
    shared += config.count("shared_expert_intermediate_size", default=0)
    used = config.count("num_experts_per_tok", default=1)
    all_bytes, used_bytes = (3.0 * hidden * (width * one + shared) for one in (experts, used))
    return all_bytes + hidden * experts, used_bytes + hidden * experts


def _weight_bytes(config: ModelConfig) -> float:
    """Of one parameter, with scales."""
    quantization = config.nested("quantization_config")
    if not quantization:
        return DTYPE_BYTES.get(config.dtype, 2)
    method = str(quantization.get("quant_method"))
    bits = ModelConfig(quantization).count("bits", default=0)
    if method not in _QUANTIZED_BYTES and not bits:
        raise ConfigError(f"config.json: the bytes of quantization_config {method} are not known")
    return _QUANTIZED_BYTES.get(method, 1.1 * bits / 8)


_QUANTIZED_BYTES: Final = {"fp8": 1.0, "mxfp4": 0.6}


@dataclass(frozen=True, slots=True)
class LoadSize:
    """Tokens of prompts and answers: the mean, and the longest request."""

    prompt_tokens: float
    answer_tokens: float
    longest_tokens: int


def tensor_parallel_sizes(config: ModelConfig, device: Accelerator, devices: int) -> list[int]:
    """The numbers of ranks that divide the heads, within one machine."""
    heads, kv_heads = config.heads, config.kv_heads
    return [
        size
        for size in (1, 2, 4, 8)
        if size <= min(devices, device.machine_devices)
        and heads % size == 0
        and (kv_heads % size == 0 or size % kv_heads == 0)
    ]


def computed_profile(
    config: ModelConfig, device: Accelerator, ranks: int, network_gbit_per_s: float, load: LoadSize
) -> WorkerProfile | None:
    """The profile of a worker with so many devices. None where weights and the longest request do not fit."""
    work, layout, layers = work_of(config), kv_layout(config, ranks), len(config.layer_types)
    memory_bytes = _MEMORY_SHARE * 1e9 * device.memory_gb
    room = memory_bytes - work.weight_bytes / ranks - _ACTIVATION_BYTES
    tokens = max(1, round(load.prompt_tokens + load.answer_tokens))
    copies = max(1, ranks // config.kv_heads)
    kv_tokens = int(room * ranks / copies / prompt_bytes(layout, tokens) * tokens)
    if kv_tokens < load.longest_tokens:
        return None
    memory = 1e12 * device.memory_tb_per_s * _MEMORY_RATE_SHARE * ranks
    is_fp8 = device.fp8_tflop_per_s and _weight_bytes(config) == 1
    rate = device.fp8_tflop_per_s if is_fp8 else device.bf16_tflop_per_s
    compute = 1e12 * rate * _COMPUTE_RATE_SHARE * ranks
    # In each layer, the ranks add their parts twice, in a ring: 2 bytes of each channel of a token.
    added = 2 * layers * 2 * (ranks - 1) / ranks * 2 * config.count("hidden_size")
    token_s = 2 * work.active_parameters / compute
    token_s += added / (1e9 * device.link_gb_per_s * _MEMORY_RATE_SHARE)
    fixed_s = work.weight_bytes / memory + _STEP_OVERHEAD_S
    fixed_s += 2 * layers * _ALL_REDUCE_S if ranks > 1 else 0.0
    prompt = max(1, round(load.prompt_tokens))
    sent = prompt_bytes(layout, prompt)
    sent_s = sent * sent_s_per_byte(network_gbit_per_s)
    # Layers are sent while later ones are computed.
    exposed_s = max(sent_s / layers, sent_s - token_s * prompt)
    return WorkerProfile(
        steps=StepTimes(
            fixed_s=fixed_s,
            s_per_prompt_token=token_s,
            s_per_attended_token=work.pair_operations / compute,
            s_per_answer=token_s,
            s_per_context_token=copies * layout.token_bytes / memory,
            prompt_steps=_COUNT,
            answer_steps=_COUNT,
        ),
        handovers=HandoverTimes(_HANDOVER_S, exposed_s / sent, _COUNT),
        kv_tokens=kv_tokens,
        kv_bytes_per_token=max(1, round(sent / prompt)),
        max_num_seqs=_SEQUENCES,
        max_num_batched_tokens=_STEP_TOKENS,
        measured=f"computed from published peak rates, not measured: {config.name} on {ranks} {device.name}",
    )


def sent_s_per_byte(network_gbit_per_s: float) -> float:
    """Seconds that a byte of KV takes on the network."""
    return 8.0 / (1e9 * network_gbit_per_s * _NETWORK_RATE_SHARE)
