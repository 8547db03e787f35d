"""Moves running answers to other decode workers, with their KV: see docs/architecture/moves.md."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from headrace.kv.v1 import prefix_pb2
from headrace_common.deadlines import Deadline
from headrace_common.durations import seconds_from_duration
from headrace_common.errors import (
    Cancelled,
    Conflict,
    DeadlineExceeded,
    DecodeFull,
    HeadraceError,
    InvalidRequest,
    NotFound,
    QueueFull,
)
from headrace_common.tasks import BackgroundTasks, report_bug
from headrace_frontend.answers import possible_ids
from headrace_frontend.request.response_stream import ResponseStream
from headrace_kv.layout import STATE, WorkerRef
from headrace_router.dispatch.attempt import Attempt
from headrace_router.dispatch.dispatcher import RequestDispatcher
from headrace_router.dispatch.prefix_fetch import KvSource, Warming, first_of
from headrace_router.dispatch.relocation import (
    RunningAnswer,
    gathered_answer,
    late_answer,
    may_be_late,
)
from headrace_router.dispatch.retry_policy import PAIR_ERRORS, TAKEN_SLOT_PAUSE_S
from headrace_router.placement import Decision
from headrace_router.prefill_queue.task import SignTask
from headrace_router.tracing.attempt_record import Move
from headrace_router.workers.connection import LoadReservation
from headrace_router.workers.table import Worker

_LOG = logging.getLogger(__name__)

OF_WORKER_MAX: Final = 4
"""Moves at once from a worker, and to one."""
OF_ROUTER_MAX: Final = 16
WARM_S: Final = 30.0
"""The longest time for the KV. The source generates meanwhile."""
SWITCH_S: Final = 2.0
"""The longest time in which tokens of the source are held."""
TOKEN_S: Final = 0.5
"""The longest wait for the token of the source after which its tokens are held."""
_PAUSE_S: Final = 1.0
"""After a move that has failed, before the next one of the same answer."""
_POLL_S: Final = 0.02
LOOK_S: Final = 0.5
"""Between two plans of moves that the load asks for."""
PLANNED_S: Final = {"late": 1.0, "gather": 5.0}
"""How long a worker must be the one that gives an answer, by what asks for it."""
REST_S: Final = 10.0
"""In which an answer does not move again for these reasons."""
_IDLE_S: Final = 0.2
"""Between two looks at the answers that are left, while none of them is due."""

_Result = TypeVar("_Result")
CountMove: TypeAlias = Callable[[str, str], None]
"""Counts a move by its outcome, "moved" or an error's reason, and by what has asked for it."""


@dataclass(eq=False, slots=True)
class _Course:
    """One move of the answer of an attempt. See Moves for `sign`."""

    dispatcher: RequestDispatcher
    sign: SignTask
    attempt: Attempt
    decision: Decision
    _start_ns: int = field(default_factory=time.monotonic_ns, init=False)
    _payload_bytes: int = field(default=0, init=False)

    async def run(self) -> Move:
        """Raises HeadraceError if the answer stays."""
        late = Deadline.after(WARM_S)
        if not await self._warm(late, remote=True):
            await _once_free(lambda: self._warm(late, remote=False))
        return await _once_free(self._switch)

    def _reserve(self) -> LoadReservation:
        target = self.decision.worker.ref
        workers, request = self.dispatcher.workers, self.attempt.request
        load = workers.reserve_load(target, len(request.prefix_ids))
        if load is None:
            raise NotFound(f"{target} has left", metadata={"worker_id": target.worker_id})
        return load

    async def _warm(self, late: Deadline, *, remote: bool) -> bool:
        """The target gets the KV of the whole blocks that the source has, from there or by computing it.

        False when the source cannot send, or what it sends does not arrive.
        """
        attempt, request, target = self.attempt, self.attempt.request, self.decision.worker
        prepared, generated = request.prepared, request.response.generated
        _require_running(attempt)
        token_ids = prepared.token_ids + array("I", generated)
        end = len(token_ids) - 1
        end -= end % attempt.worker.layout.block_tokens
        if any(end < one.start_token + one.token_count for one in prepared.images) or not end:
            return True
        source = None
        if remote:
            asked = prefix_pb2.SendPrefixRequest(
                transfer_id=attempt.transfer_id,
                generated_token_ids=generated[len(attempt.given) :],
            )
            source = KvSource(attempt.decode_worker, attempt.load.links.channel, asked)
        load = self._reserve()
        key_id, charge = self.dispatcher.ticket_key_id, attempt.record.charge
        warming = Warming(request, target, load, key_id, self.sign, charge)
        try:
            sent_bytes = await warming.run(
                token_ids[: end + 1],
                # Admitted with the growth of the answer, so that this has room too.
                prepared.sampling.max_tokens - len(generated),
                source,
                late.remaining_s(),
                attempt.ended,
            )
        except PAIR_ERRORS as error:
            if source is None:
                raise
            _LOG.info("%s lacks KV of an answer: %s", target.ref, error.detail)
            sent_bytes = None
        finally:
            load.release()
        _require_running(attempt)
        self._payload_bytes = sent_bytes or 0
        return sent_bytes is not None

    async def _switch(self) -> Move:
        """The target continues after the tokens that the client has, and the source's are held until it does."""
        source = self.attempt
        # Right after a token the client waits for none yet.
        await first_of(source.next_tokens(), source.ended, timeout_s=TOKEN_S)
        _require_running(source)
        moved: asyncio.Future[Move] = asyncio.get_running_loop().create_future()
        name = self.decision.worker.ref.worker_id
        move = Move(source.decode_worker.worker_id, name, self._payload_bytes, self._start_ns)
        target = self.dispatcher.continue_on(source, self.decision, self._reserve(), moved, move)
        source.hold()
        try:
            await first_of(moved, target.ended, source.ended, timeout_s=SWITCH_S)
        finally:
            if not moved.done():
                source.let_go()
                target.close()
        if moved.done():
            return moved.result()
        error = target.ended.exception() if target.ended.done() else None
        _require_running(source)
        raise error or DeadlineExceeded(f"{name} had no token in {SWITCH_S:g} s")


@dataclass(eq=False, slots=True)
class Moves:
    """Moves answers, a bounded number at once. The router owns each answer throughout, and the client sees one stream.

    One event loop owns it. `sign` makes the ticket with which the source sends.
    """

    dispatcher: RequestDispatcher
    sign: SignTask
    count: CountMove
    _moving: set[int] = field(default_factory=set, init=False)
    """Identities of requests."""
    _workers: Counter[WorkerRef] = field(default_factory=Counter, init=False)
    """The moves from and to each worker."""
    leaving: set[WorkerRef] = field(default_factory=set, init=False)
    """The workers that are emptied now."""
    _rest_s: WeakKeyDictionary[ResponseStream, float] = field(
        default_factory=WeakKeyDictionary, init=False
    )
    """Until when an answer rests."""
    _plans: dict[str, tuple[tuple[str, WorkerRef], float]] = field(default_factory=dict, init=False)
    """By model, what asks for its next move and the source, and since when it is planned."""
    _balanced: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)
    """By model, the latest move that was planned."""
    _tasks: BackgroundTasks = field(default_factory=lambda: BackgroundTasks("a move"), init=False)

    async def move(self, attempt: Attempt, asker: str, worker_id: str = "") -> Move:
        """Moves the answer of an attempt that leads to the named worker, or to the cheapest.

        Raises HeadraceError if it stays where it is: nothing has changed then.
        """
        outcome = Cancelled.reason
        try:
            moved = await self._move(attempt, worker_id)
            outcome = "moved"
            return moved
        except HeadraceError as error:
            outcome = error.reason
            raise
        finally:
            self.count(outcome, asker)

    async def move_request(self, request_id: str, worker_id: str) -> list[Move]:
        """As `move`, for all answers to a request, by its id or its response's. Raises Conflict if all have ended."""
        found: list[Attempt] = []
        for possible_id in possible_ids(request_id):
            found = found or [
                attempt
                for attempt in self.dispatcher.running.values()
                if _is_of(attempt.request.prepared.request_id, possible_id)
            ]
        if not found:
            raise NotFound(
                f"no answer to request {request_id} runs on this router",
                metadata={"request_id": request_id},
            )
        moves: list[Move] = []
        for attempt in found:
            try:
                moves.append(await self.move(attempt, "operator", worker_id))
            except Conflict:
                # A choice that has ended, or moves for another reason, keeps no other one.
                if attempt is found[-1] and not moves:
                    raise
        return moves

    async def _move(self, attempt: Attempt, worker_id: str) -> Move:
        if not attempt.generates or attempt.ended.done():
            raise Conflict("the answer is not generated at this moment")
        if _has_states(attempt.worker):
            why = "has states, of which its worker has that of the last token only"
            raise InvalidRequest({"request_id": why})
        decision = self.dispatcher.place_beside(attempt, worker_id)
        with self._counted(attempt, decision.worker.ref):
            return await _Course(self.dispatcher, self.sign, attempt, decision).run()

    @contextmanager
    def _counted(self, attempt: Attempt, target: WorkerRef) -> Iterator[None]:
        pair, name = (attempt.decode_worker, target), id(attempt.request)
        if name in self._moving:
            raise Conflict("the answer moves already")
        fullest = max(self._workers[one] for one in pair)
        if fullest >= OF_WORKER_MAX or len(self._moving) >= OF_ROUTER_MAX:
            most = str(OF_WORKER_MAX)
            raise QueueFull(
                f"too many answers move: {len(self._moving)}, from or to a worker at most {most}",
                metadata={"queue": "moves", "maxsize": most},
            )
        self._moving.add(name)
        self._workers.update(pair)
        try:
            yield
        finally:
            self._moving.discard(name)
            self._workers.subtract(pair)
            self._workers += Counter()

    def worker_leaves(self, worker: WorkerRef) -> None:
        """Moves all answers from a worker in the background, while they are to leave it. Repeats are ignored."""
        if worker not in self.leaving:
            self.leaving.add(worker)
            self._tasks.start(self._empty(worker))

    async def _empty(self, worker: WorkerRef) -> None:
        running, workers = self.dispatcher.running, self.dispatcher.workers
        try:
            while workers.leaves(worker) and (left := running.of_worker(worker)):
                now_s = time.monotonic()
                due = [one for one in left if one.generates and not self._rests(one, now_s)]
                for attempt in due[: OF_WORKER_MAX - self._workers[worker]]:
                    self._tasks.start(self._try(attempt, "drain", rest_s=_PAUSE_S))
                await asyncio.sleep(_POLL_S if due else _IDLE_S)
        finally:
            self.leaving.discard(worker)

    async def balance(self) -> None:
        """Moves late answers, and gathers answers by policy, one at a time of each model. Never returns."""
        while True:
            await asyncio.sleep(LOOK_S)
            for model in self.dispatcher.workers.decode_worker_counts():
                try:
                    self._balance(model)
                except Exception as error:  # noqa: BLE001 - other models have a turn
                    report_bug(f"a plan of moves for {model}", error)
                # The plans of many models do not hold the event loop together.
                await asyncio.sleep(0)

    def _balance(self, model: str) -> None:
        """What is planned must be planned for a while before it is done, and an answer rests after each try."""
        if (moving := self._balanced.get(model)) is not None and not moving.done():
            return
        if (planned := self._planned(model)) is None:
            self._plans.pop(model, None)
            return
        asker, attempt, target = planned
        plan, key = self._plans.get(model), (asker, attempt.decode_worker)
        if plan is None or plan[0] != key:
            plan = self._plans[model] = key, time.monotonic()
        if time.monotonic() - plan[1] >= PLANNED_S[asker]:
            trying = self._try(attempt, asker, target.worker_id, rest_s=REST_S)
            self._balanced[model] = asyncio.create_task(trying)
            self._tasks.start(self._balanced[model])

    def _planned(self, model: str) -> tuple[str, Attempt, WorkerRef] | None:
        """What asks for a move, the answer and its target."""
        dispatcher, now_s = self.dispatcher, time.monotonic()
        table, policy = dispatcher.workers.table(model), dispatcher.policy()
        bound_s = seconds_from_duration(policy.tpot_target) or math.inf
        if len(table) < 2 or _has_states(table.workers[0]):
            return None
        of_worker, workers = dispatcher.running.of_worker, enumerate(table.workers)
        attempts = [(row, one) for row, worker in workers for one in of_worker(worker.ref)]
        bounds_s = [one.request.prepared.tpot_target_s or bound_s for _, one in attempts]
        if not attempts or not (policy.gather_fill or may_be_late(table, min(bounds_s))):
            return None
        answers = [
            RunningAnswer(
                row,
                len(one.request.prepared.token_ids) + one.response.completion_tokens,
                tpot_s,
                one.generates and not self._rests(one, now_s),
                one.request.prepared.adapter,
            )
            for (row, one), tpot_s in zip(attempts, bounds_s, strict=True)
        ]
        asker, found = "late", late_answer(table, answers, bound_s)
        if found is None and policy.gather_fill:
            asker, found = "gather", gathered_answer(table, answers, bound_s, policy.gather_fill)
        if found is None:
            return None
        return asker, attempts[found[0]][1], table.workers[found[1]].ref

    def _rests(self, attempt: Attempt, now_s: float) -> bool:
        return self._rest_s.get(attempt.response, 0.0) > now_s

    async def _try(self, attempt: Attempt, asker: str, target: str = "", *, rest_s: float) -> None:
        """Then the answer rests. One that cannot be moved stays."""
        self._rest_s[attempt.response] = math.inf
        try:
            await self.move(attempt, asker, target)
        except HeadraceError as error:
            request_id = attempt.request.prepared.request_id
            _LOG.info("answer %s stays on %s: %s", request_id, attempt.decode_worker, error.detail)
            if isinstance(error, InvalidRequest):
                rest_s = math.inf
        finally:
            self._rest_s[attempt.response] = time.monotonic() + rest_s


async def _once_free(step: Callable[[], Awaitable[_Result]]) -> _Result:
    """The target frees what it had for the KV some milliseconds after that request's end."""
    give_up = Deadline.after(SWITCH_S)
    while True:
        try:
            return await step()
        except DecodeFull:
            if give_up.expired:
                raise
            await asyncio.sleep(TAKEN_SLOT_PAUSE_S)


def _require_running(attempt: Attempt) -> None:
    """Raises Conflict once the answer has ended."""
    if attempt.ended.done() or attempt.response.ended_by:
        raise Conflict("the answer has ended where it was")


def _has_states(worker: Worker) -> bool:
    return any(group.kind == STATE for group in worker.layout.groups)


def _is_of(answer_id: str, request_id: str) -> bool:
    """Whether an answer is that of a request, or one of its choices."""
    whole, _, choice = answer_id.rpartition("-")
    return request_id in (answer_id, whole if choice.isdecimal() else answer_id)
