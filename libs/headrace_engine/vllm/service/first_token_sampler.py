"""Chooses the first token of an answer from logits that prefill has sent, as a step of vLLM would.

Batch, sampler and the handling of a request's settings are vLLM's. Only the row of logits is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace_common.errors import InternalError, TransferFailed
from headrace_engine.interface import DecodeTokens, Sampling, TokenLogprobs
from headrace_engine.vllm.compat import first_batch, make_sampler, vocabulary_size
from headrace_engine.vllm.service.sampling import (
    STEP_LIMIT,
    rejected,
    request_errors,
    sampling_params,
)

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
        """Removes the tokens with which the answer cannot begin from a row of logits. Not thread-safe.

        Raises ValueError when a limit of the grammar's library is reached.
        """
        import torch
        import xgrammar

        bits = self._manager.grammar_bitmask({_ID: request}, [_ID], {})
        if request.structured_output_request.grammar.ll_matcher.is_error():
            raise ValueError(STEP_LIMIT)
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


FLOAT_BYTES = 4


class FirstTokenSampler:
    """Samples one row of logits at a time, on a thread of its own."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._config = vllm_config
        self._vocabulary = vocabulary_size(vllm_config)
        self._sampler = make_sampler(vllm_config)
        self._grammars: FirstTokenGrammars | None = None
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="headrace-first-sample", initializer=_use_one_thread
        )

    @property
    def logits_bytes(self) -> int:
        """Bytes of one row."""
        return FLOAT_BYTES * self._vocabulary

    async def choose(
        self, logits: bytes, prompt: Sequence[int], sampling: Sampling
    ) -> DecodeTokens:
        """The token after the prompt. Raises TransferFailed for logits of another vocabulary, else InternalError."""
        if len(logits) != self.logits_bytes:
            raise TransferFailed(
                f"{len(logits)} bytes of logits have arrived, but those of this model have {self.logits_bytes}"
            )
        loop = asyncio.get_running_loop()
        params = sampling_params(sampling, None)
        try:
            request = await self._compile(params) if params.structured_outputs else None
            choose = partial(self._choose, logits, list(prompt), sampling, params, request)
            return await loop.run_in_executor(self._thread, choose)
        except request_errors() as exc:
            raise rejected(exc, sampling) from exc
        except RuntimeError as exc:
            raise InternalError(f"vLLM could not sample: {exc}") from exc

    async def _compile(self, params: SamplingParams) -> Request:
        if self._grammars is None:
            self._grammars = FirstTokenGrammars(self._config)
        return await self._grammars.compile(params)

    async def warm(self) -> None:
        """Samples once by each code path, since the first use of each is slow."""
        logits = bytes(self.logits_bytes)
        seeded = Sampling(top_p=0.9, top_k=2, min_p=0.1, seed=1, presence_penalty=1.0, logprobs=1)
        for sampling in (Sampling(temperature=0.0), Sampling(), seeded):
            await self.choose(logits, (0,), sampling)

    def close(self) -> None:
        """Ends the thread after the current row."""
        self._thread.shutdown(cancel_futures=True)
        if self._grammars is not None:
            self._grammars.close()

    def _choose(
        self,
        logits: bytes,
        prompt: list[int],
        sampling: Sampling,
        params: SamplingParams,
        constrained: Request | None,
    ) -> DecodeTokens:
        import torch

        batch = first_batch(self._config, prompt, params)
        # Copied, because sampling writes into the row.
        row = torch.frombuffer(bytearray(logits), dtype=torch.float32).unsqueeze(0)
        with torch.inference_mode():
            if constrained is not None and self._grammars is not None:
                self._grammars.mask(constrained, row)
            output = self._sampler(row, batch.sampling_metadata)
        token_id = int(output.sampled_token_ids[0, 0])
        if output.logprobs_tensors is None or sampling.logprobs is None:
            return DecodeTokens((token_id,))
        found = output.logprobs_tensors
        return DecodeTokens(
            (token_id,),
            (_logprobs(found.logprob_token_ids[0], found.logprobs[0], sampling.logprobs),),
        )


def _use_one_thread() -> None:
    """One row is little work, and OpenMP threads would spin after it."""
    import torch

    torch.set_num_threads(1)


def _logprobs(token_ids: Tensor, logprobs: Tensor, count: int) -> TokenLogprobs:
    """From a row that has the chosen token first, then the likeliest ones."""
    ids: list[Any] = token_ids.tolist()
    values: list[float] = logprobs.tolist()
    return TokenLogprobs(
        values[0], tuple(zip(ids[1 : count + 1], values[1 : count + 1], strict=True))
    )
