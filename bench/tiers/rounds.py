"""A round: new conversations, and the answers of each engine to their fifth turns."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from bench.tiers.engines import ANSWER_TOKENS, Engines, Ours, answer_by_vllm
from bench.tiers.peers import TierPeer
from bench.tiers.report import (
    DEVICE,
    DISK,
    HOST,
    NOWHERE,
    PLACES_OF_PEERS,
    REMOTE,
    VLLM_DEVICE,
    VLLM_NOWHERE,
    Results,
    Turn,
    row_of,
)

FIRST_TOKENS: Final = 700
TURN_TOKENS: Final = 64
TURNS: Final = 4
CONVERSATIONS: Final = 7

# Conversations of a round, by number. 4 and 5 move through KV memory while others are asked.
ASKED: Final = ((6, DEVICE), (3, HOST), (0, DISK))
ASKED_LAST: Final = 1


class Conversation:
    """Grows by the user's random tokens and by the answers."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.text: list[int] = []
        self.prompts: list[list[int]] = []
        self.grow(FIRST_TOKENS - TURN_TOKENS)

    def ask(self) -> list[int]:
        """The prompt of the next turn."""
        self.grow(TURN_TOKENS)
        self.prompts.append(list(self.text))
        return self.prompts[-1]

    def answered(self, turn: Turn) -> None:
        """The answer belongs to the next prompt."""
        self.text += turn.token_ids

    def grow(self, count: int) -> None:
        """Adds random tokens."""
        self.text += [self._random.randrange(1_000, 40_000) for _ in range(count)]


def len_of_history() -> int:
    """Tokens of a conversation before its fifth turn."""
    return FIRST_TOKENS + (TURNS - 1) * TURN_TOKENS + TURNS * ANSWER_TOKENS


async def measure_round(running: Engines, number: int, found: Results, *, with_pool: bool) -> None:
    """One turn for each row."""
    ours, plain = running.ours, running.plain
    await ours.forget()
    seeds = itertools.count(1_000 * number)
    conversations = [Conversation(next(seeds)) for _ in range(CONVERSATIONS)]
    for conversation in conversations:
        await four_turns(ours, conversation)
    expected: dict[str, tuple[list[int], Turn]] = {}
    for index, row in ASKED:
        prompt = conversations[index].ask()
        turn = await ours.answer(prompt)
        found.turns[row].append(turn)
        for load in turn.loads:
            found.copy_s[load.tier].append(load.seconds / load.block_count)
        computed = await answer_by_vllm(plain, prompt)
        found.compare(turn, computed)
        expected[row] = prompt, computed
    found.turns[VLLM_NOWHERE].append(expected[DISK][1])
    new = Conversation(next(seeds))
    new.grow(len_of_history() - len(new.text))
    await answer_by_vllm(plain, new.text)
    prompt = new.ask()
    cached, computed = await answer_by_vllm(plain, prompt), await ours.answer(prompt)
    expected[NOWHERE] = prompt, cached
    found.turns[VLLM_DEVICE].append(cached)
    found.turns[NOWHERE].append(computed)
    found.compare(computed, cached)
    if with_pool:
        await ours.forget()
        prompt = conversations[ASKED_LAST].ask()
        turn = await ours.answer(prompt)
        found.turns[REMOTE].append(turn)
        found.compare(turn, await answer_by_vllm(plain, prompt))
    for peer in running.peers:
        await measure_peer(peer, conversations, expected, found)


async def measure_peer(
    peer: TierPeer,
    conversations: Sequence[Conversation],
    expected: Mapping[str, tuple[list[int], Turn]],
    found: Results,
) -> None:
    """One turn for each row of a peer. `expected`: prompts by place, and their answers.

    The first four turns have one token: the prompts contain the answers, and a peer stores KV of prompts only.
    """
    for conversation in conversations:
        for prompt in conversation.prompts[:TURNS]:
            await answer_by_vllm(peer.child, prompt, 1)
    for place in PLACES_OF_PEERS:
        prompt, answer = expected[place]
        turn = await answer_by_vllm(peer.child, prompt)
        found.turns[row_of(place, peer.name)].append(turn)
        found.compare(turn, answer)


async def four_turns(ours: Ours, conversation: Conversation) -> None:
    """The turns before the measured one."""
    for _ in range(TURNS):
        conversation.answered(await ours.answer(conversation.ask()))


def memcpy_s(block_bytes: int, count: int) -> float:
    """Seconds a block, when one copy moves as many bytes as `count` blocks have."""
    source = np.ones(block_bytes * count, np.uint8)
    target = np.zeros_like(source)
    # Neither is in a cache of the processor.
    np.ones(64 << 20, np.uint8).sum()
    start_s = time.monotonic()
    np.copyto(target, source)
    return (time.monotonic() - start_s) / count
