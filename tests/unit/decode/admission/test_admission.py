"""Reservations stay within the capacity, and all are released."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.errors import DecodeFull, DuplicateTransfer, InvalidRequest
from headrace_decode.admission.admission import Admission, Capacity, SeenTransfers
from headrace_decode.admission.retry_hint import HINT_S_MIN
from headrace_kv.layout.layout import TOKENS, CacheGroup

CAPACITY = Capacity(usable_blocks=10, block_tokens=16, max_model_len=96, max_num_seqs=3)


def admit(
    admission: Admission,
    transfer_id: str,
    prompt: int = 1,
    answer: int = 10,
    quarantined: int = 0,
    remaining_s: float = math.inf,
) -> None:
    admission.admit(
        transfer_id,
        prompt_tokens=prompt,
        max_tokens=answer,
        quarantined_blocks=quarantined,
        remaining_s=remaining_s,
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
    admission = Admission(CAPACITY)
    admit(admission, "a", 80, 16)
    with pytest.raises(DecodeFull, match="4 blocks are needed and 3 are free"):
        admit(admission, "b", 48, 16, quarantined=1)
    admit(admission, "b", 48, 16, quarantined=0)
    assert admission.reserved_blocks == 10


def test_a_prompt_that_can_never_fit_has_no_retry_time() -> None:
    small = Capacity(usable_blocks=2, block_tokens=16, max_model_len=96, max_num_seqs=3)
    with pytest.raises(InvalidRequest, match="token_ids"):
        admit(Admission(small), "a", 40, 1)
    with pytest.raises(InvalidRequest, match="shorter than the context"):
        admit(Admission(CAPACITY), "a", 96, 1)
    with pytest.raises(InvalidRequest, match="at least one"):
        admit(Admission(CAPACITY), "a", 0, 1)


def test_contended_room_is_not_given_to_requests_that_would_end_too_late() -> None:
    now_s = 100.0
    admission = Admission(CAPACITY, clock=lambda: now_s)
    admission.answer_completed(prompt_tokens=1, max_tokens=10, tokens=10, lead_s=0.2, stream_s=0.9)
    # There is no contention, so it may try.
    for name in "abc":
        admit(admission, name, remaining_s=0.1)
    with pytest.raises(DecodeFull, match="3 request slots") as refused:
        admit(admission, "d", remaining_s=60.0)
    admission.release("a")
    with pytest.raises(DecodeFull, match=r"about 1\.20 s .* only 1\.00 s are left") as late:
        admit(admission, "e", remaining_s=1.0)
    assert late.value.retry_after_s is not None
    assert (refused.value.time_missing, late.value.time_missing) == (False, True)
    assert admission.request_count == 2
    admit(admission, "f", answer=7, remaining_s=1.0)
    admission.release("b")
    admit(admission, "g", remaining_s=1.3)
    admission.release("c")
    # By now every refused caller has retried or left.
    assert refused.value.retry_after_s == HINT_S_MIN
    now_s += 2 * HINT_S_MIN
    admit(admission, "h", remaining_s=0.1)


def test_the_context_bounds_the_expected_answer() -> None:
    admission = Admission(CAPACITY, clock=lambda: 0.0)
    admission.answer_completed(prompt_tokens=1, max_tokens=2, tokens=2, lead_s=0.0, stream_s=1.0)
    for name in "abc":
        admit(admission, name)
    with pytest.raises(DecodeFull, match="slots"):
        admit(admission, "d", 1, 1)
    admission.release("a")
    admit(admission, "e", 90, 10**6, remaining_s=6.5)


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 95), st.integers(1, 95), st.integers(0, 10)),
        max_size=40,
    )
)
def test_reservations_never_exceed_the_capacity(steps: list[tuple[int, int, int, int]]) -> None:
    admission = Admission(CAPACITY)
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
