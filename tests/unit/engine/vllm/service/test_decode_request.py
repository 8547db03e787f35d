"""The error of a request that vLLM ends abnormally, without vLLM."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_common.errors import HeadraceError, InvalidRequest, TransferFailed
from headrace_engine.interface import (
    DecodeTokens,
    DecodeWork,
    Sampling,
    StructuredOutputs,
    TokenLogprobs,
)
from headrace_engine.vllm.service import decode_request
from headrace_engine.vllm.service.decode_request import DecodeRequest
from tests.decoding import EventSink

PROMPT: Any = {"prompt_token_ids": [1, 2, 3]}
FREE = Sampling(max_tokens=4)
FORMED = Sampling(max_tokens=4, structured_outputs=StructuredOutputs("regex", "[a-z]+"))


class Outputs:
    """A request's outputs, as vLLM collects them until they are taken."""

    request_id = "x1-0"

    def __init__(self, *outputs: Any) -> None:
        self.output: Any = None
        self.put: Any = None
        for number, output in enumerate(outputs):
            asyncio.get_running_loop().call_later(0.001 * number, self._add, output)

    def _add(self, output: Any) -> None:
        self.put(output)


class FailingEngine:
    """Ends each request with an error."""

    async def add_request(self, *request: Any, **more: Any) -> Any:
        completion = SimpleNamespace(token_ids=(), finish_reason="error", logprobs=None)
        return Outputs(SimpleNamespace(outputs=[completion], finished=True, num_cached_tokens=0))


class QuietLink:
    """A link that sends nothing."""

    def request_coming(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_request, "sampling_params", lambda *_, **__: None)


async def error_of(
    sampling: Sampling, *reports: bool, failed_transfer: bool = False, remote_kv: bool = False
) -> HeadraceError:
    """The request's error. `reports` come over the link after vLLM's output."""
    work = DecodeWork("x1", (1, 2, 3), sampling, remote_kv=remote_kv)
    engine: Any = FailingEngine()
    link: Any = QuietLink()
    request = DecodeRequest(engine, link, work, EventSink(lambda _: None), {}, PROMPT)
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
    error = await error_of(FORMED, False)
    assert isinstance(error, InvalidRequest)
    assert list(error.violations) == ["sampling.structured_outputs.regex"]


async def test_a_form_that_cannot_be_compiled_ends_a_request_without_a_reservation() -> None:
    start_s = asyncio.get_running_loop().time()
    error = await error_of(FORMED, False, remote_kv=True)
    assert list(error.metadata) == ["sampling.structured_outputs.regex"]
    assert asyncio.get_running_loop().time() < start_s + 1.0


async def test_only_the_first_report_counts() -> None:
    assert isinstance(await error_of(FORMED, True, False), TransferFailed)


async def test_other_requests_need_no_report() -> None:
    assert isinstance(await error_of(FREE), TransferFailed)
    assert isinstance(await error_of(FORMED, failed_transfer=True), TransferFailed)


async def test_without_a_report_another_attempt_may_succeed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_request, "FAILURE_LAG_S", 0.01)
    assert isinstance(await error_of(FORMED), TransferFailed)


class ScoringEngine:
    """Reports the prompt (1, 2, 3) with the first token, as vLLM does: most likely tokens by rank, and the prompt's."""

    async def add_request(self, *request: Any, **more: Any) -> Any:
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
        return Outputs(*outputs)


async def test_the_prompt_is_reported_once_with_the_first_token() -> None:
    work = DecodeWork("x1", (1, 2, 3), Sampling(max_tokens=2, prompt_logprobs=1), remote_kv=False)
    engine: Any = ScoringEngine()
    link: Any = QuietLink()
    events: list[Any] = []
    await DecodeRequest(engine, link, work, EventSink(events.append), {}, PROMPT).run()
    first, second, _ = events
    best = ((7, -0.5),)
    assert first == DecodeTokens(
        (5,), prompt_logprobs=(TokenLogprobs(-3.0, best, 9), TokenLogprobs(-4.0, best, 11))
    )
    assert second == DecodeTokens((6,))
