"""The memory that sending a layer takes depends on the chunk, not on the length of the prompt."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import dataclass
from random import Random

import pytest

from headrace_common.deadlines import Deadline
from headrace_common.identity import new_transfer_id
from headrace_kv.handoff.messages import Reservation
from headrace_kv.receive.receiver import IncomingTransfer
from tests.component.kv.harness import BLOCK_TOKENS, Rig, make_layout, running
from tests.waiting import until

LAYERS = 12
CHUNK_TOKENS = 512
SHORT, LONG = 1_024, 32_768
SLACK_BYTES = 8_192
"""Far below a list of a long prompt's 8,192 block ids of 8 bytes each. A chunk of a long prompt takes some 7 KB more,
because Python shares only integers below 257."""


@dataclass(frozen=True)
class Cost:
    """Bytes above what was allocated before: peaks of the first and the later layers (least), and what is left."""

    first_layer_peak: int
    later_layers_peak: int
    left_per_layer: float


async def push_layer(
    rig: Rig, transfer: IncomingTransfer, layer: int, blocks: tuple[int, ...], start: int
) -> int:
    """Sends one layer of one chunk. Returns the peak of allocated bytes."""
    before_count = transfer.ledger.ack_count if transfer.ledger is not None else 0
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    layers = range(layer, layer + 1)
    rig.push(transfer.transfer_id, blocks, start, start + CHUNK_TOKENS, layers)
    await until(
        lambda: transfer.ledger is not None and transfer.ledger.ack_count == before_count + 1,
    )
    return tracemalloc.get_traced_memory()[1] - before


async def cost_of(token_count: int, scattered: bool) -> Cost:
    """Sends a prompt chunk by chunk and layer by layer, and measures its last chunk."""
    block_count = token_count // BLOCK_TOKENS
    source, target = list(range(block_count)), list(range(block_count))
    if scattered:
        Random(1).shuffle(source)
        Random(2).shuffle(target)
    layout = make_layout(1, layers=LAYERS)
    async with running(layout, layout, block_count=block_count) as rig:
        reservation = Reservation(new_transfer_id(), tuple(target), 0, token_count)
        transfer = rig.receiver.reserve(reservation, Deadline.after(60.0))
        rig.open(rig.target(transfer))
        blocks = tuple(source)
        for start in range(0, token_count - CHUNK_TOKENS, CHUNK_TOKENS):
            for layer in range(LAYERS):
                await push_layer(rig, transfer, layer, blocks, start)
        last = token_count - CHUNK_TOKENS
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            first = await push_layer(rig, transfer, 0, blocks, last)
            await push_layer(rig, transfer, 1, blocks, last)
            before, _ = tracemalloc.get_traced_memory()
            later = [
                await push_layer(rig, transfer, layer, blocks, last)
                for layer in range(2, LAYERS - 1)
            ]
            left = (tracemalloc.get_traced_memory()[0] - before) / len(later)
        finally:
            tracemalloc.stop()
            gc.enable()
        await push_layer(rig, transfer, LAYERS - 1, blocks, last)
        await transfer.wait()
        # The least, because other threads can only add to a layer's peak.
        return Cost(first, min(later), left)


@pytest.mark.parametrize("scattered", [False, True])
async def test_a_layer_costs_the_same_in_a_long_prompt(scattered: bool) -> None:
    short, long = await cost_of(SHORT, scattered), await cost_of(LONG, scattered)
    print(f"scattered={scattered}: {SHORT} tokens {short}, {LONG} tokens {long}")
    assert long.later_layers_peak <= short.later_layers_peak + SLACK_BYTES
    assert long.first_layer_peak <= short.first_layer_peak + SLACK_BYTES
    assert long.left_per_layer <= short.left_per_layer + SLACK_BYTES / 2
