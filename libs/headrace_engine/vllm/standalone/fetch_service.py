"""The prefill side of pairing: answers Fetch with what the ranks report. Runs on one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import grpc.aio

from headrace.kv.v1 import pair_pb2, pair_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    Cancelled,
    HeadraceError,
    InvalidRequest,
    StaleIncarnation,
    TransferTimeout,
    WorkerGone,
)
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_engine.vllm.reasons import error_of
from headrace_engine.vllm.standalone.pending_fetches import Offer, PendingFetches
from headrace_kv.handoff.messages import SendReport, TransferTarget
from headrace_kv.layout.layout import KvDescriptor, WorkerRef
from headrace_kv.layout.proto import descriptor_from_proto, descriptor_to_proto

log = logging.getLogger(__name__)

DESCRIPTORS_MAX = 256


class DecodeMemories:
    """Asks decode engines where their KV memory is, once for each incarnation."""

    def __init__(self) -> None:
        self._endpoints: OrderedDict[WorkerRef, str] = OrderedDict()
        self._found: dict[WorkerRef, KvDescriptor] = {}

    def note(self, ref: WorkerRef, endpoint: str) -> None:
        """An engine has said by which address it is reached."""
        self._endpoints[ref] = endpoint
        self._endpoints.move_to_end(ref)
        while len(self._endpoints) > DESCRIPTORS_MAX:
            gone, _ = self._endpoints.popitem(last=False)
            self._found.pop(gone, None)

    async def find(self, ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
        """Raises StaleIncarnation when another engine answers, or WorkerGone when none does."""
        known = self._found.get(ref)
        if known is not None:
            return known
        endpoint = self._endpoints.get(ref)
        if endpoint is None:
            raise StaleIncarnation(f"{ref} has fetched nothing from this engine")
        async with open_channel(endpoint) as channel:
            try:
                said = await pair_pb2_grpc.PairServiceStub(channel).Describe(
                    pair_pb2.DescribeRequest(), timeout=deadline.remaining_s()
                )
            except grpc.aio.AioRpcError as exc:
                raise WorkerGone(
                    f"{ref} does not describe its memory at {endpoint}: "
                    f"{error_from_rpc(exc).detail}"
                ) from exc
        if WorkerRef(said.worker_id, said.incarnation) != ref:
            raise StaleIncarnation(f"{ref} is gone: {said.incarnation} answers at {endpoint}")
        self._found[ref] = found = descriptor_from_proto(said.descriptor)
        return found


class _Run:
    """One Fetch, until every rank has reported or something failed."""

    def __init__(self, rank_count: int) -> None:
        self.over = asyncio.Event()
        self.failure: HeadraceError | None = None
        self._rank_count = rank_count
        self._bytes: dict[int, int] = {}

    @property
    def quiet(self) -> bool:
        return len(self._bytes) == self._rank_count

    @property
    def payload_bytes(self) -> int:
        return sum(self._bytes.values())

    def reported(self, report: SendReport) -> None:
        self._bytes[report.rank] = sum(layer.payload_bytes for layer in report.layers)
        if report.reason:
            self.fail(error_of(report.reason, f"rank {report.rank}: {report.detail}"))
        if self.quiet:
            self.over.set()

    def fail(self, error: HeadraceError) -> None:
        if self.failure is None:
            self.failure = error
        self.over.set()


class FetchService(pair_pb2_grpc.PairServiceServicer):
    """`stop` ends a transfer on every rank; their reports come to `reported`."""

    def __init__(
        self,
        *,
        ref: WorkerRef,
        descriptor: KvDescriptor,
        offers: PendingFetches,
        memories: DecodeMemories,
        stop: Callable[[str], None],
        timeout_s: float,
    ) -> None:
        self._ref = ref
        self._descriptor = descriptor
        self._offers = offers
        self._memories = memories
        self._stop = stop
        self._timeout_s = timeout_s
        self._runs: dict[str, _Run] = {}

    def reported(self, report: SendReport) -> None:
        """A rank is quiet."""
        run = self._runs.get(report.transfer_id)
        if run is not None:
            run.reported(report)

    def fail(self, transfer_id: str, error: HeadraceError) -> None:
        """The prompt will not be sent."""
        run = self._runs.get(transfer_id)
        if run is not None:
            run.fail(error)

    async def Describe(
        self,
        request: pair_pb2.DescribeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pair_pb2.DescribeResponse:
        """See pair.proto."""
        return pair_pb2.DescribeResponse(
            worker_id=self._ref.worker_id,
            incarnation=self._ref.incarnation,
            descriptor=descriptor_to_proto(self._descriptor),
        )

    async def Fetch(
        self,
        request: pair_pb2.FetchRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pair_pb2.FetchResponse:
        """See pair.proto."""
        if request.source_incarnation not in ("", self._ref.incarnation):
            raise StaleIncarnation(
                f"the prompt was computed by {request.source_incarnation}, this is {self._ref}",
                metadata={"meant": request.source_incarnation, "actual": self._ref.incarnation},
            )
        offer = self._read(request, Deadline.from_context(context, self._timeout_s))
        target = offer.target
        if target.start_token == target.end_token:
            self._offers.end(target.transfer_id, "decode needs nothing of it")
            return pair_pb2.FetchResponse()
        self._memories.note(target.decode, target.handoff_endpoint)
        self._offers.offer(offer)
        run = self._runs[target.transfer_id] = _Run(len(self._descriptor.ranks))
        try:
            return await self._wait(run, target)
        finally:
            del self._runs[target.transfer_id]
            if not run.quiet:
                # Blocks stay with the transfer until its ranks are quiet, whoever still listens.
                self._offers.end(target.transfer_id, "decode gave it up")
                self._stop(target.transfer_id)

    async def _wait(self, run: _Run, target: TransferTarget) -> pair_pb2.FetchResponse:
        try:
            async with asyncio.timeout(max(0.0, Deadline(target.deadline_unix_s).remaining_s())):
                await run.over.wait()
        except TimeoutError:
            raise TransferTimeout(
                f"transfer {target.transfer_id} was not sent in time: "
                "the prompt did not come, or took too long",
                metadata={"transfer_id": target.transfer_id},
            ) from None
        if run.failure is not None:
            raise run.failure
        return pair_pb2.FetchResponse(payload_bytes=run.payload_bytes)

    def close(self) -> None:
        """Ends every Fetch."""
        for run in self._runs.values():
            run.fail(Cancelled("the prefill engine is shutting down"))

    @staticmethod
    def _read(request: pair_pb2.FetchRequest, deadline: Deadline) -> Offer:
        needed = ("transfer_id", "worker_id", "incarnation", "handoff_endpoint")
        problems = {name: "must not be empty" for name in needed if not getattr(request, name)}
        if request.end_token < request.start_token:
            problems["end_token"] = "must not be before start_token"
        if problems:
            raise InvalidRequest(problems)
        target = TransferTarget(
            transfer_id=request.transfer_id,
            decode=WorkerRef(request.worker_id, request.incarnation),
            handoff_endpoint=request.handoff_endpoint,
            start_token=request.start_token,
            end_token=request.end_token,
            deadline_unix_s=deadline.unix_s,
        )
        return Offer(target, request.prompt_digest)
