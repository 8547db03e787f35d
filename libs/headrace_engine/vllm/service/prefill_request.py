"""A prefill in vLLM."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from headrace.engine.v1 import link_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    HeadraceError,
    InternalError,
    TransferTimeout,
    from_reason,
)
from headrace_common.tasks import end_task
from headrace_engine.connector.transfers import PrefillTimes, PrefixParams
from headrace_engine.interface import DecodeTokens, PrefillOutcome, PrefillWork, Released, Sampling
from headrace_engine.receipts import RequestCost
from headrace_engine.vllm.service.prompts import engine_prompt
from headrace_engine.vllm.service.sampling import (
    rejected,
    request_errors,
    sampling_params,
    tokens_of,
)
from headrace_engine.vllm.settings import read_cost, read_times, send_params
from headrace_kv.messages import Reservation, SendReport

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from headrace_engine.vllm.link.server import LinkServer


log = logging.getLogger(__name__)

QUIET_TIMEOUT_S: Final = 30.0


GREEDY_ONE_TOKEN = Sampling(temperature=0.0, max_tokens=1)


@dataclass(eq=False, slots=True)
class PrefillRequest:
    """Call `outcome` once. The link calls `blocks_reserved`, `transfer_quiet` and `engine_lost`."""

    llm: AsyncLLM
    link: LinkServer
    work: PrefillWork
    rank_count: int
    on_first_token: Callable[[DecodeTokens], None] | None = None
    lora_request: LoRARequest | None = None
    _reports: dict[int, SendReport] = field(default_factory=dict, init=False)
    _failure: asyncio.Future[HeadraceError] = field(default_factory=asyncio.Future, init=False)
    _quiet: asyncio.Future[None] = field(default_factory=asyncio.Future, init=False)

    @property
    def reports(self) -> tuple[SendReport, ...]:
        """The reports of the ranks that are quiet, by rank."""
        return tuple(report for _, report in sorted(self._reports.items()))

    def blocks_reserved(self, reservation: Reservation) -> None:
        """The scheduler has allocated blocks for a prefix, which is fetched or not."""
        prefix = self.work.prefix
        if prefix is None or not prefix.start(reservation):
            self.link.transfer_event(Released(reservation.transfer_id))

    def transfer_quiet(self, report: SendReport) -> None:
        """A rank has no write of the transfer under way any more."""
        self._reports[report.rank] = report
        if len(self._reports) == self.rank_count:
            self._be_quiet()
        if report.reason:
            self.fail(
                from_reason(
                    report.reason,
                    f"rank {report.rank}: {report.detail}",
                    metadata={"transfer_id": report.transfer_id, "rank": str(report.rank)},
                )
            )

    def fail(self, error: HeadraceError) -> None:
        """The prefill has failed. Later failures are ignored."""
        if not self._failure.done():
            self._failure.set_result(error)

    def engine_lost(self, error: HeadraceError) -> None:
        """The engine's processes have ended, so none of them writes any more."""
        self.fail(error)
        self._be_quiet()

    def _be_quiet(self) -> None:
        if not self._quiet.done():
            self._quiet.set_result(None)

    async def _wait(self, awaited: asyncio.Future[Any]) -> None:
        """Raises the failure if that comes first."""
        either: set[asyncio.Future[Any]] = {awaited, self._failure}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            raise self._failure.result()

    async def outcome(self) -> PrefillOutcome:
        """See Engine.prefill."""
        deadline = Deadline(self.work.target.deadline_s)
        compute = asyncio.create_task(self._compute())
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await self._wait(compute)
                times, cost = compute.result()
                await self._wait(self._quiet)
            return PrefillOutcome(
                cached_tokens=times.cached_tokens,
                compute_start_unix_ns=times.compute_start_unix_ns,
                compute_end_unix_ns=times.compute_end_unix_ns,
                reports=self.reports,
                fetched_tokens=times.fetched_tokens,
                cost=cost,
            )
        except TimeoutError:
            raise TransferTimeout(
                f"the deadline passed with {self.rank_count - len(self._reports)} of {self.rank_count} ranks "
                "still sending",
                metadata={"transfer_id": self.work.target.transfer_id},
            ) from None
        finally:
            if not (compute.done() and self._quiet.done()):
                await asyncio.shield(asyncio.create_task(self._stop(compute)))

    async def _compute(self) -> tuple[PrefillTimes, RequestCost]:
        name, prefix = self.work.target.transfer_id, self._prefix_params()
        params = await self._run(name, prefix)
        times = read_times(params)
        if times is None and prefix is not None:
            # An engine that also decodes ends a request without its KV.
            params = await self._run(f"{name} alone", None)
            times = read_times(params)
        if times is None:
            raise InternalError("vLLM ended the prefill without its times")
        return times, read_cost(params)

    async def _run(self, request_id: str, prefix: PrefixParams | None) -> dict[str, Any] | None:
        """The kv_transfer_params of the last output. None when vLLM has ended the request without computing it."""
        target = self.work.target
        sampling = GREEDY_ONE_TOKEN
        if self.work.sampling is not None:
            sampling = replace(self.work.sampling, max_tokens=1)
        ours = send_params(target, prefix, cached_only=self.work.cached_only)
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

    async def _stop(self, compute: asyncio.Task[Any]) -> None:
        """Ends the computation and waits until every rank is quiet (I2)."""
        transfer_id = self.work.target.transfer_id
        start_s = time.monotonic()
        stop = link_pb2.Stop(transfer_id=transfer_id)
        self.link.send_to_ranks(link_pb2.AttachResponse(stop=stop))
        await end_task(compute)
        await asyncio.wait({self._quiet}, timeout=QUIET_TIMEOUT_S)
        if not self._quiet.done():
            log.error(
                "%d of %d ranks were not quiet for transfer %s after %.0f s",
                self.rank_count - len(self._reports),
                self.rank_count,
                transfer_id,
                time.monotonic() - start_s,
            )
