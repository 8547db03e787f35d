"""The sim model's closed form against memory that is read back."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_engine.interface import Sampling
from headrace_engine.sim.memory import SimMemory
from headrace_engine.sim.mix import counted_words, mix_int, mix_words
from headrace_engine.sim.model import SimModel
from headrace_engine.sim.sampling import choose_token
from headrace_engine.sim.settings import SimSettings, SimShape

BLOCK_TOKENS = 4
BLOCK_COUNT = 8


def shape_of(ranks: int) -> SimShape:
    return SimShape(
        settings=SimSettings(),
        tensor_parallel_size=ranks,
        block_tokens=BLOCK_TOKENS,
        block_count=BLOCK_COUNT,
        context_tokens=BLOCK_TOKENS * BLOCK_COUNT,
        max_requests=4,
        max_batched_tokens=64,
    )


def filled(model: SimModel, ranks: int, tokens: list[int], block_ids: list[int]) -> SimMemory:
    memory = SimMemory(model, shape_of(ranks), guard_seed=7)
    positions = np.arange(len(tokens), dtype=np.uint64)
    blocks = np.array(block_ids, np.uint64)[np.arange(len(tokens)) // BLOCK_TOKENS]
    memory.write(slice(0, model.layers), model.prefix_hashes(tokens), positions, blocks)
    return memory


prompts = st.lists(st.integers(0, 99), min_size=1, max_size=BLOCK_TOKENS * BLOCK_COUNT)


@given(prompts, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.randoms())
def test_memory_that_is_right_gives_the_closed_form(
    prompt: list[int], ranks: int, heads: int, random: Random
) -> None:
    model = SimModel(3, heads, 16, 100)
    blocks = random.sample(range(BLOCK_COUNT), BLOCK_COUNT)
    memory = filled(model, ranks, prompt, blocks)
    assert memory.digest(blocks, len(prompt)) == model.expected_digest(model.prefix_hashes(prompt))


@given(prompts, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.data())
def test_one_wrong_byte_anywhere_changes_the_digest(
    prompt: list[int], ranks: int, heads: int, data: st.DataObject
) -> None:
    model = SimModel(3, heads, 16, 100)
    blocks = list(range(BLOCK_COUNT))
    memory = filled(model, ranks, prompt, blocks)
    right = memory.digest(blocks, len(prompt))
    block, token = divmod(data.draw(st.integers(0, len(prompt) - 1), "token"), BLOCK_TOKENS)
    memory.invert_byte(
        data.draw(st.integers(0, ranks - 1), "rank"),
        data.draw(st.integers(0, model.layers - 1), "layer"),
        block,
        data.draw(st.integers(0, memory.heads_per_rank - 1), "head"),
        token,
        data.draw(st.integers(0, 15), "byte"),
    )
    assert memory.digest(blocks, len(prompt)) != right


def answer_from_memory(
    model: SimModel, memory: SimMemory, prompt: list[int], blocks: list[int], count: int
) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        digest = memory.digest(blocks, len(tokens))
        tokens.append(
            choose_token(digest, model.vocabulary, Sampling(temperature=0.0), prompt, []).token_id
        )
        position = len(tokens) - 1
        memory.write(
            slice(0, model.layers),
            model.prefix_hashes(tokens)[position:],
            np.array([position], np.uint64),
            np.array([blocks[position // BLOCK_TOKENS]], np.uint64),
        )
    return tuple(tokens[len(prompt) :])


@settings(max_examples=50)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=24), st.data())
def test_one_wrong_byte_anywhere_changes_the_answer(prompt: list[int], data: st.DataObject) -> None:
    model = SimModel(2, 2, 16, 1 << 30)
    blocks = list(range(BLOCK_COUNT))
    memory = filled(model, 2, prompt, blocks)
    block, token = divmod(data.draw(st.integers(0, len(prompt) - 1), "token"), BLOCK_TOKENS)
    rank, layer = data.draw(st.integers(0, 1), "rank"), data.draw(st.integers(0, 1), "layer")
    expected = model.expected_tokens(prompt, 3)
    assert answer_from_memory(model, memory, prompt, blocks, 3) == expected
    memory.invert_byte(rank, layer, block, 0, token, data.draw(st.integers(0, 15), "byte"))
    assert answer_from_memory(model, memory, prompt, blocks, 3) != expected


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_missing_stale_and_misplaced_blocks_change_the_digest(ranks: int) -> None:
    model = SimModel(2, 2, 16, 100)
    prompt = list(range(20))
    memory = filled(model, ranks, prompt, [0, 1, 2, 3, 4])
    right = memory.digest([0, 1, 2, 3, 4], 20)
    assert memory.digest([1, 0, 2, 3, 4], 20) != right
    assert memory.digest([0, 1, 2, 3, 5], 20) != right
    memory.fill_guard([2])
    assert memory.digest([0, 1, 2, 3, 4], 20) != right


def test_tokens_beyond_the_count_are_not_looked_at() -> None:
    model = SimModel(2, 2, 16, 100)
    memory = filled(model, 1, list(range(8)), [0, 1])
    right = memory.digest([0, 1], 6)
    memory.invert_byte(0, 0, 1, 0, 2, 0)
    assert memory.digest([0, 1], 6) == right
    assert memory.digest([0, 1], 7) != right


@given(prompts, st.integers(0, 31))
def test_prefix_sums_can_be_continued(prompt: list[int], cut: int) -> None:
    model = SimModel(1, 1, 8, 100)
    cut = min(cut, len(prompt))
    whole = model.prefix_sums(prompt)
    base = int(whole[cut - 1]) if cut else 0
    assert whole[cut:].tolist() == model.prefix_sums(prompt[cut:], cut, base).tolist()


def test_order_and_prefix_matter_to_the_hash() -> None:
    model = SimModel(1, 1, 8, 100)
    assert model.prefix_hashes([1, 2])[-1] != model.prefix_hashes([2, 1])[-1]
    assert model.prefix_hashes([1, 2])[0] == model.prefix_hashes([1, 3])[0]
    assert len(set(model.prefix_hashes([5] * 100).tolist())) == 100


def test_a_stop_token_ends_the_expected_answer() -> None:
    model = SimModel(2, 2, 16, 100)
    answer = model.expected_tokens([1, 2, 3], 8)
    assert len(answer) == 8
    stop = answer[4]
    sampling = Sampling(temperature=0.0, stop_token_ids=(stop,))
    assert model.expected_tokens([1, 2, 3], 8, sampling) == answer[: answer.index(stop) + 1]


def test_seeds_and_prompts_change_the_expected_answer() -> None:
    model = SimModel(2, 2, 16, 32000)
    seeded = [
        model.expected_tokens([1, 2, 3], 8, Sampling(temperature=1.0, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert seeded[0] == seeded[1] != seeded[2]
    assert model.expected_tokens([1, 2, 3], 8) != model.expected_tokens([1, 2, 4], 8)


@given(st.integers(0, (1 << 64) - 1))
def test_both_mixers_agree(value: int) -> None:
    assert int(mix_words(np.array([value], np.uint64))[0]) == mix_int(value)


def test_counted_words_can_start_anywhere() -> None:
    assert counted_words(10, 3).tolist()[4:] == counted_words(6, 3, 4).tolist()


def test_guard_shows_foreign_writes() -> None:
    model = SimModel(2, 2, 16, 100)
    memory = filled(model, 2, list(range(8)), [0, 1])
    assert memory.guard_violations(range(2, BLOCK_COUNT)) == ()
    assert memory.guard_violations(range(BLOCK_COUNT)) == (0, 1)
    memory.fill_guard([0, 1])
    memory.invert_byte(1, 1, 5, 0, 3, 15)
    assert memory.guard_violations(range(BLOCK_COUNT)) == (5,)


def test_regions_lie_where_the_bytes_are() -> None:
    model = SimModel(2, 4, 16, 100)
    memory = SimMemory(model, shape_of(2), guard_seed=7)
    described = memory.rank_memory(1, "in_memory", "here")
    assert described.base_address % 4096 == 0
    region = described.regions[1]
    last = region.offset_bytes + BLOCK_COUNT * region.block_stride_bytes
    assert last == described.arena_bytes == memory.arena_bytes(1)
    assert region.block_stride_bytes == 2 * region.head_stride_bytes == 2 * BLOCK_TOKENS * 16
    assert region.unit_bytes == memory.layout().groups[0].parts[0].unit_bytes
