"""The error of a request that vLLM ends abnormally, without vLLM."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_common.errors import HeadraceError, InternalError, InvalidRequest, TransferFailed
from headrace_engine.interface import (
    DecodeTokens,
    DecodeWork,
    Sampling,
    StructuredOutputs,
    TokenLogprobs,
)
from headrace_engine.receipts import RequestCost
from headrace_engine.vllm.service import decode_request
from headrace_engine.vllm.service.decode_request import DecodeRequest
from headrace_engine.vllm.settings import params_with
from tests.decoding import EventSink

PROMPT: Any = {"prompt_token_ids": [1, 2, 3]}
FREE = Sampling(max_tokens=4)
FORMED = Sampling(max_tokens=4, structured_outputs=StructuredOutputs("regex", "[a-z]+"))


def collected(*outputs: Any) -> SimpleNamespace:
    """A request's outputs, as vLLM collects them until they are taken."""
    found = SimpleNamespace(request_id="x1-0", output=None)
    loop = asyncio.get_running_loop()
    for number, output in enumerate(outputs):
        loop.call_later(0.001 * number, lambda one: found.put(one), output)  # noqa: PLW0108
    return found


async def end_with_error(*request: Any, **more: Any) -> SimpleNamespace:
    """An engine's `add_request`."""
    return collected(ending("error"))


def ending(reason: str, params: Any = None) -> SimpleNamespace:
    completion = SimpleNamespace(token_ids=(), finish_reason=reason, logprobs=None)
    ended = SimpleNamespace(outputs=[completion], finished=True, num_cached_tokens=0)
    ended.kv_transfer_params = params
    return ended


QUIET_LINK: Any = SimpleNamespace(request_coming=lambda: None)


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_request, "sampling_params", lambda *_, **__: None)


async def error_of(
    sampling: Sampling, *reports: bool, failed_transfer: bool = False, remote_kv: bool = False
) -> HeadraceError:
    """The request's error. `reports` come over the link after vLLM's output."""
    work = DecodeWork("x1", (1, 2, 3), sampling, remote_kv=remote_kv)
    engine: Any = SimpleNamespace(add_request=end_with_error)
    request = DecodeRequest(engine, QUIET_LINK, work, EventSink(lambda _: None), {}, PROMPT)
    if failed_transfer:
        request.transfer_failed()
    ending = asyncio.ensure_future(request.run())
    for load_failed in reports:
        await asyncio.sleep(0.002)
        request.failure_reported(load_failed=load_failed)
    with pytest.raises(HeadraceError) as raised:
        await ending
    return raised.value


async def test_a_failed_load_is_no_fault_of_the_answers_form() -> None:
    assert isinstance(await error_of(FORMED, True), TransferFailed)
    # Only the first report counts.
    assert isinstance(await error_of(FORMED, True, False), TransferFailed)
    error = await error_of(FORMED, False)
    assert isinstance(error, InvalidRequest)
    assert list(error.violations) == ["sampling.structured_outputs.regex"]


async def test_a_form_that_cannot_be_compiled_ends_a_request_without_a_reservation() -> None:
    start_s = asyncio.get_running_loop().time()
    error = await error_of(FORMED, False, remote_kv=True)
    assert list(error.metadata) == ["sampling.structured_outputs.regex"]
    assert asyncio.get_running_loop().time() < start_s + 1.0


async def test_a_request_that_fails_after_its_end_has_a_receipt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_request, "RESERVATION_LAG_S", 0.01)
    cost = RequestCost(decode_s=2.0)

    async def add(*request: Any, **more: Any) -> SimpleNamespace:
        return collected(ending("length", params_with(cost)))

    events: list[Any] = []
    engine: Any = SimpleNamespace(add_request=add)
    work = DecodeWork("x1", (1, 2, 3), FREE, remote_kv=True)
    with pytest.raises(InternalError, match="without a reservation"):
        await DecodeRequest(engine, QUIET_LINK, work, EventSink(events.append), {}, PROMPT).run()
    assert events == [cost]


async def test_other_requests_need_no_report() -> None:
    assert isinstance(await error_of(FREE), TransferFailed)
    assert isinstance(await error_of(FORMED, failed_transfer=True), TransferFailed)


async def test_without_a_report_another_attempt_may_succeed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_request, "FAILURE_LAG_S", 0.01)
    assert isinstance(await error_of(FORMED), TransferFailed)


async def score(*request: Any, **more: Any) -> SimpleNamespace:
    """Reports the prompt (1, 2, 3) with the first token, as vLLM does: most likely tokens by rank, and the prompt's."""

    def row(token: int, logprob: float, rank: int) -> dict[int, Any]:
        likeliest = {7: SimpleNamespace(logprob=-0.5, rank=1)}
        return {token: SimpleNamespace(logprob=logprob, rank=rank), **likeliest}

    rows: list[Any] = [None, row(2, -3.0, 9), row(3, -4.0, 11)]
    outputs = []
    for token_id, prompt_logprobs in ((5, rows), (6, [])):
        completion = SimpleNamespace(
            token_ids=(token_id,),
            finish_reason="length" if token_id == 6 else None,
            logprobs=None,
        )
        outputs.append(
            SimpleNamespace(
                outputs=[completion],
                finished=token_id == 6,
                num_cached_tokens=0,
                kv_transfer_params=None,
                prompt_logprobs=prompt_logprobs,
            )
        )
    return collected(*outputs)


async def test_the_prompt_is_reported_once_with_the_first_token() -> None:
    work = DecodeWork("x1", (1, 2, 3), Sampling(max_tokens=2, prompt_logprobs=1), remote_kv=False)
    engine: Any = SimpleNamespace(add_request=score)
    events: list[Any] = []
    await DecodeRequest(engine, QUIET_LINK, work, EventSink(events.append), {}, PROMPT).run()
    first, second, _ = events
    best = ((7, -0.5),)
    assert first == DecodeTokens(
        (5,), prompt_logprobs=(TokenLogprobs(-3.0, best, 9), TokenLogprobs(-4.0, best, 11))
    )
    assert second == DecodeTokens((6,))
