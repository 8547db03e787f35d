"""Asks routers to have prompts prefilled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count

import grpc.aio

from headrace.decode.v1 import decode_pb2
from headrace.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from headrace.registry.v1 import registry_pb2
from headrace_common.errors import WorkerGone
from headrace_common.rpc.status import error_from_rpc
from headrace_common.tasks import BackgroundTasks
from headrace_frontend.running.attempt import AdmittedRequest
from headrace_kv.layout import WorkerRef


class RouterPrefills:
    """The routers take turns. `update` must be called with every change of the live routers."""

    def __init__(self, ref: WorkerRef, open_channel: Callable[[str], grpc.aio.Channel]) -> None:
        self._ref = ref
        self._open_channel = open_channel
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._turns = count()
        self._closing = BackgroundTasks("the end of a channel to a router")

    @property
    def available(self) -> bool:
        """Whether a router is known."""
        return bool(self._channels)

    def update(self, routers: Iterable[registry_pb2.Member]) -> None:
        """Replaces the routers. Calls to those that left go on until their channel is closed."""
        endpoints = {router.endpoint for router in routers}
        for endpoint in self._channels.keys() - endpoints:
            self._closing.start(self._channels.pop(endpoint).close())
        for endpoint in sorted(endpoints - self._channels.keys()):
            self._channels[endpoint] = self._open_channel(endpoint)

    async def prefill(
        self,
        request: AdmittedRequest,
        call: decode_pb2.GenerateRequest,
        start_token: int,
        traceparent: str,
    ) -> prefill_pb2.EnqueueResponse:
        """Queues the prompt of a call with reserved blocks. Returns once its KV cache was handed over.

        Raises HeadraceError. Cancellation cancels the prefill.
        """
        endpoints = sorted(self._channels)
        if not endpoints:
            raise WorkerGone("no router is known, so no prefill worker can be asked")
        endpoint = endpoints[next(self._turns) % len(endpoints)]
        stub = prefill_pb2_grpc.PrefillQueueServiceStub(self._channels[endpoint])
        message = prefill_pb2.EnqueueRequest(
            transfer_id=call.transfer_id,
            request_id=call.request_id,
            worker_id=self._ref.worker_id,
            incarnation=self._ref.incarnation,
            token_ids=call.token_ids,
            start_token=start_token,
            traceparent=traceparent,
            cache_salt=call.cache_salt,
            include_latency=request.record.sampled or request.prepared.includes_latency,
            adapter=call.adapter if call.HasField("adapter") else None,
            priority=call.priority,
            tenant=request.prepared.tenant,
        )
        try:
            return await stub.Enqueue(message, timeout=request.deadline.remaining_s())
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error

    async def close(self) -> None:
        """Closes every channel."""
        self.update(())
        await self._closing.wait()
