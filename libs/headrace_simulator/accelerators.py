"""The profile of a worker, computed from a model's config.json and from published peak rates. Pure.

`headrace profile` measures what this computes. A step reads all weights, of a mixture's experts too, and computes its
tokens after that. Parts that a device can overlap are added, so steps are rather too long.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace_common.errors import ConfigError
from headrace_common.time_model.model import HandoverTimes, StepTimes
from headrace_kv.layout import STATE, KvLayout
from headrace_kv.model_layout import DTYPE_BYTES, ModelConfig, kv_layout, prompt_bytes
from headrace_planner.settings import WorkerProfile

STEP_TOKENS: Final = 8_192
SEQUENCES: Final = 256
MEMORY_SHARE: Final = 0.9
"""Flags of the workers that are proposed: tokens and requests of a step, and the share of a device's memory."""
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


ACCELERATORS: Final = {
    name: Accelerator(
        name=name,
        memory_gb=numbers[0],
        memory_tb_per_s=numbers[1],
        bf16_tflop_per_s=numbers[2],
        fp8_tflop_per_s=numbers[3],
        link_gb_per_s=numbers[4],
    )
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
    if found := ACCELERATORS.get(text.upper()):
        return found
    try:
        return Accelerator.model_validate_json(Path(text).read_bytes())
    except OSError:
        names = ", ".join(ACCELERATORS)
        raise ConfigError(
            f"accelerator {text} is not known: name a JSON file, or {names}"
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "all"
        raise ConfigError(f"{text}: {where}: {first['msg']}") from None


def read_model(path: Path) -> ModelConfig:
    """The config.json of a file or a folder. Raises ConfigError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}; name a config.json or its folder"
        ) from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{file} is not JSON: name a model's config.json") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is no object: name a model's config.json")
    return ModelConfig.of(content)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What computing a token takes: the parameters that it uses, and operations for each token before it.

    `window_tokens`: the sum over layers with a window of the tokens that they attend to.
    """

    parameters: float
    active_parameters: float
    weight_bytes: float
    pair_operations: float
    window_operations: float


def work_of(config: ModelConfig) -> ModelWork:
    """The work of a model, without its embeddings. Raises ConfigError for a quantization that is not known."""
    hidden, heads = config.count("hidden_size"), config.heads
    if config.is_latent:
        query, value = (
            config.count("qk_nope_head_dim") + config.count("qk_rope_head_dim"),
            config.count("v_head_dim"),
        )
        rank, latent = config.count("q_lora_rank", default=0), config.count("kv_lora_rank")
        queries = rank * (hidden + heads * query) if rank else hidden * heads * query
        attention = queries + heads * value * hidden
        attention += hidden * (latent + config.count("qk_rope_head_dim"))
        attention += latent * heads * (config.count("qk_nope_head_dim") + value)
    else:
        query = value = config.head_dim
        attention = 2 * hidden * query * (heads + config.kv_heads)
    pair = 2 * heads * (query + value)
    embedding = hidden * config.count("vocab_size")
    total = active = float(embedding)
    windows = pairs = 0.0
    for number, kind in enumerate(config.layer_types):
        layer, used = _mlp(config, number, hidden)
        # Layers with states have about as many parameters as attention with as many heads for keys as for values.
        mixing = attention if kind.endswith("attention") else 4 * hidden * hidden
        total, active = total + mixing + layer, active + mixing + used
        if kind == "full_attention":
            pairs += pair
        elif kind in _REACH:
            windows += pair * config.count(_REACH[kind])
    stored = total + (0 if config.fields.get("tie_word_embeddings") else embedding)
    return ModelWork(stored, active, stored * _weight_bytes(config), pairs, windows)


_REACH: Final = {
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}


def _mlp(config: ModelConfig, layer: int, hidden: int) -> tuple[float, float]:
    """Parameters of a layer's MLP, and those that a token uses."""
    dense = 3.0 * hidden * config.count("intermediate_size", default=0)
    experts = config.count("n_routed_experts", "num_local_experts", "num_experts", default=0)
    if not experts or layer < config.count("first_k_dense_replace", default=0):
        return dense, dense
    width = config.count("moe_intermediate_size", "intermediate_size")
    shared = width * config.count("n_shared_experts", default=0)
    shared += config.count("shared_expert_intermediate_size", default=0)
    router = float(hidden * experts)
    used = config.count("num_experts_per_tok", default=1)
    return (
        3.0 * hidden * (width * experts + shared) + router,
        3.0 * hidden * (width * used + shared) + router,
    )


def _weight_bytes(config: ModelConfig) -> float:
    """Of one parameter."""
    quantization = config.fields.get("quantization_config")
    if not isinstance(quantization, dict):
        return DTYPE_BYTES.get(config.dtype, 2)
    method, bits = quantization.get("quant_method"), quantization.get("bits")
    if method == "fp8":
        return 1.0
    if method == "mxfp4":
        return 0.6
    if isinstance(bits, int) and 2 <= bits <= 8:
        # With scales.
        return 1.1 * bits / 8
    raise ConfigError(f"config.json: the bytes of quantization_config {method!r} are not known")


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
    config: ModelConfig,
    device: Accelerator,
    ranks: int,
    network_gbit_per_s: float,
    load: LoadSize,
) -> WorkerProfile | None:
    """The profile of a worker with so many devices. None where weights and the longest request do not fit."""
    work, layout = work_of(config), kv_layout(config, tensor_parallel_size=ranks)
    room = MEMORY_SHARE * 1e9 * device.memory_gb - work.weight_bytes / ranks - _ACTIVATION_BYTES
    tokens = max(1, round(load.prompt_tokens + load.answer_tokens))
    copies = max(1, ranks // config.kv_heads)
    request = held_bytes(layout, tokens)
    kv_tokens = int(room * ranks / copies / request * tokens) if room > 0 else 0
    if kv_tokens < load.longest_tokens:
        return None
    memory = 1e12 * device.memory_tb_per_s * _MEMORY_RATE_SHARE * ranks
    rate = device.bf16_tflop_per_s
    if _weight_bytes(config) == 1:
        rate = device.fp8_tflop_per_s or rate
    compute = 1e12 * rate * _COMPUTE_RATE_SHARE * ranks
    # Each layer adds the ranks' parts twice, a ring for each token.
    layers = len(config.layer_types)
    added = 4.0 * (ranks - 1) / ranks * layers * config.count("hidden_size") * 2
    added_s = added / (1e9 * device.link_gb_per_s * _MEMORY_RATE_SHARE)
    token_s = (2 * work.active_parameters + work.window_operations) / compute + added_s
    sent = prompt_bytes(layout, max(1, round(load.prompt_tokens)))
    sent_s = sent_s_per_byte(network_gbit_per_s)
    computed_s = token_s * load.prompt_tokens
    # Layers are sent while later ones are computed.
    exposed_s = max(sent * sent_s / layers, sent * sent_s - computed_s)
    return WorkerProfile(
        steps=StepTimes(
            fixed_s=work.weight_bytes / memory
            + _STEP_OVERHEAD_S
            + (2 * layers * _ALL_REDUCE_S if ranks > 1 else 0.0),
            s_per_prompt_token=token_s,
            s_per_attended_token=work.pair_operations / compute,
            s_per_answer=token_s,
            s_per_context_token=copies * layout.token_bytes / memory,
            prompt_steps=_COUNT,
            answer_steps=_COUNT,
        ),
        handovers=HandoverTimes(_HANDOVER_S, exposed_s / sent, _COUNT),
        kv_tokens=kv_tokens,
        kv_bytes_per_token=max(1, round(sent / load.prompt_tokens)),
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=STEP_TOKENS,
        measured=f"computed from published peak rates: {config.name} on {ranks} {device.name}; no measurement",
    )


def sent_s_per_byte(network_gbit_per_s: float) -> float:
    """Seconds that a byte of KV takes on the network."""
    return 8.0 / (1e9 * network_gbit_per_s * _NETWORK_RATE_SHARE)


def held_bytes(layout: KvLayout, tokens: int) -> float:
    """The bytes that a request with so many tokens holds: one copy."""
    return sum(
        len(group.layers)
        * group.bytes_between(
            0,
            group.window_blocks(tokens) * group.block_tokens
            if group.is_windowed
            else 1
            if group.kind == STATE
            else tokens,
            group.head_count,
        )
        for group in layout.groups
    )
