"""One request on a decode engine, from the reservation of its blocks to its last token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace_common.errors import (
    Cancelled,
    HeadraceError,
    InternalError,
    InvalidRequest,
    TransferFailed,
)
from headrace_engine.interface import (
    DecodeEnded,
    DecodeEvent,
    DecodeTokens,
    DecodeWork,
    FirstToken,
    Released,
)
from headrace_engine.vllm.service.sampling import (
    STEP_LIMIT,
    prompt_logprobs_of,
    rejected,
    request_errors,
    sampling_params,
    tokens_of,
)
from headrace_engine.vllm.settings import read_kept, receive_params
from headrace_kv.messages import Reservation

if TYPE_CHECKING:
    from vllm.inputs import EngineInput, TokensPrompt
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from headrace_engine.vllm.link.server import LinkServer
    from headrace_engine.vllm.service.first_token_sampler import FirstTokenSampler

# These come over the link and may arrive later than vLLM's output.
RESERVATION_LAG_S = 10.0
FAILURE_LAG_S = 10.0


class DecodeRequest:
    """Call `events` once, and `close` after it in any case.

    The link calls `blocks_reserved`, `step_started`, `failure_reported` and `fail`.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        link: LinkServer,
        work: DecodeWork,
        prompt: TokensPrompt | EngineInput,
        sampler: FirstTokenSampler | None = None,
        max_model_len: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """`prompt`: see engine_prompt. `sampler` chooses the first token of a work with `from_hidden_state`.

        `max_model_len` is the engine's.
        """
        self._link = link
        self._work = work
        self._sampler = sampler
        self._max_model_len = max_model_len
        self._lora_request = lora_request
        self._hidden_state: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._reservation: Reservation | None = None
        self._reservation_yielded = False
        self._transfer_failed = False
        self._load_failed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._step_start_ns = 0
        self._has_tokens = False
        self._failure: HeadraceError | None = None
        self._changed = asyncio.Event()
        params = None
        if work.remote_kv:
            params = receive_params(work.transfer_id, work.awaits_first_token)
        self._outputs = llm.generate(
            prompt,
            sampling_params(
                work.sampling,
                params,
                work.token_ids[work.prompt_tokens :],
                step_of=work.transfer_id,
                priority=work.priority,
                bounds=work.bounds,
                keep=work.keep,
            ),
            work.transfer_id,
            lora_request=lora_request,
        )
        self._next: asyncio.Task[RequestOutput] | None = None

    def blocks_reserved(self, reservation: Reservation) -> None:
        """The scheduler has allocated blocks."""
        self._reservation = reservation
        self._changed.set()

    def step_started(self, monotonic_ns: int) -> None:
        """The scheduler has planned the first step with the request."""
        self._step_start_ns = monotonic_ns

    def first_hidden_state(self, state: bytes) -> None:
        """The hidden state that the first token is chosen from."""
        if not self._hidden_state.done():
            self._hidden_state.set_result(state)

    def transfer_failed(self) -> None:
        """The KV cache will not arrive: vLLM ends the request with an error."""
        self._transfer_failed = True

    def failure_reported(self, *, load_failed: bool) -> None:
        """vLLM has ended the request with an error, because of a load from a lower tier or of the answer's form."""
        if not self._load_failed.done():
            self._load_failed.set_result(load_failed)

    def fail(self, error: HeadraceError) -> None:
        """The engine's processes have ended."""
        self._failure = error
        self._changed.set()

    async def events(self) -> AsyncIterator[DecodeEvent]:
        """See Engine.decode."""
        cached_tokens = 0
        self._link.request_coming()
        self._next = asyncio.create_task(self._next_output())
        if self._work.remote_kv:
            reservation = await self._wait_reserved(self._next)
            cached_tokens = reservation.start_token
            self._reservation_yielded = True
            yield reservation
        if self._work.from_hidden_state:
            first = await self._choose_first_token(self._next)
            ended = self._end_after(first.token_ids[0])
            if ended is None:
                given = FirstToken(self._work.transfer_id, first.token_ids[0])
                self._link.transfer_event(given)
            yield first
            if ended is not None:
                yield ended
                return
        while True:
            output = await self._next
            completion = output.outputs[0]
            if completion.token_ids:
                self._has_tokens = True
                yield self._tokens_of(output)
            if output.finished:
                if not self._work.remote_kv:
                    cached_tokens = output.num_cached_tokens or 0
                stopped = await self._stopped(completion.finish_reason)
                kept = read_kept(output.kv_transfer_params)
                yield DecodeEnded(stopped, cached_tokens, kept=kept)
                return
            self._next = asyncio.create_task(self._next_output())

    def _tokens_of(self, output: RequestOutput) -> DecodeTokens:
        sampling = self._work.sampling
        tokens = tokens_of(output.outputs[0], sampling.logprobs, self._step_start_ns)
        if sampling.prompt_logprobs is None:
            return tokens
        prompt = self._work.token_ids
        return replace(
            tokens, prompt_logprobs=prompt_logprobs_of(output, prompt, sampling.prompt_logprobs)
        )

    async def _choose_first_token(self, request: asyncio.Task[RequestOutput]) -> DecodeTokens:
        """The first token, once its state has arrived. Raises an error when vLLM ends the request before that."""
        await asyncio.wait({self._hidden_state, request}, return_when=asyncio.FIRST_COMPLETED)
        if self._sampler is None:
            raise InternalError("this engine chooses no token from hidden states")
        if not self._hidden_state.done():
            await self._stopped((await request).outputs[0].finish_reason)
            raise InternalError("vLLM ended a request that waited for its first token")
        return await self._sampler.choose(
            self._hidden_state.result(),
            prompt=self._work.token_ids,
            sampling=self._work.sampling,
            lora_request=self._lora_request,
        )

    def _end_after(self, token_id: int) -> DecodeEnded | None:
        """The end of an answer that ends with this first token, by vLLM's rules. None when it goes on."""
        assert self._reservation is not None
        sampling, tokens = self._work.sampling, len(self._work.token_ids)
        stopped = token_id in sampling.stop_token_ids
        if stopped or sampling.max_tokens == 1 or tokens + 1 >= self._max_model_len:
            return DecodeEnded(stopped, self._reservation.start_token)
        return None

    async def _stopped(self, finish_reason: str | None) -> bool:
        """Whether a stop token has ended the request. Raises the error of an abnormal end."""
        if finish_reason == "stop":
            return True
        if finish_reason == "length":
            return False
        if finish_reason != "error":
            raise Cancelled(f"vLLM ended the request: {finish_reason}")
        outputs = self._work.sampling.structured_outputs
        if outputs is None or self._transfer_failed or await self._has_failed_load():
            raise TransferFailed("the KV cache did not arrive, so nothing was generated")
        remedy = (
            STEP_LIMIT
            if self._has_tokens
            else "vLLM cannot compile it, or the tokens that were generated before do not follow it; simplify it"
        )
        raise InvalidRequest({f"sampling.structured_outputs.{outputs.kind}": remedy})

    async def _has_failed_load(self) -> bool:
        """Whether a load from a lower tier has ended the request with an error."""
        await asyncio.wait({self._load_failed}, timeout=FAILURE_LAG_S)
        return not self._load_failed.done() or self._load_failed.result()

    async def _wait_reserved(self, first: asyncio.Task[Any]) -> Reservation:
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({changed, first}, return_when=asyncio.FIRST_COMPLETED)
            if not changed.done() and first.exception() is None:
                await self._raise_early_end(first.result())
                await asyncio.wait({changed}, timeout=RESERVATION_LAG_S)
        finally:
            changed.cancel()
        if self._failure is not None:
            raise self._failure
        if self._reservation is None:
            first.result()
            raise InternalError("vLLM generated tokens without a reservation of blocks")
        return self._reservation

    async def _raise_early_end(self, output: RequestOutput) -> None:
        """Raises the error of a request that vLLM has ended before it scheduled it: no reservation will come."""
        reason = output.outputs[0].finish_reason
        if output.finished and reason not in ("stop", "length"):
            await self._stopped(reason)

    async def _next_output(self) -> RequestOutput:
        try:
            return await anext(self._outputs)
        except (HeadraceError, asyncio.CancelledError):
            raise
        except StopAsyncIteration:
            raise InternalError("vLLM ended a request without a last output") from None
        except request_errors() as exc:
            raise rejected(exc, self._work.sampling, "token_ids") from exc
        except Exception as exc:
            raise self._failure or InternalError(
                f"vLLM failed: {type(exc).__name__}: {exc}"
            ) from exc

    async def close(self) -> None:
        """Aborts the request if it still runs. Releases blocks of a reservation that was never yielded."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait({self._next})
            if not self._next.cancelled():
                # Retrieved, so that asyncio does not log it: a caller that awaited it has got it.
                self._next.exception()
        await self._outputs.aclose()
        held = self._reservation
        if held is not None and not self._reservation_yielded and held.start_token < held.end_token:
            self._link.transfer_event(Released(held.transfer_id))
