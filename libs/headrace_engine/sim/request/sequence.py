"""One request inside a sim engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from headrace_engine.interface import DecodeTokens, DecodeWork, PrefillWork, Sampling
from headrace_engine.sim.model.mix import U64Array, mix_words
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.request.handover import Handover
from headrace_engine.sim.request.mailbox import Mailbox


@dataclass(slots=True, eq=False)
class Generation:
    """What a decode request has beyond its tokens."""

    sampling: Sampling
    remote_kv: bool
    transferable_tokens: int
    awaits_first_token: bool = False
    mailbox: Mailbox = field(default_factory=Mailbox)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """How a prompt that is handed over chooses the first token of its answer, and who is told."""

    sampling: Sampling
    tell: Callable[[DecodeTokens], None]


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and its answer so far; `computed` tokens have their KV in `block_ids_by_group`.

    `hashes` has room for every position that will be computed; those of `tokens` are filled in.
    Exactly one of `handover` (prefill) and `generation` (decode) is set. `ended` forbids any
    further work; the blocks are given back when no step works on the sequence and nothing outside
    reads or writes them. `block_names` are the prefix hashes, as routers know them, of the first
    blocks. Of the `cached` tokens, `copied` came from main memory, which takes time: `copying`.
    """

    transfer_id: str
    tokens: list[int]
    prompt_count: int
    hashes: U64Array
    hash_sum: int
    handover: Handover | None = None
    generation: Generation | None = None
    first_token: FirstToken | None = None
    block_ids_by_group: tuple[tuple[int, ...], ...] = ()
    block_tables: tuple[U64Array, ...] = ()
    block_names: list[int] = field(default_factory=list)
    cached: int = 0
    copied: int = 0
    copying: bool = False
    computed: int = 0
    pushed: int = 0
    chunk_count: int = 0
    ended: bool = False
    in_step: bool = False
    receiving: bool = False
    compute_start_unix_ns: int = 0
    compute_end_unix_ns: int = 0

    @property
    def capacity(self) -> int:
        """Positions whose KV the sequence will need at most."""
        return len(self.hashes)

    @property
    def pending(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.tokens) - self.computed

    @property
    def is_ready(self) -> bool:
        """Whether it may be computed: nobody waits for its KV, and nobody has given it up."""
        if self.ended or self.receiving or self.copying:
            return False
        return self.handover is None or not self.handover.failed

    @property
    def prompt(self) -> list[int]:
        """The tokens that were asked about."""
        return self.tokens[: self.prompt_count]

    @property
    def answer(self) -> list[int]:
        """The tokens that were generated, here or elsewhere."""
        return self.tokens[self.prompt_count :]

    def reusable_tokens(self, keeps_state: bool) -> int:
        """How many of the prompt's first tokens need not be computed if their KV is known.

        A token that is to be answered is never among them. A state can only be computed from the
        first token on, or handed over with one token at least.
        """
        generation = self.generation
        if generation is None:
            return 0 if keeps_state else self.prompt_count
        if keeps_state:
            return max(0, generation.transferable_tokens - 1) if generation.remote_kv else 0
        # Whoever makes the first token must be handed the prompt.
        return generation.transferable_tokens - (1 if generation.awaits_first_token else 0)

    def prefixes(self, block_tokens: int, token_count: int) -> list[int]:
        """Prefix hashes of the full blocks among the first tokens."""
        full = token_count // block_tokens
        ends: U64Array = self.hashes[block_tokens - 1 : full * block_tokens : block_tokens]
        return [int(value) for value in ends]

    def append(self, token_id: int, model: SimModel) -> None:
        """Adds a generated token, and its prefix hash if its KV will be needed."""
        position = len(self.tokens)
        self.tokens.append(token_id)
        if position < self.capacity:
            sums = model.prefix_sums([token_id], position, self.hash_sum)
            self.hash_sum = int(sums[0])
            self.hashes[position] = mix_words(sums)[0]


def prefill_sequence(
    work: PrefillWork,
    model: SimModel,
    handover: Handover,
    first_token: FirstToken | None = None,
) -> Sequence:
    """A prompt that is computed and handed over."""
    sequence = _sequence(work.target.transfer_id, work.token_ids, len(work.token_ids), model)
    sequence.handover = handover
    sequence.first_token = first_token
    sequence.pushed = work.target.start_token
    return sequence


def decode_sequence(
    work: DecodeWork, sampling: Sampling, model: SimModel, max_model_len: int
) -> Sequence:
    """A prompt that is answered. The last token of the answer needs no KV."""
    total = min(work.prompt_tokens + sampling.max_tokens, max_model_len)
    sequence = _sequence(work.transfer_id, work.token_ids, total - 1, model)
    sequence.prompt_count = work.prompt_tokens
    sequence.generation = Generation(
        sampling, work.remote_kv, work.transferable_tokens, work.awaits_first_token
    )
    return sequence


def _sequence(
    transfer_id: str, token_ids: tuple[int, ...], capacity: int, model: SimModel
) -> Sequence:
    sums = model.prefix_sums(token_ids)
    hashes = np.empty(capacity, np.uint64)
    hashes[: len(token_ids)] = mix_words(sums)
    return Sequence(
        transfer_id=transfer_id,
        tokens=list(token_ids),
        prompt_count=len(token_ids),
        hashes=hashes,
        hash_sum=int(sums[-1]),
        compute_start_unix_ns=time.time_ns(),
    )
