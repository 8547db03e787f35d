"""A job: two engines compute a prompt in turn, and one of them generates its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from headrace.kv.v1 import handoff_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.config import ServiceConfig
from headrace_common.errors import TransferFailed
from headrace_common.telemetry.setup import init_telemetry
from headrace_kv.layout import WorkerRef
from headrace_kv.messages import prefix_transfer
from headrace_prefill.worker import PrefillWorker
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

STEP_TOKENS = 128
LENGTHS = (200, 300, 400, 500, 640)
SHIFTS = (0, 1, 2, 3)
FAILING = 500
FAILING_ENDS = (128, 256, 384)
FAILING_LAYERS = (1, 4, 11)
TICKET = b"of the router"


@dataclass(slots=True)
class Result:
    """`answers` by prompt, and those of an engine alone. `beside`: whether each part began before the end of the one
    before.

    `after`: those of the prompt of which a part had failed after so many layers, the reasons of its tasks, and the
    blocks that are left.
    """

    answers: list[list[int]] = field(default_factory=list)
    plain: list[list[int]] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    fetched: list[tuple[int, int]] = field(default_factory=list)
    beside: list[bool] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    left_blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the workers."""

    ref: WorkerRef
    worker: PrefillWorker
    endpoint: str


async def divided_prompts(model: str, count: int) -> Result:
    """`count` prompts. Then one of which each part fails after some layers."""
    result = Result()
    shared: dict[str, object] = {"model": model, "max_num_batched_tokens": STEP_TOKENS}
    async with fetching_engines(shared, shared, both_roles=("decode",)) as workers:
        sides = both_sides(workers)
        for number in range(count):
            length = LENGTHS[number % len(LENGTHS)]
            prompt = prompt_of(length, 100 + number)
            ends = ends_of(length, SHIFTS[number // len(LENGTHS) % len(SHIFTS)])
            dones, answer, beside = await divided(workers, sides, prompt, ends)
            assert not any(one.reason for one in dones), dones
            result.answers.append(answer)
            result.parts.append(len(dones))
            result.fetched.append((workers.fetches[-1].token_count, ends[-1] - (0, *ends)[-2]))
            result.beside.append(beside)
            await empty(workers)
            result.plain.append(await plain_answer(workers.decode, prompt))
            await empty(workers)
        prompt = prompt_of(FAILING, 7)
        result.expected = await plain_answer(workers.decode, prompt)
        for part in range(len(FAILING_ENDS)):
            for layers in FAILING_LAYERS:
                await empty(workers)
                with failing(workers, part, layers):
                    dones, answer, _ = await divided(workers, sides, prompt, FAILING_ENDS)
                result.reasons.append(dones[-1].reason)
                # Without a reset: what the failed requests had is not found any more.
                result.after.append(
                    answer or list((await workers.run(prompt, ANSWER_TOKENS)).tokens)
                )
                result.after.append(await plain_answer(workers.decode, prompt))
        for engine in (workers.prefill, workers.decode):
            await until(partial(lambda one: one.load.used_blocks == 0, engine), LONG_S)
            result.left_blocks.append(engine.load.used_blocks)
    return result


def ends_of(length: int, shift: int) -> tuple[int, ...]:
    """The ends of parts of one step, the last one left out. `shift`: by how many blocks all are moved."""
    last = (length - 2) // BLOCK_TOKENS * BLOCK_TOKENS - shift * BLOCK_TOKENS
    return tuple(reversed(range(last, 0, -STEP_TOKENS)))


def both_sides(workers: VllmWorkers) -> tuple[Side, Side]:
    """The worker that hands over to decode, and the other one. The engine of that one generates too."""
    fetcher = replace(
        workers.fetcher, ref=DECODE, engine=workers.decode, receiver=workers.decode_receiver
    )
    worker = PrefillWorker(
        ref=DECODE,
        engine=workers.decode,
        telemetry=init_telemetry("prefill", DECODE.worker_id, ServiceConfig()),
        slot_count=8,
        prefixes=fetcher,
    )
    return (
        Side(PREFILL, workers.worker, workers.prefill_endpoint),
        Side(DECODE, worker, workers.decode_endpoint),
    )


async def empty(workers: VllmWorkers) -> None:
    """Empties both prefix caches."""
    for engine in (workers.prefill, workers.decode):
        await reset(engine)


async def divided(
    workers: VllmWorkers, sides: tuple[Side, Side], prompt: list[int], ends: Sequence[int]
) -> tuple[list[prefill_pb2.TaskDone], list[int], bool]:
    """The ends of the tasks, the answer, and whether each part began while the one before was computed."""
    async with workers.reserved(prompt, ANSWER_TOKENS) as request:
        task, tasks = request.task(), list[prefill_pb2.PrefillTask]()
        for number, end in enumerate(reversed(ends)):
            receiver, sender = sides[number % 2], sides[1 - number % 2]
            task.first_part.worker_id = sender.ref.worker_id
            task.first_part.incarnation = sender.ref.incarnation
            task.first_part.handoff_ticket, task.first_part.end_token = TICKET, end
            tasks.insert(0, task)
            task = prefill_pb2.PrefillTask(
                transfer_id=prefix_transfer(task.transfer_id),
                request_id="r",
                token_ids=prompt[:end],
                decode_worker_id=receiver.ref.worker_id,
                decode_incarnation=receiver.ref.incarnation,
                decode_endpoint=receiver.endpoint,
                handoff_ticket=TICKET,
            )
        tasks.insert(0, task)
        runs = dict[int, asyncio.Task[prefill_pb2.TaskDone]]()

        async def run(number: int) -> prefill_pb2.TaskDone:
            side = (len(tasks) - 1 - number) % 2
            done = await sides[side].worker.run(tasks[number])
            # As the router does.
            if done.reason and number:
                runs[number - 1].cancel()
            if done.reason and number + 1 < len(tasks):
                sides[1 - side].worker.cancel_part(tasks[number].transfer_id)
            return done

        # The second task expects the KV of the first one.
        for number in (1, 0, *range(2, len(tasks))):
            runs[number] = asyncio.create_task(run(number))
            await asyncio.sleep(0)
        dones = [await runs[number] for number in range(len(tasks))]
        times = [one.times for one in dones]
        began_us = [one.received_unix_ns // 1_000 + one.compute_start_us for one in times]
        ended_us = [one.received_unix_ns // 1_000 + one.compute_end_us for one in times]
        beside = all(began < ended for ended, began in zip(ended_us, began_us[1:], strict=False))
        answer = [] if dones[-1].reason else list(await request.answer())
        return dones, answer, beside


@contextmanager
def failing(workers: VllmWorkers, part: int, layers: int) -> Iterator[None]:
    """The transfer of a part's KV fails once so many layers have landed."""
    receivers = (workers.prefill_receiver, workers.decode_receiver)
    handles, landed = [one.handle for one in receivers], 0

    def count(number: int, peer: Any, request: handoff_pb2.HandoffRequest) -> None:
        nonlocal landed
        if request.WhichOneof("message") != "layers_done":
            handles[number](peer, request)
            return
        for layer in request.layers_done.layers:
            done = handoff_pb2.LayersDone(layers=[layer])
            handles[number](peer, handoff_pb2.HandoffRequest(layers_done=done))
            if layer.transfer_id.count(".prefix") == len(FAILING_ENDS) - part:
                landed += 1
                if landed == layers:
                    receivers[number].cancel(
                        layer.transfer_id, TransferFailed.reason, "the test fails it"
                    )

    for number, one in enumerate(receivers):
        one.handle = partial(count, number)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for one, handle in zip(receivers, handles, strict=True):
            one.handle = handle  # type: ignore[method-assign]
