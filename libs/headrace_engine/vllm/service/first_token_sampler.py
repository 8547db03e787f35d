"""Chooses the first token of an answer from a hidden state that prefill has sent, as a step of vLLM would.

Head, batch, sampler and the handling of a request's settings are vLLM's. Only the hidden state is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.engine.v1 import link_pb2
from headrace_common.errors import HeadraceError, InternalError, TransferFailed
from headrace_engine.interface import DecodeTokens, Sampling, TokenLogprobs
from headrace_engine.vllm.service.sampling import (
    STEP_LIMIT,
    rejected,
    request_errors,
    sampling_params,
)
from headrace_engine.vllm.settings import BESIDE_STEPS_METHOD, FIRST_TOKEN_METHOD

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.request import Request

    from headrace_engine.vllm.link.server import LinkServer
    from headrace_kv.hidden_state import HiddenFormat


_ID = "first"


class FirstTokenGrammars:
    """Compiles grammars as vLLM's scheduler does, in this process."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        from vllm.v1.structured_output import StructuredOutputManager

        self._config = vllm_config
        self._manager = StructuredOutputManager(vllm_config)

    async def compile(self, params: SamplingParams) -> Request:
        """A request with a compiled grammar, for `bitmask`. Raises ValueError when vLLM rejects its constraint."""
        request = await asyncio.to_thread(self._start, params)
        structured = request.structured_output_request
        if structured is None:
            raise InternalError("the request has no structured output")
        compiled = structured._grammar  # noqa: SLF001 - the property does not wait
        if isinstance(compiled, Future):
            await asyncio.wrap_future(compiled)
        return request

    def bitmask(self, request: Request) -> bytes:
        """A bit for each token, set where the answer can begin with it, in words of 32 bits. Not thread-safe.

        Raises ValueError when a limit of the grammar's library is reached.
        """
        bits = self._manager.grammar_bitmask({_ID: request}, [_ID], {})
        if request.structured_output_request.grammar.ll_matcher.is_error():
            raise ValueError(STEP_LIMIT)
        return bytes(bits.tobytes())

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


class FirstTokenSampler:
    """Has the engine's ranks sample first tokens: beside their steps where they can, else between them."""

    def __init__(self, llm: AsyncLLM, link: LinkServer, hidden_format: HiddenFormat) -> None:
        self._llm = llm
        self._link = link
        self._beside_steps = False
        self._hidden_format = hidden_format
        self._grammars: FirstTokenGrammars | None = None

    async def choose(
        self,
        state: bytes,
        *,
        prompt: Sequence[int],
        sampling: Sampling,
        lora_request: LoRARequest | None = None,
    ) -> DecodeTokens:
        """The token after the prompt. Raises TransferFailed for a state of another model, else InternalError."""
        if len(state) != self._hidden_format.nbytes:
            raise TransferFailed(
                f"a hidden state of {len(state)} bytes has arrived, but that of this model is {self._hidden_format}"
            )
        params = sampling_params(sampling, None)
        adapter: tuple[Any, ...] = ()
        if lora_request is not None:
            adapter = (lora_request.lora_name, lora_request.lora_int_id, lora_request.lora_path)
        try:
            bitmask = await self._bitmask(params) if params.structured_outputs else b""
            # The ranks get its effect.
            params.structured_outputs = None
            encoded = msgspec.msgpack.encode(params)
            sample = self._sample_beside_steps if self._beside_steps else self._sample
            token_id, ids, logprobs = await sample(state, list(prompt), encoded, bitmask, adapter)
        except HeadraceError:
            raise
        except request_errors() as exc:
            raise rejected(exc, sampling) from exc
        except Exception as exc:
            raise InternalError(f"vLLM could not sample: {exc}") from exc
        if sampling.logprobs is None:
            return DecodeTokens((token_id,))
        count = sampling.logprobs + 1
        others = tuple(zip(ids[1:count], logprobs[1:count], strict=True))
        return DecodeTokens((token_id,), (TokenLogprobs(logprobs[0], others),))

    async def start(self) -> None:
        """Samples once by each code path, since the first use of each is slow."""
        answers = await self._llm.collective_rpc(BESIDE_STEPS_METHOD)
        self._beside_steps = all(answers)
        state = bytes(self._hidden_format.nbytes)
        seeded = Sampling(top_p=0.9, top_k=2, min_p=0.1, seed=1, presence_penalty=1.0, logprobs=1)
        for sampling in (Sampling(temperature=0.0), Sampling(), seeded):
            await self.choose(state, prompt=(0,), sampling=sampling)

    def close(self) -> None:
        """Ends the compiler's threads."""
        if self._grammars is not None:
            self._grammars.close()

    async def _sample(self, *args: Any) -> Sequence[Any]:
        """As HiddenStates.headrace_first_token."""
        # A step that waits for KV would delay it.
        self._link.request_coming()
        results = await self._llm.collective_rpc(FIRST_TOKEN_METHOD, args=args)
        return next(result for result in results if result is not None)

    async def _sample_beside_steps(
        self, state: bytes, prompt: list[int], params: bytes, bitmask: bytes, _: object
    ) -> Sequence[Any]:
        request = link_pb2.SampleFirst(state=state, prompt=prompt, params=params, bitmask=bitmask)
        query = link_pb2.AttachResponse(sample_first=request)
        sampled = (await self._link.ask_rank(0, query)).first_sampled
        if sampled.detail:
            raise InternalError(f"vLLM could not sample: {sampled.detail}")
        return sampled.token_id, sampled.ranked_ids, sampled.logprobs

    async def _bitmask(self, params: SamplingParams) -> bytes:
        if self._grammars is None:
            self._grammars = FirstTokenGrammars(self._llm.vllm_config)
        return self._grammars.bitmask(await self._grammars.compile(params))
