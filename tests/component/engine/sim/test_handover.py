"""A prefill engine sends to a decode engine, over real handoff streams and a real transport."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    Cancelled,
    Draining,
    HeadraceError,
    InternalError,
    KvCorrupt,
    TransferFailed,
)
from headrace_engine.interface import PrefillOutcome, PrefillWork, Sampling
from headrace_engine.sim.clock import ManualClock
from headrace_engine.sim.faults import CorruptByte, SimFaults
from headrace_kv.handoff.messages import LayerSent
from headrace_kv.plan.shard_map import expected_keys
from headrace_kv.receive.state import TransferState
from headrace_kv.receive.transfer import IncomingTransfer, TransferSummary
from headrace_kv.transport.base import KvTransport
from headrace_kv.transport.in_memory import Fault, FaultKind, FaultPlan, InMemoryTransport
from tests.component.engine.sim.support import (
    GREEDY,
    Handed,
    Pair,
    advance_until,
    cancel_at_random,
    close,
    decode_work,
    pair,
    planned_bytes,
    reserve,
    until_running,
)
from tests.waiting import until

PROMPT = list(range(100, 150))
LAYERS = 3
TOKEN_BYTES = 16
RANKS = [1, 2, 4]
MODEL = f"sim:layers={LAYERS},context=512"
# A chunk of 16 tokens takes 16 s, on a clock that the test advances.
SLOW = f"{MODEL},prefill_s_per_token=1"
CHUNK_S = 16.0


def sent_layers(handed: Handed) -> list[LayerSent]:
    assert handed.outcome is not None
    return [sent for _, sent in handed.outcome.layers]


async def check_pairing(heads: int, prefill_tp: int, decode_tp: int, **both_sides: Any) -> None:
    async with pair(
        prefill={"tensor_parallel_size": prefill_tp},
        decode={"tensor_parallel_size": decode_tp},
        model=f"sim:layers={LAYERS},heads={heads},context=512",
        max_num_batched_tokens=16,
        **both_sides,
    ) as both:
        handed = await both.generate(PROMPT)
        assert handed.tokens == both.decode.model.expected_tokens(PROMPT, 6)
        layouts = (both.prefill.descriptor.layout, both.decode.descriptor.layout)
        keys = expected_keys(*layouts, "x1")
        # 49 tokens in chunks of 16.
        assert len(sent_layers(handed)) == 4 * len(keys)
        assert handed.summary is not None
        assert handed.summary.acknowledgement_count == 4 * len(keys)
        assert handed.summary.payload_bytes == planned_bytes(*layouts, "x1", 0, 49)
        moved_bytes = handed.summary.payload_bytes + handed.summary.local_bytes
        copies = max(1, decode_tp // heads)
        assert moved_bytes == 49 * LAYERS * heads * copies * TOKEN_BYTES


@pytest.mark.parametrize("local_broadcast", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("prefill_tp", RANKS)
@pytest.mark.parametrize("decode_tp", RANKS)
async def test_every_pairing_of_ranks_in_memory(
    heads: int, prefill_tp: int, decode_tp: int, local_broadcast: bool
) -> None:
    await check_pairing(heads, prefill_tp, decode_tp, local_broadcast=local_broadcast)


async def test_an_engine_opens_and_ends_mooncake_itself() -> None:
    await check_pairing(2, 1, 1, transport="mooncake")


async def test_seeded_sampling_continues_after_the_handover() -> None:
    sampling = Sampling(temperature=1.0, seed=3, max_tokens=20)
    async with pair() as both:
        handed = await both.generate(PROMPT, sampling)
        assert handed.tokens == both.decode.model.expected_tokens(PROMPT, 20, sampling)


def has_received(transfer: IncomingTransfer, payload_bytes: int) -> bool:
    return transfer.ledger is not None and transfer.ledger.payload_bytes == payload_bytes


async def test_a_layer_is_sent_before_the_next_one_is_computed() -> None:
    clock = ManualClock()
    async with pair(model=SLOW, max_num_batched_tokens=16, prefill_clock=clock) as both:
        begun = await start_prefill(both, opened=True)
        layer_bytes = 16 * 2 * TOKEN_BYTES
        for layer in range(LAYERS):
            await clock.advance(CHUNK_S / LAYERS)
            await until(partial(has_received, begun.transfer, (layer + 1) * layer_bytes))
        assert begun.transfer.state is TransferState.RECEIVING
        assert not begun.prefill.done()
        await advance_until(begun.prefill.done, clock)
        await asyncio.gather(begun.prefill, begun.waiting)


async def test_only_missing_blocks_are_transferred_for_a_shared_prefix() -> None:
    async with pair(model=MODEL) as both:
        first = await both.generate(PROMPT)
        other = [*PROMPT[:30], *range(500, 520)]
        second = await both.generate(other, transfer_id="x2")
        assert second.tokens == both.decode.model.expected_tokens(other, 6)
        assert (second.reservation.start_token, second.end.cached_tokens) == (24, 24)
        assert second.outcome is not None
        assert second.outcome.cached_tokens == 24
        assert first.summary is not None
        assert second.summary is not None
        # 49 tokens against those from 24 on.
        assert second.summary.payload_bytes * 49 == first.summary.payload_bytes * 25


@pytest.mark.parametrize("prefill_tokens, decode_tokens", [(16, 8), (8, 12), (5, 8)])
async def test_block_sizes_may_differ(prefill_tokens: int, decode_tokens: int) -> None:
    """The shared prefix that decode keeps ends inside a block of prefill's."""
    async with pair(
        prefill={"block_size": prefill_tokens, "tensor_parallel_size": 2},
        decode={"block_size": decode_tokens},
        model=f"sim:layers={LAYERS},heads=2,context=480",
        max_num_batched_tokens=32,
    ) as both:
        await both.generate(PROMPT)
        other = [*PROMPT[:30], *range(500, 530)]
        handed = await both.generate(other, transfer_id="x2")
        assert handed.tokens == both.decode.model.expected_tokens(other, 6)
        assert handed.reservation.start_token == 30 // decode_tokens * decode_tokens


async def test_prefixes_cached_on_the_prefill_side_are_sent_at_once() -> None:
    async with pair(model=MODEL, decode={"num_gpu_blocks_override": 7}) as both:
        await both.generate(PROMPT)
        await both.generate(list(range(50)), transfer_id="x2")
        again = await both.generate(PROMPT, transfer_id="x3")
        assert again.end.cached_tokens == 0
        assert again.tokens == both.decode.model.expected_tokens(PROMPT, 6)
        assert again.outcome is not None
        assert again.outcome.cached_tokens == 48


async def test_a_prompt_that_prefill_has_cached_is_not_computed() -> None:
    async with pair(decode={"num_gpu_blocks_override": 7}) as both:
        prompt = PROMPT[:41]
        await both.generate(prompt)
        await both.generate(list(range(50)), transfer_id="x2")
        both.prefill._stepper._faults = SimFaults(fail_chunk=0)
        again = await both.generate(prompt, transfer_id="x3")
        assert again.reservation.start_token == 0
        assert again.outcome is not None
        assert again.outcome.cached_tokens == 40
        assert again.tokens == both.decode.model.expected_tokens(prompt, 6)


@pytest.mark.parametrize("layer", range(LAYERS))
async def test_a_corrupt_byte_changes_the_answer(layer: int) -> None:
    faults = SimFaults(corrupt=CorruptByte(rank=1, layer=layer, token=17, byte=5))
    async with pair(
        model=f"sim:layers={LAYERS},heads=2,context=512",
        decode={"tensor_parallel_size": 2},
        decode_faults=faults,
    ) as both:
        handed = await both.generate(PROMPT)
        assert handed.tokens != both.decode.model.expected_tokens(PROMPT, 6)


async def test_many_requests_at_once() -> None:
    async with pair(
        prefill={"tensor_parallel_size": 2},
        num_gpu_blocks_override=40,
        max_num_batched_tokens=32,
        max_num_seqs=4,
    ) as both:
        prompts = [[number, *range(20 + 3 * number)] for number in range(12)]
        handed = await asyncio.gather(
            *(
                both.generate(prompt, transfer_id=f"x{number}")
                for number, prompt in enumerate(prompts)
            )
        )
        for prompt, one in zip(prompts, handed, strict=True):
            assert one.tokens == both.decode.model.expected_tokens(prompt, 6)


@dataclass(frozen=True, slots=True)
class Begun:
    """A prefill that runs, and decode's wait for its transfer, after which decode's request is aborted."""

    prefill: asyncio.Task[PrefillOutcome]
    waiting: asyncio.Task[TransferSummary]
    transfer: IncomingTransfer


async def start_prefill(both: Pair, timeout_s: float = 20.0, *, opened: bool = False) -> Begun:
    """Starts a prefill; `opened` waits until its transfer is open."""
    reader = both.decode.decode(decode_work(PROMPT, GREEDY, remote_kv=True))
    reservation = await reserve(reader)
    transfer = both.receiver.reserve(reservation, Deadline.after(timeout_s))

    async def wait() -> TransferSummary:
        try:
            summary = await transfer.wait()
            both.decode.arrived(reservation.transfer_id)
            return summary
        finally:
            await close(reader)

    waiting = asyncio.create_task(wait())
    work = PrefillWork(tuple(PROMPT[:-1]), both.target(reservation, timeout_s))
    prefill = asyncio.create_task(both.prefill.prefill(work))
    if opened:
        await until(lambda: transfer.state is not TransferState.RESERVED)
    return Begun(prefill, waiting, transfer)


@pytest.mark.parametrize("computed_s", [0.0, 1.0, CHUNK_S + 1, 2.5 * CHUNK_S])
async def test_a_cancelled_prefill_quiesces_and_frees_its_blocks(computed_s: float) -> None:
    clock = ManualClock()
    async with pair(
        model=SLOW,
        prefill={"tensor_parallel_size": 2},
        max_num_batched_tokens=16,
        prefill_clock=clock,
    ) as both:
        begun = await start_prefill(both)
        await until_running(both.prefill)
        await clock.advance(computed_s)
        begun.prefill.cancel()
        with pytest.raises(asyncio.CancelledError):
            await begun.prefill
        assert all(not sender.active_transfers() for sender in both.prefill._senders)
        both.receiver.cancel("x1", Cancelled.reason, "the prefill was cancelled")
        with pytest.raises(HeadraceError):
            await begun.waiting


async def test_decode_can_cancel_a_prefill() -> None:
    clock = ManualClock()
    async with pair(model=SLOW, max_num_batched_tokens=16, prefill_clock=clock) as both:
        begun = await start_prefill(both, opened=True)
        await clock.advance(CHUNK_S)
        both.receiver.cancel("x1", Cancelled.reason, "the client left")
        with pytest.raises(Cancelled):
            await begun.prefill
        with pytest.raises(HeadraceError):
            await begun.waiting


async def test_a_failing_chunk_fails_both_sides() -> None:
    clock = ManualClock()
    faults = SimFaults(fail_chunk=1)
    async with pair(
        model=SLOW, prefill_faults=faults, max_num_batched_tokens=16, prefill_clock=clock
    ) as both:
        begun = await start_prefill(both, opened=True)
        await clock.advance(CHUNK_S)
        with pytest.raises(InternalError, match="chunk 1"):
            await begun.prefill
        with pytest.raises(HeadraceError):
            await begun.waiting


def faulty(fault: Fault, number: int) -> Callable[[], KvTransport]:
    return lambda: InMemoryTransport(FaultPlan(by_write={number: fault}))


async def test_a_failing_write_fails_both_sides() -> None:
    transports = faulty(Fault(FaultKind.FAIL), 2)
    async with pair(model=MODEL, prefill_transports=transports) as both:
        begun = await start_prefill(both)
        with pytest.raises(TransferFailed):
            await begun.prefill
        with pytest.raises(HeadraceError):
            await begun.waiting
        handed = await both.generate(PROMPT, transfer_id="x2")
        assert handed.tokens == both.decode.model.expected_tokens(PROMPT, 6)


async def test_a_dropped_write_changes_the_answer() -> None:
    transports = faulty(Fault(FaultKind.DROP), 2)
    async with pair(prefill_transports=transports, digest="off") as both:
        handed = await both.generate(PROMPT)
        assert handed.tokens != both.decode.model.expected_tokens(PROMPT, 6)


async def test_a_dropped_write_is_an_error_with_digests() -> None:
    transports = faulty(Fault(FaultKind.DROP), 2)
    async with pair(prefill_transports=transports) as both:
        with pytest.raises(KvCorrupt, match="layer 1 from rank 0 to rank 0"):
            await both.generate(PROMPT)


async def test_a_deadline_ends_a_prefill() -> None:
    clock = ManualClock()
    async with pair(model=SLOW, prefill_clock=clock) as both:
        # Computing never ends while the clock stands still.
        begun = await start_prefill(both, timeout_s=0.3)
        with pytest.raises(HeadraceError) as raised:
            await begun.prefill
        assert raised.value.reason == "TRANSFER_TIMEOUT"
        with pytest.raises(HeadraceError):
            await begun.waiting


async def test_prefills_wait_for_blocks_in_turn() -> None:
    clock = ManualClock()
    async with pair(
        model=SLOW,
        prefill={"num_gpu_blocks_override": 8},
        decode={"num_gpu_blocks_override": 40},
        prefill_clock=clock,
    ) as both:
        prompts = [[number, *PROMPT] for number in range(3)]
        tasks = [
            asyncio.create_task(both.generate(prompt, transfer_id=f"x{number}"))
            for number, prompt in enumerate(prompts)
        ]
        await until(lambda: both.prefill.usage().waiting_requests == 2)
        await advance_until(lambda: all(task.done() for task in tasks), clock, step_s=CHUNK_S)
        for prompt, task in zip(prompts, tasks, strict=True):
            assert (await task).tokens == both.decode.model.expected_tokens(prompt, 6)


async def test_a_prefix_that_only_decode_has_is_computed_but_not_sent() -> None:
    async with pair(prefill={"num_gpu_blocks_override": 7}, max_num_batched_tokens=16) as both:
        await both.generate(PROMPT)
        await both.generate(list(range(50)), transfer_id="x2")
        other = [*PROMPT[:30], *range(500, 520)]
        handed = await both.generate(other, transfer_id="x3")
        assert handed.reservation.start_token == 24
        assert handed.outcome is not None
        assert handed.outcome.cached_tokens < 24
        assert min(sent.start_token for sent in sent_layers(handed)) == 24
        assert handed.tokens == both.decode.model.expected_tokens(other, 6)


async def test_closing_the_engine_ends_a_prefill() -> None:
    clock = ManualClock()
    async with pair(model=SLOW, max_num_batched_tokens=16, prefill_clock=clock) as both:
        begun = await start_prefill(both, opened=True)
        await clock.advance(1.0)
        await both.prefill.close()
        with pytest.raises(Draining):
            await begun.prefill
        with pytest.raises(HeadraceError):
            await begun.waiting


@pytest.mark.parametrize("seed", range(3))
async def test_random_cancellations_leak_no_block_and_affect_no_other_request(seed: int) -> None:
    clock = ManualClock()
    async with pair(
        model=f"sim:layers={LAYERS},context=512,prefill_s_per_token=0.1,decode_step_s=1",
        prefill={"tensor_parallel_size": 2, "num_gpu_blocks_override": 30},
        decode={"num_gpu_blocks_override": 40},
        max_num_batched_tokens=16,
        max_num_seqs=6,
        prefill_clock=clock,
        decode_clock=clock,
    ) as both:
        await cancel_at_random(both, clock, count=40, seed=seed, ticks=40)
