"""Digests are the same on both sides, for any runs in any order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from headrace_common.errors import TransferFailed
from headrace_kv.checksum import (
    SAMPLED_SHARE,
    destination_digest,
    digest_share,
    is_digested,
    source_digest,
)
from headrace_kv.layout import WorkerRef
from headrace_kv.receive.verification import (
    FAULT_WINDOW_S,
    INTACT_PER_FAULT,
    REJECTED_S,
    CorruptSenderTracker,
)
from headrace_kv.runs import Runs
from headrace_kv.transport.memory import HOST_MEMORY


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.sampled_from([1, 3, 40, 9000]), st.integers(0, 2**32 - 1))
def test_both_sides_agree_on_any_list_of_runs(count: int, length_max: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, length_max + 1, count)
    total = int(lengths.sum())
    source = generator.integers(0, 256, total + count, dtype=np.uint8)
    destination = np.zeros_like(source)
    at = np.cumsum(lengths + 1) - lengths - 1
    to = np.empty_like(at)
    order = generator.permutation(count)
    to[order] = np.cumsum(lengths[order] + 1) - lengths[order] - 1
    runs = Runs(source.ctypes.data + at, destination.ctypes.data + to, lengths)
    pieces = []
    for i in order.tolist():
        piece = source[at[i] : at[i] + lengths[i]]
        destination[to[i] : to[i] + lengths[i]] = piece
        pieces.append(piece.tobytes())
    expected = xxh3_64_intdigest(b"".join(pieces), seed)
    assert source_digest(HOST_MEMORY, runs, seed) == expected
    assert destination_digest(HOST_MEMORY, runs, seed) == expected
    relisted = Runs(
        runs.source_addresses[order], runs.destination_addresses[order], runs.lengths[order]
    )
    assert source_digest(HOST_MEMORY, relisted, seed) == expected
    assert source_digest(HOST_MEMORY, runs, seed + 1) != expected, "another handoff"
    destination[to[order[0]]] ^= 1
    assert destination_digest(HOST_MEMORY, runs, seed) != expected


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 60), st.sampled_from([1, 40, 20_000]), st.integers(0, 2**32 - 1))
def test_word_sums_depend_on_the_place_of_each_word(
    count: int, words_max: int, numbers: int
) -> None:
    generator = np.random.default_rng(numbers)
    lengths = 4 * generator.integers(1, words_max + 1, count)
    total, seed = int(lengths.sum()), int(generator.integers(2**64, dtype=np.uint64))
    source = generator.integers(0, 256, total, dtype=np.uint8)
    starts = np.cumsum(lengths) - lengths
    order = generator.permutation(count)
    to = np.empty_like(starts)
    to[order] = np.cumsum(lengths[order]) - lengths[order]
    destination = np.zeros_like(source)
    for i in range(count):
        destination[to[i] : to[i] + lengths[i]] = source[starts[i] : starts[i] + lengths[i]]
    runs = Runs(source.ctypes.data + starts, destination.ctypes.data + to, lengths)
    factor = 0x9E3779B97F4A7C15
    expected = (
        sum(
            word * (index * factor + seed & 2**64 - 1 | 1)
            for index, word in enumerate(destination.view("<u4").tolist())
        )
        % 2**64
    )
    assert source_digest(HOST_MEMORY, runs, seed, word_sum=True) == expected
    assert destination_digest(HOST_MEMORY, runs, seed, word_sum=True) == expected
    words = destination.view("<u4")
    for bit in (0, 15, 31):
        words[-1] ^= 1 << bit
        assert destination_digest(HOST_MEMORY, runs, seed, word_sum=True) != expected
        words[-1] ^= 1 << bit
    if words[0] != words[-1]:
        words[0], words[-1] = words[-1], words[0]
        assert destination_digest(HOST_MEMORY, runs, seed, word_sum=True) != expected


def test_sampling_selects_its_share_and_the_same_pairs_on_both_sides() -> None:
    pairs = [(f"x{number:032x}", layer) for number in range(200) for layer in range(40)]
    chosen = [is_digested(digest_share("sampled"), *pair) for pair in pairs]
    assert chosen == [is_digested(SAMPLED_SHARE, *pair) for pair in pairs]
    assert 0.75 * SAMPLED_SHARE < sum(chosen) / len(chosen) < 1.25 * SAMPLED_SHARE
    assert all(is_digested(digest_share("on"), *pair) for pair in pairs)
    assert not any(is_digested(digest_share("off"), *pair) for pair in pairs)


def test_distrust_needs_repeats_and_ends_with_the_incarnation() -> None:
    distrust = CorruptSenderTracker(2)
    bad, reborn = WorkerRef("prefill-0", "a" * 16), WorkerRef("prefill-0", "b" * 16)
    distrust.record(bad, "arrived corrupt")
    distrust.require_accepted(bad)
    assert not distrust.rejected
    distrust.record(bad, "arrived corrupt")
    with pytest.raises(TransferFailed, match="arrived corrupt"):
        distrust.require_accepted(bad)
    assert list(distrust.rejected) == [bad]
    distrust.require_accepted(reborn)
    for number in range(3000):
        distrust.record(WorkerRef("other", str(number)), "")
    assert len(distrust.rejected) <= 1


def test_distrust_expires_and_a_fault_after_it_lasts_twice_as_long() -> None:
    now_s = 0.0
    distrust, bad = CorruptSenderTracker(2, clock=lambda: now_s), WorkerRef("prefill-0", "a" * 16)
    distrust.record(bad, "arrived corrupt")
    now_s = FAULT_WINDOW_S + 1.0
    distrust.record(bad, "arrived corrupt")
    assert not distrust.rejected
    for _ in range(INTACT_PER_FAULT):
        distrust.record_intact(bad)
    distrust.record(bad, "arrived corrupt")
    assert not distrust.rejected
    distrust.record(bad, "arrived corrupt")
    for lasting_s in (REJECTED_S, 2 * REJECTED_S):
        now_s += lasting_s - 1.0
        assert list(distrust.rejected) == [bad]
        now_s += 2.0
        assert not distrust.rejected
        assert distrust.was_rejected(bad)
        distrust.record(bad, "arrived corrupt")
