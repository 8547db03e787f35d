"""One attempt at a decode worker: the worker streams tokens, the router's prefill queue computes the prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_client.progress import Progress
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import ProtocolViolation, WorkerGone
from headrace_common.latency.report import wait_for_report
from headrace_common.tickets.direct_request import decode_request_of


class DirectAttempt:
    """Runs once. When `responses` ends, for any reason, its RPCs have ended."""

    def __init__(
        self,
        direct: inference_pb2.DirectRequest,
        worker_id: str,
        progress: Progress,
        *,
        decode: grpc.aio.Channel,
        router: inference_pb2_grpc.InferenceServiceAsyncStub,
        router_metadata: tuple[tuple[str, str], ...],
        deadline: Deadline,
    ) -> None:
        """`progress` is of the whole answer. The caller records in it each response of this attempt."""
        self._direct = direct
        self._worker_id = worker_id
        self._stub = decode_pb2_grpc.DecodeServiceStub(decode)
        self._router = router
        self._router_metadata = router_metadata
        self._deadline = deadline
        self._progress = progress
        progress.record_attempt()

    async def responses(self) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Streams the responses that the router would send, without text. Raises AioRpcError and HeadraceError."""
        steps, sent_ns = self._progress.direct, time.monotonic_ns()
        call: Any = self._stub.Generate(
            decode_request_of(self._direct),
            timeout=self._deadline.remaining_s(),
            metadata=(("traceparent", self._direct.traceparent),),
        )
        prefill: asyncio.Task[inference_pb2.PrefillResponse] | None = None
        try:
            reserved = (await self._read(call)).reserved
            remote = self._direct.remote_prefill and reserved.start_token < reserved.end_token
            if steps is not None:
                steps.reserved(sent_ns, remote=remote)
            if remote:
                prefill = asyncio.create_task(self._prefill(reserved.start_token))
            event = await _first_of(asyncio.create_task(self._read(call)), prefill)
            while (kind := event.WhichOneof("event")) == "tokens":
                if steps is not None and event.tokens.HasField("times"):
                    steps.made(event.tokens.times)
                yield self._response(event.tokens)
                event = await self._read(call)
            if kind != "finished":
                raise ProtocolViolation(f"{self._worker_id} sent {kind or 'nothing'} in its answer")
            last = await self._last(event.finished, prefill)
            if steps is not None and self._progress.has_tokens:
                first_us = round(1e6 * self._progress.first_s)
                last.timing.latency.CopyFrom(steps.latency(first_us))
            yield last
        finally:
            call.cancel()
            if prefill is not None and not prefill.done():
                prefill.cancel()
                await asyncio.wait({prefill})

    async def _read(self, call: Any) -> decode_pb2.GenerateResponse:
        event = await call.read()
        if not isinstance(event, decode_pb2.GenerateResponse):
            raise WorkerGone(
                f"decode worker {self._worker_id} ended its stream too early",
                metadata={"worker_id": self._worker_id},
            )
        return event

    async def _prefill(self, start_token: int) -> inference_pb2.PrefillResponse:
        steps, sent_ns = self._progress.direct, time.monotonic_ns()
        response = await self._router.Prefill(
            inference_pb2.PrefillRequest(
                direct=self._direct, start_token=start_token, include_latency=steps is not None
            ),
            timeout=self._deadline.remaining_s(),
            metadata=self._router_metadata,
        )
        if steps is not None:
            steps.prefilled(sent_ns, response.steps)
        return response

    def _response(self, tokens: decode_pb2.Tokens) -> inference_pb2.GenerateResponse:
        response = inference_pb2.GenerateResponse(
            request_id=self._direct.request_id,
            token_ids=tokens.token_ids,
            logprobs=tokens.logprobs,
        )
        if not self._progress.has_tokens:
            response.trace_id = self._direct.traceparent.split("-")[1]
        return response

    async def _last(
        self,
        finished: decode_pb2.Finished,
        prefill: asyncio.Task[inference_pb2.PrefillResponse] | None,
    ) -> inference_pb2.GenerateResponse:
        now_s = time.monotonic()
        progress = self._progress
        prompt_tokens = len(self._direct.token_ids) - self._direct.generated_token_count
        cached_tokens = min(finished.cached_tokens, prompt_tokens)
        prefill_worker_id = ""
        if prefill is not None:
            await wait_for_report(prefill, self._deadline)
            if prefill.done() and prefill.exception() is None:
                prefill_worker_id = prefill.result().worker_id
        return inference_pb2.GenerateResponse(
            request_id=self._direct.request_id,
            finish_reason=finished.reason,
            usage=inference_pb2.Usage(
                prompt_tokens=prompt_tokens,
                completion_tokens=len(progress.generated),
                decode_cached_tokens=cached_tokens,
                transferred_tokens=min(finished.transferred_tokens, prompt_tokens - cached_tokens),
            ),
            timing=inference_pb2.Timing(
                time_to_first_token=duration_from_seconds(
                    (progress.first_s or now_s) - progress.begin_s
                ),
                total=duration_from_seconds(now_s - progress.begin_s),
                decode_worker_id=self._worker_id,
                prefill_worker_id=prefill_worker_id,
                attempts=progress.attempts,
            ),
        )


async def _first_of(
    read: asyncio.Task[decode_pb2.GenerateResponse],
    prefill: asyncio.Task[inference_pb2.PrefillResponse] | None,
) -> decode_pb2.GenerateResponse:
    """The decode worker's next event. Raises the prefill's error when that comes first."""
    try:
        if prefill is not None:
            await asyncio.wait({read, prefill}, return_when=asyncio.FIRST_COMPLETED)
            if not read.done():
                prefill.result()
        return await read
    finally:
        if not read.done():
            read.cancel()
            await asyncio.wait({read})
