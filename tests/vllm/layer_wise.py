"""A job: decode overlaps the last layers, which prefill sends delayed.

The delay is in memory that prefill's ranks share with the job's process.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import RawValue
from random import Random
from typing import Any

from headrace_common.errors import TransferFailed
from headrace_engine.interface import DecodeTokens, DecodeWork, PrefillWork
from headrace_engine.torch_memory.event_ordered_sender import EventOrderedSender, Sender
from headrace_engine.vllm.rank import connector_worker
from headrace_kv.handoff.messages import LayerRange, Reservation
from headrace_kv.receive.observer import OverlapSettings
from tests.vllm.hybrids import mend_rotation
from tests.vllm.pair import BLOCK_TOKENS, GREEDY, Answer, Pair, counts, reset, running_pair
from tests.waiting import until

OVERLAP = OverlapSettings(layer_count=2, wait_s=1.0)
SLOW_S = 0.15
STUCK_S = 2.5
LENGTHS = (33, 65, 300)
CONTEXT_TOKENS = 1024
LONG = replace(GREEDY, max_tokens=900)

_delay_s = RawValue("d", 0.0)
_first_slow_layer = RawValue("i", 0)


class _Past:
    def __init__(self, when_s: float) -> None:
        self._when_s = when_s

    def query(self) -> bool:
        return time.monotonic() >= self._when_s


class SlowTail(EventOrderedSender):
    """Delays the last layers, like a slow network."""

    def __init__(self, sender: Sender) -> None:
        self._when_s = 0.0
        super().__init__(sender, lambda: _Past(self._when_s))

    def push(self, piece: LayerRange) -> None:
        is_slow = piece.layer >= _first_slow_layer.value
        self._when_s = time.monotonic() + (_delay_s.value if is_slow else 0.0)
        super().push(piece)


@dataclass(slots=True)
class Result:
    """Answers by prompt length, and the outcomes of requests that end early."""

    plain: dict[int, list[int]] = field(default_factory=dict)
    split: dict[int, list[int]] = field(default_factory=dict)
    after_first: dict[int, list[int]] = field(default_factory=dict)
    overlap_count: int = 0
    wait_expired: dict[str, Any] = field(default_factory=dict)
    aborted: dict[str, Any] = field(default_factory=dict)
    cut_off: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)


class Rig:
    """A pair with delayed last layers."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.random = Random(5)
        self.overlapped: list[str] = []
        link = pair.decode._link
        assert link is not None
        arriving = link.arriving

        def record(transfer_id: str, deadline: Any) -> None:
            self.overlapped.append(transfer_id)
            arriving(transfer_id, deadline)

        link.arriving = record  # type: ignore[method-assign]

    def prompt(self, length: int) -> list[int]:
        return [self.random.randrange(3, 500) for _ in range(length)]

    @asynccontextmanager
    async def bystander(self) -> AsyncIterator[Bystander]:
        """Runs another answer meanwhile, and aborts it at the end."""
        prompt = self.prompt(40)
        plain = await self.pair.plain(prompt, replace(LONG, max_tokens=60))
        await reset(self.pair.decode)
        one = Bystander(plain.token_ids)

        async def consume() -> None:
            work = DecodeWork(self.pair.new_transfer_id(), tuple(prompt), LONG, remote_kv=False)
            async for event in self.pair.decode.decode(work):
                if isinstance(event, DecodeTokens):
                    one.token_ids.extend(event.token_ids)
                    one.times_s.extend([time.monotonic()] * len(event.token_ids))

        task = asyncio.create_task(consume())
        try:
            await until(lambda: len(one.token_ids) > 3)
            # The engine reports its load a moment later.
            await until(lambda: self.pair.decode.load.used_blocks == one.block_count(prompt))
            yield one
            await until(lambda: len(one.token_ids) >= len(one.plain), 60)
        finally:
            task.cancel()
            await asyncio.wait({task})


@dataclass(slots=True)
class Bystander:
    """Expected tokens, and generated ones with their times."""

    plain: list[int]
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def block_count(self, prompt: list[int]) -> int:
        return -(-(len(prompt) + len(self.token_ids)) // BLOCK_TOKENS)

    @property
    def right(self) -> bool:
        return self.token_ids[: len(self.plain)] == self.plain

    @property
    def longest_gap_s(self) -> float:
        return max(after - before for before, after in itertools.pairwise(self.times_s))


@asynccontextmanager
async def slow_pair(
    model: str, prefill_ranks: int = 1, decode_ranks: int = 1, **overlap: Any
) -> AsyncIterator[Rig]:
    """Engines. Prefill delays the last layers by `_delay_s`."""
    vars(connector_worker)["order_sender"] = lambda sender, order: SlowTail(sender)
    mend_rotation()
    changes: dict[str, object] = {
        "model": model,
        "max_model_len": CONTEXT_TOKENS,
        "max_num_batched_tokens": 256 if "deepseek" not in model else CONTEXT_TOKENS,
    }
    async with running_pair(
        prefill=changes | {"tensor_parallel_size": prefill_ranks},
        decode=changes
        | {"tensor_parallel_size": decode_ranks, "overlap_layers": replace(OVERLAP, **overlap)},
    ) as pair:
        layers = pair.decode.descriptor.layout.layer_count
        _first_slow_layer.value = layers - min(OVERLAP.layer_count, layers - 1)
        yield Rig(pair)


async def answers(
    model: str,
    prefill_ranks: int = 1,
    decode_ranks: int = 1,
    layer_count: int = OVERLAP.layer_count,
) -> Result:
    """Compares answers only."""
    result = Result()
    async with slow_pair(model, prefill_ranks, decode_ranks, layer_count=layer_count) as rig:
        await compare(rig, result)
    return result


async def compare(rig: Rig, result: Result) -> None:
    """Generates on decode alone, and then on both engines, with the first token from either."""
    pair = rig.pair
    await pair.split(rig.prompt(20))
    for length in LENGTHS:
        prompt = rig.prompt(length)
        _delay_s.value = 0.0
        result.plain[length] = (await pair.plain(prompt)).token_ids
        await pair.reset()
        _delay_s.value = SLOW_S
        before = len(rig.overlapped)
        result.split[length] = (await pair.split(prompt)).token_ids
        await pair.reset()
        result.after_first[length] = (await pair.split_after_first(prompt)).token_ids
        await pair.reset()
        result.overlap_count += len(rig.overlapped) - before


async def compare_and_end_early(model: str) -> Result:
    """Compares answers, and ends requests in several ways while a step waits."""
    result = Result()
    async with slow_pair(model) as rig:
        await compare(rig, result)
        result.wait_expired = await wait_expires(rig)
        result.aborted = await client_aborts(rig)
        result.cut_off = await prefill_cancelled(rig)
        result.shared = await prefix_of_a_delayed_request(rig)
    return result


class DelayedRequest:
    """A request with last layers that do not arrive for a long time."""

    def __init__(self, rig: Rig, prompt: list[int]) -> None:
        self.rig = rig
        self.prompt = prompt
        self.tokens: list[int] = []
        self.error: BaseException | None = None
        self.work = DecodeWork(rig.pair.new_transfer_id(), tuple(prompt), GREEDY, remote_kv=True)
        self.prefill: asyncio.Task[Any] | None = None
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        pair = self.rig.pair
        try:
            async for event in pair.decode.decode(self.work):
                if isinstance(event, Reservation):
                    transfer = pair.reserve(event)
                    task = PrefillWork(tuple(self.prompt[:-1]), pair.target(event))
                    self.prefill = asyncio.create_task(pair.prefill.prefill(task))
                    arrival = asyncio.create_task(transfer.wait())
                    arrival.add_done_callback(self._arrived)
                elif isinstance(event, DecodeTokens):
                    self.tokens.extend(event.token_ids)
        except TransferFailed as exc:
            self.error = exc
        finally:
            # As the decode service does at the end of an attempt.
            pair.receiver.cancel(self.work.transfer_id, "CANCELLED", "the request has ended")

    def _arrived(self, arrival: asyncio.Task[Any]) -> None:
        if not arrival.cancelled() and arrival.exception() is None:
            self.rig.pair.decode.arrived(self.work.transfer_id)

    async def wait_overlapped(self) -> None:
        await until(lambda: self.work.transfer_id in self.rig.overlapped)

    async def end(self, *, abort: bool = False) -> None:
        if abort:
            self._reader.cancel()
        await asyncio.wait({self._reader}, timeout=30)

    async def settle(self) -> None:
        """Waits until prefill is quiet and decode's blocks are free."""
        if self.prefill is not None:
            with suppress(BaseException):
                await asyncio.wait_for(asyncio.gather(self.prefill, return_exceptions=True), 30)
        await self.rig.pair.reset()


async def end_early(
    rig: Rig, end: Callable[[DelayedRequest], Any], prompt_tokens: int = 200
) -> dict[str, Any]:
    """Ends a delayed request by `end`, beside an answer that may only pause."""
    pair = rig.pair
    _delay_s.value = 0.0
    prompt = rig.prompt(prompt_tokens)
    plain = await pair.plain(prompt)
    await pair.reset()
    async with rig.bystander() as other:
        start = pair.decode.load
        _delay_s.value = STUCK_S
        delayed = DelayedRequest(rig, prompt)
        await delayed.wait_overlapped()
        start_s = time.monotonic()
        await end(delayed)
        ended_s = time.monotonic() - start_s
        released = delayed.work.transfer_id in pair.released
        held = pair.decode.load.used_blocks
        if len(other.token_ids) < LONG.max_tokens:
            held -= start.used_blocks
        _delay_s.value = 0.0
    await delayed.settle()
    # Wrong blocks in the prefix cache would change this answer.
    after: Answer = await pair.plain(prompt)
    assert after.end is not None
    await pair.reset()
    again = await pair.split(prompt)
    await pair.reset()
    await asyncio.sleep(0.3)
    return {
        "tokens": delayed.tokens,
        "error": type(delayed.error).__name__ if delayed.error else "",
        "seconds": ended_s,
        "released_before_end": released,
        "held_blocks_at_end": held,
        "bystander_right": other.right,
        "bystander_gap_s": other.longest_gap_s,
        "plain": plain.token_ids,
        "after": after.token_ids,
        "cached_after": after.end.cached_tokens,
        "again": again.token_ids,
        "load": counts(pair.decode.load),
    }


async def wait_expires(rig: Rig) -> dict[str, Any]:
    return await end_early(rig, lambda delayed: delayed.end())


async def client_aborts(rig: Rig) -> dict[str, Any]:
    async def cancel(delayed: DelayedRequest) -> None:
        await asyncio.sleep(0.1)
        await delayed.end(abort=True)

    return await end_early(rig, cancel)


async def prefill_cancelled(rig: Rig) -> dict[str, Any]:
    async def stop(delayed: DelayedRequest) -> None:
        await asyncio.sleep(0.1)
        assert delayed.prefill is not None
        delayed.prefill.cancel()
        await delayed.end()

    return await end_early(rig, stop)


async def prefix_of_a_delayed_request(rig: Rig) -> dict[str, Any]:
    """Another request with the same prefix arrives while the first one's cache is incomplete."""
    pair = rig.pair
    _delay_s.value = 0.0
    prompt = rig.prompt(200)
    other = [*prompt[:150], *rig.prompt(30)]
    plain = await pair.plain(other)
    await pair.reset()
    _delay_s.value = STUCK_S
    delayed = DelayedRequest(rig, prompt)
    await delayed.wait_overlapped()
    answer = await pair.plain(other)
    await delayed.end()
    _delay_s.value = 0.0
    await delayed.settle()
    return {
        "plain": plain.token_ids,
        "answer": answer.token_ids,
        "error": type(delayed.error).__name__ if delayed.error else "",
    }
