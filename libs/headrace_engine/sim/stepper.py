"""Computes one step: writes KV layer by layer, and generates tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_engine.interface import DecodeTokens, Sampling, TokenLogprobs
from headrace_engine.receipts import StepColumns
from headrace_engine.sim.cache.memory import SimMemory
from headrace_engine.sim.cache.pools import CachePools
from headrace_engine.sim.model.bit_mixer import U64Array
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.sampling import (
    Choice,
    choice_is_complete,
    choose_token,
    digest_of,
    hidden_state_of,
    plain_token,
)
from headrace_engine.sim.model.settings import SimSettings
from headrace_engine.sim.ranks import Ranks
from headrace_engine.sim.sequence import Answer, Prompt, Sequence
from headrace_kv.layout import STATE, CacheGroup


class SimClock:
    """The time of the running event loop in seconds. A test may give an engine a clock that it advances itself."""

    def now_s(self) -> float:
        """The current time."""
        return asyncio.get_running_loop().time()

    async def sleep_until(self, due_s: float) -> None:
        """Returns when the time is `due_s` or later. Always lets other tasks run."""
        await asyncio.sleep(max(0.0, due_s - self.now_s()))

    async def wait(self, event: asyncio.Event) -> None:
        """Waits for an event that does not depend on this clock."""
        await event.wait()


class Chunk(NamedTuple):
    """Positions [start, end) of one sequence.

    `is_decode`: it is the last known token of a decode request, and so gives a new token.
    """

    sequence: Sequence
    start: int
    end: int
    is_decode: bool = False


def plan_step(sequences: Items[Sequence], token_budget: int, block_tokens: int) -> list[Chunk]:
    """One token of each sequence that generates; prompts share the rest of the budget, and come after these.

    `sequences` are in order of preference. Prompts get equal shares of whole blocks, but for a
    prompt's last chunk. At least one block is computed.
    """
    chunks: list[Chunk] = []
    prompts: list[Sequence] = []
    for sequence in sequences:
        computed = sequence.computed
        pending = len(sequence.tokens) - computed
        if pending == 1 and isinstance(sequence, Answer):
            chunks.append(Chunk(sequence, computed, computed + 1, True))
        elif pending:
            prompts.append(sequence)
    budget = max(block_tokens, token_budget - len(chunks))
    while prompts and budget >= block_tokens:
        sequence = prompts.pop(0)
        share = max(budget // (len(prompts) + 1) // block_tokens, 1) * block_tokens
        end = min(len(sequence.tokens), sequence.computed + share)
        chunks.append(Chunk(sequence, sequence.computed, end))
        budget -= end - sequence.computed
    return chunks


def columns_of(chunks: Items[Chunk]) -> StepColumns:
    """The requests of a step."""
    return StepColumns(
        [chunk.sequence.transfer_id for chunk in chunks if chunk.is_decode],
        [chunk.start for chunk in chunks if chunk.is_decode],
        [
            (one.transfer_id, start, end - start)
            for one, start, end, decodes in chunks
            if not decodes
        ],
    )


class StepWrites:
    """The positions of a step with their hashes and blocks, and the states that it advances."""

    def __init__(self, chunks: Items[Chunk], groups: tuple[CacheGroup, ...]) -> None:
        self._positions = np.concatenate(
            [np.arange(chunk.start, chunk.end, dtype=np.uint64) for chunk in chunks]
        )
        self._hashes = np.concatenate(
            [chunk.sequence.hashes[chunk.start : chunk.end] for chunk in chunks]
        )
        self._blocks = tuple(_blocks(chunks, index, group) for index, group in enumerate(groups))
        self._advances: _Advances | None = None
        if any(group.kind == STATE for group in groups):
            self._advances = _advances(chunks)

    def execute(self, memory: SimMemory, layers: range) -> None:
        """Writes these layers."""
        memory.write(layers, self._hashes, self._positions, self._blocks)
        if self._advances is not None:
            memory.advance_states(layers, *self._advances, self._blocks)


_Advances = tuple[U64Array, U64Array, NDArray[np.bool_]]
"""Of each advanced state: the hashes before and after, and whether there is none before."""


def _advances(chunks: Items[Chunk]) -> _Advances:
    is_first = np.array([chunk.start == 0 for chunk in chunks])
    # The first chunk of a prompt has no hash before it; any value will do.
    before = [chunk.sequence.hashes[max(0, chunk.start - 1)] for chunk in chunks]
    after = [chunk.sequence.hashes[chunk.end - 1] for chunk in chunks]
    return np.array(before, np.uint64), np.array(after, np.uint64), is_first


def _blocks(chunks: Items[Chunk], index: int, group: CacheGroup) -> U64Array:
    """Each position's block, or each chunk's page of a state."""
    tables = [chunk.sequence.block_tables[index] for chunk in chunks]
    if group.kind == STATE:
        return np.concatenate(tables)
    return np.concatenate(
        [
            table[np.arange(chunk.start, chunk.end) // group.block_tokens]
            for chunk, table in zip(chunks, tables, strict=True)
        ]
    )


@dataclass(eq=False)
class Stepper:
    """Computes chunks, in the time that the settings give. Requests keep their blocks while a step runs."""

    model: SimModel
    memory: SimMemory
    pools: CachePools
    ranks: Ranks
    settings: SimSettings
    clock: SimClock

    def __post_init__(self) -> None:
        self._groups = self.memory.layout().groups
        self.layers_arrived = asyncio.Event()
        """Set when `ranks` have more layers of a transfer."""

    def generate_from_hidden_state(self, answer: Answer, state: bytes) -> int:
        """Generates an answer's first token. Raises KvCorrupt when no prefill can have made the state."""
        choice = self._choose(answer, answer.work.sampling, answer.prompt_count, digest_of(state))
        answer.token_generated(choice.token_id, choice.logprobs)
        return choice.token_id

    async def compute(self, chunks: Items[Chunk], *, sends: bool) -> None:
        """Computes a step. With `sends`, the ranks send each layer as it is written."""
        layers = self.model.layer_count
        layer_s = step_layer_s(chunks, self.settings)
        writes = StepWrites(chunks, self._groups) if self.settings.verify else None
        if not sends and not self.ranks.arrivals.awaited:
            # Only the end of the step matters.
            if writes is not None:
                writes.execute(self.memory, range(layers))
            if layer_s:
                await self.clock.sleep_until(self.clock.now_s() + layers * layer_s)
            return
        due_s = self.clock.now_s()
        for layer in range(layers):
            if writes is not None:
                writes.execute(self.memory, range(layer, layer + 1))
            while self.ranks.arrivals.lacks(layer):
                self.layers_arrived.clear()
                await self.clock.wait(self.layers_arrived)
                due_s = max(due_s, self.clock.now_s())
            due_s += layer_s
            await self.clock.sleep_until(due_s)
            self.ranks.layer_written(layer)

    def advance(self, chunk: Chunk, start_ns: int) -> None:
        """Handles the result of a chunk that a step has computed, which began at `start_ns`."""
        sequence, start, end, _ = chunk
        sequence.chunk_computed(end, start_ns)
        stride = self.pools.stride_tokens
        if start // stride != end // stride and not sequence.is_partial:
            self.pools.register(sequence, start, end)
        if len(sequence.tokens) > end or sequence.ended:
            return
        if isinstance(sequence, Prompt):
            self.end_prefill(sequence)
        elif isinstance(sequence, Answer):
            self._generate(sequence)

    def end_prefill(self, prompt: Prompt) -> None:
        """The prompt is computed. The answer's first token does not wait for the rest of the transfer."""
        sampling = prompt.work.sampling
        if prompt.on_first_token is not None and sampling is not None:
            choice = self._choose(prompt, sampling, len(prompt.tokens), self._digest(prompt))
            prompt.on_first_token(DecodeTokens((choice.token_id,), choice.logprobs))
        prompt.close()

    def hidden_state(self, sequence: Sequence) -> bytes:
        """The state of the last token. All tokens are computed."""
        return hidden_state_of(self._digest(sequence))

    def _generate(self, answer: Answer) -> None:
        digest = self._digest(answer)
        if answer.is_plain:
            answer.token_generated(plain_token(digest, self.model.vocabulary))
            return
        sampling, count = answer.work.sampling, answer.prompt_count
        if choice_is_complete(sampling, answer.tokens[count:]):
            answer.end_answer(stopped=True)
            return
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if sampling.prompt_logprobs is not None and len(answer.tokens) == count:
            prompt_logprobs = self.model.prompt_logprobs(
                answer.tokens, answer.hashes, sampling.prompt_logprobs
            )
        choice = self._choose(answer, sampling, count, digest)
        answer.token_generated(choice.token_id, choice.logprobs, prompt_logprobs)

    def _digest(self, sequence: Sequence) -> int:
        if not self.settings.verify:
            return sequence.last_hash
        return self.memory.digest(sequence.block_ids_by_group, sequence.computed)

    def _choose(
        self, sequence: Sequence, sampling: Sampling, prompt_count: int, digest: int
    ) -> Choice:
        tokens = sequence.tokens
        return choose_token(
            digest, self.model.vocabulary, sampling, tokens[:prompt_count], tokens[prompt_count:]
        )


def step_layer_s(chunks: Items[Chunk], settings: SimSettings) -> float:
    """Seconds that one layer of a step with these chunks takes."""
    step_s = settings.decode_step_s if chunks[0].is_decode else 0.0
    if settings.prefill_s_per_token and not chunks[-1].is_decode:
        prompt_tokens = sum(chunk.end - chunk.start for chunk in chunks if not chunk.is_decode)
        step_s += prompt_tokens * settings.prefill_s_per_token
    return step_s / settings.layer_count + settings.layer_s
