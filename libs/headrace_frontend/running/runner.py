"""Runs requests of clients, for every listener that accepts them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from typing import Final

from headrace.inference.v1 import inference_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.callers.bounds import CallerBounds, current_input
from headrace_common.callers.priority import Priority, permitted_priority
from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError
from headrace_common.latency.clocks import clocks_now
from headrace_common.process.pacing import LoopLoad
from headrace_common.rpc.trace_context import SERVED
from headrace_common.telemetry.metrics.instruments import BucketCounts
from headrace_frontend.admission.admission import Admission
from headrace_frontend.answers import Answer, answer_count, request_id_of, run_answers
from headrace_frontend.request.preparation import RequestPreparer
from headrace_frontend.request.response_stream import Outlet, ResponseStream, ResponseWriter
from headrace_frontend.running.attempt import AdmittedRequest
from headrace_frontend.running.record import FINISH_REASON_NAMES
from headrace_frontend.running.tracer import RequestTracer

READ_GRACE_S: Final = 5.0
"""Seconds after its deadline in which a client may read what a response has. Then it loses its slot."""


class RequestCounter:
    """Counts requests as they end. This one counts nothing."""

    @contextmanager
    def count_failures(self) -> Iterator[None]:
        """Counts a request that the block fails or cancels."""
        try:
            yield
        except BaseException as error:
            self.count_failure(error)
            raise

    def count_failure(self, error: BaseException) -> None:
        """Counts a request that has ended with this error."""

    def token_gaps(self) -> BucketCounts | None:
        """Collects the times between the tokens of one answer, for count_answer."""
        return None

    def count_answer(
        self,
        end_reason: str,
        answer: ResponseStream,
        arrival_ns: int,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        """Counts a request that has ended with an answer, and its times and tokens. It arrived at `arrival_ns`."""


@dataclass(eq=False, slots=True, kw_only=True)
class RequestRunner:
    """Admits, prepares and dispatches requests, and writes their responses."""

    callers: CallerBounds
    admission: Admission
    policy: Callable[[], registry_pb2.Policy]
    """Returns the policy in force."""
    preparer: RequestPreparer
    dispatch: Callable[[AdmittedRequest], Awaitable[None]]
    """Fills and finishes the response, from the tokens that it has."""
    tracer: RequestTracer
    drain_error: Callable[[], HeadraceError]
    """The error for new requests after `drain`."""
    runs_while_draining: bool = False
    """Whether `dispatch` refuses new requests itself."""
    check_arrival: Callable[[AdmittedRequest], None] = lambda request: None
    """May raise an error for a valid request by its expected wait for a slot."""
    load: LoopLoad = field(default_factory=LoopLoad)
    """That of the event loop."""
    paced: bool = False
    """Whether the workers pace the tokens by it."""
    counter: RequestCounter = field(default_factory=RequestCounter)
    draining: bool = field(default=False, init=False)
    """Whether new requests are rejected."""
    requests: int = field(default=0, init=False)
    """The number of requests that `run` serves now, with those that wait."""

    def drain(self) -> None:
        """Rejects new requests from now on. Requests in flight continue."""
        self.draining = True

    def reject_when_draining(self) -> None:
        """Raises Draining after `drain`."""
        if self.draining:
            raise self.drain_error()

    async def run(
        self,
        request: inference_pb2.GenerateRequest,
        tenant: str,
        deadline: Deadline,
        write: ResponseWriter,
        outlet: Outlet | None = None,
        on_lowered: Callable[[int], None] | None = None,
    ) -> None:
        """Writes the response to `request`, message by message. Cancellation ends all work for the request.

        `outlet` may get all messages of a single answer but the last, instead of `write`. `on_lowered` gets what the
        prompt leaves of the context, where max_tokens is more. Raises HeadraceError, before or between messages.
        """
        served = SERVED.get()
        arrival = served.fetch[0] if served is not None and served.fetch else clocks_now()
        self.requests += 1
        try:
            if not self.runs_while_draining:
                self.reject_when_draining()
            answer = Answer(
                request,
                request_id_of(request),
                tenant,
                self.priority_of(request.priority, tenant),
                deadline,
                arrival,
                write,
                outlet,
                on_lowered,
            )
            if answer_count(request) == 1:
                await self._answer(answer)
            else:
                await run_answers(answer, self._answer)
        except BaseException as error:
            self.counter.count_failure(error)
            raise
        finally:
            self.requests -= 1

    async def _answer(self, answer: Answer) -> None:
        priority = answer.priority
        permit = await self.admission.admit(answer.tenant, answer.deadline, priority)
        record = self.tracer.start(answer.request_id, answer.arrival, priority=priority.label)
        try:
            prepared = answer.prepared
            if prepared is None:
                prepared = await self.preparer.prepare(
                    answer.request,
                    answer.request_id,
                    answer.deadline,
                    answer.tenant,
                    answer.priority,
                    answer.on_lowered,
                )
            if answer.group is not None:
                prepared = answer.group.first_prepared(prepared)
            record.prepared(answer.request, prepared)
            response = ResponseStream(
                prepared,
                record.trace_id,
                self.load,
                paced=self.paced,
                gaps=self.counter.token_gaps(),
                on_first_message=permit.release_tokens,
            )
            admitted = AdmittedRequest(
                prepared, response, answer.deadline, record, permit, self.check_arrival
            )
            if prepared.images:
                await permit.acquire_images(prepared.image_bytes)
            if (sent := current_input()) is not None:
                sent.admit()
            await permit.acquire_tokens(len(prepared.token_ids))
            self.check_arrival(admitted)
            record.slot_wanted()
            await permit.acquire_slot(prepared.model)
            record.slot_acquired()
            await self.callers.wait_turn()
            record.starts(response)
            if answer.group is not None:
                answer.group.first_started(response)
            read_limit_s = answer.deadline.remaining_s() + READ_GRACE_S
            await response.write(self.dispatch(admitted), answer.write, answer.outlet, read_limit_s)
        except BaseException as error:
            self.tracer.end(record, error)
            raise
        else:
            self.tracer.end(record)
        finally:
            permit.close()
        self.counter.count_answer(
            end_reason=FINISH_REASON_NAMES[response.finish_reason],
            answer=response,
            arrival_ns=answer.arrival.monotonic_ns,
            priority=priority,
        )

    @asynccontextmanager
    async def admitted(
        self, tenant: str, deadline: Deadline, requested: int = 0
    ) -> AsyncIterator[None]:
        """A place over the block, for work that is not a request, such as tokenizing. Raises as `admit` does.

        `requested` is the class that it names.
        """
        with self.counter.count_failures():
            self.reject_when_draining()
            priority = self.priority_of(requested, tenant)
            with closing(await self.admission.admit(tenant, deadline, priority)):
                yield

    def priority_of(self, requested: int, tenant: str) -> Priority:
        """The class of a request that names the class `requested`. Raises PermissionDenied or InvalidRequest."""
        return permitted_priority(requested, tenant, self.policy().tenant_priorities)
