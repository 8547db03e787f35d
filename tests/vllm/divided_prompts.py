"""A job: two engines compute a prompt, and the first one generates its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from headrace.kv.v1 import handoff_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import HeadraceError, TransferFailed
from headrace_engine.interface import PrefillWork
from headrace_kv.messages import TransferTarget, prefix_transfer
from tests.component.prefill.fetching import DECODE, PREFILL
from tests.vllm.pair import BLOCK_TOKENS, prompt_of, reset
from tests.vllm.prefix_fetch import (
    ANSWER_TOKENS,
    LONG_S,
    VllmWorkers,
    fetching_engines,
    plain_answer,
)
from tests.waiting import until

LENGTHS = (65, 100, 128, 300, 500)
SHARES = (0.1, 0.3, 0.5, 0.7, 0.95)
FAILING = 400
TICKET = b"of the router"


@dataclass(slots=True)
class Result:
    """`answers` by prompt, and those of an engine alone. `beside`: whether both computed at the same time.

    `after`: those of the prompt that had failed after so many layers, the reasons of its tasks, and the blocks that are
    left.
    """

    answers: list[list[int]] = field(default_factory=list)
    plain: list[list[int]] = field(default_factory=list)
    fetched: list[tuple[int, int]] = field(default_factory=list)
    beside: list[bool] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    left_blocks: list[int] = field(default_factory=list)


async def divided_prompts(model: str, count: int) -> Result:
    """`count` prompts. Then one of which the first part fails after each layer."""
    result = Result()
    shared: dict[str, object] = {"model": model}
    async with fetching_engines(shared, shared, both_roles=("decode",)) as workers:
        for number in range(count):
            length = LENGTHS[number % len(LENGTHS)]
            prompt = prompt_of(length, 100 + number)
            blocks = int(SHARES[number // len(LENGTHS) % len(SHARES)] * (length - 1) / BLOCK_TOKENS)
            token = max(1, blocks) * BLOCK_TOKENS
            done, answer, beside = await divided(workers, prompt, token)
            assert done.reason == "", done.detail
            result.answers.append(answer)
            result.fetched.append((workers.fetches[-1].token_count, token))
            result.beside.append(beside)
            await empty(workers)
            result.plain.append(await plain_answer(workers.decode, prompt))
            await empty(workers)
        prompt = prompt_of(FAILING, 7)
        result.expected = await plain_answer(workers.decode, prompt)
        for layers in range(1, workers.decode.descriptor.layout.layer_count):
            await empty(workers)
            with failing(workers, layers):
                done, *_ = await divided(workers, prompt, 6 * BLOCK_TOKENS)
            result.reasons.append(done.reason)
            # Without a reset: what the failed request had is not found any more.
            result.after.append(list((await workers.run(prompt, ANSWER_TOKENS)).tokens))
        for engine in (workers.prefill, workers.decode):
            await until(partial(lambda one: one.load.used_blocks == 0, engine), LONG_S)
            result.left_blocks.append(engine.load.used_blocks)
    return result


async def empty(workers: VllmWorkers) -> None:
    """Empties both prefix caches."""
    for engine in (workers.prefill, workers.decode):
        await reset(engine)


async def divided(
    workers: VllmWorkers, prompt: list[int], token: int
) -> tuple[prefill_pb2.TaskDone, list[int], bool]:
    """The end of the task, the answer, and whether both computed at the same time.

    The engine that generates computes the tokens below `token` first.
    """
    async with workers.reserved(prompt, ANSWER_TOKENS) as request:
        target = TransferTarget(
            transfer_id=prefix_transfer(request.name),
            decode=PREFILL,
            handoff_endpoint=workers.prefill_endpoint,
            start_token=0,
            end_token=token,
            deadline_s=time.monotonic() + LONG_S,
            ticket=TICKET,
        )
        part = prefill_pb2.FirstPart(
            worker_id=DECODE.worker_id,
            incarnation=DECODE.incarnation,
            handoff_ticket=TICKET,
            end_token=token,
        )
        task = asyncio.create_task(request.prefill(first_part=part))
        await asyncio.sleep(0)
        first = workers.decode.prefill(PrefillWork(tuple(prompt[:token]), target))
        computed_ns = 0
        with suppress(HeadraceError):
            computed_ns = (await first).compute_end_unix_ns
        done = await task
        began_ns = done.times.received_unix_ns + 1_000 * done.times.compute_start_us
        answer = [] if done.reason else list(await request.answer())
        return done, answer, began_ns < computed_ns


@contextmanager
def failing(workers: VllmWorkers, layers: int) -> Iterator[None]:
    """The first part's transfer fails once so many layers have landed."""
    receiver = workers.prefill_receiver
    handle, landed = receiver.handle, 0

    def count(peer: Any, request: handoff_pb2.HandoffRequest) -> None:
        nonlocal landed
        if request.WhichOneof("message") != "layers_done":
            handle(peer, request)
            return
        for layer in request.layers_done.layers:
            done = handoff_pb2.LayersDone(layers=[layer])
            handle(peer, handoff_pb2.HandoffRequest(layers_done=done))
            landed += 1
            if landed == layers:
                receiver.cancel(layer.transfer_id, TransferFailed.reason, "the test fails it")

    receiver.handle = count  # type: ignore[method-assign]
    try:
        yield
    finally:
        receiver.handle = handle  # type: ignore[method-assign]
