"""Faults of sim engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_common.errors import InternalError
from headrace_engine.sim.engine import SimEngine
from headrace_engine.sim.stepper import Chunk


@dataclass(frozen=True, slots=True)
class CorruptByte:
    """One byte of a request's KV cache. `head` counts within the rank. A state has token 0 only."""

    rank: int
    layer: int
    part: str
    token: int
    byte: int
    head: int = 0


def corrupt_arrived(engine: SimEngine, corrupt: CorruptByte) -> None:
    """Inverts the byte of each request once its cache has arrived."""
    arrived, memory = engine.arrived, engine._memory
    index = memory.layout().group_index(corrupt.layer)
    number, token = divmod(corrupt.token, max(1, memory.groups[index].block_tokens))

    def arrived_corrupt(transfer_id: str) -> None:
        sequence = engine._receiving(transfer_id)
        if sequence is not None:
            block = sequence.block_ids_by_group[index][number]
            memory.invert_byte(
                rank=corrupt.rank,
                layer=corrupt.layer,
                part=corrupt.part,
                block=block,
                head=corrupt.head,
                token=token,
                byte=corrupt.byte,
            )
        arrived(transfer_id)

    vars(engine)["arrived"] = arrived_corrupt


def fail_chunk(engine: SimEngine, number: int) -> None:
    """Makes every step fail that computes chunk `number` of a prompt, from 0."""
    stepper = engine._stepper
    compute = stepper.compute

    async def fail_orcompute(chunks: Sequence[Chunk]) -> None:
        if any(not one.is_decode and one.sequence.chunk_count == number for one in chunks):
            raise InternalError(f"chunk {number} fails: a fault was injected")
        await compute(chunks)

    vars(stepper)["compute"] = fail_orcompute
