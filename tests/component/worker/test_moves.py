"""Answers that move between workers with simulated engines, behind a real router and a real registry."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_common.durations import duration_from_seconds
from headrace_decode.attempts import Attempts
from headrace_engine.proto import sampling_from_proto
from headrace_router.dispatch import moves
from headrace_router.dispatch.moves import OF_WORKER_MAX
from tests.channels import operator_channel
from tests.component.worker.serving import MODEL, Workers, running
from tests.component.worker.test_both_roles import CLOSED_FORM, NAMES
from tests.suite.deployment import greedy, prompt_of
from tests.waiting import until

SLOW = f"{MODEL},decode_step_s=0.01"
TOKENS = 100
SEEDED: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "seed": 11,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logprobs": 2,
}
CHOICE = sampling_pb2.StructuredOutputs(choice=sampling_pb2.Choice(texts=["yes " * 20, "no " * 27]))


@dataclass(slots=True)
class Answer:
    """An answer that is being read, or several choices of one."""

    request: inference_pb2.GenerateRequest
    messages: list[inference_pb2.GenerateResponse] = field(default_factory=list)

    async def read(self, pair: Workers) -> None:
        async for message in pair.rig.stub.Generate(self.request, timeout=60):
            self.messages.append(message)

    def tokens(self, choice: int = 0) -> tuple[int, ...]:
        return tuple(
            token for one in self.messages if one.choice == choice for token in one.token_ids
        )

    def last(self, choice: int = 0) -> inference_pb2.GenerateResponse:
        return [one for one in self.messages if one.choice == choice][-1]

    def check(self) -> None:
        """Each token once, and no attempt was a retry."""
        sampling = sampling_from_proto(self.request.sampling, ())
        count = len(self.tokens()) if sampling.structured_outputs is not None else TOKENS
        tokens = CLOSED_FORM.expected_tokens(self.request.tokens.ids, count, sampling)
        assert self.tokens() == tokens
        assert self.last().timing.attempts == 1
        assert self.last().usage.completion_tokens == len(tokens)
        logprobs = sum(len(one.logprobs) for one in self.messages)
        assert logprobs == (len(tokens) if self.request.sampling.HasField("logprobs") else 0)


async def begun(pair: Workers, *requests: inference_pb2.GenerateRequest) -> Any:
    """Answers with some tokens each, and the tasks that read them."""
    answers = [Answer(request) for request in requests]
    reading = [asyncio.create_task(one.read(pair)) for one in answers]
    await until(lambda: all(len(one.tokens()) > 8 for one in answers))
    return answers, asyncio.gather(*reading)


async def move(pair: Workers, request_id: str) -> list[inference_pb2.AnswerMove]:
    request = inference_pb2.MoveAnswerRequest(request_id=request_id)
    return list((await pair.rig.operator_stub.MoveAnswer(request, timeout=30)).moves)


@pytest.mark.parametrize(
    "sampling", [{}, SEEDED, {"structured_outputs": CHOICE}], ids=["greedy", "seeded", "form"]
)
async def test_an_answer_moves_there_and_back_with_its_kv(sampling: dict[str, Any]) -> None:
    async with running(SLOW) as pair:
        request = greedy(prompt_of(100, 1), TOKENS, request_id="one", **sampling)
        (answer,), reading = await begun(pair, request)
        (there,) = await move(pair, "one")
        (back,) = await move(pair, "one")
        await reading
        answer.check()
        ends = {there.source_worker_id, there.target_worker_id}
        assert ends == NAMES
        assert (back.source_worker_id, back.target_worker_id) == (
            there.target_worker_id,
            there.source_worker_id,
        )
        # Three blocks of the prompt at least, and on the way back what was generated there.
        assert there.payload_bytes >= 3 * 32 * CLOSED_FORM_BYTES
        assert answer.last().timing.decode_worker_id == back.target_worker_id
        assert answer.last().usage.receipt.moves == 2
        assert (
            answer.last().usage.decode_cached_tokens + answer.last().usage.transferred_tokens < 96
        )
        await pair.wait_idle()


CLOSED_FORM_BYTES = 64


async def test_all_choices_of_a_request_move() -> None:
    async with running(SLOW) as pair:
        request = greedy(prompt_of(60, 2), TOKENS, request_id="two", **SEEDED)
        request.n = 2
        (answer,), reading = await begun(pair, request)
        await until(lambda: len(answer.tokens(1)) > 8)
        moved = await move(pair, "two")
        await reading
        (unmoved,), other = await begun(pair, request)
        await other
        assert len(moved) == 2
        for choice in range(2):
            assert answer.tokens(choice) == unmoved.tokens(choice)
        assert answer.tokens(0) != answer.tokens(1)
        await pair.wait_idle()


async def test_answers_gather_on_one_worker_where_the_policy_wants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(moves.PLANNED_S, "gather", 0.0)
    monkeypatch.setattr(moves, "LOOK_S", 0.05)
    async with running(f"{MODEL},decode_step_s=0.04") as pair:
        requests = [greedy(prompt_of(70 + n, n), TOKENS, request_id=f"r{n}") for n in range(4)]
        answers, reading = await begun(pair, *requests)
        attempts = pair.rig.router.moves.dispatcher.running
        names = [one.decode_worker.worker_id for one in attempts.values()]
        if len(set(names)) == 1:
            await move(pair, "r0")
        pair.rig.policy.tpot_target.CopyFrom(duration_from_seconds(0.1))
        pair.rig.policy.gather_fill = 1.0
        await until(lambda: len({one.decode_worker for one in attempts.values()}) == 1)
        assert len(attempts) == len(requests)
        await reading
        for answer in answers:
            answer.check()
        assert len({answer.last().timing.decode_worker_id for answer in answers}) == 1
        await pair.wait_idle()


async def drain(pair: Workers, name: str, *, keep_answers: bool = False) -> None:
    member = pair.members[name]
    async with operator_channel(member.endpoint) as channel:
        request = worker_pb2.DrainRequest(
            incarnation=member.incarnation,
            grace=duration_from_seconds(30),
            keep_answers=keep_answers,
        )
        await worker_pb2_grpc.WorkerServiceStub(channel).Drain(request, timeout=5)


@pytest.mark.parametrize("keep_answers", [False, True])
async def test_answers_of_a_drained_worker_move_unless_it_keeps_them(
    monkeypatch: pytest.MonkeyPatch, keep_answers: bool
) -> None:
    sent = 0

    def admitted(attempts: Attempts, transfer_id: str, token_count: int) -> None:
        nonlocal sent
        sent += 1

    monkeypatch.setattr(Attempts, "admit_sending", admitted)
    async with running(SLOW) as pair:
        requests = [
            greedy(prompt_of(70 + n, n), TOKENS, request_id=f"r{n}", **(SEEDED if n % 2 else {}))
            for n in range(3 * OF_WORKER_MAX)
        ]
        answers, reading = await begun(pair, *requests)
        running_answers = pair.rig.router.moves.dispatcher.running.values()
        begins = [one.decode_worker.worker_id for one in running_answers]
        victim = max(NAMES, key=begins.count)
        await drain(pair, victim, keep_answers=keep_answers)
        await asyncio.wait_for(asyncio.shield(pair.serving[victim]), 30)
        await reading
        for answer in answers:
            answer.check()
        ends = {answer.last().timing.decode_worker_id for answer in answers}
        assert ends == (set(begins) if keep_answers else NAMES - {victim})
        assert (sent > 0) == (not keep_answers)
        await pair.wait_idle()


async def test_answers_leave_a_worker_to_which_the_policy_leaves_prompts() -> None:
    async with running(SLOW) as pair:
        requests = [greedy(prompt_of(70 + n, n), TOKENS, request_id=f"r{n}") for n in range(3)]
        answers, reading = await begun(pair, *requests)
        running_answers = pair.rig.router.moves.dispatcher.running.values()
        (left, *_) = [one.decode_worker.worker_id for one in running_answers]
        pair.rig.policy.worker_roles[left] = registry_pb2.WORKER_ROLE_PREFILL
        pair.rig.router.update(list(pair.members.values()))
        await reading
        for answer in answers:
            answer.check()
            assert answer.last().timing.decode_worker_id == (NAMES - {left}).pop()
        await pair.wait_idle()
