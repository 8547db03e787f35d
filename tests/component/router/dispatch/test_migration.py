"""Responses that continue at another decode worker: every token once, and the same text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace.worker.v1 import worker_pb2
from headrace_common.errors import (
    DeadlineExceeded,
    DecodeFull,
    Draining,
    HeadraceError,
    InvalidRequest,
    WorkerGone,
)
from headrace_common.telemetry import schema
from headrace_kv.layout import WorkerRef
from tests.kit.router import Rig, text_of, with_settings
from tests.kit.workers import TEXT, TOKENS, FakeDecode, full, hand_over, raising, recite, sampling
from tests.waiting import forever, let_a_wrong_step_show, until


def decode_requests(rig: Rig) -> list[decode_pb2.GenerateRequest]:
    """The requests to decode workers, ordered by the tokens that were generated before."""
    requests = [request for decode in rig.decodes for request in decode.requests]
    return sorted(requests, key=lambda request: request.generated_token_count)


# The third token is the first byte of a character.
@pytest.mark.parametrize("tokens,remote", [(1, False), (3, False), (19, False), (16, True)])
async def test_a_response_continues_at_another_worker(rig: Rig, tokens: int, remote: bool) -> None:
    """A remote prefill computes the prompt and the generated tokens."""
    dying = recite(tokens, FakeDecode.die)
    await rig.add_decodes(dying, dying, recite(99))
    tasks = (await rig.add_prefill(hand_over)).tasks if remote else []
    responses = await rig.ask(sampling=sampling(logprobs=1, seed=7))
    assert text_of(responses) == TEXT
    sent = [token for response in responses for token in response.token_ids]
    assert bytes(sent) == TOKENS
    assert [-entry.logprob for r in responses for entry in r.logprobs] == sent
    last = responses[-1]
    assert last.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
    # Generated tokens are not counted as prompt.
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (8, len(TOKENS))
    assert last.usage.decode_cached_tokens <= 8
    assert last.timing.attempts == 3
    assert last.timing.decode_worker_id == "d2"
    requests = decode_requests(rig)
    assert [request.generated_token_count for request in requests] == [0, tokens, 2 * tokens]
    for request in requests:
        done = TOKENS[: request.generated_token_count]
        assert bytes(request.token_ids) == b"a prompt" + done
        assert request.sampling == requests[0].sampling
    assert len({request.transfer_id for request in requests}) == 3
    assert [(task.transfer_id, list(task.token_ids)) for task in tasks] == [
        (request.transfer_id, list(request.token_ids)[:-1]) for request in requests if remote
    ]


@pytest.mark.parametrize(
    "params,reason",
    [
        (sampling_pb2.SamplingParams(max_tokens=4), sampling_pb2.FINISH_REASON_LENGTH),
        (sampling(stop_token_ids=[TOKENS[3]]), sampling_pb2.FINISH_REASON_STOP),
    ],
    ids=["length", "stop token"],
)
async def test_a_complete_response_is_not_retried_when_finished_is_lost(
    rig: Rig, params: sampling_pb2.SamplingParams, reason: int
) -> None:
    """The last token arrives, and the worker dies before Finished."""
    _, spare = await rig.add_decodes(recite(4, FakeDecode.die), recite(99))
    responses = await rig.ask(sampling=params)
    assert responses[-1].finish_reason == reason
    assert responses[-1].usage.completion_tokens == 4
    assert responses[-1].timing.attempts == 1
    assert not spare.requests


@pytest.mark.parametrize(
    "error", [Draining("shutting down"), WorkerGone("as scripted")], ids=lambda error: error.reason
)
async def test_a_decode_worker_that_ends_its_stream_is_replaced(
    rig: Rig, error: HeadraceError
) -> None:
    leaving, _ = await rig.add_decodes(recite(9, raising(error)), recite(99))
    responses = await rig.ask(sampling=sampling())
    assert text_of(responses) == TEXT
    assert responses[-1].timing.attempts == 2
    assert len(leaving.requests) == 1
    trace = await rig.trace_of(responses[0].trace_id)
    attempts = [span.attributes for span in trace.spans if span.name == schema.SPAN_ATTEMPT]
    attempts.sort(key=lambda attributes: int(attributes[schema.ATTRIBUTE_ATTEMPT]))
    assert [each[schema.ATTRIBUTE_GENERATED_TOKENS] for each in attempts] == ["0", "9"]
    assert attempts[0][schema.ATTRIBUTE_ERROR_REASON] == error.reason
    assert schema.ATTRIBUTE_ERROR_REASON not in attempts[1]


async def stall(worker: FakeDecode) -> None:
    """Reports a stalled engine, which never steps again."""
    worker.stall = worker_pb2.Stall(request_count=3, token_count=4)
    await forever()


async def test_a_response_leaves_a_stalled_worker_and_later_ones_avoid_it(rig: Rig) -> None:
    stalling, other = await rig.add_decodes(recite(9, stall), recite(99))
    # Both have room, so the first answers show which worker is asked.
    responses = await rig.ask(sampling=sampling())
    if responses[-1].timing.attempts == 1:
        responses = await rig.ask(sampling=sampling())
    assert text_of(responses) == TEXT
    assert responses[-1].timing.attempts == 2
    await until(lambda: stalling.cancelled == {stalling.requests[0].transfer_id})
    for _ in range(4):
        await rig.ask(sampling=sampling())
    assert len(stalling.requests) == 1
    # It serves again as soon as it reports no stall.
    stalling.stall, stalling.script = None, recite(99)
    await until(lambda: bool(rig.router.workers.table("sim").reachable.all()))
    other.script = full
    assert text_of(await rig.ask(sampling=sampling())) == TEXT
    assert len(stalling.requests) == 2


async def test_a_response_leaves_a_worker_that_only_its_connection_shows_to_live(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def be_silent(worker: FakeDecode) -> None:
        worker.reports.clear()
        await forever()

    monkeypatch.setenv("HEADRACE_PING_TIMEOUT_S", "1")
    silent, _ = await rig.add_decodes(recite(9, be_silent), recite(99))
    responses = await rig.ask(sampling=sampling())
    if responses[-1].timing.attempts == 1:
        responses = await rig.ask(sampling=sampling())
    assert text_of(responses) == TEXT
    assert responses[-1].timing.attempts == 2
    silent.reports.set()
    await until(lambda: bool(rig.router.workers.table("sim").reachable.all()))


async def test_the_retry_budget_bounds_migrations(rig: Rig) -> None:
    rig.policy.retry_budget = 1
    for _ in range(4):
        await rig.add_decode(recite(2, FakeDecode.die))
    error = await rig.error_of(sampling=sampling())
    assert isinstance(error, WorkerGone)
    assert [request.generated_token_count for request in decode_requests(rig)] == [0, 2]


@with_settings(worker_wait_s=10.0)
async def test_a_started_response_waits_for_room_until_its_deadline(rig: Rig) -> None:
    draining, other = await rig.add_decodes(recite(2, raising(Draining("shutting down"))), full)
    asking = asyncio.create_task(rig.ask(sampling=sampling()))
    await until(lambda: len(other.requests) >= 2)
    other.script = recite(99)
    assert text_of(await asking) == TEXT
    assert len(draining.requests) == 1
    other.script = full
    draining.script = recite(2, raising(Draining("shutting down")))
    error = await rig.error_of(sampling=sampling(), timeout_s=2.0)
    assert isinstance(error, DecodeFull | DeadlineExceeded | Draining)


@with_settings(worker_wait_s=0.5)
async def test_a_started_response_waits_no_longer_than_the_worker_wait(rig: Rig) -> None:
    await rig.add_decode(recite(2, FakeDecode.die))
    error = await rig.error_of(sampling=sampling())
    assert isinstance(error, WorkerGone)
    assert "decode worker d0" in error.detail


async def test_an_unreachable_worker_is_not_asked_after_a_full_one(rig: Rig) -> None:
    """The client gets the error that states when to ask again."""
    lost, _ = await rig.add_decodes(recite(99), full)
    ref = next(w.ref for w in rig.router.workers.table("sim").workers if w.ref.worker_id == "d0")
    lost.reports.clear()
    await until(partial(_stays_unreachable, rig, ref))
    error = await rig.error_of(sampling=sampling(), timeout_s=0.3)
    assert isinstance(error, DecodeFull | DeadlineExceeded)
    assert not lost.requests


async def _stays_unreachable(rig: Rig, ref: WorkerRef) -> bool:
    """Marks a worker that reports no more. A status may still have been on its way."""
    rig.router.workers.mark_unreachable(ref)
    await let_a_wrong_step_show()
    return not rig.router.workers.table("sim").reachable.all()


@pytest.mark.parametrize("done", [0, 3, 17, len(TOKENS)])
@pytest.mark.parametrize("stops", [(), ("Süden",)])
async def test_a_request_continues_after_the_tokens_of_its_client(
    rig: Rig, done: int, stops: tuple[str, ...]
) -> None:
    decode = await rig.add_decode(recite(99))
    ids = list(TOKENS)
    whole = await rig.ask(sampling=sampling(stop=stops))
    rest = await rig.ask(
        sampling=sampling(stop=stops), generated=inference_pb2.TokenIds(ids=ids[:done])
    )
    sent = [token for response in rest for token in response.token_ids]
    assert rest[-1].finish_reason == whole[-1].finish_reason
    if done > whole[-1].usage.completion_tokens:
        assert not sent
        return
    assert rest[-1].usage.completion_tokens == whole[-1].usage.completion_tokens
    assert sent == ids[done : whole[-1].usage.completion_tokens]
    # Text that the client's tokens complete is not sent again.
    assert text_of(whole).endswith(text_of(rest))
    prior = bytes(ids[:done]).decode(errors="ignore")
    assert text_of(rest) in (text_of(whole)[len(prior) :], text_of(whole))
    assert len(decode.requests) == (2 if sent else 1)


async def test_invalid_generated_tokens_are_rejected(rig: Rig) -> None:
    await rig.add_decode(recite(99))
    too_many = inference_pb2.TokenIds(ids=[65] * 4)
    error = await rig.error_of(
        sampling=sampling_pb2.SamplingParams(max_tokens=3), generated=too_many
    )
    assert isinstance(error, InvalidRequest)
    assert set(error.violations) == {"generated.ids"}
    error = await rig.error_of(generated=inference_pb2.TokenIds(ids=[10**6]))
    assert isinstance(error, InvalidRequest)
    assert set(error.violations) == {"generated.ids[0]"}


async def test_a_worker_that_sends_a_token_beyond_the_vocabulary_loses_this_request_only(
    rig: Rig,
) -> None:
    both_asked, lied = asyncio.Event(), asyncio.Event()

    async def lie_once(
        worker: FakeDecode, request: decode_pb2.GenerateRequest
    ) -> AsyncIterator[Any]:
        if bytes(request.token_ids) == b"other":
            yield decode_pb2.Reserved()
            await lied.wait()
            yield decode_pb2.Tokens(token_ids=TOKENS)
            yield decode_pb2.Finished(reason=sampling_pb2.FINISH_REASON_LENGTH)
            return
        yield decode_pb2.Reserved()
        yield decode_pb2.Tokens(token_ids=TOKENS[:5])
        await both_asked.wait()
        yield decode_pb2.Tokens(token_ids=[2**32 - 1, *TOKENS[5:]])
        await forever()

    lying = await rig.add_decode(lie_once)
    asking = [
        asyncio.create_task(rig.ask(text, sampling=sampling())) for text in ("a prompt", "other")
    ]
    await until(lambda: len(lying.requests) == 2)
    honest = await rig.add_decode(recite(99))
    both_asked.set()
    responses = await asking[0]
    lied.set()
    other = await asking[1]
    assert text_of(responses) == text_of(other) == TEXT
    assert [one[-1].timing.attempts for one in (responses, other)] == [2, 1]
    assert [request.generated_token_count for request in honest.requests] == [5]
    trace = await rig.trace_of(responses[0].trace_id)
    assert any("decode worker d0" in str(span) for span in trace.spans)
