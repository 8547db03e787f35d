"""A prefill in vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from headrace.engine.v1 import link_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError, InternalError
from headrace_common.tasks import end_task
from headrace_engine.connector.sender_reports import SenderReports
from headrace_engine.connector.transfers import PrefillTimes, PrefixParams, SendParams
from headrace_engine.interface import DecodeTokens, PrefillOutcome, PrefillWork, Released, Sampling
from headrace_engine.receipts import RequestCost
from headrace_engine.vllm.service.prompts import engine_prompt
from headrace_engine.vllm.service.sampling import (
    rejected,
    request_errors,
    sampling_params,
    tokens_of,
)
from headrace_engine.vllm.settings import find_params, params_with
from headrace_kv.messages import Reservation

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from headrace_engine.vllm.link.server import LinkServer


GREEDY_ONE_TOKEN = Sampling(temperature=0.0, max_tokens=1)


@dataclass(eq=False, slots=True)
class PrefillRequest:
    """Call `outcome` once. The link calls `blocks_reserved`, and the methods of `sending`."""

    llm: AsyncLLM
    link: LinkServer
    work: PrefillWork
    rank_count: int
    on_first_token: Callable[[DecodeTokens], None] | None = None
    lora_request: LoRARequest | None = None
    sending: SenderReports = field(init=False)
    """What the ranks report."""
    _computing: asyncio.Task[tuple[PrefillTimes, RequestCost]] = field(init=False)

    def __post_init__(self) -> None:
        self.sending = SenderReports(self.work.target, self.rank_count, self._stop)

    def blocks_reserved(self, reservation: Reservation) -> None:
        """The scheduler has allocated blocks for a prefix, which is fetched or not."""
        prefix = self.work.prefix
        if prefix is None or not prefix.start(reservation):
            self.link.transfer_event(Released(reservation.transfer_id))

    async def outcome(self) -> PrefillOutcome:
        """See Engine.prefill."""
        self._computing = asyncio.create_task(self._compute())
        self._computing.add_done_callback(self._computed)
        try:
            await self.sending.wait()
            # vLLM's last output may follow the last report.
            async with asyncio.timeout(Deadline(self.work.target.deadline_s).remaining_s()):
                times, cost = await self._computing
        except TimeoutError:
            raise self.sending.timeout_error() from None
        finally:
            await end_task(self._computing)
        return PrefillOutcome(
            cached_tokens=times.cached_tokens,
            compute_start_unix_ns=times.compute_start_unix_ns,
            compute_end_unix_ns=times.compute_end_unix_ns,
            reports=self.sending.reports,
            fetched_tokens=times.fetched_tokens,
            cost=cost,
        )

    def _computed(self, computing: asyncio.Task[tuple[PrefillTimes, RequestCost]]) -> None:
        error = None if computing.cancelled() else computing.exception()
        if error is not None:
            bug = InternalError(f"the prefill met a bug: {error}")
            self.sending.fail(error if isinstance(error, HeadraceError) else bug)

    def _stop(self, transfer_id: str) -> None:
        """Ends the computation, and sending on every rank."""
        stop = link_pb2.Stop(transfer_id=transfer_id)
        self.link.send_to_ranks(link_pb2.AttachResponse(stop=stop))
        self._computing.cancel()

    async def _compute(self) -> tuple[PrefillTimes, RequestCost]:
        name, prefix = self.work.target.transfer_id, self._prefix_params()
        params = await self._run(name, prefix)
        times = find_params(params, PrefillTimes)
        if times is None and prefix is not None:
            # An engine that also decodes ends a request without its KV.
            params = await self._run(f"{name} alone", None)
            times = find_params(params, PrefillTimes)
        if times is None:
            raise InternalError("vLLM ended the prefill without its times")
        return times, find_params(params, RequestCost) or RequestCost()

    async def _run(self, request_id: str, prefix: PrefixParams | None) -> dict[str, Any] | None:
        """The kv_transfer_params of the last output. None when vLLM has ended the request without computing it."""
        target = self.work.target
        sampling = GREEDY_ONE_TOKEN
        if self.work.sampling is not None:
            sampling = replace(self.work.sampling, max_tokens=1)
        ours = params_with(SendParams(target, prefix, self.work.cached_only))
        params = sampling_params(
            sampling,
            ours,
            priority=self.work.priority,
            bounds=self.work.bounds,
        )
        token_ids = self.work.token_ids
        if self.work.cached_only:
            # vLLM computes one token at least.
            token_ids = (*token_ids, token_ids[-1])
        prompt = await engine_prompt(self.llm, token_ids, self.work.cache_salt, self.work.images)
        last = None
        # A step that waits for another prompt's prefix would delay it.
        self.link.request_coming()
        try:
            async for output in self.llm.generate(
                prompt, params, request_id, lora_request=self.lora_request
            ):
                last = output
                if self.on_first_token is not None and output.outputs[0].token_ids:
                    self.on_first_token(tokens_of(output.outputs[0], sampling.logprobs))
        except HeadraceError:
            raise
        except request_errors() as exc:
            raise rejected(exc, sampling, "token_ids") from exc
        except Exception as exc:
            raise InternalError(f"vLLM failed: {type(exc).__name__}: {exc}") from exc
        return last.kv_transfer_params if last is not None else None

    def _prefix_params(self) -> PrefixParams | None:
        prefix = self.work.prefix
        if prefix is None:
            return None
        return PrefixParams(prefix.transfer_id, prefix.end_token, prefix.least_tokens)
