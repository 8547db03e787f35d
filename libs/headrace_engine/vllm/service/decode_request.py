"""One request on a decode engine, from the reservation of its blocks to its last token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from headrace_common.errors import (
    Cancelled,
    HeadraceError,
    InternalError,
    InvalidRequest,
    TransferFailed,
)
from headrace_engine.connector.transfers import ReceiveParams
from headrace_engine.interface import (
    AnswerSink,
    DecodeEnded,
    DecodeTokens,
    DecodeWork,
    FirstToken,
)
from headrace_engine.receipts import RequestCost
from headrace_engine.vllm.compat import take_outputs
from headrace_engine.vllm.service.sampling import (
    STEP_LIMIT,
    prompt_logprobs_of,
    rejected,
    request_errors,
    sampling_params,
    tokens_of,
)
from headrace_engine.vllm.settings import find_params, params_with
from headrace_kv.messages import Reservation
from headrace_kv.tiers.promises import Kept

if TYPE_CHECKING:
    from vllm.inputs import EngineInput, TokensPrompt
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

    from headrace_engine.vllm.link.server import LinkServer
    from headrace_engine.vllm.service.first_token_sampler import FirstTokenSampler

# These come over the link and may arrive later than vLLM's output.
RESERVATION_LAG_S = 10.0
FAILURE_LAG_S = 10.0


@dataclass(eq=False, slots=True)
class DecodeRequest:
    """Call `run` once. The link calls `blocks_reserved`, `step_started`, `failure_reported` and `fail`."""

    llm: AsyncLLM
    link: LinkServer
    work: DecodeWork
    sink: AnswerSink
    takers: dict[str, AnswerSink]
    """See pass_tokens."""
    prompt: TokensPrompt | EngineInput
    """See engine_prompt."""
    sampler: FirstTokenSampler | None = None
    """Chooses the first token of a work with `from_hidden_state`."""
    max_model_len: int = 0
    """The engine's."""
    lora_request: LoRARequest | None = None
    _hidden_state: asyncio.Future[bytes] = field(default_factory=asyncio.Future, init=False)
    _reserved: asyncio.Future[Reservation] = field(default_factory=asyncio.Future, init=False)
    _transfer_failed: bool = field(default=False, init=False)
    _load_failed: asyncio.Future[bool] = field(default_factory=asyncio.Future, init=False)
    _step_start_ns: int = field(default=0, init=False)
    _has_tokens: bool = field(default=False, init=False)
    _vllm_id: str = field(default="", init=False)
    _early: list[RequestOutput] | None = field(default_factory=list, init=False)
    """Outputs that came before the reservation or the first token. None once outputs are put at once."""
    _last: asyncio.Future[RequestOutput] = field(default_factory=asyncio.Future, init=False)
    """The output with the end, or the error. Until then vLLM has the request."""

    def blocks_reserved(self, reservation: Reservation) -> None:
        """The scheduler has allocated blocks."""
        if not self._reserved.done():
            self._reserved.set_result(reservation)
            self.sink.put(reservation)

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

    def failure_reported(self, cost: Sequence[float] = (), *, load_failed: bool) -> None:
        """vLLM has aborted the request, or ended it because of a load from a lower tier or of the answer's form."""
        if any(cost):
            self.sink.put(RequestCost(cost[0], cost[1], cost[2], int(cost[3])))
        if not self._load_failed.done():
            self._load_failed.set_result(load_failed)

    def fail(self, error: HeadraceError) -> None:
        """The engine's processes have ended."""
        if not self._last.done():
            self._last.set_exception(error)

    async def run(self) -> None:
        """See Engine.decode."""
        self.link.request_coming()
        outputs = await self._start()
        try:
            self._vllm_id = outputs.request_id
            take_outputs(outputs, self._output_arrived)
            await self._generate()
        except (Exception, asyncio.CancelledError):
            ended = self._last.done() and self._last.exception() is None
            if ended and (cost := _cost_of(self._last.result())) != RequestCost():
                # vLLM reports no failure of a request that it has ended.
                self.sink.put(cost)
            raise
        finally:
            self.takers.pop(self._vllm_id, None)
            # An exception is retrieved here, so that asyncio does not log it.
            if not self._last.done() or self._last.exception() is not None:
                await self.llm.abort(outputs.request_id, internal=True)

    async def _start(self) -> RequestOutputCollector:
        work = self.work
        params = None
        if work.remote_kv:
            params = params_with(
                ReceiveParams(work.transfer_id, work.awaits_first_token, work.computes_from)
            )
        try:
            return await self.llm.add_request(
                work.transfer_id,
                self.prompt,
                sampling_params(
                    work.sampling,
                    params,
                    work.token_ids[work.prompt_tokens :],
                    step_of=work.transfer_id,
                    priority=work.priority,
                    bounds=work.bounds,
                    keep=work.keep,
                    tenant_salt=work.tenant_salt,
                ),
                lora_request=self.lora_request,
            )
        except Exception as error:
            raise self._known_error(error) from error

    async def _generate(self) -> None:
        cached_tokens: int | None = None
        if self.work.remote_kv:
            cached_tokens = (await self._wait_reserved()).start_token
        if self.work.from_hidden_state:
            first = await self._choose_first_token()
            ended = self._end_after(first.token_ids[0])
            if ended is None:
                given = FirstToken(self.work.transfer_id, first.token_ids[0])
                self.link.transfer_event(given)
            self.sink.put(first)
            if ended is not None:
                self.sink.put(ended)
                return
        early, self._early = self._early or (), None
        for output in early:
            self._put_tokens(output)
        # Its cancellation is not that of the future, which says whether vLLM has ended the request.
        await asyncio.wait({self._last})
        last = self._last.result()
        self._put_tokens(last)
        if cached_tokens is None:
            cached_tokens = last.num_cached_tokens or 0
        stopped = await self._stopped(last.outputs[0].finish_reason)
        kept = find_params(last.kv_transfer_params, Kept)
        self.sink.put(DecodeEnded(stopped, cached_tokens, kept=kept, cost=_cost_of(last)))

    def _output_arrived(self, output: RequestOutput | Exception) -> None:
        """Called by vLLM's task that reads the outputs of all requests, which must not fail."""
        if self._last.done():
            return
        if isinstance(output, Exception):
            self._last.set_exception(self._known_error(output))
        elif output.finished:
            self._last.set_result(output)
        elif self._early is not None:
            self._early.append(output)
        else:
            self._put_tokens(output)
            if self.work.sampling.logprobs is None:
                self.takers[self._vllm_id] = self.sink

    def _put_tokens(self, output: RequestOutput) -> None:
        if not output.outputs[0].token_ids:
            return
        self._has_tokens = True
        try:
            self.sink.put(self._tokens_of(output))
        except Exception as error:  # noqa: BLE001
            self.fail(self._known_error(error))

    def _tokens_of(self, output: RequestOutput) -> DecodeTokens:
        sampling = self.work.sampling
        tokens = tokens_of(output.outputs[0], sampling.logprobs, self._step_start_ns)
        if sampling.prompt_logprobs is None:
            return tokens
        prompt = self.work.token_ids
        return replace(
            tokens, prompt_logprobs=prompt_logprobs_of(output, prompt, sampling.prompt_logprobs)
        )

    async def _choose_first_token(self) -> DecodeTokens:
        """The first token, once its state has arrived. Raises an error when vLLM ends the request before that."""
        awaited: set[asyncio.Future[Any]] = {self._hidden_state, self._last}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if self.sampler is None:
            raise InternalError("this engine chooses no token from hidden states")
        if not self._hidden_state.done():
            await self._stopped(self._last.result().outputs[0].finish_reason)
            raise InternalError("vLLM ended a request that waited for its first token")
        return await self.sampler.choose(
            self._hidden_state.result(),
            prompt=self.work.token_ids,
            sampling=self.work.sampling,
            lora_request=self.lora_request,
        )

    def _end_after(self, token_id: int) -> DecodeEnded | None:
        """The end of an answer that ends with this first token, by vLLM's rules. None when it goes on."""
        sampling, tokens = self.work.sampling, len(self.work.token_ids)
        stopped = token_id in sampling.stop_token_ids
        if stopped or sampling.max_tokens == 1 or tokens + 1 >= self.max_model_len:
            return DecodeEnded(stopped, self._reserved.result().start_token)
        return None

    async def _stopped(self, finish_reason: str | None) -> bool:
        """Whether a stop token has ended the request. Raises the error of an abnormal end."""
        if finish_reason == "stop":
            return True
        if finish_reason == "length":
            return False
        if finish_reason != "error":
            raise Cancelled(f"vLLM ended the request: {finish_reason}")
        outputs = self.work.sampling.structured_outputs
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

    async def _wait_reserved(self) -> Reservation:
        awaited: set[asyncio.Future[Any]] = {self._reserved, self._last}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if not self._reserved.done():
            # No reservation comes for a request that vLLM has ended with an error before it scheduled it.
            await self._stopped(self._last.result().outputs[0].finish_reason)
            await asyncio.wait({self._reserved}, timeout=RESERVATION_LAG_S)
        if not self._reserved.done():
            raise InternalError("vLLM generated tokens without a reservation of blocks")
        return self._reserved.result()

    def _known_error(self, error: Exception) -> HeadraceError:
        if isinstance(error, HeadraceError):
            return error
        if isinstance(error, request_errors()):
            return rejected(error, self.work.sampling, "token_ids")
        return InternalError(f"vLLM failed: {type(error).__name__}: {error}")


def _cost_of(last: RequestOutput) -> RequestCost:
    return find_params(last.kv_transfer_params, RequestCost) or RequestCost()
