"""LoadService: what waits on this router and sums over its answered requests, and records of them for operators."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

import grpc.aio

from headrace.inference.v1 import load_pb2, load_pb2_grpc
from headrace_common.durations import timestamp_from_unix_ns, unix_ns_from_timestamp
from headrace_common.errors import QueueFull
from headrace_frontend.request.response_stream import ResponseStream
from headrace_frontend.running.record import RequestRecord
from headrace_frontend.running.runner import RequestRunner
from headrace_kv.prefix.hashing import PrefixHasher
from headrace_router.prefill_queue.queue import PrefillQueue

RECORDINGS_MAX: Final = 4
RECORDS_MAX: Final = 4_096
"""Calls of RecordLoad at a time, and records that wait for each reader."""
_BLOCK_TOKENS: Final = 512


@dataclass(eq=False, slots=True)
class _Recording:
    """One call of RecordLoad. Its key hashes no other prompt. None in the queue ends it."""

    begin_unix_ns: int = field(default_factory=time.time_ns)
    hasher: PrefixHasher = field(
        default_factory=lambda: PrefixHasher(secrets.randbits(64), _BLOCK_TOKENS)
    )
    records: asyncio.Queue[load_pb2.RecordLoadResponse | None] = field(
        default_factory=asyncio.Queue
    )
    lost: int = 0

    def add(self, record: RequestRecord, response: ResponseStream) -> None:
        """A request has been answered."""
        if record.usage is None or record.arrival_unix_ns < self.begin_unix_ns:
            return
        if self.records.qsize() >= RECORDS_MAX:
            self.lost += 1
            return
        request = response.request
        root = self.hasher.root_of(request.cache_salt)
        answer = load_pb2.RecordLoadResponse(
            arrival_time=timestamp_from_unix_ns(record.arrival_unix_ns),
            prompt_tokens=record.prompt_tokens,
            answer_tokens=record.usage.completion_tokens,
            prefix_hashes=self.hasher.hashes(request.prefix_ids, root),
            priority=record.priority,
            lost_records=self.lost,
        )
        self.records.put_nowait(answer)


class LoadRecorder:
    """Passes the answered requests to those that record the load. One event loop owns it."""

    def __init__(self) -> None:
        self._recordings: set[_Recording] = set()

    def add(self, record: RequestRecord, response: ResponseStream) -> None:
        """A request has ended."""
        for recording in self._recordings:
            recording.add(record, response)

    def end(self) -> None:
        """Ends the calls."""
        for recording in self._recordings:
            recording.records.put_nowait(None)

    async def record(self) -> AsyncGenerator[load_pb2.RecordLoadResponse]:
        """The requests that arrive from now on, as they end, until `end`. Raises QueueFull."""
        if len(self._recordings) >= RECORDINGS_MAX:
            raise QueueFull(f"{RECORDINGS_MAX} operators record the load: wait until one has ended")
        recording = _Recording()
        self._recordings.add(recording)
        try:
            while (record := await recording.records.get()) is not None:
                yield record
        finally:
            self._recordings.discard(recording)


class LoadReader(load_pb2_grpc.LoadServiceServicer):
    """Answers planners. `models` are the names that this router serves."""

    def __init__(
        self,
        models: Collection[str],
        queue: PrefillQueue,
        runner: RequestRunner,
        answered: Callable[[str], load_pb2.RequestTotals],
        recorder: LoadRecorder,
        usage_since: Callable[[int], Iterable[load_pb2.HourlyUsage]] = lambda unix_ns: (),
    ) -> None:
        """`answered`: see RouterMetrics. `usage_since`: see UsageBook."""
        self._usage_since = usage_since
        self._recorder = recorder
        self._models = sorted(models)
        self._queue, self._runner = queue, runner
        self._answered = answered

    async def GetLoad(
        self,
        request: load_pb2.GetLoadRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> load_pb2.GetLoadResponse:
        """The load of every served model, by name."""
        load = load_pb2.GetLoadResponse(models=map(self._load_of, self._models))
        if request.HasField("usage_since_time"):
            load.usages.extend(self._usage_since(unix_ns_from_timestamp(request.usage_since_time)))
        return load

    async def RecordLoad(
        self, request: load_pb2.RecordLoadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[load_pb2.RecordLoadResponse]:
        """Records of answered requests, until the call is cancelled or a drain begins."""
        self._runner.reject_when_draining()
        async with aclosing(self._recorder.record()) as records:
            async for record in records:
                yield record

    def _load_of(self, model: str) -> load_pb2.ModelLoad:
        depths = self._queue.depths(model)
        return load_pb2.ModelLoad(
            model=model,
            queued_prompts=sum(depths.values()),
            waiting_requests=self._runner.admission.waiting_for_slot(model),
            answered=self._answered(model),
            queued_by_class=load_pb2.ClassCounts(**depths),
        )
