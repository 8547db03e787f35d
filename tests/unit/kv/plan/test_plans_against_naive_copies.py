"""Any layout into any other: what the plans copy is what a loop over single elements copies, byte for byte."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import lcm
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace_common.deadlines import Deadline
from headrace_kv.compatibility import require_compatible
from headrace_kv.copy_plan import CopyPlanner, Runs
from headrace_kv.layout import (
    STATE,
    TOKEN_OUTER,
    TOKENS,
    CacheGroup,
    GroupKind,
    KvDescriptor,
    KvLayout,
    Part,
    RankMemory,
    Region,
)
from headrace_kv.messages import LayerRange, Reservation
from headrace_kv.receive.ledger import LayerLanded, Ledger, LocalLedger
from headrace_kv.receive.local_broadcast import LocalBroadcast, LocalJob, copy_in_process
from headrace_kv.send.plan import WritePlan
from headrace_kv.shard_map import HEAD_OUTER, edges_from, heads_held, place_regions
from tests.in_memory_transport import InMemoryTransport, MemoryFabric

SPARE_BLOCKS = 2


@dataclass(frozen=True)
class Side:
    """A worker: each rank's arena, registered with a transport of its own."""

    layout: KvLayout
    arenas: list[NDArray[np.uint8]]
    memories: list[RankMemory]
    transports: list[InMemoryTransport]
    block_ids: tuple[tuple[int, ...], ...]


Cell = tuple[int, str, int, int]
"""(layer, part, model head, token; of what is copied whole, the number of the block)."""


def random_groups(random: Random) -> tuple[CacheGroup, ...]:
    """One to three groups over up to three layers, each of another kind."""
    owners = [random.randrange(3) for _ in range(random.randint(1, 3))]
    found: list[CacheGroup] = []
    for owner in sorted(set(owners)):
        kind: GroupKind = random.choice([TOKENS, TOKENS, STATE]) if found else TOKENS
        opaque = random.random() < 0.3
        names = random.choice([("kv",), ("k", "v"), ("nope", "rope"), ("k", "v", "k_scale")])
        size = random.randint(1, 4)
        parts = tuple(
            Part(
                name,
                "uint8",
                1 if name in ("rope", "k_scale") else size,
                "packed" if opaque and name != "k_scale" else TOKEN_OUTER,
            )
            for name in names
        )
        layers = tuple(layer for layer, index in enumerate(owners) if index == owner)
        tokens = 0 if kind == STATE else random.randint(1, 5)
        heads = random.choice([1, 2, 3, 4, 6])
        window, chunk = random_window(random) if kind == TOKENS else (0, 0)
        found.append(CacheGroup(f"g{owner}", layers, kind, heads, tokens, parts, window, chunk))
    return tuple(found)


def random_window(random: Random) -> tuple[int, int]:
    """Mostly none, else a sliding window or a chunk."""
    tokens = random.randint(1, 12)
    return random.choice([(0, 0), (0, 0), (tokens, 0), (0, tokens)])


def random_layout(random: Random, groups: tuple[CacheGroup, ...]) -> KvLayout:
    """A worker of a model: any parallelism, and another block size where that may differ."""
    sized = tuple(
        replace(group, block_tokens=random.randint(1, 7))
        if group.token_addressable and not group.is_windowed
        else group
        for group in groups
    )
    layer_count = sum(len(group.layers) for group in groups)
    later = {random.randint(1, 6) for _ in range(2)}
    stages = (0, *sorted(start for start in later if start < layer_count))
    return KvLayout("m", random.choice([1, 1, 2, 2, 3, 4, 5, 6]), sized, stages)


def make_side(random: Random, layout: KvLayout, start: int, end: int, fabric: MemoryFabric) -> Side:
    """Memory in any order of dimensions; blocks in any order, with spare ones between."""
    counts, block_ids = [], []
    for group in layout.groups:
        needed = group.blocks_between(start, end)
        counts.append(needed + SPARE_BLOCKS)
        ids = random.sample(range(needed + SPARE_BLOCKS), needed)
        if random.random() < 0.5:
            ids.sort()
        # A window has left these blocks: they must not be used.
        size = group.block_tokens or 1
        left = group.first_sent_token(start, end) // size - start // size
        block_ids.append((-1,) * left + tuple(ids[left:]))
    arenas, memories, transports = [], [], []
    for rank in range(layout.rank_count):
        order = random.sample(HEAD_OUTER, len(HEAD_OUTER))
        placed = place_regions(layout, rank, counts, order, random.choice([1, 64]))
        arena = np.zeros(max(1, placed.arena_bytes), dtype=np.uint8)
        transport = InMemoryTransport(fabric=fabric)
        memory = RankMemory(
            rank,
            transport.name,
            transport.session,
            arena.ctypes.data,
            placed.arena_bytes,
            placed.regions,
        )
        transport.register(arena.ctypes.data, len(arena))
        arenas.append(arena)
        memories.append(memory)
        transports.append(transport)
    return Side(layout, arenas, memories, transports, tuple(block_ids))


def visit(side: Side, start: int, end: int, first_token: int, see: Callable[..., None]) -> None:
    """Calls see(rank, cell, bytes of the arena) for every unit of tokens [start, end), one by one.

    The block lists begin with the block of `first_token`.
    """
    tp = side.layout.tensor_parallel_size
    for rank, memory in enumerate(side.memories):
        for region in memory.regions:
            index = side.layout.group_index(region.layer)
            group = side.layout.groups[index]
            ids = side.block_ids[index]
            for head, model_head in enumerate(heads_held(rank % tp, tp, group.head_count)):
                sent = group.first_sent_token(start, end)
                for unit, block, token in units(region, group, ids, sent, end, first_token):
                    at = (
                        region.offset_bytes
                        + block * region.block_stride_bytes
                        + head * region.head_stride_bytes
                        + token * region.token_stride_bytes
                    )
                    cell = (region.layer, region.part, model_head, unit)
                    see(rank, cell, slice(at, at + region.unit_bytes))


def units(
    region: Region, group: CacheGroup, ids: tuple[int, ...], start: int, end: int, first_token: int
) -> list[tuple[int, int, int]]:
    """(token or block of the prompt, block id, token in the block) of what is copied."""
    if group.kind == STATE:
        return [(0, ids[0], 0)]
    size = group.block_tokens
    first = first_token // size
    if region.token_addressable:
        return [(token, ids[token // size - first], token % size) for token in range(start, end)]
    return [(block, ids[block - first], 0) for block in range(start // size, -(-end // size))]


def whole_tokens(layout: KvLayout) -> int:
    """Tokens that may not be taken apart in some group."""
    sizes = [
        group.block_tokens
        for group in layout.groups
        if group.kind == TOKENS and not group.token_addressable
    ]
    return lcm(*sizes)


@pytest.mark.parametrize("lot", range(5))
@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 2**48))
def test_every_byte_arrives_once(lot: int, seed: int) -> None:
    random = Random(5 * seed + lot)
    groups = random_groups(random)
    prefill, decode = random_layout(random, groups), random_layout(random, groups)
    decode = replace(decode, broadcast_width=random.choice([1, 1, 2, 3, 6]))
    require_compatible(prefill, decode)
    step = whole_tokens(decode)
    end = random.randint(1, 20)
    start = random.choice([0, random.randrange(end)]) // step * step
    cuts = {random.randint(start, end) // step * step for _ in range(2)}
    ends = sorted({cut for cut in cuts if cut > start} | {end})
    fabric = MemoryFabric()
    source = make_side(random, prefill, 0, end, fabric)
    target = make_side(random, decode, start, end, fabric)

    rng = np.random.default_rng(5)
    truth: dict[Cell, NDArray[np.uint8]] = {}

    def write_truth(rank: int, cell: Cell, at: slice) -> None:
        if cell not in truth:
            truth[cell] = rng.integers(1, 256, at.stop - at.start, dtype=np.uint8)
        source.arenas[rank][at] = truth[cell]

    visit(source, 0, end, 0, write_truth)
    expected = [arena.copy() for arena in target.arenas]
    visit(
        target, start, end, start, lambda rank, cell, at: np.copyto(expected[rank][at], truth[cell])
    )

    reservation = Reservation("x", target.block_ids[0], start, end, target.block_ids[1:])
    ledger = Ledger(decode, prefill, reservation)
    local = LocalLedger(decode, reservation)
    written = [np.zeros(len(arena), dtype=np.uint8) for arena in target.arenas]
    for rank in range(prefill.rank_count):
        send(source, target, rank, reservation, ends, ledger, local, written)
        if random.random() < 0.5:
            copy_locally(target, reservation, local, written)
    assert ledger.complete
    copy_locally(target, reservation, local, written)
    assert not local.missing_keys
    for rank, arena in enumerate(target.arenas):
        assert np.array_equal(arena, expected[rank])
        assert written[rank].max(initial=0) <= 1
        assert np.array_equal(written[rank] > 0, expected[rank] > 0)


def copy_locally(
    target: Side, reservation: Reservation, ledger: LocalLedger, written: list[NDArray[np.uint8]]
) -> None:
    """Makes the local copies that are due, and notes every byte written."""
    copies = ledger.take_due(1 << 30)
    if not copies:
        return

    def write(source: RankMemory, destination: RankMemory, runs: Runs, timeout_s: float) -> None:
        copy_in_process(source, destination, runs, timeout_s)
        note(destination, runs, written)

    broadcast = LocalBroadcast(KvDescriptor(target.layout, tuple(target.memories)), write)
    job = LocalJob(reservation, copies, Deadline.after(10.0), threading.Event())
    broadcast.submit(job).result(10.0)
    broadcast.close()
    for copy in copies:
        assert ledger.missing_keys
        ledger.count(copy)


def note(destination: RankMemory, runs: Runs, written: list[NDArray[np.uint8]]) -> None:
    """Counts the writes of every byte of a rank's arena."""
    for at, length in zip(runs.destination_addresses, runs.lengths, strict=True):
        first = int(at) - destination.base_address
        written[destination.rank][first : first + int(length)] += 1


def send(
    source: Side,
    target: Side,
    rank: int,
    reservation: Reservation,
    ends: list[int],
    ledger: Ledger,
    local: LocalLedger,
    written: list[NDArray[np.uint8]],
) -> None:
    """Does what a rank's sender does, chunk by chunk, and notes every byte written."""
    edges = edges_from(rank, source.layout, target.layout, reservation.transfer_id)
    plan = WritePlan(edges, source.layout, target.layout, reservation)
    planners = [CopyPlanner(source.memories[rank], memory) for memory in target.memories]
    begin = 0
    for end in ends:
        for layer in source.layout.layers_of(rank):
            index = source.layout.group_index(layer)
            if source.layout.groups[index].kind == STATE and end != ends[-1]:
                continue
            piece = LayerRange("x", layer, begin, end, source.block_ids[index], 0)
            for edge, span in plan.claim(piece):
                destination = edge.destination_rank
                runs = planners[destination].plan(edge, layer, span)
                assert len(runs.sort_and_merge()) == len(runs)
                memory = target.memories[destination]
                source.transports[rank].write(memory.session, runs, 5.0)
                note(memory, runs, written)
                nbytes = runs.payload_bytes
                key = (rank, destination, layer)
                assert ledger.land(key, span.start_token, span.end_token, nbytes)
                local.land(LayerLanded(edge, layer, span.start_token, span.end_token, None))
                plan.landed(layer, destination, span.end_token)
        begin = end
    assert plan.complete
