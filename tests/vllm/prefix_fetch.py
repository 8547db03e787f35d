"""A job: a conversation on services with two engines, where prefill fetches what decode generated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from headrace.kv.v1 import handoff_pb2
from headrace_common.config import ServiceConfig
from headrace_common.deadlines import Deadline
from headrace_common.errors import TransferTimeout
from headrace_common.telemetry.setup import init_telemetry
from headrace_engine.interface import DecodeTokens, DecodeWork, Sampling
from headrace_engine.vllm.engine import VllmEngine
from headrace_kv.layout import KvDescriptor, WorkerRef
from headrace_kv.messages import prefix_transfer
from headrace_kv.prefix.fetch_rule import FetchRule
from headrace_kv.receive.receiver import Receiver
from tests.component.prefill.fetching import DECODE, PREFILL, FetchingWorkers, serve
from tests.decoding import decoded
from tests.freezing import freeze as freeze_processes
from tests.freezing import thaw
from tests.vllm.pair import BLOCK_TOKENS, LEASE_TTL_S, engine_config, prompt_of, reset
from tests.waiting import until

TURNS = 10
FROZEN_TURN = 6
TURN_TOKENS = 40
ANSWER_TOKENS = 40
LONG_S = 60.0


class VllmWorkers(FetchingWorkers[VllmEngine]):
    """With real engines."""


@dataclass(slots=True)
class Result:
    """By turn: the answers, those of the decode engine alone, and the tokens and reason of each fetch.

    `expected_tokens`: what decode had more than prefill. `left_blocks`: of both engines, at the end.
    """

    answers: list[list[int]] = field(default_factory=list)
    plain: list[list[int]] = field(default_factory=list)
    fetched_tokens: list[int] = field(default_factory=list)
    expected_tokens: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    left_blocks: list[int] = field(default_factory=list)

    async def end(self, workers: VllmWorkers, prompts: list[list[int]]) -> None:
        """Adds what was fetched, what is left when all has ended, and the answers of the decode engine alone."""
        self.reasons = [fetch.reason for fetch in workers.fetches]
        self.fetched_tokens = [fetch.token_count for fetch in workers.fetches]
        for engine in (workers.prefill, workers.decode):
            await until(partial(_is_free, engine), LONG_S)
            self.left_blocks.append(engine.load.used_blocks)
        for prompt in prompts:
            await reset(workers.decode)
            self.plain.append(await plain_answer(workers.decode, prompt))


@dataclass(slots=True)
class FrozenResult(Result):
    """`held_blocks`: blocks of prefill while a late fetch may still be written. `whole_blocks`: those of that turn's
    prompt.
    """

    held_blocks: int = 0
    whole_blocks: int = 0


class AlwaysFetch(FetchRule):
    """A tiny model may compute faster than a busy machine fetches."""

    def may_fetch(self, link: str, token_count: int) -> bool:
        return token_count >= self.min_tokens


class Cut:
    """Lets a receiver know of a transfer's first layer, then calls `on_cut` and keeps all messages until `heal`."""

    def __init__(self, receiver: Receiver, on_cut: Callable[[], None]) -> None:
        self._receiver = receiver
        self._handle = receiver.handle
        self._on_cut = on_cut
        self.late: list[tuple[Any, handoff_pb2.HandoffRequest]] = []
        receiver.handle = self._cut  # type: ignore[method-assign]

    def _cut(self, peer: Any, request: handoff_pb2.HandoffRequest) -> None:
        if self.late:
            self.late.append((peer, request))
        elif request.WhichOneof("message") != "layers_done":
            self._handle(peer, request)
        else:
            first, *others = (
                handoff_pb2.HandoffRequest(layers_done=handoff_pb2.LayersDone(layers=layers))
                for layers in (request.layers_done.layers[:1], request.layers_done.layers[1:])
            )
            self._handle(peer, first)
            self.late += [(peer, other) for other in others]
            self._on_cut()

    def heal(self) -> None:
        self._receiver.handle = self._handle  # type: ignore[method-assign]
        for peer, request in self.late:
            self._handle(peer, request)


async def conversation(
    model: str,
    prefill_ranks: int,
    decode_ranks: int,
    engine_args: str = "",
    stages: int = 1,
    both_roles: bool = False,
) -> FrozenResult:
    """Ten turns. In one of them, decode's engine freezes while it sends. Both engines have `stages`, and may have both
    roles.
    """
    shared: dict[str, object] = {
        "model": model,
        "engine_args": engine_args,
        "pipeline_parallel_size": stages,
    }
    async with fetching_engines(
        shared | {"tensor_parallel_size": prefill_ranks},
        shared | {"tensor_parallel_size": decode_ranks},
        both_roles=("prefill", "decode") if both_roles else (),
    ) as workers:
        return await _converse(workers)


@asynccontextmanager
async def fetching_engines(
    prefill: dict[str, object],
    decode: dict[str, object],
    *,
    both_roles: Collection[str] = (),
) -> AsyncIterator[VllmWorkers]:
    """Both workers, of which those of `both_roles` have both. Prefill fetches all that it lacks."""
    changes = {"prefill": prefill, "decode": decode}
    refs = {"prefill": PREFILL, "decode": DECODE}
    engines: dict[WorkerRef, VllmEngine] = {}

    async def descriptors(ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
        return engines[ref].descriptor

    for role, ref in refs.items():
        config = engine_config("both" if role in both_roles else role, ref=ref, **changes[role])
        engines[ref] = VllmEngine(config, descriptors)
    async with AsyncExitStack() as stack:
        # They are forked, which must happen before this process uses gRPC.
        for engine in engines.values():
            stack.push_async_callback(engine.close)
            engine.launch()
        for engine in engines.values():
            await engine.attach()
        telemetry = init_telemetry("prefill", PREFILL.worker_id, ServiceConfig())
        stack.push_async_callback(asyncio.to_thread, telemetry.shutdown)
        workers: VllmWorkers = await serve(
            *(stack, VllmWorkers, engines[PREFILL], engines[DECODE]),
            *(telemetry, AlwaysFetch(0.0), LONG_S),
            lease_s=LEASE_TTL_S,
        )
        yield workers


async def _converse(workers: VllmWorkers) -> FrozenResult:
    result = FrozenResult()
    prompts: list[list[int]] = []
    prompt: list[int] = []
    for turn in range(TURNS):
        prompt = [*prompt, *prompt_of(TURN_TOKENS, turn)]
        prompts.append(prompt)
        run = _frozen_turn if turn == FROZEN_TURN else _turn
        result.answers.append(await run(workers, prompt, result))
        prompt = [*prompt, *result.answers[-1]]
    await result.end(workers, prompts)
    return result


def _is_free(engine: VllmEngine) -> bool:
    return engine.load.used_blocks == 0


async def _turn(workers: VllmWorkers, prompt: list[int], result: FrozenResult) -> list[int]:
    turn = await workers.run(prompt, ANSWER_TOKENS)
    expected = turn.start_token - turn.done.cached_tokens
    if turn.start_token:
        result.expected_tokens.append(expected)
    return list(turn.tokens)


async def _frozen_turn(workers: VllmWorkers, prompt: list[int], result: FrozenResult) -> list[int]:
    """Decode's engine freezes after the first layer. Prefill gives up the fetch, and the rest comes later."""
    receiver = workers.prefill_receiver
    process_ids = _process_ids(workers.decode)
    frozen = asyncio.Event()

    def freeze() -> None:
        freeze_processes(*process_ids)
        frozen.set()

    async with workers.reserved(prompt, ANSWER_TOKENS) as request:
        cut = Cut(receiver, freeze)
        running = asyncio.create_task(request.prefill())
        await asyncio.wait_for(frozen.wait(), LONG_S)
        receiver.cancel(prefix_transfer(request.name), TransferTimeout.reason, "the fetch is late")
        result.whole_blocks = -(-len(prompt) // BLOCK_TOKENS)
        result.held_blocks = held = receiver.quarantined_blocks
        # The prompt is computed in other blocks than those that may still be written. It may be sent already.
        await until(
            lambda: workers.prefill.load.used_blocks > result.whole_blocks or running.done(), LONG_S
        )
        assert workers.prefill.load.used_blocks >= held
        thaw(*process_ids)
        cut.heal()
        done = await running
        assert done.reason == "", done.detail
        result.expected_tokens.append(request.reserved.start_token - done.cached_tokens)
        return list(await request.answer())


def _process_ids(engine: VllmEngine) -> list[int]:
    """The processes of its ranks."""
    assert engine._link is not None
    return [
        engine._link._ranks[rank.rank].attachment.process_id for rank in engine.descriptor.ranks
    ]


async def plain_answer(engine: VllmEngine, prompt: list[int]) -> list[int]:
    """The answer of one engine alone."""
    sampling = Sampling(temperature=0.0, max_tokens=ANSWER_TOKENS)
    work = DecodeWork(f"plain{len(prompt)}", tuple(prompt), sampling, remote_kv=False)
    tokens: list[int] = []
    async with asyncio.timeout(LONG_S):
        async for event in decoded(engine, work):
            if isinstance(event, DecodeTokens):
                tokens.extend(event.token_ids)
    return tokens
