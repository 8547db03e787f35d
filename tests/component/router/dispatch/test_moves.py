"""Answers that move. tests/model/test_moves_model.py has sources, targets and clients that end at any moment."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2, receipt_pb2, sampling_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import (
    Conflict,
    DecodeFull,
    NoDecodeWorker,
    NotFound,
    QueueFull,
    WorkerGone,
)
from headrace_common.rpc.status import error_from_rpc
from headrace_common.time_model.model import StepTimes, TimeModel, time_model_to_proto
from headrace_kv.layout import WorkerRef
from headrace_router.dispatch import moves
from tests.kit.router import Rig, text_of
from tests.kit.workers import (
    TEXT,
    TOKENS,
    FakeDecode,
    FakePrefill,
    Script,
    full,
    hang,
    reserved,
    sampling,
)
from tests.waiting import forever, until

EARLY = 9
"""Tokens that the source sends at once."""


class Course:
    """A source that sends the rest of its tokens, or ends, when a test lets it; and a target likewise."""

    def __init__(self) -> None:
        self.source_goes_on, self.target_begins = asyncio.Event(), asyncio.Event()
        self.warm = asyncio.Event()
        """Whether the target has computed the prompt."""
        self.warm.set()
        self.continued = asyncio.Event()
        """The target has the continuation."""
        self.end: Callable[[FakeDecode], Any] | None = None
        """What the source does in place of its last token."""

    async def source(
        self, worker: FakeDecode, request: decode_pb2.GenerateRequest
    ) -> AsyncIterator[Any]:
        yield reserved(request)
        start = request.generated_token_count
        for token in TOKENS[start:EARLY]:
            yield one(request, token)
        if start < EARLY:
            await self.source_goes_on.wait()
        for token in TOKENS[max(start, EARLY) : -1]:
            yield one(request, token)
        if self.end is not None:
            await self.end(worker)
        yield one(request, TOKENS[-1])
        yield decode_pb2.Finished(reason=sampling_pb2.FINISH_REASON_LENGTH)

    async def target(
        self, worker: FakeDecode, request: decode_pb2.GenerateRequest
    ) -> AsyncIterator[Any]:
        yield reserved(request)
        if not request.generated_token_count:
            await self.warm.wait()
            # More tokens follow until the router cancels it.
            yield one(request, 0)
            await forever()
        self.continued.set()
        await self.target_begins.wait()
        for token in TOKENS[request.generated_token_count :]:
            yield one(request, token)
        yield decode_pb2.Finished(reason=sampling_pb2.FINISH_REASON_LENGTH, cached_tokens=8)


def one(request: decode_pb2.GenerateRequest, token: int) -> decode_pb2.Tokens:
    logprobs = [sampling_pb2.TokenLogprobs(logprob=-token)] if request.sampling.logprobs else []
    return decode_pb2.Tokens(token_ids=[token], logprobs=logprobs)


class Reader:
    """Reads an answer."""

    def __init__(
        self, rig: Rig, request_id: str = "r", tpot_target: Any = None, **fields: Any
    ) -> None:
        self.messages: list[inference_pb2.GenerateResponse] = []
        request = inference_pb2.GenerateRequest(
            text="a prompt",
            request_id=request_id,
            tpot_target=tpot_target,
            sampling=sampling(logprobs=1, seed=7, **fields),
        )
        self.call = rig.stub.Generate(request, timeout=60)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self.call:
            self.messages.append(message)

    @property
    def tokens(self) -> bytes:
        return bytes(token for message in self.messages for token in message.token_ids)

    async def whole(self) -> inference_pb2.GenerateResponse:
        """The last message of an answer with each token once."""
        await self.task
        assert self.tokens == TOKENS
        assert text_of(self.messages) == TEXT
        assert [-one.logprob for m in self.messages for one in m.logprobs] == list(TOKENS)
        last = self.messages[-1]
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (8, len(TOKENS))
        assert last.timing.attempts == 1
        return last


async def begin(rig: Rig, course: Course, *more: Script) -> Reader:
    """An answer with its first tokens, on d0."""
    await rig.add_decodes(course.source, course.target, *more)
    reader = Reader(rig)
    await until(lambda: len(reader.tokens) == EARLY)
    return reader


async def move(rig: Rig, worker_id: str = "d1", request_id: str = "r") -> Any:
    """Raises HeadraceError."""
    request = inference_pb2.MoveAnswerRequest(request_id=request_id, worker_id=worker_id)
    try:
        (moved,) = (await rig.operator_stub.MoveAnswer(request, timeout=30)).moves
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
    return moved


async def test_answers_leave_a_worker_only_while_the_policy_leaves_it_prompts(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    course, counted = Course(), Counter[tuple[str, str]]()
    rig.router.moves.count = lambda *labels: counted.update([labels])
    reader = await begin(rig, course)
    source, target = rig.decodes
    target.running_requests = target.member.max_num_seqs
    target_ref = WorkerRef(target.member.worker_id, target.member.incarnation)
    await until(lambda: rig.router.workers.loads()[target_ref].requests >= 8)
    source.change_member(role=registry_pb2.Member.ROLE_BOTH)
    rig.policy.worker_roles["d0"] = registry_pb2.WORKER_ROLE_PREFILL
    rig.refresh()
    await until(lambda: counted["DECODE_FULL", "drain"] > 0)
    rig.policy.worker_roles["d0"] = registry_pb2.WORKER_ROLE_BOTH
    rig.refresh()
    await until(lambda: not rig.router.moves.leaving)
    course.source_goes_on.set()
    assert (await reader.whole()).timing.decode_worker_id == "d0"


async def test_of_two_routers_that_fill_a_target_one_keeps_its_answer(rig: Rig) -> None:
    """Routers do not know of each other's moves. The target admits what fits, and refuses the rest before any KV."""
    course, at_once = Course(), [0]

    async def with_one_place(
        worker: FakeDecode, request: decode_pb2.GenerateRequest
    ) -> AsyncIterator[Any]:
        if at_once[-1]:
            raise DecodeFull("as scripted")
        at_once.append(at_once[-1] + 1)
        try:
            async for event in course.target(worker, request):
                yield event
        finally:
            at_once.append(at_once[-1] - 1)

    course.warm.clear()
    first = await begin(rig, course)
    rig.decodes[1].script = with_one_place
    other = await Rig().start()
    # With one worker known, the second answer is on it.
    other.decodes.append(rig.decodes[0])
    other.refresh()
    second = Reader(other, "other")
    await until(lambda: len(second.tokens) == EARLY)
    moving = asyncio.create_task(move(rig))
    await until(lambda: at_once[-1] == 1)
    other.decodes.append(rig.decodes[1])
    other.refresh()
    # A worker that reports late on a busy machine is unreachable for a while.
    await until(lambda: other.router.workers.table("sim").reachable.tolist() == [True, True])
    with pytest.raises(DecodeFull):
        await move(other, request_id="other")
    course.warm.set()
    course.target_begins.set()
    await moving
    course.source_goes_on.set()
    assert (await first.whole()).timing.decode_worker_id == "d1"
    assert (await second.whole()).timing.decode_worker_id == "d0"
    assert max(at_once) == 1
    other.decodes.clear()
    await other.close()


async def test_an_answer_leaves_a_worker_with_steps_beyond_its_bound(rig: Rig) -> None:
    course, counted = Course(), Counter[tuple[str, str]]()
    rig.router.moves.count = lambda *labels: counted.update([labels])
    await rig.add_decodes(course.source, course.target)
    reader = Reader(rig, tpot_target=duration_from_seconds(0.05))
    await until(lambda: len(reader.tokens) == EARLY)
    for worker, step_s in zip(rig.decodes, (0.06, 0.01), strict=True):
        worker.times = time_model_to_proto(TimeModel(StepTimes(fixed_s=step_s, answer_steps=50)))
    course.target_begins.set()
    assert (await reader.whole()).timing.decode_worker_id == "d1"
    assert counted == {("moved", "late"): 1}


async def test_the_usage_has_what_the_prefill_worker_had_cached(rig: Rig) -> None:
    async def compute(worker: FakePrefill, task: prefill_pb2.PrefillTask) -> None:
        done = prefill_pb2.TaskDone(transfer_id=task.transfer_id, cached_tokens=3)
        await worker.send(prefill_pb2.PullRequest(done=done))

    await rig.add_prefill(compute)
    course = Course()
    reader = await begin(rig, course)
    (attempt,) = rig.router.moves.dispatcher.running.values()
    await until(lambda: attempt.request.record.attempts[0].prefill_cached_tokens == 3)
    course.target_begins.set()
    await move(rig)
    assert (await reader.whole()).usage.cached_tokens == 3


async def test_the_receipt_has_what_a_move_cost_that_failed(rig: Rig) -> None:
    course = Course()

    async def failing(
        worker: FakeDecode, request: decode_pb2.GenerateRequest
    ) -> AsyncIterator[Any]:
        yield reserved(request)
        if request.generated_token_count:
            raise WorkerGone("as scripted")
        spent = receipt_pb2.Receipt(decode_device_us=7, computed_tokens=9)
        yield decode_pb2.Finished(reason=sampling_pb2.FINISH_REASON_LENGTH, receipt=spent)

    reader = await begin(rig, course)
    rig.decodes[1].script = failing
    with pytest.raises(WorkerGone):
        await move(rig)
    course.source_goes_on.set()
    receipt = (await reader.whole()).usage.receipt
    # The source refuses to send, so that the target has two requests for the KV.
    assert (receipt.decode_device_us, receipt.computed_tokens, receipt.moves) == (14, 18, 0)


@pytest.mark.parametrize("warm", [False, True])
async def test_the_error_of_a_move_names_the_lost_target(rig: Rig, warm: bool) -> None:
    course = Course()
    if not warm:
        course.warm.clear()
    reader = await begin(rig, course)
    moving = asyncio.create_task(move(rig))
    target = rig.decodes[1]
    # The source refuses to send, so the second request is for the KV too.
    await until(lambda: course.continued.is_set() if warm else len(target.requests) == 2)
    await target.kill()
    with pytest.raises(WorkerGone, match=r"decode worker d1.* vanished") as gone:
        await moving
    # With this, the router would not have answered.
    assert "grpc_code" not in gone.value.metadata
    course.source_goes_on.set()
    assert (await reader.whole()).timing.decode_worker_id == "d0"


async def test_a_choice_that_has_ended_keeps_no_other_one(rig: Rig) -> None:
    course = Course()
    reader = await begin(rig, course)
    running = rig.router.moves.dispatcher.running
    (attempt,) = running.values()
    # It has ended when its turn comes.
    running[1] = attempt
    course.target_begins.set()
    assert (await move(rig)).target_worker_id == "d1"
    del running[1]
    await reader.whole()


async def test_what_cannot_move_stays_and_says_why(rig: Rig) -> None:
    course = Course()
    reader = await begin(rig, course, full)
    rig.decodes[2].running_requests = rig.decodes[2].member.max_num_seqs
    full_ref = WorkerRef(rig.decodes[2].member.worker_id, rig.decodes[2].member.incarnation)
    await until(lambda: rig.router.workers.loads()[full_ref].requests >= 8)
    with pytest.raises(NotFound):
        await move(rig, request_id="another")
    with pytest.raises(NoDecodeWorker):
        await move(rig, worker_id="d0")
    with pytest.raises(DecodeFull, match="d2 takes no answer: it is full"):
        await move(rig, worker_id="d2")
    with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
        await rig.stub.MoveAnswer(inference_pb2.MoveAnswerRequest(request_id="r"), timeout=30)
    course.source_goes_on.set()
    assert (await reader.whole()).timing.decode_worker_id == "d0"


async def test_an_answer_that_does_not_generate_or_moves_already_stays(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = Course()
    course.warm.clear()
    reader = await begin(rig, course)
    source, target = rig.decodes
    moving = asyncio.create_task(move(rig))
    await until(lambda: len(target.requests) == 2)
    with pytest.raises(Conflict, match="moves already"):
        await move(rig)
    monkeypatch.setattr(moves, "OF_ROUTER_MAX", 1)
    source.script = hang
    other = Reader(rig, request_id="other")
    await until(lambda: len(rig.router.moves.dispatcher.running) == 2)
    with pytest.raises(Conflict, match="not generated at this moment"):
        await move(rig, request_id="other")
    source.script = course.source
    third = Reader(rig, request_id="third")
    await until(lambda: len(third.tokens) == EARLY)
    with pytest.raises(QueueFull, match="too many answers move: 1"):
        await move(rig, request_id="third")
    course.warm.set()
    course.target_begins.set()
    await moving
    course.source_goes_on.set()
    await reader.whole()
    await third.whole()
    other.call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await other.task
