"""The grammar of a structured output for a first token that is chosen from logits, outside vLLM's engine."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TYPE_CHECKING

from headrace_common.errors import InternalError

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

_ID = "first"


class FirstTokenGrammars:
    """Compiles grammars as vLLM's scheduler does, in this process."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        from vllm.v1.structured_output import StructuredOutputManager

        self._config = vllm_config
        self._manager = StructuredOutputManager(vllm_config)

    async def compile(self, params: SamplingParams) -> Request:
        """A request with a compiled grammar, for `mask`. Raises ValueError when vLLM rejects its constraint."""
        request = await asyncio.to_thread(self._start, params)
        structured = request.structured_output_request
        if structured is None:
            raise InternalError("the request has no structured output")
        compiled = structured._grammar  # noqa: SLF001 - the property does not wait
        if isinstance(compiled, Future):
            await asyncio.wrap_future(compiled)
        return request

    def mask(self, request: Request, row: Tensor) -> None:
        """Removes the tokens with which the answer cannot begin from a row of logits. Not thread-safe."""
        import torch
        import xgrammar

        bits = self._manager.grammar_bitmask({_ID: request}, [_ID], {})
        xgrammar.apply_token_bitmask_inplace(row, torch.from_numpy(bits))

    def close(self) -> None:
        """Ends the compiler's threads."""
        self._manager.clear_backend()

    def _start(self, params: SamplingParams) -> Request:
        from vllm.v1.request import Request

        # Chooses the library that compiles it.
        params.verify(
            self._config.model_config,
            self._config.speculative_config,
            self._config.structured_outputs_config,
            self._manager.tokenizer,
        )
        request = Request(
            request_id=_ID, prompt_token_ids=[0], sampling_params=params, pooling_params=None
        )
        self._manager.grammar_init(request)
        return request
