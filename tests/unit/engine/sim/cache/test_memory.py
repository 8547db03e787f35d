"""Memory of any layout, written and read back, against the model's closed form."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.interface import Sampling
from headrace_engine.sim.cache.memory import SimMemory
from headrace_engine.sim.model.bit_mixer import mix_words
from headrace_engine.sim.model.model import SimModel, WordArray
from headrace_engine.sim.model.sampling import choose_token
from headrace_engine.sim.model.settings import SimShape, parse_settings
from headrace_kv.layout import STATE
from tests.sim_blocks import touched_blocks

BLOCK_TOKENS = 4
BLOCK_COUNT = 8
MODELS = [
    "layers=3,heads=4",
    "layers=3,heads=1,parts=nope:16/rope:8",
    "heads=4,parts=k:16:int8/v:16:int8/scale:4:float32,order=nhd",
    "heads=5,parts=k:12/v:3,order=block/layer/head/token/part",
    "parts=k:16/v:20,block_format=token_inner",
    "state_layers=3,state_heads=3",
    "layers=3,index_layers=3,index_block_tokens=6,order=nhd",
    "index_layers=1,state_layers=2,order=part/block/token/layer/head,block_format=token_inner",
]


class Filled:
    """A memory that holds one prompt, in blocks and pages taken at random."""

    def __init__(self, text: str, ranks: int, prompt: list[int], random: Random) -> None:
        self.shape = SimShape(
            settings=parse_settings(f"sim:vocabulary=1073741824,{text}"),
            tensor_parallel_size=ranks,
            block_tokens=BLOCK_TOKENS,
            block_count=BLOCK_COUNT,
            max_model_len=BLOCK_TOKENS * BLOCK_COUNT,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            stages=1 + text.count("state_layers"),
        )
        self.model = SimModel(self.shape.settings)
        self.memory = SimMemory(self.model, self.shape, guard_seed=7)
        self.blocks = tuple(
            random.sample(range(count), count)[: 1 if group.kind == STATE else count]
            for group, count in zip(self.shape.groups, self.shape.block_counts, strict=True)
        )
        self.tokens: list[int] = []
        cut = random.randrange(len(prompt)) if len(prompt) > 1 else 0
        for part in (prompt[:cut], prompt[cut:]):
            if part:
                self.append(part)

    def append(self, tokens: list[int]) -> None:
        """Computes more tokens, in one step."""
        start = len(self.tokens)
        self.tokens += tokens
        hashes = mix_words(self.model.prefix_sums(self.tokens))
        positions = np.arange(start, len(self.tokens), dtype=np.uint64)
        layers = range(self.model.layer_count)
        owners = tuple(
            np.array(ids, np.uint64)[positions // np.uint64(group.block_tokens or 64)]
            for group, ids in zip(self.shape.groups, self.blocks, strict=True)
        )
        self.memory.write(layers, hashes[start:], positions, owners)
        pages = tuple(np.array(ids[:1], np.uint64) for ids in self.blocks)
        before, is_first = hashes[max(0, start - 1)][None], np.array([start == 0])
        self.memory.advance_states(layers, before, hashes[-1:], is_first, pages)

    def digest(self) -> int:
        return self.memory.digest(self.blocks, len(self.tokens))

    def expected(self) -> int:
        return self.model.expected_digest(mix_words(self.model.prefix_sums(self.tokens)))

    def answer(self, count: int) -> tuple[int, ...]:
        """Goes on from memory."""
        prompt = len(self.tokens)
        for _ in range(count):
            sampling = Sampling(temperature=0.0)
            choice = choose_token(self.digest(), self.model.vocabulary, sampling, self.tokens, [])
            self.append([choice.token_id])
        return tuple(self.tokens[prompt:])

    def invert_any_byte(self, data: st.DataObject) -> None:
        """One byte that the prompt's KV has, in any rank, layer, part, head and token."""
        rank = data.draw(st.integers(0, self.memory.layout().rank_count - 1), "rank")
        held = data.draw(st.sampled_from(self.memory._held[rank]), "cache")
        part = data.draw(st.sampled_from(self.model.caches[held.group].parts), "part")
        token = data.draw(st.integers(0, len(self.tokens) - 1), "token")
        group = self.shape.groups[held.group]
        block, token = (0, 0) if group.kind == STATE else divmod(token, group.block_tokens)
        names = [one.name for one in group.parts]
        invert_byte(
            held.views[names.index(part.name)],
            data.draw(st.integers(0, len(held.layer_ids) - 1), "layer"),
            self.blocks[held.group][block],
            data.draw(st.integers(0, len(held.heads) - 1), "head"),
            token,
            data.draw(st.integers(0, part.unit_bytes - 1), "byte"),
        )


def invert_byte(view: WordArray, *indices: int) -> None:
    """Inverts a byte of a view's layer, block, head and token."""
    *place, byte = indices
    word, shift = divmod(byte, view.dtype.itemsize)
    view[(*place, word)] ^= view.dtype.type(0xFF << 8 * shift)


texts = st.sampled_from(MODELS)
ranks_of = st.integers(1, 6)
# Three tokens of an answer have room after them.
prompts = st.lists(st.integers(0, 99), min_size=1, max_size=BLOCK_TOKENS * BLOCK_COUNT - 3)


@given(texts, ranks_of, prompts, st.randoms(), st.data())
def test_intact_memory_gives_the_closed_form_and_one_wrong_byte_another(
    text: str, ranks: int, prompt: list[int], random: Random, data: st.DataObject
) -> None:
    filled = Filled(text, ranks, prompt, random)
    assert filled.digest() == filled.expected()
    expected = filled.model.expected_tokens(prompt, 3)
    assert Filled(text, ranks, prompt, random).answer(3) == expected
    filled.invert_any_byte(data)
    assert filled.digest() != filled.expected()
    assert filled.answer(3) != expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "text", ["layers=2", "block_format=token_inner", "order=nhd,parts=k:8/v:4"]
)
def test_missing_stale_and_misplaced_blocks_change_the_digest(text: str, ranks: int) -> None:
    filled = Filled(text, ranks, list(range(20)), Random(1))
    right, (blocks,) = filled.digest(), filled.blocks
    assert filled.memory.digest([[blocks[1], blocks[0], *blocks[2:]]], 20) != right
    assert filled.memory.digest([[*blocks[:4], blocks[5]]], 20) != right
    filled.memory.fill_guard(0, [blocks[2]])
    assert filled.digest() != right


@pytest.mark.parametrize(
    "text", ["layers=2", "block_format=token_inner", "order=nhd,parts=k:8/v:4"]
)
def test_guard_shows_foreign_writes(text: str) -> None:
    filled = Filled(text, 2, list(range(8)), Random(1))
    used = filled.blocks[0][:2]
    free = [block for block in range(BLOCK_COUNT) if block not in used]
    assert touched_blocks(filled.memory, 0, free) == ()
    assert touched_blocks(filled.memory, 0, range(BLOCK_COUNT)) == tuple(sorted(used))
    filled.memory.fill_guard(0, used)
    invert_byte(filled.memory._held[1][0].views[0], 1, 5, 0, 3, 7)
    assert touched_blocks(filled.memory, 0, range(BLOCK_COUNT)) == (5,)
