"""Sim engines with verify=off: the same path of a request, without the bytes."""

import ctypes

from tests.component.engine.sim.support import (
    Pair,
    answer_of,
    decode_work,
    pair,
)

PROMPT = list(range(100, 150))
MODEL = "sim:context=512,verify=off"


def memory_of(both: Pair) -> set[bytes]:
    """The bytes of every rank of both engines."""
    return {
        ctypes.string_at(rank.base_address, rank.arena_bytes)
        for engine in (both.prefill, both.decode)
        for rank in engine.descriptor.ranks
    }


async def test_answers_depend_on_the_tokens_alone_and_the_memory_stays_empty() -> None:
    async with pair(model=MODEL, guarded=False) as both:
        remote = await both.generate(PROMPT)
        assert remote.summary is not None
        assert remote.summary.payload_bytes > 0
        other = [*PROMPT[:20], 7, *PROMPT[21:]]
        local, _, _ = await answer_of(both.decode, decode_work(other, transfer_id="x2"))
        assert local == both.decode.model.expected_tokens(other, 6)
        assert local != remote.tokens
        assert memory_of(both) == {bytes(len(next(iter(memory_of(both)))))}
