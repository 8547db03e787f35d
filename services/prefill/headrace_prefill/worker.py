"""Runs prefill tasks, a bounded number at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from google.protobuf import duration_pb2

from headrace.prefill.v1 import prefill_pb2
from headrace.worker.v1 import worker_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    HeadraceError,
    InternalError,
    InvalidRequest,
)
from headrace_common.telemetry.setup import Telemetry
from headrace_engine.interface import DecodeTokens, Engine, PrefillOutcome, PrefillWork
from headrace_engine.proto import logprobs_to_proto, sampling_from_proto
from headrace_kv.handoff.messages import TransferTarget
from headrace_kv.layout.layout import WorkerRef
from headrace_prefill.spans import record_task

log = logging.getLogger(__name__)


class PrefillWorker:
    """Owns the worker's slots. A task waits here only while more routers handed tasks out than
    there are slots. `on_ended` hears the error's reason, or nothing, and the bytes of every task's transfer.
    """

    def __init__(
        self,
        *,
        ref: WorkerRef,
        engine: Engine,
        telemetry: Telemetry,
        slot_count: int,
        task_timeout_s: float,
        on_ended: Callable[[str, int], None] | None = None,
    ) -> None:
        self.ref = ref
        self.slot_count = slot_count
        self.draining = False
        self._engine = engine
        self._telemetry = telemetry
        self._task_timeout_s = task_timeout_s
        self._on_ended = on_ended
        self._slots = asyncio.Semaphore(slot_count)
        self._held = 0
        self._running = 0

    async def run(
        self,
        task: prefill_pb2.PrefillTask,
        on_start: Callable[[], Awaitable[None]] | None = None,
        on_first_token: Callable[[prefill_pb2.FirstToken], None] | None = None,
    ) -> prefill_pb2.TaskDone:
        """Does the task and says how it ended; never raises for the task's own faults.

        `on_start` is awaited when the task has a slot, before anything is opened; `on_first_token`
        is told the first token of a task that asks for one. Cancelled, the worker stops the
        engine's work first and then reports CANCELLED.
        """
        start_ns = time.time_ns()
        outcome: PrefillOutcome | None = None
        error: HeadraceError | None = None
        self._held += 1
        try:
            outcome = await self._prefill(task, on_start, on_first_token)
        except asyncio.CancelledError:
            error = self._cancellation()
            current = asyncio.current_task()
            if current is not None:
                current.uncancel()
        except HeadraceError as failure:
            error = failure
        except Exception as failure:
            log.exception("prefill of %s failed", task.transfer_id)
            error = InternalError(f"{type(failure).__name__}: {failure}")
        finally:
            self._held -= 1
        end_ns = time.time_ns()
        record_task(self._telemetry, self.ref, task, outcome, error, start_ns, end_ns)
        done = _done(task, outcome, error, end_ns - start_ns)
        if self._on_ended is not None:
            self._on_ended(done.reason, done.payload_bytes)
        return done

    def _cancellation(self) -> HeadraceError:
        if not self.draining:
            return Cancelled("the router gave the task up")
        worker_id = self.ref.worker_id
        return Draining(f"{worker_id} is shutting down", metadata={"worker_id": worker_id})

    async def _prefill(
        self,
        task: prefill_pb2.PrefillTask,
        on_start: Callable[[], Awaitable[None]] | None,
        on_first_token: Callable[[prefill_pb2.FirstToken], None] | None,
    ) -> PrefillOutcome:
        deadline = self._deadline(task)
        work = _work(task, deadline)
        if work.target.with_logits and not self._engine.logits_bytes:
            what = f"the engine of {self.ref.worker_id} hands no logits over"
            raise InvalidRequest({"first_token": f"{what}: choose decode or prefill"})

        def tell(tokens: DecodeTokens) -> None:
            if on_first_token is not None:
                on_first_token(_first_token(task.transfer_id, tokens))

        try:
            async with asyncio.timeout(deadline.remaining_s()), self._slots:
                self._running += 1
                try:
                    if on_start is not None:
                        await on_start()
                    return await self._engine.prefill(work, tell if work.sampling else None)
                finally:
                    self._running -= 1
        except TimeoutError:
            raise DeadlineExceeded(
                f"the deadline passed while prefilling {len(work.token_ids)} tokens",
                metadata={"waited_for": "prefill"},
            ) from None

    def _deadline(self, task: prefill_pb2.PrefillTask) -> Deadline:
        if not task.HasField("deadline_time"):
            return Deadline.after(self._task_timeout_s)
        return Deadline(task.deadline_time.seconds + task.deadline_time.nanos / 1e9)

    def status(self) -> worker_pb2.WatchStatusResponse:
        """What WatchStatus says now."""
        states = worker_pb2.WatchStatusResponse
        return worker_pb2.WatchStatusResponse(
            worker_id=self.ref.worker_id,
            incarnation=self.ref.incarnation,
            state=states.STATE_DRAINING if self.draining else states.STATE_SERVING,
            running_requests=self._running,
            waiting_requests=self._held - self._running,
            total_blocks=self._engine.descriptor.ranks[0].block_count,
            active_transfers=self._running,
            used_blocks=self._engine.usage().used_blocks,
        )


def _work(task: prefill_pb2.PrefillTask, deadline: Deadline) -> PrefillWork:
    """Raises InvalidRequest naming what the router got wrong."""
    violations: dict[str, str] = {}
    if not task.transfer_id:
        violations["transfer_id"] = "must not be empty"
    if not task.token_ids:
        violations["token_ids"] = "must hold at least one token"
    if task.start_token >= max(1, len(task.token_ids)):
        violations["start_token"] = f"must be below the {len(task.token_ids)} tokens to compute"
    if task.send_logits and task.HasField("sampling"):
        violations["send_logits"] = "goes without sampling: decode chooses the token"
    if violations:
        raise InvalidRequest(violations)
    return PrefillWork(
        token_ids=tuple(task.token_ids),
        target=TransferTarget(
            transfer_id=task.transfer_id,
            decode=WorkerRef(task.decode_worker_id, task.decode_incarnation),
            handoff_endpoint=task.decode_endpoint,
            start_token=task.start_token,
            end_token=len(task.token_ids),
            deadline_unix_s=deadline.unix_s,
            with_logits=task.send_logits,
        ),
        sampling=sampling_from_proto(task.sampling, ()) if task.HasField("sampling") else None,
    )


def _first_token(transfer_id: str, tokens: DecodeTokens) -> prefill_pb2.FirstToken:
    (token_id,) = tokens.token_ids
    first = prefill_pb2.FirstToken(transfer_id=transfer_id, token_id=token_id)
    for logprobs in tokens.logprobs:
        first.logprobs.CopyFrom(logprobs_to_proto(logprobs))
    return first


def _done(
    task: prefill_pb2.PrefillTask,
    outcome: PrefillOutcome | None,
    error: HeadraceError | None,
    duration_ns: int,
) -> prefill_pb2.TaskDone:
    done = prefill_pb2.TaskDone(
        transfer_id=task.transfer_id,
        duration=duration_pb2.Duration(seconds=duration_ns // 10**9, nanos=duration_ns % 10**9),
    )
    if error is not None:
        done.reason, done.detail = error.reason, error.detail
    if outcome is not None:
        done.cached_tokens = outcome.cached_tokens
        done.payload_bytes = sum(sent.payload_bytes for _, sent in outcome.layers)
    return done
