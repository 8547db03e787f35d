"""A job: aborts requests in every state, on engines with few blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from headrace_common.errors import Cancelled, HeadraceError
from headrace_engine.interface import (
    Arrived,
    DecodeTokens,
    DecodeWork,
    PrefillWork,
    Released,
    Sampling,
)
from headrace_engine.vllm.engine import VllmEngine
from headrace_engine.vllm.link.messages import EngineLoad
from headrace_kv.messages import Reservation
from tests.decoding import decoded
from tests.vllm.pair import ENGINE_ARGS, Pair, counts, reset, running_pair
from tests.waiting import until

BLOCK_COUNT = 20
CONTEXT_TOKENS = 576
LONG = Sampling(temperature=0.0, max_tokens=250)
Step = Callable[["Rig"], Awaitable[None]]


@dataclass(slots=True)
class Outcome:
    """`seen`: the engine's load when the request was aborted. `after`: the load once it had settled."""

    seen: dict[str, int]
    after: dict[str, int]


@dataclass(slots=True)
class AbortResult:
    """Outcomes by state, of both engines. `start`: the load of each engine before each abort."""

    start: dict[str, int]
    decode: dict[str, Outcome] = field(default_factory=dict)
    prefill: dict[str, Outcome] = field(default_factory=dict)


class Rig:
    """A pair, and requests that can be aborted."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._random = Random(3)
        self.seen = EngineLoad()

    def prompt(self, length: int) -> list[int]:
        return [self._random.randrange(3, 500) for _ in range(length)]

    @asynccontextmanager
    async def decoding(
        self, length: int, *, remote: bool = False, hand_over: bool = False
    ) -> AsyncIterator[list[int]]:
        """Runs a decode request and aborts it at the end. Yields the list that its tokens are added to."""
        pair, prompt = self.pair, self.prompt(length)
        work = DecodeWork(pair.new_transfer_id(), tuple(prompt), LONG, remote_kv=remote)
        tokens: list[int] = []
        reserved: list[Reservation] = []

        async def consume() -> None:
            async for event in decoded(pair.decode, work):
                if isinstance(event, DecodeTokens):
                    tokens.extend(event.token_ids)
                elif isinstance(event, Reservation):
                    reserved.append(event)
                    if hand_over:
                        await pair.hand_over(prompt, event)
                        pair.decode.transfer_event(Arrived(work.transfer_id))

        task = asyncio.create_task(consume())
        try:
            if remote and hand_over:
                await until(lambda: bool(tokens))
            yield tokens
        finally:
            task.cancel()
            await asyncio.wait({task})
            if reserved and not hand_over:
                await asyncio.sleep(0.2)
                assert pair.decode.load.used_blocks, "blocks were reused before they were released"
                pair.decode.transfer_event(Released(work.transfer_id))

    @asynccontextmanager
    async def prefilling(self, length: int) -> AsyncIterator[asyncio.Task[object]]:
        """Runs a prefill for blocks that decode never reserves, and aborts it at the end."""
        blocks = tuple(range(1, 1 + -(-length // 32)))
        transfer_id = self.pair.new_transfer_id()
        self.pair.receiver.expect(transfer_id)
        target = self.pair.target(Reservation(transfer_id, blocks, 0, length))
        work = PrefillWork(tuple(self.prompt(length)), target)
        task: asyncio.Task[object] = asyncio.create_task(self.pair.prefill.prefill(work))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait({task})
            self.pair.receiver.cancel(transfer_id, Cancelled.reason, "the test has ended it")


async def decode_waiting(rig: Rig) -> None:
    decode = rig.pair.decode
    async with rig.decoding(300) as first:
        await until(lambda: bool(first))
        async with rig.decoding(500, remote=True):
            await until(lambda: decode.load.waiting_requests == 1)
            rig.seen = decode.load
        await until(lambda: decode.load.waiting_requests == 0)


async def decode_remote(rig: Rig) -> None:
    decode = rig.pair.decode
    async with rig.decoding(300, remote=True):
        await until(lambda: decode.load.used_blocks == 10)
        rig.seen = decode.load


async def decode_running(rig: Rig) -> None:
    async with rig.decoding(300) as tokens:
        await until(lambda: len(tokens) > 3)
        await until(lambda: rig.pair.decode.load.running_requests == 1)
        rig.seen = rig.pair.decode.load


async def decode_preempted(rig: Rig) -> None:
    decode = rig.pair.decode
    async with rig.decoding(260) as first:
        await until(lambda: bool(first))
        # vLLM preempts the later one, here after it has received its KV.
        async with rig.decoding(260, remote=True, hand_over=True) as second:
            await until(lambda: decode.load.waiting_requests == 1)
            rig.seen = decode.load
            assert second
        await until(lambda: decode.load.waiting_requests == 0)


async def prefill_waiting(rig: Rig) -> None:
    prefill = rig.pair.prefill
    async with rig.prefilling(500):
        await until(lambda: prefill.load.used_blocks == 16)
        async with rig.prefilling(400):
            # The first one may still be computed.
            await until(lambda: prefill.load.waiting_requests == 1)
            await until(lambda: prefill.load.running_requests == 0)
            rig.seen = prefill.load
        await until(lambda: prefill.load.waiting_requests == 0)


async def prefill_running(rig: Rig) -> None:
    prefill = rig.pair.prefill
    async with rig.prefilling(570):
        await until(lambda: prefill.load.running_requests == 1)
        rig.seen = prefill.load


async def prefill_preempted(rig: Rig) -> None:
    """Preempts by a reset: vLLM starts a prefill only when there are blocks for all of it."""
    prefill = rig.pair.prefill
    assert prefill._llm is not None
    async with rig.prefilling(570) as task:
        await until(lambda: prefill.load.running_requests == 1)
        rig.seen = prefill.load
        await prefill._llm.reset_prefix_cache(reset_running_requests=True)
        done, _ = await asyncio.wait({task}, timeout=10)
        assert done
        assert isinstance(task.exception(), HeadraceError)


async def prefill_sending(rig: Rig) -> None:
    prefill = rig.pair.prefill
    async with rig.prefilling(500):
        await until(lambda: prefill.load.used_blocks == 16)
        await until(lambda: prefill.load.running_requests == 0)
        rig.seen = prefill.load


STATES: dict[str, dict[str, Step]] = {
    "decode": {
        "waiting": decode_waiting,
        "remote": decode_remote,
        "running": decode_running,
        "preempted": decode_preempted,
    },
    "prefill": {
        "waiting": prefill_waiting,
        "running": prefill_running,
        "preempted": prefill_preempted,
        "sending": prefill_sending,
    },
}


async def measure(model: str, stages: int, engine_args: str = ENGINE_ARGS) -> AbortResult:
    """Aborts a request in every state."""
    changes: dict[str, object] = {
        "model": model,
        "pipeline_parallel_size": stages,
        "num_gpu_blocks_override": BLOCK_COUNT,
        "max_model_len": CONTEXT_TOKENS,
        "max_num_seqs": 4,
        "engine_args": engine_args,
    }
    async with running_pair(
        prefill=changes | {"max_num_batched_tokens": 16},
        decode=changes | {"max_num_batched_tokens": 256},
    ) as pair:
        rig = Rig(pair)
        async with rig.decoding(40, remote=True, hand_over=True):
            pass
        start = await settled(pair.decode)
        result = AbortResult(start)
        assert await settled(pair.prefill) == start
        for role, engine, outcomes in (
            ("decode", pair.decode, result.decode),
            ("prefill", pair.prefill, result.prefill),
        ):
            for state, abort in STATES[role].items():
                if (stages > 1 or engine_args) and abort is prefill_preempted:
                    # vLLM resets nothing while steps are under way.
                    continue
                rig.seen = EngineLoad()
                await abort(rig)
                outcomes[state] = Outcome(counts(rig.seen), await settled(engine))
                await reset(engine)
        return result


async def settled(engine: VllmEngine) -> dict[str, int]:
    """The load after a second, in which late blocks must be freed."""
    await asyncio.sleep(1)
    return counts(engine.load)
