"""Serves Fetch on prefill: sends prompts to decode engines that ask for them. Runs on one event loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from headrace.kv.v1 import layout_pb2, pair_pb2, pair_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    Cancelled,
    DuplicateTransfer,
    HeadraceError,
    InvalidRequest,
    NotFound,
    QueueFull,
    StaleIncarnation,
    TransferTimeout,
)
from headrace_common.tasks import Recent
from headrace_engine.connector.sender_reports import SenderReports
from headrace_kv.layout import KvDescriptor, WorkerRef, descriptor_from_proto
from headrace_kv.messages import SendReport, TransferTarget


@dataclass(frozen=True, slots=True)
class PendingFetch:
    """A decode engine has reserved blocks, `target`, for the KV cache of the prompt with this digest."""

    target: TransferTarget
    prompt_digest: int


class PendingFetches:
    """Holds at most `limit` fetches without a prompt. Any thread may call its methods.

    The ids of the last `remembered` transfers that were matched or closed are rejected when they come again.
    """

    def __init__(self, limit: int = 1024, remembered: int = 4096) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._pending: dict[str, PendingFetch] = {}
        self._closed: Recent[str, str] = Recent(remembered)

    def add(self, fetch: PendingFetch) -> None:
        """Raises NotFound when the transfer is closed, DuplicateTransfer when it is pending, or QueueFull."""
        transfer_id = fetch.target.transfer_id
        with self._lock:
            if transfer_id in self._closed:
                raise NotFound(
                    f"transfer {transfer_id} is over here: {self._closed[transfer_id]}",
                    metadata={"transfer_id": transfer_id},
                )
            if transfer_id in self._pending:
                raise DuplicateTransfer(
                    f"transfer {transfer_id} is being fetched already",
                    metadata={"transfer_id": transfer_id},
                )
            if len(self._pending) >= self._limit:
                raise QueueFull(f"{self._limit} transfers wait for their prompts already")
            self._pending[transfer_id] = fetch

    def match(self, transfer_id: str) -> PendingFetch | None:
        """Removes and returns the fetch for a prompt, and closes its transfer. None while there is none."""
        with self._lock:
            fetch = self._pending.pop(transfer_id, None)
            if fetch is not None:
                self._closed.setdefault(transfer_id, "it has been fetched")
            return fetch

    def close(self, transfer_id: str, why: str) -> None:
        """From now on, no fetch and no prompt match under this id."""
        with self._lock:
            self._pending.pop(transfer_id, None)
            self._closed.setdefault(transfer_id, why)

    def close_reason(self, transfer_id: str) -> str:
        """Why a transfer is closed. Empty when it is not."""
        with self._lock:
            return self._closed.get(transfer_id, "")

    def close_expired(self, transfer_id: str, deadline: Deadline) -> str:
        """Closes a transfer after its deadline. Returns why it is closed, empty when it is not."""
        if deadline.expired:
            self.close(transfer_id, "its deadline has passed")
        return self.close_reason(transfer_id)


log = logging.getLogger(__name__)

DESCRIPTORS_MAX = 256


class DecodeMemories:
    """The memory descriptors of the decode engines that have fetched last, at most DESCRIPTORS_MAX."""

    def __init__(self) -> None:
        self._found: Recent[WorkerRef, KvDescriptor] = Recent(DESCRIPTORS_MAX)

    def add(self, ref: WorkerRef, descriptor: layout_pb2.KvDescriptor) -> None:
        """The memory of an engine, which stays the same for its incarnation."""
        self._found[ref] = self._found.get(ref) or descriptor_from_proto(descriptor)

    async def find(self, ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
        """Raises StaleIncarnation for an engine that is not among them."""
        found = self._found.get(ref)
        if found is None:
            raise StaleIncarnation(f"{ref} has fetched nothing from this engine")
        return found


@dataclass(eq=False, slots=True, kw_only=True)
class FetchService(pair_pb2_grpc.PairServiceServicer):
    """`stop` ends a transfer on every rank. The ranks' reports come to `transfer_quiet`."""

    ref: WorkerRef
    rank_count: int
    pending: PendingFetches
    memories: DecodeMemories
    stop: Callable[[str], None]
    timeout_s: float
    _fetches: dict[str, SenderReports] = field(default_factory=dict, init=False)

    def transfer_quiet(self, report: SendReport) -> None:
        """A rank has no write of a transfer under way any more."""
        fetch = self._fetches.get(report.transfer_id)
        if fetch is not None:
            fetch.rank_quiet(report)

    def fail(self, transfer_id: str, error: HeadraceError) -> None:
        """The prompt is not going to be sent."""
        fetch = self._fetches.get(transfer_id)
        if fetch is not None:
            fetch.fail(error)

    async def Fetch(
        self,
        request: pair_pb2.FetchRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pair_pb2.FetchResponse:
        """See pair.proto."""
        if request.source_incarnation not in ("", self.ref.incarnation):
            raise StaleIncarnation(
                f"the prompt was computed by {request.source_incarnation}, this is {self.ref}",
                metadata={"meant": request.source_incarnation, "actual": self.ref.incarnation},
            )
        pending = self._read(request, Deadline.from_context(context, self.timeout_s))
        target = pending.target
        if target.start_token == target.end_token:
            self.pending.close(target.transfer_id, "decode needs nothing of it")
            return pair_pb2.FetchResponse()
        self.memories.add(target.decode, request.descriptor)
        self.pending.add(pending)
        fetch = SenderReports(target, self.rank_count, self._stop_ranks)
        self._fetches[target.transfer_id] = fetch
        try:
            await fetch.wait()
        except TransferTimeout as error:
            raise TransferTimeout(
                f"transfer {target.transfer_id} was not sent in time: the prompt did not arrive, or took too long "
                f"({error.detail})",
                metadata={"transfer_id": target.transfer_id},
            ) from error
        finally:
            del self._fetches[target.transfer_id]
        return pair_pb2.FetchResponse(payload_bytes=sum(one.payload_bytes for one in fetch.reports))

    def _stop_ranks(self, transfer_id: str) -> None:
        self.pending.close(transfer_id, "decode cancelled it")
        self.stop(transfer_id)

    def close(self) -> None:
        """Ends every Fetch."""
        for fetch in self._fetches.values():
            fetch.ranks_lost(Cancelled("the prefill engine is shutting down"))

    @staticmethod
    def _read(request: pair_pb2.FetchRequest, deadline: Deadline) -> PendingFetch:
        needed = ("transfer_id", "worker_id", "incarnation", "handoff_endpoint")
        problems = {name: "must not be empty" for name in needed if not getattr(request, name)}
        if not request.HasField("descriptor"):
            problems["descriptor"] = "must be given"
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
            deadline_s=deadline.monotonic_s,
        )
        return PendingFetch(target, request.prompt_digest)
