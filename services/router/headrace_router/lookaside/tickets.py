"""Look-aside: clients that stream from decode workers directly, with the router's word for it.

The router chooses the worker and signs a ticket. The prefill queue stays the router's: the client hands the decode
worker's reservation back, and its prompt waits its turn among the others.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    DeadlineExceeded,
    DuplicateTransfer,
    InvalidRequest,
    WorkerGone,
)
from headrace_common.identity import new_transfer_id
from headrace_common.rpc.tickets import TicketSigner, check_ticket, decode_request_of
from headrace_kv.layout.layout import WorkerRef
from headrace_router.dispatch.dispatcher import RequestDispatcher
from headrace_router.dispatch.first_token import BY_DECODE
from headrace_router.dispatch.messages import decode_request
from headrace_router.lookaside.tracking import DirectRequestTracker
from headrace_router.placement import CandidateCost, Decision
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.request.response_stream import ended_by
from headrace_router.request.validation import PreparedRequest
from headrace_router.workers.directory import Promise, WorkerDirectory
from headrace_router.workers.table import Worker

_SEEN_MAX: Final = 65_536
# A client that has its reservation has long come back by then.
_RESERVATION_S: Final = 1.0


class LookAside:
    """Gives tickets, and takes back what they lead to.

    What was given counts as placed on its worker until the ticket ends, by when the worker itself reports it.
    `late_s` is how long after its ticket's end a reservation may still be handed back.
    """

    def __init__(
        self,
        *,
        view: WorkerDirectory,
        queue: PrefillQueue,
        generator: RequestDispatcher,
        signer: TicketSigner,
        allowed: bool,
        late_s: float,
        direct: DirectRequestTracker,
    ) -> None:
        self._view = view
        self._queue = queue
        self._generator = generator
        self._signer = signer
        self._allowed = allowed
        self._late_s = late_s
        self.direct = direct
        self._prefilled: OrderedDict[str, None] = OrderedDict()
        self._awaited: dict[str, ExitStack] = {}

    def grant(
        self, request: PreparedRequest, decision: Decision, tenant: str, traceparent: str
    ) -> inference_pb2.DirectRequest | None:
        """How to ask the chosen worker directly; None where that is not allowed or not possible.

        Stop texts are found in text, and text is made by the router only, and so is a first token from prefill passed
        on, or its logits asked for. Without a client's word for that, decode makes it, whatever the policy.
        """
        if not self._allowed or request.stop_strings or not self._signer.key:
            return None
        if (request.first_token or BY_DECODE) != BY_DECODE:
            return None
        if ended_by(request, request.generated):
            return None
        worker = decision.worker
        tokens = len(request.token_ids) + len(request.generated)
        promise = self._view.promise(worker.ref, tokens)
        if promise is None:
            return None
        self._release_later(promise)
        spoken = decode_request(request, decision, new_transfer_id(), request.generated)
        ticket = self._signer.sign(spoken, worker.ref.worker_id, tenant)
        if spoken.remote_prefill:
            self._await_prompt(worker, spoken.transfer_id, len(spoken.token_ids) - 1)
        expire_time = Timestamp()
        expire_time.FromNanoseconds(int(Deadline.after(self._signer.ttl_s).unix_s * 1e9))
        return inference_pb2.DirectRequest(
            endpoint=worker.endpoint,
            request_id=spoken.request_id,
            transfer_id=spoken.transfer_id,
            incarnation=spoken.incarnation,
            token_ids=spoken.token_ids,
            sampling=spoken.sampling,
            stop_token_ids=spoken.stop_token_ids,
            remote_prefill=spoken.remote_prefill,
            ticket=ticket,
            expire_time=expire_time,
            traceparent=traceparent,
            generated_token_count=spoken.generated_token_count,
        )

    def check(self, request: inference_pb2.PrefillRequest) -> decode_pb2.TicketClaims:
        """What a reservation's ticket allows. Raises Unauthenticated or InvalidRequest."""
        claims = check_ticket(
            self._signer.key, decode_request_of(request.direct), None, late_s=self._late_s
        )
        wanted = len(request.direct.token_ids) - 1
        if not request.direct.remote_prefill or request.start_token >= wanted:
            raise InvalidRequest(
                {"start_token": "nothing is missing: the decode worker goes on by itself"}
            )
        return claims

    async def prefill(
        self,
        request: inference_pb2.PrefillRequest,
        claims: decode_pb2.TicketClaims,
        deadline: Deadline,
    ) -> inference_pb2.PrefillResponse:
        """Has the prompt computed and handed over. `claims` are those that `check` gave.

        Raises DuplicateTransfer when that was asked for before, QueueFull, WorkerGone, DeadlineExceeded, or what the
        prefill worker failed with. Being cancelled gives the task up.
        """
        direct = request.direct
        worker = self._view.worker(WorkerRef(claims.worker_id, claims.incarnation))
        if worker is None:
            raise WorkerGone(
                f"decode worker {claims.worker_id} has left",
                metadata={"worker_id": claims.worker_id},
            )
        self._note_once(direct.transfer_id)
        deadline_time = Timestamp()
        deadline_time.FromNanoseconds(int(deadline.unix_s * 1e9))
        task = prefill_pb2.PrefillTask(
            transfer_id=direct.transfer_id,
            request_id=direct.request_id,
            token_ids=direct.token_ids[:-1],
            start_token=request.start_token,
            decode_worker_id=worker.ref.worker_id,
            decode_incarnation=worker.ref.incarnation,
            decode_endpoint=worker.endpoint,
            deadline_time=deadline_time,
            traceparent=direct.traceparent,
        )
        terms = self._generator.task_terms(worker, direct.token_ids, deadline)
        self._forget_prompt(direct.transfer_id)
        queued = self._queue.enqueue(task, layout=worker.layout, terms=terms)
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                outcome = await asyncio.shield(queued.outcome)
        except TimeoutError:
            what = "a prefill worker"
            raise DeadlineExceeded(
                f"the deadline passed while waiting for {what}", metadata={"waited_for": what}
            ) from None
        finally:
            # Nothing happens to a task that has ended.
            queued.cancel()
        if outcome.error is not None:
            raise outcome.error
        done = outcome.done or prefill_pb2.TaskDone()
        return inference_pb2.PrefillResponse(
            worker_id=queued.worker.worker_id if queued.worker is not None else "",
            cached_tokens=done.cached_tokens,
            payload_bytes=done.payload_bytes,
        )

    def _note_once(self, transfer_id: str) -> None:
        if transfer_id in self._prefilled:
            raise DuplicateTransfer(
                f"the prompt of {transfer_id} was handed to the prefill queue before",
                metadata={"transfer_id": transfer_id},
            )
        self._prefilled[transfer_id] = None
        if len(self._prefilled) > _SEEN_MAX:
            self._prefilled.popitem(last=False)

    def _await_prompt(self, worker: Worker, transfer_id: str, tokens: int) -> None:
        """The queue counts the prompt until it comes, or is not likely to come any more."""
        awaited = self._awaited[transfer_id] = ExitStack()
        awaited.enter_context(self._queue.promised(worker.layout, tokens))
        wait_s = min(_RESERVATION_S, self._signer.ttl_s)
        asyncio.get_running_loop().call_later(wait_s, self._forget_prompt, transfer_id)

    def _forget_prompt(self, transfer_id: str) -> None:
        awaited = self._awaited.pop(transfer_id, None)
        if awaited is not None:
            awaited.close()

    def _release_later(self, promise: Promise) -> None:
        asyncio.get_running_loop().call_later(self._signer.ttl_s, promise.release)


def candidates_to_proto(
    costs: tuple[CandidateCost, ...], prefix_faults: Mapping[WorkerRef, str]
) -> list[inference_pb2.Candidate]:
    """The candidates, in the same order. `prefix_faults` says whose caches cannot count, and why."""
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
