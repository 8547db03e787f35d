"""Look-aside: clients stream from decode workers directly, with a ticket that the router signs.

The router chooses the worker. It also keeps the only prefill queue: the client sends the decode worker's reservation to
the router, which queues the prompt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Final

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.callers.priority import Priority
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds, timestamp_from_unix_s
from headrace_common.errors import (
    InvalidRequest,
)
from headrace_common.identity import new_transfer_id
from headrace_common.tickets.direct import TicketSigner, check_ticket
from headrace_common.tickets.direct_request import decode_request_of
from headrace_frontend.request.response_stream import ended_by
from headrace_frontend.request.validation import PreparedRequest
from headrace_kv.layout.layout import WorkerRef
from headrace_router.dispatch.first_token import BY_DECODE
from headrace_router.dispatch.messages import decode_request
from headrace_router.lookaside.keys import RouterKeys
from headrace_router.lookaside.prompts import DirectPrompts
from headrace_router.lookaside.steps import task_steps
from headrace_router.lookaside.tracking import DirectRequestTracker
from headrace_router.placement import CandidateCost, Decision
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.tracing.timeline import AttemptTimeline
from headrace_router.tracing.worker_clocks import WorkerClocks
from headrace_router.workers.directory import WorkerDirectory
from headrace_router.workers.table import Worker

# A client that was granted a reservation has sent it to the router by then.
_RESERVATION_S: Final = 1.0


class LookAside:
    """Grants tickets, and queues the prompts of their requests.

    A granted request counts as placed on its worker until the ticket expires. By then the worker reports the request.
    `late_s` is how long after its ticket has expired a reservation is still accepted.
    """

    def __init__(
        self,
        *,
        workers: WorkerDirectory,
        queue: PrefillQueue,
        prompts: DirectPrompts,
        signer: TicketSigner,
        keys: RouterKeys,
        allowed: bool,
        late_s: float,
        direct: DirectRequestTracker,
        clocks: WorkerClocks,
    ) -> None:
        self._workers = workers
        self._queue = queue
        self._prompts = prompts
        self._signer = signer
        self._keys = keys
        self._allowed = allowed
        self._late_s = late_s
        self.direct = direct
        self._clocks = clocks
        self._expected: dict[str, ExitStack] = {}

    def grant(
        self, request: PreparedRequest, decision: Decision, tenant: str, traceparent: str
    ) -> inference_pb2.DirectRequest | None:
        """The request that the client may send to the chosen worker. None when it must go through the router.

        The router is needed for stop texts, because only the router makes text. It also passes on a first token or
        logits from prefill. Unless the client asks for these, decode makes the first token, whatever the policy. It is
        also needed for a worker that would refuse the ticket.
        """
        if not self._allowed or request.stop_strings:
            return None
        if (request.first_token or BY_DECODE) != BY_DECODE:
            return None
        if ended_by(request, request.generated):
            return None
        worker = decision.worker
        if not worker.client_endpoint or not self._workers.accepts_tickets(worker.ref):
            return None
        tokens = len(request.token_ids) + len(request.generated)
        reservation = self._workers.reserve_load(worker.ref, tokens, routed=False)
        if reservation is None:
            return None
        loop = asyncio.get_running_loop()
        loop.call_later(self._signer.ttl_s, reservation.release)
        call = decode_request(request, decision, new_transfer_id(), request.generated)
        ticket = self._signer.sign(call, worker.ref.worker_id, tenant)
        if call.remote_prefill:
            self._expect_prompt(worker, call.transfer_id, len(call.token_ids) - 1)
        return inference_pb2.DirectRequest(
            endpoint=worker.client_endpoint,
            request_id=call.request_id,
            transfer_id=call.transfer_id,
            incarnation=call.incarnation,
            token_ids=call.token_ids,
            sampling=call.sampling,
            stop_token_ids=call.stop_token_ids,
            remote_prefill=call.remote_prefill,
            ticket=ticket,
            expire_time=timestamp_from_unix_s(time.time() + self._signer.ttl_s),
            traceparent=traceparent,
            generated_token_count=call.generated_token_count,
            ticket_lifetime=duration_from_seconds(self._signer.ttl_s),
            cache_salt=call.cache_salt,
            adapter=call.adapter if call.HasField("adapter") else None,
            priority=call.priority,
        )

    def check(self, request: inference_pb2.PrefillRequest) -> decode_pb2.TicketClaims:
        """The claims of a reservation's ticket. Raises Unauthenticated or InvalidRequest."""
        claims = check_ticket(
            self._keys.find,
            decode_request_of(request.direct),
            None,
            late_s=self._late_s,
            clock=self._workers.unix_ns,
        )
        end_token = len(request.direct.token_ids) - 1
        if not request.direct.remote_prefill or request.start_token >= end_token:
            raise InvalidRequest(
                {"start_token": "nothing is missing: the decode worker continues by itself"}
            )
        return claims

    async def prefill(
        self,
        request: inference_pb2.PrefillRequest,
        claims: decode_pb2.TicketClaims,
        deadline: Deadline,
        arrival_ns: int,
    ) -> inference_pb2.PrefillResponse:
        """Queues the prompt, and returns once its KV cache was handed over. `claims` are those of `check`.

        The call arrived at `arrival_ns` of the monotonic clock.

        Raises DuplicateTransfer on a repeated call, QueueFull, WorkerGone, DeadlineExceeded, or the error of the
        prefill worker. Cancellation cancels the task.
        """
        direct = request.direct
        worker = self._prompts.worker(WorkerRef(claims.worker_id, claims.incarnation))
        task = prefill_pb2.PrefillTask(
            transfer_id=direct.transfer_id,
            request_id=direct.request_id,
            token_ids=direct.token_ids[:-1],
            start_token=request.start_token,
            decode_worker_id=worker.ref.worker_id,
            decode_incarnation=worker.ref.incarnation,
            decode_endpoint=worker.endpoint,
            traceparent=direct.traceparent,
            cache_salt=direct.cache_salt,
            adapter=direct.adapter if direct.HasField("adapter") else None,
        )
        self._end_expectation(direct.transfer_id)
        timeline = AttemptTimeline(self._clocks)
        self.direct.prefilling(direct.transfer_id, timeline, arrival_ns)
        done = await self._prompts.hand_over(
            *(task, tuple(direct.token_ids), worker, deadline, timeline),
            priority=Priority.from_proto(direct.priority),
        )
        steps = task_steps(timeline.collect(), arrival_ns) if request.include_latency else None
        return inference_pb2.PrefillResponse(
            worker_id=done.worker_id,
            cached_tokens=done.cached_tokens,
            payload_bytes=done.payload_bytes,
            steps=steps,
        )

    def _expect_prompt(self, worker: Worker, transfer_id: str, tokens: int) -> None:
        """Lets the queue count the prompt until it comes, or is no longer likely to come."""
        expected = self._expected[transfer_id] = ExitStack()
        expected.enter_context(self._queue.expect_task(worker.layout, tokens))
        wait_s = min(_RESERVATION_S, self._signer.ttl_s)
        asyncio.get_running_loop().call_later(wait_s, self._end_expectation, transfer_id)

    def _end_expectation(self, transfer_id: str) -> None:
        expected = self._expected.pop(transfer_id, None)
        if expected is not None:
            expected.close()


def candidates_to_proto(
    costs: tuple[CandidateCost, ...], prefix_faults: Mapping[WorkerRef, str]
) -> list[inference_pb2.Candidate]:
    """Converts candidates, in the same order. `prefix_faults` gives the reason why a worker's cache does not count."""
    faults = {ref.worker_id: fault for ref, fault in prefix_faults.items()}
    return [
        inference_pb2.Candidate(
            worker_id=candidate.worker_id,
            cost=candidate.cost,
            cached_tokens=candidate.cached_tokens,
            missing_tokens=candidate.missing_tokens,
            held_tokens=candidate.held_tokens,
            requests=candidate.requests,
            unfit=candidate.unfit,
            prefix_fault=faults.get(candidate.worker_id, ""),
        )
        for candidate in costs
    ]
