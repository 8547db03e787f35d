"""When the canary compares blocks, and when it rejects a prefill worker. In virtual time, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import cast

import pytest
from opentelemetry import trace

from headrace_common.errors import InternalError, TransferFailed
from headrace_decode.attempt import DecodeAttempt
from headrace_decode.canary import BLOCKS_MAX, LEARNED_COMPARISONS, Canary, Comparison
from headrace_engine.interface import (
    BlockErrors,
    DecodeWork,
    Engine,
    PromptImage,
    ReceivedBlock,
    Sampling,
)
from headrace_kv.layout import KvLayout, WorkerRef
from headrace_kv.messages import Reservation
from headrace_kv.receive.verification import DigestChecks
from tests.virtually import virtually

BLOCK = 4
PREFILL, OTHER = WorkerRef("prefill-0", "a"), WorkerRef("prefill-1", "b")
HONEST: BlockErrors = {(0, 0): 0.0, (0, 1): 0.001}
WRONG: BlockErrors = {(0, 0): 0.0, (0, 1): 0.9}


@dataclass
class Bench:
    """A canary over an engine with answers that a test sets."""

    interval_requests: int = 1
    answer: BlockErrors | Exception | None = field(default_factory=lambda: HONEST)
    answers: dict[int | None, BlockErrors] = field(default_factory=dict)
    """Those of single blocks."""
    alternates: bool = False
    """Whether the answers for a block are WRONG and HONEST in turns."""
    answer_s: float = 0.0
    idle: bool = True
    asked: list[ReceivedBlock] = field(default_factory=list)
    results: list[Comparison] = field(default_factory=list)
    ended_count: int = 0
    resets: int = 0
    resets_refused: int = 0
    share: float = 0.0
    """Of transfers with digests."""
    memory: dict[int, int] = field(default_factory=dict)
    """What blocks hold, 0 unless set."""
    lease_holders: tuple[WorkerRef, ...] = (PREFILL, OTHER)

    def __post_init__(self) -> None:
        layout = KvLayout.attention(
            model="m",
            dtype="float32",
            layer_count=1,
            kv_head_count=2,
            block_tokens=BLOCK,
            parts={"kv": 64},
        )
        engine = SimpleNamespace(
            descriptor=SimpleNamespace(layout=layout),
            compare_block=self.compare_block,
            reset_prefix_cache=self.reset_prefix_cache,
        )
        self.canary = Canary(
            cast("Engine", engine),
            self.interval_requests,
            on_compared=self.results.append,
            checks=cast("DigestChecks", self) if self.share else None,
            random=Random(3),
        )
        self.canary.watch(lambda: self.idle, self.holders)

    def holders(self, since_s: float) -> tuple[WorkerRef, ...]:
        return self.lease_holders if since_s > 0 else (PREFILL, OTHER)

    def digest_blocks(self, block_ids: Sequence[int]) -> Future[list[tuple[int, ...]]]:
        digests: Future[list[tuple[int, ...]]] = Future()
        digests.set_result([(self.memory.get(one, 0),) for one in block_ids])
        return digests

    async def compare_block(self, block: ReceivedBlock) -> BlockErrors | None:
        self.asked.append(block)
        await asyncio.sleep(self.answer_s)
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.alternates:
            return WRONG if self.asked.count(block) % 2 else HONEST
        return self.answers.get(block.block_id, self.answer)

    async def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return self.resets > self.resets_refused

    def end(
        self,
        prefill: WorkerRef | None = PREFILL,
        *,
        start: int = 0,
        end: int = 2 * BLOCK + 1,
        images: tuple[PromptImage, ...] = (),
        overwritten: int = 0,
    ) -> None:
        """An attempt has ended. Without `prefill` nothing was handed over to it.

        A block, unless 0, was written over between the arrival and the end.
        """
        self.ended_count += 1
        work = DecodeWork(
            f"x{self.ended_count}",
            tuple(range(end + 1)),
            Sampling(),
            remote_kv=True,
            images=images,
        )
        blocks = tuple(range(100, 100 + -(-(end - start) // BLOCK)))
        reservation = Reservation(work.transfer_id, blocks, start, end)
        attempt = SimpleNamespace(
            work=work,
            reservation=reservation,
            summary=None if prefill is None else SimpleNamespace(prefill=prefill),
            span=trace.INVALID_SPAN,
        )
        self.canary.attempt_arrived(cast("DecodeAttempt", attempt))
        if overwritten:
            self.memory[overwritten] = self.memory.get(overwritten, 0) + 1
        self.canary.attempt_closed(cast("DecodeAttempt", attempt))

    async def end_idle(self, count: int, prefill: WorkerRef = PREFILL) -> None:
        """The same, `count` times with pauses."""
        for _ in range(count):
            self.end(prefill)
            await asyncio.sleep(1.0)

    @property
    def outcomes(self) -> list[str]:
        return [one.outcome for one in self.results]


# Each comparison has two blocks.
LEARNING = LEARNED_COMPARISONS // 2


@virtually
async def test_one_of_so_many_requests_is_compared_once_the_tolerance_is_learned() -> None:
    bench = Bench(interval_requests=5)
    await bench.end_idle(LEARNING)
    assert len(bench.results) == LEARNING
    await bench.end_idle(4)
    assert len(bench.results) == LEARNING
    await bench.end_idle(1)
    assert len(bench.results) == LEARNING + 1
    assert bench.results[-1].transfer_id == f"x{LEARNING + 5}"
    # Every prefill worker is counted for itself.
    await bench.end_idle(LEARNING + 4, OTHER)
    assert len(bench.results) == 2 * LEARNING + 1
    assert set(bench.outcomes) == {"same"}


@virtually
async def test_only_whole_blocks_are_compared_with_the_tokens_up_to_their_end() -> None:
    bench = Bench()
    bench.end(start=4, end=15)
    await asyncio.sleep(1.0)
    assert [(one.block_id, one.token_ids) for one in bench.asked] == [
        (None, tuple(range(4))),
        (100, tuple(range(8))),
        (101, tuple(range(12))),
    ]
    bench.asked.clear()
    bench.end(end=3)
    bench.end(None)
    await asyncio.sleep(1.0)
    assert not bench.asked
    bench.end(end=100 * BLOCK)
    await asyncio.sleep(1.0)
    assert len({one.block_id for one in bench.asked}) == BLOCKS_MAX


@virtually
async def test_a_second_difference_quarantines_the_pair_and_no_other() -> None:
    bench = Bench()
    await bench.end_idle(LEARNING)
    await bench.end_idle(LEARNING, OTHER)
    bench.results.clear()
    bench.answer = WRONG
    await bench.end_idle(1)
    bench.canary.corrupt_senders.require_accepted(PREFILL)
    assert bench.outcomes == ["different"]
    assert bench.resets == 1
    assert not bench.canary.corrupt_senders.rejected
    await bench.end_idle(1)
    assert bench.outcomes == ["different", "quarantined"]
    assert bench.resets == 2
    difference = bench.results[-1].difference
    assert difference is not None
    assert (difference.layer, difference.head) == (0, 1)
    (detail,) = bench.canary.corrupt_senders.rejected.values()
    assert detail == (
        f"its KV is not what this worker computes and {OTHER} sends: layer 0, head 1 differ by 0.9, more than 0.004"
    )
    with pytest.raises(TransferFailed, match="layer 0, head 1"):
        bench.canary.corrupt_senders.require_accepted(PREFILL)
    bench.canary.corrupt_senders.require_accepted(OTHER)
    bench.canary.corrupt_senders.require_accepted(
        WorkerRef(PREFILL.worker_id, "another incarnation")
    )
    # What was handed over before is not compared any more.
    await bench.end_idle(3)
    assert len(bench.results) == 2


@virtually
async def test_a_difference_that_a_second_computation_does_not_find_does_not_count() -> None:
    bench = Bench(alternates=True)
    await bench.end_idle(3)
    assert bench.outcomes == ["same"] * 3
    assert len(bench.asked) == 12
    assert bench.resets == 0
    assert not bench.canary.corrupt_senders.rejected


@virtually
async def test_a_pair_that_is_wrong_from_its_start_learns_nothing() -> None:
    bench = Bench(interval_requests=500, answer=WRONG)
    await bench.end_idle(2)
    assert bench.outcomes == ["different", "quarantined"]


@virtually
async def test_a_busy_worker_compares_nothing_and_the_latest_request_waits() -> None:
    bench = Bench(idle=False)
    await bench.end_idle(20)
    assert not bench.asked
    bench.idle = True
    bench.end(None)
    await asyncio.sleep(1.0)
    assert [one.transfer_id for one in bench.results] == ["x20"]


@virtually
async def test_a_request_ends_the_comparison_after_the_block_in_computation() -> None:
    bench = Bench(answer_s=1.0)
    bench.end(end=8 * BLOCK)
    await asyncio.sleep(0.5)
    bench.idle = False
    await asyncio.sleep(30.0)
    assert len(bench.asked) == 1
    assert bench.results[0].block_count == 1


@virtually
async def test_an_engine_that_fails_rejects_no_worker() -> None:
    bench = Bench(answer=InternalError("the engine has ended"))
    await bench.end_idle(3)
    assert not bench.results
    bench.answer = HONEST
    await bench.end_idle(1)
    assert bench.outcomes == ["same"]


@virtually
async def test_the_prefix_cache_is_emptied_once_no_request_holds_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(answer=WRONG, resets_refused=3)
    await bench.end_idle(1)
    assert bench.resets == 4
    assert "reset-cache" not in caplog.text
    busy = Bench(answer=WRONG, resets_refused=1000)
    await busy.end_idle(1)
    await asyncio.sleep(10.0)
    assert busy.resets < 1000
    assert "reset-cache" in caplog.text


@virtually
async def test_no_block_that_ends_within_an_image_is_compared() -> None:
    bench = Bench()
    image = PromptImage(b"x", bytes(16), start_token=BLOCK + 1, token_count=BLOCK)
    bench.end(end=3 * BLOCK, images=(image,))
    await asyncio.sleep(1.0)
    assert [(len(one.token_ids), one.images) for one in bench.asked] == [
        (BLOCK, ()),
        (3 * BLOCK, (image,)),
    ]


@virtually
async def test_blocks_that_are_written_over_after_their_arrival_do_not_count_against_their_sender(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(share=1.0)
    await bench.end_idle(LEARNING)
    bench.asked.clear()
    bench.answer, bench.idle = WRONG, False
    for _ in range(3):
        bench.end(overwritten=101)
        await asyncio.sleep(1.0)
    assert [one.block_id for one in bench.asked] == [101, 101] * 3
    assert bench.outcomes[LEARNING:] == ["overwritten"] * 3
    assert not bench.canary.corrupt_senders.rejected
    assert f"Write leases since then, 2: {PREFILL}, {OTHER}" in caplog.text
    assert bench.resets == 3
    # Only one worker could have written.
    bench.lease_holders = (OTHER,)
    for _ in range(2):
        bench.end(overwritten=101)
        await asyncio.sleep(1.0)
    assert [one.prefill for one in bench.results[-2:]] == [OTHER, OTHER]
    assert list(bench.canary.corrupt_senders.rejected) == [OTHER]


@virtually
async def test_a_block_that_was_evicted_after_the_end_is_no_difference() -> None:
    bench = Bench(share=1.0, answer=None)
    bench.end(overwritten=101)
    await asyncio.sleep(1.0)
    assert bench.outcomes == ["dropped"]


@virtually
async def test_a_cached_block_of_a_prompt_does_not_count_against_the_sender_of_the_others() -> None:
    bench = Bench(share=1.0, answers={None: WRONG}, lease_holders=(PREFILL,))
    for _ in range(3):
        bench.end(start=2 * BLOCK, end=4 * BLOCK)
        await asyncio.sleep(1.0)
    assert bench.outcomes == ["overwritten"] * 3
    assert not bench.canary.corrupt_senders.rejected
