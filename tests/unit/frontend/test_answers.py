"""Several answers to one prompt: when they start, where they go, and which are returned."""

from __future__ import annotations

import asyncio
import math
from typing import Any
from unittest.mock import Mock

import pytest

from headrace.inference.v1 import first_token_pb2, inference_pb2, sampling_pb2
from headrace_common.errors import DecodeFull
from headrace_common.process.pacing import LoopLoad
from headrace_frontend.answers import AnswerGroup, answer_count
from headrace_frontend.request.response_stream import ResponseStream
from headrace_frontend.request.validation import PreparedRequest
from headrace_kv.layout import WorkerRef
from tests.kit.requests import prepared

WORKER = WorkerRef("decode-0", "1")


class Written:
    """What a client receives."""

    def __init__(self) -> None:
        self.messages: list[inference_pb2.GenerateResponse] = []

    async def write(self, message: inference_pb2.GenerateResponse) -> None:
        self.messages.append(message)


def request_of(**fields: Any) -> inference_pb2.GenerateRequest:
    fields = {"text": "x" * 100, "request_id": "r1", **fields}
    return inference_pb2.GenerateRequest(**fields)


def prepared_of(request: inference_pb2.GenerateRequest) -> PreparedRequest:
    return prepared(request, context=512)


def message_of(*logprobs: float) -> inference_pb2.GenerateResponse:
    entries = [sampling_pb2.TokenLogprobs(logprob=value) for value in logprobs]
    return inference_pb2.GenerateResponse(text=str(logprobs[0]), logprobs=entries)


@pytest.mark.parametrize(
    ("fields", "count"),
    [({}, 1), ({"n": 1}, 1), ({"n": 3}, 3), ({"n": 2, "best_of": 5}, 5), ({"n": 129}, 1)],
)
def test_the_count_is_that_of_all_answers(fields: dict[str, int], count: int) -> None:
    assert answer_count(request_of(**fields)) == count


@pytest.mark.parametrize(
    ("maker", "batches"),
    [
        (first_token_pb2.FIRST_TOKEN_POLICY_DECODE, 1),
        (first_token_pb2.FIRST_TOKEN_POLICY_PREFILL, 2),
        (first_token_pb2.FIRST_TOKEN_POLICY_HIDDEN, 2),
    ],
)
async def test_others_start_when_a_decode_worker_has_the_kv_cache(
    maker: first_token_pb2.FirstTokenPolicy.ValueType, batches: int
) -> None:
    """A token of prefill, or from its hidden state, is no proof of that."""
    written = Written()
    sampling = sampling_pb2.SamplingParams(seed=2**63 - 1)
    group = AnswerGroup(request_of(n=3, sampling=sampling), written.write)
    first = group.first_prepared(prepared_of(request_of(sampling=sampling)))
    response = ResponseStream(first, "trace")
    group.first_started(response)
    response.attempt_started(WORKER, Mock(), Mock())
    waiting = [asyncio.create_task(group.prepared(number)) for number in (1, 2)]
    for batch in range(batches):
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        if not batch:
            response.begins_by(maker)
        response.add_tokens([5])
        message = await response.next_message()
        assert message is not None
        await group.writer(0)(message)
    others = await asyncio.gather(*waiting)
    assert [other.cached_on for other in others] == [WORKER, WORKER]
    assert [other.request_id for other in others] == ["r1-1", "r1-2"]
    assert [other.sampling.seed for other in others] == [0, 1]
    assert first.sampling.seed == 2**63 - 1


async def test_answers_to_a_short_prompt_start_at_once() -> None:
    group = AnswerGroup(request_of(n=2), Written().write)
    first = group.first_prepared(prepared_of(request_of(text="short")))
    async with asyncio.timeout(5):
        other = await group.prepared(1)
    assert (first.request_id, other.request_id) == ("r1", "r1-1")
    assert not other.sampling.HasField("seed")


async def test_messages_name_their_answer_and_the_clients_request() -> None:
    written = Written()
    group = AnswerGroup(request_of(n=2), written.write)
    group.first_prepared(prepared_of(request_of()))
    await group.writer(1)(inference_pb2.GenerateResponse(request_id="r1-1", text="b"))
    await group.finish()
    (message,) = written.messages
    assert (message.request_id, message.choice, message.text) == ("r1", 1, "b")


@pytest.mark.parametrize("asked", [False, True])
async def test_the_best_answers_are_those_with_likely_tokens(asked: bool) -> None:
    written = Written()
    sampling = sampling_pb2.SamplingParams()
    if asked:
        sampling.logprobs = 2
    request = request_of(n=2, best_of=3, sampling=sampling)
    group = AnswerGroup(request, written.write)
    first = group.first_prepared(prepared_of(request))
    assert first.sampling.HasField("logprobs")
    # The sum of the second is the lowest, but not its mean.
    for number, logprobs in enumerate([(-3.0,), (-2.0, -2.0, -2.0), (-1.0, -2.5)]):
        await group.writer(number)(message_of(*logprobs))
    assert not written.messages
    await group.finish()
    assert [(message.choice, message.text) for message in written.messages] == [
        (0, "-1.0"),
        (1, "-2.0"),
    ]
    assert [bool(message.logprobs) for message in written.messages] == [asked, asked]


class Client:
    """Takes messages at once until it is full, and then one whenever it has read one."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.received: list[str] = []
        self.read = asyncio.Event()
        self.tasks: set[asyncio.Task[Any] | None] = set()

    @property
    def writable(self) -> bool:
        return len(self.received) < self.room

    def write_message(self, message: inference_pb2.GenerateResponse) -> None:
        self.received.append(message.text)

    def write_text(self, text: str) -> bool:
        taken = self.writable
        if taken:
            self.received.append(text)
        return taken

    async def write(self, message: inference_pb2.GenerateResponse) -> None:
        self.tasks.add(asyncio.current_task())
        if not message.finish_reason:
            await self.read.wait()
        self.received.append(message.text)


def load_of(gap_s: float) -> LoopLoad:
    """A gap that does not change by itself."""
    load = LoopLoad()
    load.gap_s, load.next_update_s = gap_s, math.inf
    return load


def response_of() -> ResponseStream:
    return ResponseStream(prepared_of(request_of()), "t", load_of(0.0))


def finish(response: ResponseStream) -> None:
    reason = sampling_pb2.FINISH_REASON_LENGTH
    response.finish(reason, inference_pb2.Usage(), inference_pb2.Timing())


async def test_a_client_that_does_not_read_gets_the_rest_from_a_task_in_order() -> None:
    client = Client(room=1)
    response = response_of()

    async def produce() -> None:
        for letter in "abcd":
            response.add_tokens(letter.encode())
            await asyncio.sleep(0)
        client.read.set()
        finish(response)

    async with asyncio.timeout(10):
        await response.write(produce(), client.write, client)
    assert "".join(client.received) == "abcd"
    assert asyncio.current_task() not in client.tasks


@pytest.mark.parametrize("room", [1, 100])
async def test_an_error_follows_the_tokens_before_it(room: int) -> None:
    client = Client(room)
    client.read.set()
    response = response_of()

    async def produce() -> None:
        response.add_tokens(b"a")
        response.add_tokens(b"b")
        raise DecodeFull("no room")

    async with asyncio.timeout(10):
        with pytest.raises(DecodeFull):
            await response.write(produce(), client.write, client)
    assert "".join(client.received) == "ab"


async def test_a_cancelled_response_leaves_no_task_and_sends_nothing_more() -> None:
    client = Client(room=1)
    response = response_of()
    full = asyncio.Event()

    async def produce() -> None:
        response.add_tokens(b"a")
        response.add_tokens(b"b")
        full.set()
        await asyncio.Event().wait()

    before = asyncio.all_tasks()
    writing = asyncio.create_task(response.write(produce(), client.write, client))
    async with asyncio.timeout(10):
        await full.wait()
        writing.cancel()
        await asyncio.wait({writing})
    assert asyncio.all_tasks() == before
    client.room = 100
    response.add_tokens(b"c")
    assert client.received == ["a"]


@pytest.mark.parametrize("by_timer", [True, False])
async def test_a_bug_in_a_write_ends_the_response(by_timer: bool) -> None:
    load = load_of(0.0)
    response = ResponseStream(prepared_of(request_of()), "t", load)
    produced = asyncio.Event()

    async def broken(message: inference_pb2.GenerateResponse) -> None:
        raise ValueError("a bug")

    class Broken(Client):
        def write_text(self, text: str) -> bool:
            raise ValueError("a bug")

    async def produce() -> None:
        # The timer of the gap sends the second. Only a machine that stands still takes longer to add a token.
        load.gap_s = 0.3 if by_timer else 0.0
        response.add_tokens(b"a")
        response.add_tokens(b"b")
        produced.set()
        await asyncio.Event().wait()

    client = Broken(room=2) if by_timer else Client(room=1)
    writing = asyncio.create_task(response.write(produce(), broken, client))
    # A timeout that cancels it would end it, too.
    done, _ = await asyncio.wait({writing}, timeout=10)
    assert done == {writing}
    assert isinstance(writing.exception(), ValueError)
    assert produced.is_set()
    assert not writing.cancelling()
