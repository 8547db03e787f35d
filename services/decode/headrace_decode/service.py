"""DecodeService: the RPCs of a decode worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from headrace.worker.v1 import worker_pb2
from headrace_common.deadlines import Deadline
from headrace_common.telemetry.setup import Telemetry
from headrace_common.tickets import TicketKeys
from headrace_decode.admission import BlockAdmission
from headrace_decode.attempts import Attempts
from headrace_decode.link.session import LinkSession, LinkSessions
from headrace_engine.interface import Engine
from headrace_kv.layout import WorkerRef
from headrace_kv.receive.receiver import Receiver


class DecodeService(decode_pb2_grpc.DecodeServiceServicer):
    """Runs attempts for routers, and reports the worker's status."""

    def __init__(
        self,
        *,
        ref: WorkerRef,
        engine: Engine,
        receiver: Receiver,
        admission: BlockAdmission,
        telemetry: Telemetry,
        default_deadline_s: float,
        ticket_keys: TicketKeys,
    ) -> None:
        self._ref = ref
        self._engine = engine
        self._receiver = receiver
        self._admission = admission
        self._default_deadline_s = default_deadline_s
        self._attempts = Attempts(
            ref=ref,
            engine=engine,
            receiver=receiver,
            admission=admission,
            telemetry=telemetry,
            ticket_keys=ticket_keys,
        )
        self._links = LinkSessions()

    async def Link(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[decode_pb2.LinkRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """See decode.proto."""
        session = LinkSession(self._attempts.start, context.write, self._default_deadline_s)
        with self._links.listed(session):
            await session.run(request_iterator)

    @property
    def attempts(self) -> Attempts:
        """The attempts of this worker."""
        return self._attempts

    async def SetFirstToken(
        self,
        request: decode_pb2.SetFirstTokenRequest,
        context: grpc.aio.ServicerContext[
            decode_pb2.SetFirstTokenRequest, decode_pb2.SetFirstTokenResponse
        ],
    ) -> decode_pb2.SetFirstTokenResponse:
        """See decode.proto."""
        self._attempts.set_first_token(request)
        return decode_pb2.SetFirstTokenResponse()

    async def Keep(
        self,
        request: decode_pb2.KeepRequest,
        context: grpc.aio.ServicerContext[decode_pb2.KeepRequest, decode_pb2.KeepResponse],
    ) -> decode_pb2.KeepResponse:
        """See decode.proto."""
        return await self._attempts.keep(
            request, Deadline.from_context(context, self._default_deadline_s)
        )

    def start_drain(self, notice_s: float = 0.0) -> None:
        """Reports DRAINING in `status` at once, and refuses new attempts after `notice_s`."""
        self._attempts.start_drain(notice_s)

    async def finish_drain(self, deadline: Deadline) -> None:
        """Returns once no attempt is left, none can start, and every link has sent what it had.

        At the deadline, attempts end with Draining, so that their routers continue on other workers.
        """
        await self._attempts.finish_drain(deadline)
        await self._links.end(self._attempts.refusal)

    def status(self) -> worker_pb2.WatchStatusResponse:
        """The state that WatchStatus reports now."""
        usage = self._engine.usage()
        draining = self._attempts.draining
        states = worker_pb2.WatchStatusResponse
        return worker_pb2.WatchStatusResponse(
            worker_id=self._ref.worker_id,
            incarnation=self._ref.incarnation,
            state=states.STATE_DRAINING if draining else states.STATE_SERVING,
            running_requests=usage.running_requests,
            waiting_requests=usage.waiting_requests,
            total_blocks=self._engine.descriptor.ranks[0].block_count,
            reserved_blocks=self._admission.reserved_blocks,
            quarantined_blocks=self._receiver.quarantined_blocks,
            active_transfers=self._receiver.active_count,
            used_blocks=usage.used_blocks,
            distrusted_workers=[
                worker_pb2.DistrustedWorker(
                    worker_id=one.worker_id, incarnation=one.incarnation, detail=detail
                )
                for one, detail in self._receiver.rejected_senders.items()
            ],
        )
