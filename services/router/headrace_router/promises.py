"""Promises to keep KV, which clients renew and end."""

from __future__ import annotations

import grpc.aio

from headrace.decode.v1 import decode_pb2_grpc
from headrace.inference.v1 import inference_pb2, keep_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError, NotFound, StaleIncarnation, WorkerGone
from headrace_common.rpc.status import error_from_rpc
from headrace_frontend.promises import no_promise, worker_request
from headrace_router.workers.directory import WorkerDirectory


class PromiseKeeper:
    """Asks the worker that an id names. Nothing is stored here, so every router can do it."""

    def __init__(self, workers: WorkerDirectory) -> None:
        self._workers = workers

    async def keep(
        self, tenant: str, request: inference_pb2.KeepRequest, deadline: Deadline
    ) -> keep_pb2.Kept:
        """See InferenceService.Keep. Raises HeadraceError."""
        asked = worker_request(tenant, request)
        channel = self._workers.channel_of(asked.incarnation)
        if channel is None:
            raise no_promise()
        try:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            answer = await stub.Keep(asked, timeout=deadline.remaining_s())
        except grpc.aio.AioRpcError as rpc_error:
            raise _explained(error_from_rpc(rpc_error)) from rpc_error
        if answer.kept.tokens:
            answer.kept.id = request.id
        return answer.kept


def _explained(error: HeadraceError) -> HeadraceError:
    """A worker that is gone has lost what it promised."""
    return no_promise() if isinstance(error, NotFound | StaleIncarnation | WorkerGone) else error
