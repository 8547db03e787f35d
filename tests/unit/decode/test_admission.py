"""Reservations stay within the capacity, and all are released."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.errors import DecodeFull, DuplicateTransfer, InvalidRequest
from headrace_decode.admission import HINT_S_MIN, BlockAdmission, Capacity, SeenTransfers
from headrace_kv.layout import TOKENS, CacheGroup

CAPACITY = Capacity(usable_blocks=10, block_tokens=16, max_model_len=96, max_num_seqs=3)


def admit(
    admission: BlockAdmission,
    transfer_id: str,
    prompt: int = 1,
    answer: int = 10,
    quarantined: int = 0,
) -> None:
    admission.admit(
        transfer_id,
        prompt_tokens=prompt,
        max_tokens=answer,
        quarantined_blocks=quarantined,
    )


@pytest.mark.parametrize(
    "prompt,answer,blocks",
    [(1, 1, 1), (15, 1, 1), (16, 1, 2), (16, 16, 2), (16, 17, 3), (95, 1000, 6), (1, 10**6, 6)],
)
def test_blocks_cover_prompt_and_growth_up_to_the_context(
    prompt: int, answer: int, blocks: int
) -> None:
    assert CAPACITY.blocks_for(prompt, answer) == blocks


@pytest.mark.parametrize("prompt,blocks", [(15, 1 + 1), (32, 3 + 3), (64, 5 + 5), (90, 6 + 5)])
def test_windows_take_blocks_of_the_same_pool(prompt: int, blocks: int) -> None:
    """A window of 64 tokens that begins inside a block reaches into a fifth one."""
    window = CacheGroup("window", (1,), TOKENS, 1, 16, (), window_tokens=64)
    assert replace(CAPACITY, windows=(window,)).blocks_for(prompt, 1) == blocks


def test_quarantined_blocks_are_not_reserved() -> None:
    admission = BlockAdmission(CAPACITY)
    admit(admission, "a", 80, 16)
    with pytest.raises(DecodeFull, match="4 blocks are needed and 3 are free"):
        admit(admission, "b", 48, 16, quarantined=1)
    admit(admission, "b", 48, 16, quarantined=0)
    assert admission.reserved_blocks == 10


def test_a_prompt_that_can_never_fit_has_no_retry_time() -> None:
    small = Capacity(usable_blocks=2, block_tokens=16, max_model_len=96, max_num_seqs=3)
    with pytest.raises(InvalidRequest, match="token_ids"):
        admit(BlockAdmission(small), "a", 40, 1)
    with pytest.raises(InvalidRequest, match="shorter than the context"):
        admit(BlockAdmission(CAPACITY), "a", 96, 1)
    with pytest.raises(InvalidRequest, match="at least one"):
        admit(BlockAdmission(CAPACITY), "a", 0, 1)


def test_a_worker_without_a_free_slot_refuses_until_a_request_has_ended() -> None:
    admission = BlockAdmission(CAPACITY)
    for name in "abc":
        admit(admission, name)
    with pytest.raises(DecodeFull, match="3 request slots") as refused:
        admit(admission, "d")
    assert (refused.value.needs_blocks, refused.value.retry_after_s) == (False, HINT_S_MIN)
    admission.release("a")
    admit(admission, "d")


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 95), st.integers(1, 95), st.integers(0, 10)),
        max_size=40,
    )
)
def test_reservations_never_exceed_the_capacity(steps: list[tuple[int, int, int, int]]) -> None:
    admission = BlockAdmission(CAPACITY)
    held: dict[str, int] = {}
    for number, prompt, answer, quarantined in steps:
        name = str(number)
        if name in held:
            # A second release frees nothing.
            admission.release(name)
            admission.release(name)
            del held[name]
            assert admission.reserved_blocks == sum(held.values())
            continue
        before = admission.reserved_blocks
        try:
            admit(admission, name, prompt, answer, quarantined)
        except DecodeFull:
            assert admission.reserved_blocks == before
            continue
        held[name] = CAPACITY.blocks_for(prompt, answer)
        assert admission.reserved_blocks + quarantined <= CAPACITY.usable_blocks
        assert admission.reserved_blocks == sum(held.values())
        assert admission.request_count == len(held) <= CAPACITY.max_num_seqs


def test_seen_transfers_are_refused_and_bounded() -> None:
    seen = SeenTransfers(limit=3)
    for name in ("a", "b", "c", "d"):
        seen.check(name)
        seen.remember(name)
    seen.check("a")
    with pytest.raises(DuplicateTransfer, match="d"):
        seen.check("d")
