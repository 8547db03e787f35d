"""One request on a decode engine, from its blocks to its last token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from headrace_common.errors import (
    Cancelled,
    HeadraceError,
    InternalError,
    InvalidRequest,
    TransferFailed,
)
from headrace_engine.interface import DecodeEnded, DecodeEvent, DecodeTokens, DecodeWork
from headrace_engine.vllm.service.sampling import sampling_params, tokens_of
from headrace_engine.vllm.settings import incoming_params
from headrace_kv.handoff.messages import Reservation

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from headrace_engine.vllm.link.server import LinkServer
    from headrace_engine.vllm.service.first_token_sampler import FirstSampler

# The reservation and the tokens come by two ways; the first may be behind by this much.
RESERVATION_LAG_S = 10.0


class DecodeRun:
    """`reserved` and `fail` are called from the link; `events` once, and `close` after it whatever happened."""

    def __init__(
        self,
        llm: AsyncLLM,
        link: LinkServer,
        work: DecodeWork,
        sampler: FirstSampler | None = None,
        max_model_len: int = 0,
    ) -> None:
        """Of an engine that takes `max_model_len`. `sampler` makes the first token of a work with `from_logits`."""
        self._link = link
        self._work = work
        self._sampler = sampler
        self._context_tokens = max_model_len
        self._logits: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._reservation: Reservation | None = None
        self._told = False
        self._failure: HeadraceError | None = None
        self._changed = asyncio.Event()
        params = None
        if work.remote_kv:
            params = incoming_params(work.transfer_id, work.awaits_first_token)
        self._outputs = llm.generate(
            {"prompt_token_ids": list(work.token_ids[: work.prompt_tokens])},
            sampling_params(work.sampling, params, work.token_ids[work.prompt_tokens :]),
            work.transfer_id,
        )
        self._next: asyncio.Task[RequestOutput] | None = None

    def reserved(self, reservation: Reservation) -> None:
        """The scheduler holds blocks."""
        self._reservation = reservation
        self._changed.set()

    def first_logits(self, logits: bytes) -> None:
        """What the first token is made from."""
        if not self._logits.done():
            self._logits.set_result(logits)

    def fail(self, error: HeadraceError) -> None:
        """The engine is gone."""
        self._failure = error
        self._changed.set()

    async def events(self) -> AsyncIterator[DecodeEvent]:
        """See Engine.decode."""
        cached_tokens = 0
        self._link.request_coming()
        self._next = asyncio.create_task(self._take())
        if self._work.remote_kv:
            reservation = await self._wait_reserved(self._next)
            cached_tokens = reservation.start_token
            self._told = True
            yield reservation
        if self._work.from_logits:
            first = await self._make_first(self._next)
            ended = self._ended_by(first.token_ids[0])
            if ended is None:
                self._link.first_token(self._work.transfer_id, first.token_ids[0])
            yield first
            if ended is not None:
                yield ended
                return
        while True:
            output = await self._next
            completion = output.outputs[0]
            if completion.token_ids:
                yield tokens_of(completion, self._work.sampling.logprobs)
            if output.finished:
                if not self._work.remote_kv:
                    cached_tokens = output.num_cached_tokens or 0
                yield DecodeEnded(_stopped(completion.finish_reason), cached_tokens)
                return
            self._next = asyncio.create_task(self._take())

    async def _make_first(self, request: asyncio.Task[RequestOutput]) -> DecodeTokens:
        """The first token, once its logits are there. Raises what vLLM ends the request with before that."""
        await asyncio.wait({self._logits, request}, return_when=asyncio.FIRST_COMPLETED)
        if self._sampler is None:
            raise InternalError("this engine chooses no token from logits")
        if not self._logits.done():
            _stopped((await request).outputs[0].finish_reason)
            raise InternalError("vLLM ended a request that waited for its first token")
        prompt = self._work.token_ids
        return await self._sampler.choose(self._logits.result(), prompt, self._work.sampling)

    def _ended_by(self, token_id: int) -> DecodeEnded | None:
        """How an answer ends with its first token, if it does: as vLLM would have it."""
        assert self._reservation is not None
        sampling, tokens = self._work.sampling, len(self._work.token_ids)
        stopped = token_id in sampling.stop_token_ids
        if stopped or sampling.max_tokens == 1 or tokens + 1 >= self._context_tokens:
            return DecodeEnded(stopped, self._reservation.start_token)
        return None

    async def _wait_reserved(self, first: asyncio.Task[Any]) -> Reservation:
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({changed, first}, return_when=asyncio.FIRST_COMPLETED)
            if not changed.done() and first.exception() is None:
                await asyncio.wait({changed}, timeout=RESERVATION_LAG_S)
        finally:
            changed.cancel()
        if self._failure is not None:
            raise self._failure
        if self._reservation is None:
            first.result()
            raise InternalError("vLLM generated without saying which blocks it uses")
        return self._reservation

    async def _take(self) -> RequestOutput:
        try:
            return await anext(self._outputs)
        except (HeadraceError, asyncio.CancelledError):
            raise
        except StopAsyncIteration:
            raise InternalError("vLLM ended a request without saying so") from None
        except ValueError as exc:
            raise InvalidRequest({"token_ids": f"vLLM refuses it: {exc}"}) from exc
        except Exception as exc:
            raise self._failure or InternalError(
                f"vLLM failed: {type(exc).__name__}: {exc}"
            ) from exc

    async def close(self) -> None:
        """Aborts what still runs, and gives blocks back that the caller never heard of."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait({self._next})
            if not self._next.cancelled():
                # Whoever awaited it has heard of it; nobody else wants to.
                self._next.exception()
        await self._outputs.aclose()
        held = self._reservation
        if held is not None and not self._told and held.start_token < held.end_token:
            self._link.released(held.transfer_id)


def _stopped(finish_reason: str | None) -> bool:
    """Raises what an abnormal end means."""
    if finish_reason == "stop":
        return True
    if finish_reason == "length":
        return False
    if finish_reason == "error":
        raise TransferFailed("the KV cache did not arrive, so nothing was generated")
    raise Cancelled(f"vLLM ended the request: {finish_reason}")
