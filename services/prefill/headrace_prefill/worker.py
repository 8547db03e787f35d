"""Runs prefill tasks, a bounded number at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Final

from headrace.prefill.v1 import prefill_pb2
from headrace.worker.v1 import worker_pb2
from headrace_common.callers.priority import Priority
from headrace_common.deadlines import Deadline
from headrace_common.durations import seconds_from_duration
from headrace_common.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    HeadraceError,
    InternalError,
    InvalidRequest,
)
from headrace_common.latency.clocks import clocks_now
from headrace_common.logs import TRACE_NAMES
from headrace_common.registry.adapters import Adapter
from headrace_common.telemetry.setup import Telemetry
from headrace_common.time_model.model import HandoverLearner, TimeModel
from headrace_engine.interface import DecodeTokens, Engine, PrefillOutcome, PrefillWork
from headrace_engine.proto import (
    bounds_from_proto,
    images_from_proto,
    logprobs_to_proto,
    receipt_to_proto,
    requested_adapter,
    require_vocabulary,
    sampling_from_proto,
)
from headrace_engine.steps import Stall
from headrace_kv.layout import WorkerRef
from headrace_kv.messages import SendReport, TransferTarget, prefix_transfer
from headrace_kv.prefix.cache_salt import salt_violations
from headrace_prefill.prefix_fetch import PrefixFetch, PrefixFetcher
from headrace_prefill.spans import EndedTask, TaskSpans, last_link

log = logging.getLogger(__name__)

TASK_TIMEOUT_S: Final = 600.0
"""Seconds until the deadline of tasks that have none."""
STALL_POLL_S: Final = 0.5


class PrefillWorker:
    """Owns the worker's slots. A task waits for a slot when its router was idle and others use all slots.

    `on_received` is called when a task has come. `on_ended` gets the decode worker's id of every task, the error's
    reason, or "", the payload bytes, and the reports of its ranks. Its last argument are the tokens computed in vain.
    `prefixes` may have prefixes fetched. `handovers` learns from the tasks. `room` gives a context in which the engine
    has blocks for a prompt of so many tokens. Without it, all of its blocks are for prompts.
    """

    def __init__(
        self,
        *,
        ref: WorkerRef,
        engine: Engine,
        telemetry: Telemetry,
        slot_count: int,
        on_ended: Callable[[str, str, int, Sequence[SendReport], int], None] = lambda *_: None,
        on_received: Callable[[], None] = lambda: None,
        task_timeout_s: float = TASK_TIMEOUT_S,
        prefixes: PrefixFetcher | None = None,
        handovers: HandoverLearner | None = None,
        room: Callable[[int], AbstractAsyncContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self.ref = ref
        self.slot_count = slot_count
        self._draining = False
        self._engine = engine
        self._task_timeout_s = task_timeout_s
        self._on_ended = on_ended
        self._on_received = on_received
        self._spans = TaskSpans(telemetry, ref)
        self._prefixes = prefixes
        self._handovers = handovers or HandoverLearner()
        self._room = room
        self._slots = asyncio.Semaphore(slot_count)
        self._ended: dict[str, asyncio.Event] = {}
        self._held = 0
        self._running = 0

    async def run(
        self,
        task: prefill_pb2.PrefillTask,
        on_start: Callable[[], Awaitable[None]] | None = None,
        on_first_token: Callable[[prefill_pb2.FirstToken], None] = lambda first: None,
    ) -> prefill_pb2.TaskDone:
        """Executes the task and returns its result, failures included.

        `on_start` is awaited when the task has a slot, before its transfer is opened.
        `on_first_token` gets the first token of a task with sampling. A cancellation stops the
        engine's work first and then returns CANCELLED, or DRAINING after `start_drain`.
        """
        start_unix_ns, start_ns, _ = clocks_now()
        outcome: PrefillOutcome | None = None
        error: HeadraceError | None = None
        reports: list[SendReport] = []
        fetch: PrefixFetch | None = None
        has_sent_token = False

        def forward_first_token(tokens: DecodeTokens) -> None:
            nonlocal has_sent_token
            has_sent_token = True
            first = _first_token_to_proto(task.transfer_id, tokens)
            sent_ns = start_unix_ns + time.monotonic_ns() - start_ns
            first.times.CopyFrom(_task_times(None, start_unix_ns, sent_ns))
            on_first_token(first)

        for name in (task.request_id, task.transfer_id):
            TRACE_NAMES.add(name, task.traceparent)
        self._held += 1
        self._on_received()
        try:
            deadline = self._deadline(task)
            work = _work_from_proto(task, deadline, self._engine.adapters)
            require_vocabulary(work.token_ids, work.images, self._engine.vocabulary_size)
            if self._prefixes is not None:
                fetch = self._prefixes.offer(work, task.first_part)
                work = replace(work, prefix=fetch)
            outcome = await self._prefill(
                work,
                deadline,
                on_start,
                forward_first_token,
                reports.append,
            )
        except asyncio.CancelledError:
            error = (fetch.error if fetch is not None else None) or self._cancellation()
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
            if fetch is not None:
                await fetch.close()
        end_unix_ns = start_unix_ns + time.monotonic_ns() - start_ns
        fetched = None if fetch is None else fetch.record
        ended = EndedTask(task, outcome, reports, error, start_unix_ns, end_unix_ns, fetched)
        self._spans.record(ended)
        done = _done_to_proto(ended)
        if fetch is not None and error is not None and error is fetch.error:
            # Only the error of a lost stream names its sender.
            lost = "prefill" in error.metadata
            done.failed_part = (
                prefill_pb2.FAILED_PART_STREAM if lost else prefill_pb2.FAILED_PART_FIRST
            )
        if outcome is not None:
            cached = outcome.cached_tokens + outcome.fetched_tokens
            done.receipt.CopyFrom(receipt_to_proto(outcome.cost, self._engine.descriptor, cached))
        # A cancelled prompt was not computed in vain if its first token may have ended the answer.
        used = error is None or (has_sent_token and isinstance(error, Cancelled))
        wasted = len(task.token_ids) if reports and not used else 0
        self._on_ended(task.decode_worker_id, done.reason, done.payload_bytes, reports, wasted)
        return done

    def cancel_part(self, transfer_id: str) -> None:
        """The worker that computes the first part of a task does not send it under this transfer any more."""
        if self._prefixes is not None:
            self._prefixes.receiver.cancel(transfer_id, Cancelled.reason, "its worker has failed")

    def stall(self) -> Stall | None:
        """None while the engine steps, or has nothing to do."""
        return self._engine.steps.stall()

    async def wait_stepping(self) -> None:
        """Returns when there is no stall."""
        while True:
            if self.stall() is None:
                return
            await asyncio.sleep(STALL_POLL_S)

    @property
    def held_count(self) -> int:
        """The tasks that it has."""
        return self._held

    def start_drain(self) -> None:
        """Reports DRAINING in `status`, and as the error of tasks that are cancelled."""
        self._draining = True

    def _cancellation(self) -> HeadraceError:
        if not self._draining:
            return Cancelled("the router cancelled the task")
        worker_id = self.ref.worker_id
        return Draining(f"{worker_id} is shutting down", metadata={"worker_id": worker_id})

    async def _prefill(
        self,
        work: PrefillWork,
        deadline: Deadline,
        on_start: Callable[[], Awaitable[None]] | None,
        on_first_token: Callable[[DecodeTokens], None],
        on_report: Callable[[SendReport], None],
    ) -> PrefillOutcome:
        if work.target.with_hidden_state and not self._engine.hidden_format:
            what = f"the engine of {self.ref.worker_id} sends no hidden states"
            raise InvalidRequest({"first_token": f"{what}: choose decode or prefill"})

        try:
            async with (
                asyncio.timeout(deadline.remaining_s()),
                self._in_turn(work.target.transfer_id),
                self._slots,
                self._room(len(work.token_ids)),
            ):
                self._running += 1
                try:
                    if on_start is not None:
                        await on_start()
                    on_token = on_first_token if work.sampling else None
                    outcome = await self._engine.prefill(work, on_token, on_report)
                    self._measure(work, outcome)
                    return outcome
                finally:
                    self._running -= 1
        except TimeoutError:
            raise DeadlineExceeded(
                f"the deadline passed while prefilling {len(work.token_ids)} tokens",
                metadata={"waited_for": "prefill"},
            ) from None

    @asynccontextmanager
    async def _in_turn(self, transfer_id: str) -> AsyncIterator[None]:
        """Entered when the task that computes the part of a divided prompt two before this task's own has ended.

        So its part is cached here, and the other worker sends one part only.
        """
        ended = self._ended[transfer_id] = asyncio.Event()
        try:
            before = self._ended.get(prefix_transfer(prefix_transfer(transfer_id)))
            if before is not None:
                await before.wait()
            yield
        finally:
            ended.set()
            self._ended.pop(transfer_id, None)

    def times(self, decode_worker_id: str) -> TimeModel:
        """What it has learned of steps, and of hand-overs: over all links, and to one decode worker."""
        links = self._handovers.links_to(decode_worker_id)
        return TimeModel(self._engine.step_times, self._handovers.times, links)

    def _measure(self, work: PrefillWork, outcome: PrefillOutcome) -> None:
        links = [link for report in outcome.reports for link in report.links]
        landed_ns = max((link.landed_unix_ns for link in links), default=0)
        if landed_ns and outcome.compute_end_unix_ns:
            self._handovers.observe(
                sum(report.payload_bytes for report in outcome.reports),
                1e-9 * max(0, landed_ns - outcome.compute_end_unix_ns),
                work.target.decode.worker_id,
            )

    def _deadline(self, task: prefill_pb2.PrefillTask) -> Deadline:
        if not task.HasField("remaining"):
            return Deadline.after(self._task_timeout_s)
        return Deadline.after(seconds_from_duration(task.remaining))

    def status(self) -> worker_pb2.WatchStatusResponse:
        """The state that WatchStatus reports now."""
        states = worker_pb2.WatchStatusResponse
        return worker_pb2.WatchStatusResponse(
            worker_id=self.ref.worker_id,
            incarnation=self.ref.incarnation,
            state=states.STATE_DRAINING if self._draining else states.STATE_SERVING,
            running_requests=self._running,
            waiting_requests=self._held - self._running,
            total_blocks=self._engine.descriptor.ranks[0].block_count,
            active_transfers=self._running,
            used_blocks=self._engine.usage().used_blocks,
        )


def _work_from_proto(
    task: prefill_pb2.PrefillTask, deadline: Deadline, adapters: Collection[Adapter]
) -> PrefillWork:
    """Raises InvalidRequest naming every wrong field."""
    violations = salt_violations(task.cache_salt)
    if not task.transfer_id:
        violations["transfer_id"] = "must not be empty"
    if not task.token_ids:
        violations["token_ids"] = "must hold at least one token"
    if task.start_token >= max(1, len(task.token_ids)):
        violations["start_token"] = f"must be below the {len(task.token_ids)} tokens to compute"
    if task.send_hidden_state and task.HasField("sampling"):
        violations["send_hidden_state"] = "excludes sampling: decode chooses the token"
    if violations:
        raise InvalidRequest(violations)
    return PrefillWork(
        # A slice is copied without a Python step for each token.
        token_ids=tuple(task.token_ids[:]),
        target=TransferTarget(
            transfer_id=task.transfer_id,
            decode=WorkerRef(task.decode_worker_id, task.decode_incarnation),
            handoff_endpoint=task.decode_endpoint,
            start_token=task.start_token,
            end_token=len(task.token_ids),
            deadline_s=deadline.monotonic_s,
            with_hidden_state=task.send_hidden_state,
            ticket=task.handoff_ticket,
        ),
        sampling=sampling_from_proto(task.sampling, task.sampling.stop_token_ids)
        if task.HasField("sampling")
        else None,
        cache_salt=task.cache_salt,
        adapter=requested_adapter(task, adapters),
        priority=Priority.from_proto(task.priority),
        bounds=bounds_from_proto(task.bounds),
        images=images_from_proto(task.images, len(task.token_ids)),
    )


def _first_token_to_proto(transfer_id: str, tokens: DecodeTokens) -> prefill_pb2.FirstToken:
    (token_id,) = tokens.token_ids
    first = prefill_pb2.FirstToken(transfer_id=transfer_id, token_id=token_id)
    for logprobs in tokens.logprobs:
        first.logprobs.CopyFrom(logprobs_to_proto(logprobs))
    return first


def _done_to_proto(ended: EndedTask) -> prefill_pb2.TaskDone:
    done = prefill_pb2.TaskDone(
        transfer_id=ended.task.transfer_id,
        times=_task_times(ended.outcome, ended.start_unix_ns, ended.end_unix_ns),
        last_link=last_link(ended.reports, ended.start_unix_ns),
    )
    if ended.error is not None:
        done.reason, done.detail = ended.error.reason, ended.error.detail
    if ended.outcome is not None:
        done.cached_tokens = ended.outcome.cached_tokens
        done.payload_bytes = sum(report.payload_bytes for report in ended.reports)
    return done


def _task_times(
    outcome: PrefillOutcome | None, received_unix_ns: int, sent_unix_ns: int
) -> prefill_pb2.TaskTimes:
    """The times of a task until `sent_unix_ns`. Without an outcome, only that it was received."""

    def after_us(unix_ns: int) -> int:
        return max(1, (unix_ns - received_unix_ns) // 1_000) if unix_ns else 0

    times = prefill_pb2.TaskTimes(received_unix_ns=received_unix_ns, sent_us=after_us(sent_unix_ns))
    if outcome is not None:
        times.compute_start_us = after_us(outcome.compute_start_unix_ns)
        times.compute_end_us = after_us(outcome.compute_end_unix_ns)
        links = [link for report in outcome.reports for link in report.links]
        if links:
            times.first_write_us = after_us(min(link.submitted_unix_ns for link in links))
            times.last_write_us = after_us(max(link.landed_unix_ns for link in links))
    return times
