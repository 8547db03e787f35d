"""A job: engines with further arguments of vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace_engine.vllm.engine import VllmEngine
from tests.vllm.pair import prompt_of, running_pair

ARGUMENTS = """
    --no-enable-prefix-caching --max-logprobs 3 --scheduling-policy priority --long-prefill-token-threshold 64
    --load-format safetensors --hf-overrides '{"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}'
    --prefix-caching-hash-algo sha256_cbor
    --watermark 0.05 --additional-config '{"note": 1}' --structured-outputs-config.backend guidance
    --max-num-scheduled-tokens 256
"""


@dataclass(slots=True)
class Result:
    """`answers`: of a prompt, on one engine and twice on two. `cached`: its tokens in prefix caches the second time."""

    answers: list[list[int]]
    cached: list[int]
    identity: str
    in_effect: dict[str, Any]


async def answer(model: str) -> Result:
    """Answers one prompt three times."""
    prompt = prompt_of(150)
    changes = {"model": model, "engine_args": ARGUMENTS}
    async with running_pair(prefill=dict(changes), decode=dict(changes)) as pair:
        first = await pair.split(prompt)
        second = await pair.split(prompt)
        plain = await pair.plain(prompt)
        assert second.reservation is not None
        assert second.prefill is not None
        return Result(
            answers=[one.token_ids for one in (first, second, plain)],
            cached=[second.reservation.start_token, second.prefill.cached_tokens],
            identity=pair.decode.descriptor.layout.model,
            in_effect=in_effect(pair.decode),
        )


def in_effect(engine: VllmEngine) -> dict[str, Any]:
    """What the engine's own configuration says of the arguments."""
    assert engine._llm is not None
    config = engine._llm.vllm_config
    return {
        "enable_prefix_caching": config.cache_config.enable_prefix_caching,
        "max_logprobs": config.model_config.max_logprobs,
        "scheduling_policy": config.scheduler_config.policy,
        "long_prefill_token_threshold": config.scheduler_config.long_prefill_token_threshold,
        "load_format": config.load_config.load_format,
        "hf_overrides": config.model_config.hf_config.rope_parameters["rope_theta"],
        "prefix_caching_hash_algo": config.cache_config.prefix_caching_hash_algo,
        "watermark": config.scheduler_config.watermark,
        "additional_config": config.additional_config,
        "structured_outputs_config.backend": config.structured_outputs_config.backend,
        "max_num_scheduled_tokens": config.scheduler_config.max_num_scheduled_tokens,
    }
