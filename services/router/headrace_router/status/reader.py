"""Reads the state of the deployment from the parts of the router."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from google.protobuf.json_format import MessageToDict

from headrace.registry.v1 import registry_pb2
from headrace_common.registry.duties import COMPUTE_PROMPTS, GENERATE, WORKERS
from headrace_common.version import version
from headrace_frontend.admission.admission import Admission
from headrace_kv.layout import WorkerRef
from headrace_router.dispatch.dispatcher import PolicySource
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.worker_stream import PrefillLoad
from headrace_router.status.document import (
    DRAINING,
    READY,
    SILENT,
    STALLED,
    UNREACHABLE,
    DeploymentState,
    RequestDigest,
    TraceDigests,
    WorkerRow,
    status_document,
    sum_links,
)
from headrace_router.status.traffic import Traffic, TrafficCounts
from headrace_router.tracing.store import TraceStore
from headrace_router.workers.directory import WorkerDirectory
from headrace_router.workers.table import Load

REFRESH_S: Final = 1.0
"""Pages that ask within this time share one document."""
_ENTRIES_MAX: Final = 64


class StatusReader:
    """Makes the document, at most once in REFRESH_S. One event loop owns it."""

    def __init__(
        self,
        workers: WorkerDirectory,
        queue: PrefillQueue,
        admission: Admission,
        policy: PolicySource,
        traces: TraceStore,
        traffic: Callable[[], TrafficCounts],
        router_id: str,
    ) -> None:
        self._decode, self._queue, self._admission = workers, queue, admission
        self._policy = policy
        self._router_id = router_id
        self._digests = TraceDigests(traces)
        self._traffic = Traffic(traffic)
        self._members: Collection[registry_pb2.Member] = ()
        self._reading = asyncio.Lock()
        self._document = b""
        self._made_s = float("-inf")

    def update(self, members: Collection[registry_pb2.Member]) -> None:
        """Replaces the members that the registry lists."""
        self._members = tuple(members)

    async def read(self) -> bytes:
        """The document as JSON. Traces are read in a thread, and the rest in the turn of one event loop."""
        async with self._reading:
            if time.monotonic() - self._made_s >= REFRESH_S:
                state = self._state(await asyncio.to_thread(self._digests.read))
                self._document = await asyncio.to_thread(_encode, state)
                self._made_s = time.monotonic()
            return self._document

    def _state(self, requests: Sequence[RequestDigest]) -> DeploymentState:
        queue, admission = self._queue, self._admission
        return DeploymentState(
            unix_ns=time.time_ns(),
            router_id=self._router_id,
            version=version(),
            workers=self._workers(),
            queue={
                "depth": queue.depth,
                "limit": queue.max_queued_tasks,
                "tokens": queue.queued_tokens,
                "oldest_age_s": max(queue.oldest_ages_s().values()),
                "wait_s": queue.wait_s(),
            },
            admission={
                "requests": admission.requests.pool.used,
                "max_requests": admission.requests.pool.capacity,
                "slots": admission.slots,
                "used_slots": admission.used_slots,
                "waiting": admission.waiting,
                "queued_tokens": admission.tokens.pool.used,
                "max_queued_tokens": admission.tokens.pool.capacity,
            },
            policy=policy_object(self._policy()),
            traffic=self._traffic.sample(),
            requests=requests,
            links=sum_links(requests),
        )

    def _workers(self) -> list[WorkerRow]:
        decode = self._decode.loads()
        prefill = self._queue.workers.loads()
        rows: list[WorkerRow] = []
        for member in self._members:
            ref = WorkerRef(member.worker_id, member.incarnation)
            if member.role in GENERATE:
                rows.append(_decode_row(member, decode.get(ref)))
            if member.role in COMPUTE_PROMPTS:
                rows.append(_prefill_row(member, prefill.get(ref)))
            if member.role not in WORKERS:
                rows.append(WorkerRow("router", *_base_of(member), READY))
        return rows


def _base_of(member: registry_pb2.Member) -> tuple[str, str, str]:
    return member.worker_id, member.endpoint, member.model


def _decode_row(member: registry_pb2.Member, load: Load | None) -> WorkerRow:
    if load is None:
        return WorkerRow("decode", *_base_of(member), SILENT)
    draining = DRAINING if load.draining else READY
    unreachable = STALLED if load.stalled else UNREACHABLE
    return WorkerRow(
        "decode",
        *_base_of(member),
        draining if load.reachable else unreachable,
        requests=load.requests,
        max_requests=member.max_num_seqs,
        held_tokens=load.held_tokens,
        total_tokens=load.total_tokens,
    )


def _prefill_row(member: registry_pb2.Member, load: PrefillLoad | None) -> WorkerRow:
    if load is None:
        return WorkerRow("prefill", *_base_of(member), SILENT)
    return WorkerRow(
        "prefill",
        *_base_of(member),
        DRAINING if load.retired else READY,
        requests=load.tasks,
        max_requests=load.tasks + load.credits,
        held_tokens=load.load_tokens,
    )


def policy_object(policy: registry_pb2.Policy) -> dict[str, Any]:
    """The policy as JSON has it, with at most _ENTRIES_MAX tenants and workers."""
    shown = MessageToDict(policy, preserving_proto_field_name=True)
    for name in ("tenant_weights", "worker_roles"):
        entries = shown.get(name, {})
        if len(entries) > _ENTRIES_MAX:
            shown[name] = dict(sorted(entries.items())[:_ENTRIES_MAX])
            shown[f"{name}_left_out"] = len(entries) - _ENTRIES_MAX
    return shown


def _encode(state: DeploymentState) -> bytes:
    return json.dumps(status_document(state), separators=(",", ":")).encode()
