"""One request on a link: credit for what was used, and the errors of its own methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import receipt_pb2, sampling_pb2
from headrace_common.errors import ProtocolViolation, WorkerGone
from headrace_common.limits import PROMPT_LOGPROBS_VALUES_MAX
from headrace_common.rpc.status import status_of
from headrace_router.decode_link.answer import LinkedAnswers
from tests.kit.link import KeptEvents


async def test_an_answer_fails_by_its_own_error_and_others_go_on() -> None:
    class Broken(KeptEvents):
        def add_batch(
            self, token_ids: Sequence[int], logprobs: Sequence[Any], prompt_logprobs: Sequence[Any]
        ) -> bool:
            raise ValueError("a bug")

        def reserve(self, reserved: decode_pb2.Reserved) -> None:
            raise ValueError("another bug")

    answer = Broken()
    answer.opened(1, 8, lambda *_: None)
    answer.add_tokens([1])
    with pytest.raises(ValueError, match="a bug"):
        answer.poll()
    answer.receive_reserved(decode_pb2.Reserved())
    with pytest.raises(ValueError, match="another bug"):
        answer.poll()


async def test_no_token_follows_one_beyond_the_vocabulary() -> None:
    class Held(KeptEvents):
        def worker_failed(self, error: Exception) -> None:
            # As that of an attempt that gives held tokens first.
            self.forward(self.add_batch)
            super().worker_failed(error)

    answer = Held()
    answer.vocabulary_size = 9
    answer.opened(1, 8, lambda *_: None)
    for token_id in (9, 1):
        answer.add_tokens([token_id])
    with pytest.raises(ProtocolViolation, match="vocabulary"):
        answer.poll()
    assert answer.poll() is None


@pytest.mark.parametrize("has_room", [True, False])
async def test_credit_is_returned_once_tokens_are_used(has_room: bool) -> None:
    granted: list[int] = []
    answer = KeptEvents(has_room=has_room)
    answer.opened(1, 8, lambda _, tokens: granted.append(tokens))
    for count in (3, 1, 4):
        answer.add_tokens([1] * count)
    assert granted == ([4, 4] if has_room else [])
    if not has_room:
        with pytest.raises(ProtocolViolation, match="credit"):
            answer.add_tokens([1])
        answer.return_credit()
        assert granted == [8]


async def test_more_prompt_logprobs_than_a_request_may_have_are_a_violation() -> None:
    answer = KeptEvents()
    answer.opened(1, 8, lambda *_: None)
    many = [sampling_pb2.TokenLogprobs()] * (PROMPT_LOGPROBS_VALUES_MAX // 2)
    answer.add_prompt_logprobs(many)
    answer.add_prompt_logprobs(many)
    with pytest.raises(ProtocolViolation):
        answer.add_prompt_logprobs(many)


async def test_failed_requests_that_had_blocks_await_a_receipt() -> None:
    answers, paid = LinkedAnswers(), list[int]()
    for stream_id in (1, 2):
        answer = KeptEvents()
        answer.opened(stream_id, 8, lambda *_: None)
        answer.report_late(lambda receipt: paid.append(receipt.decode_device_us))
        answers.add(answer)
    status = status_of(WorkerGone("it stops")).SerializeToString()
    message = decode_pb2.LinkResponse()
    message.reserved.add(stream_id=1)
    for stream_id in (1, 2):
        message.failures.add(stream_id=stream_id, status=status)
        cost = receipt_pb2.Receipt(decode_device_us=stream_id)
        message.receipts.add(stream_id=stream_id, receipt=cost)
    answers.receive(message)
    # A second receipt of a request does not count.
    answers.receive(message)
    assert paid == [1]
