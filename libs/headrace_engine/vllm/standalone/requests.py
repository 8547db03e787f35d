"""vLLM's requests, as far as pairing goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_engine.vllm.standalone.pair_scheduler import Prompt

if TYPE_CHECKING:
    from vllm.v1.request import Request


def prompt_of(request: Request) -> Prompt:
    """A prompt that is not made of tokens has none here, and is not handed over."""
    adapter = request.lora_request
    return Prompt(
        request_id=request.request_id,
        token_ids=() if request.prompt_embeds is not None else request.prompt_token_ids or (),
        extras=(
            f"adapter {adapter.lora_name}" if adapter is not None else "",
            *(feature.identifier for feature in request.mm_features),
        ),
        params=request.kv_transfer_params,
    )


def is_complete(request: Request) -> bool:
    """Whether the request has ended by itself, so that its prompt is in the cache as a whole."""
    from vllm.v1.request import RequestStatus

    ended = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
    return request.status in ended and request.num_computed_tokens >= request.num_prompt_tokens
