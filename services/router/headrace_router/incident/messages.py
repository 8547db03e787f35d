"""Events of a router as messages. Each function fills one: headrace_common.telemetry.events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.incident.v1 import incident_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.callers.priority import Priority
from headrace_common.registry.adapters import Adapter, adapter_to_proto
from headrace_common.telemetry.events import Seen
from headrace_common.time_model.model import TimeModel, time_model_to_proto
from headrace_kv.layout import KvLayout, WorkerRef, layout_to_proto
from headrace_router.costs import Candidates
from headrace_router.placement import Decision, PlacementRequest
from headrace_router.prefill_queue.task import TaskTerms
from headrace_router.workers.table import Load, Worker

_Event = incident_pb2.Event
_PullingWorkers = tuple[tuple[KvLayout, frozenset[WorkerRef]], ...]


def member_ref(ref: WorkerRef) -> registry_pb2.MemberRef:
    """A worker as a message."""
    return registry_pb2.MemberRef(worker_id=ref.worker_id, incarnation=ref.incarnation)


def _refs(refs: Iterable[WorkerRef]) -> list[registry_pb2.MemberRef]:
    return [member_ref(ref) for ref in sorted(refs)]


def _layout(event: _Event, seen: Seen, layout: KvLayout) -> int:
    """The number of a layout."""
    number: int | None = seen.get(layout)
    if number is None:
        seen["layouts"] = number = seen.get("layouts", 0) + 1
        seen[layout] = number
        event.new_layouts.append(layout_to_proto(layout))
    return number


def describe_policy(event: _Event, seen: Seen, policy: registry_pb2.Policy) -> None:
    """The policy in force from now on."""
    event.policy.CopyFrom(policy)


def describe_members(event: _Event, seen: Seen, members: Sequence[registry_pb2.Member]) -> None:
    """The members from now on."""
    event.members.SetInParent()
    for member in members:
        event.members.members.add(
            worker_id=member.worker_id,
            incarnation=member.incarnation,
            role=member.role,
            place=member.place if member.HasField("place") else None,
            adapters=member.adapters,
        )


def describe_table(event: _Event, seen: Seen, number: int, workers: Sequence[Worker]) -> None:
    """A new table."""
    event.table.number = number
    for worker in workers:
        event.table.workers.add(
            worker_id=worker.ref.worker_id,
            incarnation=worker.ref.incarnation,
            layout=_layout(event, seen, worker.layout),
            max_model_len=worker.max_model_len,
            max_num_seqs=worker.max_num_seqs,
            adapters=map(adapter_to_proto, sorted(worker.adapters | worker.earlier_adapters)),
            computes_prompts=worker.computes_prompts,
            role=worker.role,
        )
    # A reader forgets the times of an earlier table of this number.
    for row in range(len(workers)):
        seen.pop((number, row), None)


def describe_load(event: _Event, seen: Seen, number: int, row: int, load: Load) -> None:
    """A change of a worker's load."""
    prompts = load.prompts
    event.load.MergeFrom(
        incident_pb2.LoadChange(
            table=number,
            row=row,
            requests=load.requests,
            external_requests=load.external_requests,
            held_tokens=load.held_tokens,
            total_tokens=load.total_tokens,
            reachable=load.reachable,
            draining=load.draining,
            prompt_tokens=prompts.tokens,
            prompt_attended=prompts.attended,
            head_tokens=prompts.head_tokens,
            head_attended=prompts.head_attended,
            head_start_s=prompts.head_start_s,
        )
    )
    if seen.get((number, row)) != load.times:
        seen[number, row] = load.times
        event.load.times.CopyFrom(time_model_to_proto(load.times))


def describe_placement(
    event: _Event,
    seen: Seen,
    number: int,
    request: PlacementRequest,
    candidates: Candidates,
    pulling: _PullingWorkers,
    drawn: int,
    result: Decision | str,
) -> None:
    """A decision by table `number`, or the reason of an error."""
    placement = event.placement
    placement.table, placement.drawn = number, drawn
    _describe_request(placement, request)
    _describe_candidates(event, seen, candidates, pulling)
    if isinstance(result, str):
        placement.error = result
        return
    rows = {worker.ref: row for row, worker in enumerate(candidates.decode.workers)}
    placement.chosen, placement.remote = rows[result.worker.ref], result.remote
    if result.prefill is not None:
        placement.prefill.CopyFrom(member_ref(result.prefill))


def _describe_request(placement: incident_pb2.Placement, request: PlacementRequest) -> None:
    policy, targets = request.policy, request.targets
    placement.MergeFrom(
        incident_pb2.Placement(
            prompt_tokens=request.prompt_tokens,
            prefill_placement=request.prefill_placement,
            local_prefill_max_tokens=policy.local_prefill_max_tokens,
            overlap_weight=policy.overlap_weight,
            temperature=policy.temperature,
            max_queue_wait_s=policy.max_queue_wait_s,
            remaining_s=request.remaining_s,
            failed=_refs(request.failed),
            suspect=_refs(request.suspect),
            local_only=request.local_only,
            adapter=adapter_to_proto(request.adapter) if request.adapter is not None else None,
            ttft_s=targets.ttft_s,
            tpot_s=targets.tpot_s,
            elapsed_s=targets.elapsed_s,
            answer_tokens=targets.answer_tokens,
            early_first=request.early_first,
        )
    )


def _describe_candidates(
    event: _Event, seen: Seen, candidates: Candidates, pulling: _PullingWorkers
) -> None:
    placement = event.placement
    if candidates.cached_tokens is not None:
        placement.cached_tokens.extend(candidates.cached_tokens.tolist())
    placement.queue_wait_s = candidates.queue_wait_s
    if candidates.pairs is not None:
        placement.pair_allowed.extend(candidates.pairs.allowed.tolist())
        placement.pair_extra.extend(candidates.pairs.extra.tolist())
    if seen.get("pulling") != pulling:
        seen["pulling"] = pulling
        placement.pulling.SetInParent()
        for layout, refs in pulling:
            number = _layout(event, seen, layout)
            placement.pulling.layouts.add(layout=number, workers=_refs(refs))
    if seen.get("prefill_times") != candidates.prefill_times:
        seen["prefill_times"] = candidates.prefill_times
        placement.prefill_times.CopyFrom(time_model_to_proto(candidates.prefill_times))


def describe_emptied(event: _Event, seen: Seen) -> None:
    """The queue has no tasks, and its workers follow."""
    event.queue.emptied = True


def describe_joined(
    event: _Event,
    seen: Seen,
    ref: WorkerRef,
    model: str,
    layout: KvLayout,
    adapters: Iterable[Adapter],
    unused_credits: int = 0,
    times: TimeModel | None = None,
) -> None:
    """A prefill worker."""
    event.queue.joined.hello.MergeFrom(
        prefill_pb2.Hello(
            worker_id=ref.worker_id,
            incarnation=ref.incarnation,
            model=model,
            layout=layout_to_proto(layout),
            adapters=map(adapter_to_proto, sorted(adapters)),
        )
    )
    event.queue.joined.credits = unused_credits
    if times is not None:
        event.queue.joined.times.CopyFrom(time_model_to_proto(times))


def describe_left(event: _Event, seen: Seen, ref: WorkerRef) -> None:
    """A prefill worker's stream has ended."""
    event.queue.left.CopyFrom(member_ref(ref))


def describe_restricted(event: _Event, seen: Seen, refs: frozenset[WorkerRef]) -> None:
    """Workers that get only tasks that no other may take."""
    event.queue.restricted.SetInParent()
    event.queue.restricted.workers.extend(_refs(refs))


def _message(event: _Event, ref: WorkerRef) -> prefill_pb2.PullRequest:
    event.queue.message.worker.CopyFrom(member_ref(ref))
    return event.queue.message.request


def describe_credit(event: _Event, seen: Seen, ref: WorkerRef, task_count: int) -> None:
    """A prefill worker can take more tasks."""
    _message(event, ref).credit.task_count = task_count


def describe_started(event: _Event, seen: Seen, ref: WorkerRef, transfer_id: str) -> None:
    """A prefill worker starts a task."""
    _message(event, ref).started.transfer_id = transfer_id


def describe_done(event: _Event, seen: Seen, ref: WorkerRef, done: prefill_pb2.TaskDone) -> None:
    """A prefill worker has ended a task."""
    _message(event, ref).done.CopyFrom(done)


def describe_task(
    event: _Event,
    seen: Seen,
    task: prefill_pb2.PrefillTask,
    tokens: int,
    layout: KvLayout,
    terms: TaskTerms,
) -> None:
    """A task joined the queue. The message has nothing of its prompt."""
    queued = event.queue.task
    queued.task.MergeFrom(
        prefill_pb2.PrefillTask(
            transfer_id=task.transfer_id,
            request_id=task.request_id,
            start_token=task.start_token,
            decode_worker_id=task.decode_worker_id,
            decode_incarnation=task.decode_incarnation,
            adapter=task.adapter if task.HasField("adapter") else None,
        )
    )
    queued.tokens, queued.layout = tokens, _layout(event, seen, layout)
    queued.deadline_s, queued.returns_max = terms.deadline_s, terms.returns_max
    queued.avoid.extend(_refs(terms.avoid))
    for ref, cached_tokens in terms.cached.items():
        queued.cached.add(worker=member_ref(ref), tokens=cached_tokens)
    queued.front, queued.tenant = terms.front, terms.tenant
    queued.priority = terms.priority.to_proto()
    if terms.planned is not None:
        queued.planned.CopyFrom(member_ref(terms.planned))


def describe_cancelled(event: _Event, seen: Seen, transfer_id: str) -> None:
    """A task was given up."""
    event.queue.cancelled = transfer_id


def describe_expected(
    event: _Event,
    seen: Seen,
    number: int,
    layout: KvLayout,
    tokens: int,
    priority: Priority,
    tenant: str,
) -> None:
    """A prompt will join the queue."""
    expected = event.queue.expected
    expected.number, expected.layout = number, _layout(event, seen, layout)
    expected.tokens, expected.priority, expected.tenant = tokens, priority.to_proto(), tenant


def describe_expected_end(event: _Event, seen: Seen, number: int) -> None:
    """It is expected no more."""
    event.queue.expected.number, event.queue.expected.ended = number, True


def describe_sent(event: _Event, seen: Seen, transfer_id: str, ref: WorkerRef) -> None:
    """The queue's decision."""
    event.queue.sent.transfer_id = transfer_id
    event.queue.sent.worker.CopyFrom(member_ref(ref))


def describe_pool_call(
    event: _Event,
    seen: Seen,
    number: int,
    kind: incident_pb2.PoolCall.Kind.ValueType,
    tenant: str,
    priority: Priority,
    amount: int,
    request: int,
    done: bool,
    granted: Sequence[int],
) -> None:
    """A call of a fair pool. The tenant's place has the name of a pool that is created."""
    is_new = kind == incident_pb2.PoolCall.KIND_CREATE
    event.pool.MergeFrom(
        incident_pb2.PoolCall(
            pool=number,
            kind=kind,
            tenant="" if is_new else tenant,
            name=tenant if is_new else "",
            priority=priority.to_proto(),
            amount=amount,
            request=request,
            done=done,
            granted=granted,
        )
    )
