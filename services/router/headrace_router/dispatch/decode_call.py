"""The call of an attempt to its decode worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import grpc.aio

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from headrace.inference.v1 import inference_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    DeadlineExceeded,
    HeadraceError,
    ProtocolViolation,
    Unauthenticated,
    WorkerGone,
)
from headrace_common.rpc.status import error_from_rpc
from headrace_common.tasks import end_task
from headrace_kv.layout import WorkerRef
from headrace_router.decode_link.answer import AnswerEvent
from headrace_router.decode_link.link import DecodeLinks


class DecodeCall:
    """One request on the link to the worker, and SetFirstToken for its transfer. Close it when the attempt ends.

    `carrier` is that of the attempt's span. Every error names the worker. A passed deadline also names `waited_for()`,
    as gRPC's own error does not.
    """

    def __init__(
        self,
        links: DecodeLinks,
        worker: WorkerRef,
        request: decode_pb2.GenerateRequest,
        token_ids: inference_pb2.TokenIds,
        *,
        deadline: Deadline,
        carrier: Mapping[str, str],
        waited_for: Callable[[], str],
        vocabulary_size: int,
    ) -> None:
        self._worker = worker
        self._transfer_id = request.transfer_id
        self._deadline = deadline
        self._carrier = carrier
        self._waited_for = waited_for
        self._links = links
        self._link, self.answer = links.open(request, token_ids, deadline, carrier, vocabulary_size)
        """What the worker has sent, with its times."""
        self._read_ahead: asyncio.Task[AnswerEvent] | None = None

    async def read_reservation(self) -> decode_pb2.Reserved:
        """The next event. Raises ProtocolViolation for any other event."""
        first = await self.read()
        if not isinstance(first, decode_pb2.Reserved):
            raise ProtocolViolation(f"{self._worker} did not send Reserved")
        return first

    async def read(self) -> AnswerEvent:
        """The next event. Raises WorkerGone when the stream ends instead."""
        if self._read_ahead is None:
            return await self._read()
        event = await self._read_ahead
        self._read_ahead = None
        return event

    def read_ahead(self) -> asyncio.Task[AnswerEvent]:
        """The read of the next event as a task, to wait for it beside other futures. `read` returns its event."""
        if self._read_ahead is None:
            self._read_ahead = asyncio.create_task(self._read())
        return self._read_ahead

    async def set_first_token(self, token_id: int) -> None:
        """Sends the token that prefill generated. Raises NotFound when the worker has ended the transfer.

        Returns early when `read` has an event or an error: a stuck worker answers nothing.
        """
        request = decode_pb2.SetFirstTokenRequest(
            transfer_id=self._transfer_id,
            incarnation=self._worker.incarnation,
            token_id=token_id,
        )
        calling = asyncio.ensure_future(
            decode_pb2_grpc.DecodeServiceStub(self._links.channel).SetFirstToken(
                request,
                timeout=self._deadline.remaining_s(),
                metadata=tuple(self._carrier.items()),
            )
        )
        try:
            await asyncio.wait({calling, self.read_ahead()}, return_when=asyncio.FIRST_COMPLETED)
            if calling.done():
                calling.result()
        except grpc.aio.AioRpcError as error:
            raise self._explained(error_from_rpc(error)) from error
        finally:
            calling.cancel()

    async def close(self) -> None:
        """Cancels the request, unless it has ended."""
        self._link.release(self.answer)
        read = self._read_ahead
        await end_task(read)
        if read is not None and not read.cancelled():
            # Marks the exception as retrieved: asyncio would log it otherwise.
            read.exception()

    async def _read(self) -> AnswerEvent:
        try:
            return await self.answer.read()
        except HeadraceError as error:
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained from error

    def _explained(self, error: HeadraceError) -> HeadraceError:
        """The error with the worker's name. A client would take a rejected credential for its own API key."""
        if isinstance(error, DeadlineExceeded) and "waited_for" not in error.metadata:
            return DeadlineExceeded.waiting_for(self._waited_for())
        if isinstance(error, WorkerGone) and "worker_id" not in error.metadata:
            return self._gone(f"vanished: {error.detail}", error)
        if isinstance(error, ProtocolViolation) and "worker_id" not in error.metadata:
            metadata = {**error.metadata, "worker_id": self._worker.worker_id}
            what = f"decode worker {self._worker}: {error.detail}"
            return ProtocolViolation(what, metadata=metadata)
        if isinstance(error, Unauthenticated):
            return self._gone(f"rejected this router: {error.detail}", error)
        return error

    def _gone(self, problem: str, cause: HeadraceError | None = None) -> WorkerGone:
        metadata = cause.metadata if cause is not None else {}
        return WorkerGone(
            f"decode worker {self._worker} {problem}",
            metadata={**metadata, "worker_id": self._worker.worker_id},
        )
