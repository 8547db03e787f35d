"""Prompts that are prefilled once decode has admitted them, before it has their blocks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import first_token_pb2, sampling_pb2
from headrace_common.errors import TransferFailed
from headrace_kv.layout import WorkerRef
from headrace_router.dispatch.messages import begins_early
from headrace_router.placement import Decision
from headrace_router.workers.table import Worker
from tests.kit.router import Rig, text_of
from tests.kit.workers import (
    FakeDecode,
    Script,
    finished,
    hand_over,
    reject,
    reply,
    reserved,
    send_first_token,
    stall,
    tokens,
)
from tests.sim_layout import LAYOUT
from tests.waiting import let_a_wrong_step_show, until

PREFILL = first_token_pb2.FIRST_TOKEN_POLICY_PREFILL
DECODE = first_token_pb2.FIRST_TOKEN_POLICY_DECODE


def admit(blocks: asyncio.Event, then: Script) -> Script:
    """Admits the request, and goes on when it gets `blocks`."""

    async def script(worker: FakeDecode, request: Any) -> Any:
        assert request.early_admission
        yield decode_pb2.Reserved(end_token=reserved(request).end_token, admitted=True)
        await blocks.wait()
        async for event in then(worker, request):
            yield event

    return script


async def answer_alone(worker: FakeDecode, request: Any) -> Any:
    """Has the KV of the whole prompt."""
    yield reserved(request, start=reserved(request).end_token)
    yield tokens("aris")
    yield finished(request)


@pytest.mark.parametrize("policy", [DECODE, PREFILL])
async def test_the_prompt_is_computed_while_decode_allocates_its_blocks(
    rig: Rig, policy: Any
) -> None:
    blocks = asyncio.Event()
    by_prefill = policy == PREFILL
    text = "aris" if by_prefill else "Paris"
    decode = await rig.add_decode(admit(blocks, reply(text, after_first_token=by_prefill)))
    prefill = await rig.add_prefill(send_first_token("P", stall) if by_prefill else stall)
    asking = asyncio.create_task(rig.ask("capital?", first_token=policy))
    await until(lambda: bool(prefill.tasks))
    assert prefill.tasks[0].start_token == 0
    await let_a_wrong_step_show()
    # The engine takes a first token with blocks only.
    assert not decode.first_tokens
    blocks.set()
    await hand_over(prefill, prefill.tasks[0])
    responses = await asking
    assert text_of(responses) == "Paris"
    assert responses[-1].timing.attempts == 1


@pytest.mark.parametrize("policy", [DECODE, PREFILL])
async def test_a_prompt_of_which_decode_has_everything_is_cancelled(rig: Rig, policy: Any) -> None:
    blocks = asyncio.Event()
    await rig.add_decode(admit(blocks, answer_alone))
    prefill = await rig.add_prefill(send_first_token("P", stall) if policy == PREFILL else stall)
    asking = asyncio.create_task(rig.ask("capital?", first_token=policy))
    await until(lambda: bool(prefill.tasks))
    blocks.set()
    responses = await asking
    # The token of prefill is not used: decode makes the first one.
    assert text_of(responses) == "aris"
    assert responses[-1].timing.attempts == 1
    await until(lambda: prefill.cancels == [prefill.tasks[0].transfer_id])


async def test_a_prompt_is_cancelled_when_its_blocks_are_refused(rig: Rig) -> None:
    blocks = asyncio.Event()
    decode = await rig.add_decode(admit(blocks, reject(TransferFailed("no blocks"))))
    prefill = await rig.add_prefill(stall)
    asking = asyncio.create_task(rig.ask("capital?"))
    await until(lambda: bool(prefill.tasks))
    decode.script, prefill.behaviour = reply("Paris"), hand_over
    blocks.set()
    responses = await asking
    assert (text_of(responses), responses[-1].timing.attempts) == ("Paris", 2)
    await until(lambda: prefill.cancels == [prefill.tasks[0].transfer_id])


@pytest.mark.parametrize(
    ("cached", "remote", "sampling", "early"),
    [
        (0, True, {}, True),
        (0, False, {}, False),
        (64, True, {}, False),
        (0, True, {"structured_outputs": sampling_pb2.StructuredOutputs(regex="a")}, False),
    ],
    ids=["new prompt", "local prefill", "cached prefix", "constraint"],
)
def test_only_new_prompts_without_constraints_begin_early(
    cached: int, remote: bool, sampling: Any, early: bool
) -> None:
    worker = Worker(WorkerRef("d0", "1"), "d0:1", "sim", 4_096, 10, LAYOUT)
    decision = Decision(worker, remote, "", (), decode_cached_tokens=cached)
    request = decode_pb2.GenerateRequest(sampling=sampling_pb2.SamplingParams(**sampling))
    assert begins_early(request, decision) is early
