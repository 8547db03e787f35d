"""One request inside a sim engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from headrace_common.callers.priority import Priority
from headrace_common.errors import HeadraceError
from headrace_engine.connector.transfers import (
    PrefillTimes,
    PrefixParams,
    ReceiveParams,
    ScheduledRequest,
    SendParams,
)
from headrace_engine.interface import (
    DecodeEnded,
    DecodeTokens,
    DecodeWork,
    PrefillWork,
    RemotePrefix,
    Sampling,
    TokenLogprobs,
)
from headrace_engine.sim.block_names import BlockNames
from headrace_engine.sim.events import DecodeEventQueue
from headrace_engine.sim.model.bit_mixer import U64Array, mix_int, mix_words
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.sampling import is_plain
from headrace_engine.sim.outgoing import SenderReports
from headrace_engine.step_budget import NO_BOUNDS, AnswerPace, DueToken, TokenBounds
from headrace_kv.prefix.events import Tier
from headrace_kv.prefix.images import hashed_token_ids
from headrace_kv.tiers.promises import Kept


class Wait(Enum):
    """What a request waits for: copies from tiers, the time that they take, a transfer, and the end of all reads."""

    COPY = auto()
    LOAD = auto()
    ARRIVAL = auto()
    QUIET = auto()


@dataclass(frozen=True, slots=True)
class DecodeTerms:
    """What only a decode request has."""

    sampling: Sampling
    remote_kv: bool
    transferable_tokens: int
    plain: bool = False
    """Whether `plain_token` chooses its tokens."""
    keep: Callable[[Sequence], Kept | None] = lambda sequence: None
    """Promises what is computed when the answer ends."""
    events: DecodeEventQueue = field(default_factory=DecodeEventQueue)


@dataclass(frozen=True, slots=True)
class FirstTokenRequest:
    """How a prefill request chooses the answer's first token, and the callback that gets it."""

    sampling: Sampling
    on_token: Callable[[DecodeTokens], None]


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and its answer so far. Others read its fields, and only its methods change them.

    `computed` tokens have their KV in `block_ids_by_group`. `cached` ones were not computed here. Of these, `loaded`
    were copied from lower tiers: `tier_tokens` from each. A transfer brings the `transferred` tokens after them.
    `block_tables` holds the same block ids as arrays. `hashes` has room for every position that needs KV; those of
    `tokens` are filled. Exactly one of `outgoing` (prefill) and `generation` (decode) is set. `params`: its transfers,
    until it has blocks. `waits`: why no step may compute it. A prefill request has `times` once it has computed and
    sent. The blocks are in use until `is_releasable`.
    """

    transfer_id: str
    tokens: list[int]
    prompt_count: int
    hashes: U64Array
    hash_sum: int
    names: BlockNames
    params: SendParams | ReceiveParams | None = None
    priority: Priority = Priority.NORMAL
    bounds: TokenBounds = NO_BOUNDS
    outgoing: SenderReports | None = None
    generation: DecodeTerms | None = None
    first_token: FirstTokenRequest | None = None
    prefix: RemotePrefix | None = None
    cached_only: bool = False
    awaits_first_token: bool = False
    block_ids_by_group: tuple[tuple[int, ...], ...] = ()
    block_tables: tuple[U64Array, ...] = ()
    cached: int = 0
    loaded: int = 0
    tier_tokens: Mapping[Tier, int] = field(default_factory=dict)
    transferred: int = 0
    load_failed: bool = False
    computed: int = 0
    ended: bool = False
    waits: set[Wait] = field(default_factory=set)
    times: PrefillTimes | None = None
    first_step_ns: int = 0
    _steps: int = 0
    _planned: bool = False
    _pace: AnswerPace | None = None

    def due_token(self, now_s: float) -> DueToken:
        """When the next token of an answer with a bound is due, counted from the first call."""
        generated = len(self.tokens) - self.prompt_count
        if self._pace is None:
            self._pace = AnswerPace(self.bounds.tpot_s, now_s, generated)
        return self._pace.due(generated, self.capacity - self.prompt_count)

    @property
    def capacity(self) -> int:
        """Positions that need KV at most."""
        return len(self.hashes)

    @property
    def pending(self) -> int:
        """Tokens that still need their KV computed."""
        return len(self.tokens) - self.computed

    @property
    def is_ready(self) -> bool:
        """Whether a step may compute it: it has not ended or failed, and waits for no KV."""
        return not self.ended and not self.waits

    @property
    def is_releasable(self) -> bool:
        """Whether it has ended, and no step, sender or remote rank uses its blocks (I1, I2)."""
        return (
            self.ended
            and not self._steps
            and not self.waits & {Wait.COPY, Wait.ARRIVAL, Wait.QUIET}
        )

    def reusable_tokens(self, keeps_state: bool) -> int:
        """How many of the prompt's first tokens need no computing when their KV is cached.

        The last token of a prompt that is decoded here is never among them. A state can only be
        computed from the first token on, or received with one token at least.
        """
        generation = self.generation
        if generation is None:
            return 0 if keeps_state else self.prompt_count
        if generation.sampling.prompt_logprobs is not None:
            return 0
        if keeps_state:
            return max(0, generation.transferable_tokens - 1) if generation.remote_kv else 0
        # A transfer that brings the first token must not be empty.
        return generation.transferable_tokens - (1 if self.awaits_first_token else 0)

    def blocks_allocated(
        self, block_ids_by_group: tuple[tuple[int, ...], ...], cached_tokens: int
    ) -> None:
        """It holds these blocks. They have the KV of its first `cached_tokens`."""
        self.block_ids_by_group = block_ids_by_group
        self.block_tables = tuple(np.asarray(ids, np.uint64) for ids in block_ids_by_group)
        self.cached = self.computed = cached_tokens

    def kv_awaited(self, tier_tokens: Mapping[Tier, int], transferred: int) -> None:
        """The KV of tokens after the cached ones is copied from tiers, and then that of others comes by a transfer."""
        self.tier_tokens, self.transferred = tier_tokens, transferred
        self.loaded = sum(tier_tokens.values())
        self.cached += self.loaded
        if self.loaded:
            self.wait(Wait.COPY)
        if transferred:
            self.wait(Wait.ARRIVAL)

    def copies_ended(self, *, failed: bool) -> None:
        """Nothing is copied into its blocks any more."""
        self.end_wait(Wait.COPY)
        self.load_failed = failed

    def wait(self, wait: Wait) -> None:
        """It waits for this from now on, until `end_wait`."""
        self.waits.add(wait)

    def end_wait(self, wait: Wait) -> None:
        """It need not wait for this any more."""
        self.waits.discard(wait)

    def kv_arrived(self) -> None:
        """What it does not await any more is in its blocks."""
        transferred = 0 if Wait.ARRIVAL in self.waits else self.transferred
        self.computed = max(self.computed, self.cached + transferred)

    def blocks_lost(self) -> None:
        """It gives up its blocks, and begins again without its `prefix`."""
        self.block_ids_by_group = self.block_tables = ()
        self.cached = self.loaded = self.transferred = self.computed = 0
        self.tier_tokens = {}
        self.prefix = None
        self._planned = self.load_failed = False

    def take_params(self) -> SendParams | ReceiveParams | None:
        """Its transfers, once: without their KV, it computes all tokens here."""
        params, self.params = self.params, None
        return params

    def part_of_step(self, end_token: int) -> ScheduledRequest:
        """Its tokens from the computed ones up to `end_token`, in a step. The first one states its blocks."""
        blocks = () if self._planned else self.block_ids_by_group
        is_first, self._planned = not self._planned, True
        count = end_token - self.computed
        return ScheduledRequest(self.transfer_id, self.computed, count, blocks, is_first)

    def step_started(self) -> None:
        """A step is planned that computes a chunk of it."""
        self._steps += 1
        if not self.first_step_ns:
            self.first_step_ns = time.monotonic_ns()

    def step_ended(self) -> None:
        """A step with a chunk of it has ended."""
        self._steps -= 1

    def chunk_computed(self, end_token: int) -> None:
        """The KV of its tokens below `end_token` is computed."""
        self.computed = end_token

    def finished(self, times: PrefillTimes | None, *, copied: bool) -> None:
        """It has ended. With `times` or `copied`, its blocks are in use until senders and copies are quiet."""
        self.times = times
        if times is not None or copied:
            self.wait(Wait.QUIET)

    def first_token_received(self, token_id: int, model: SimModel) -> None:
        """The answer's first token is known. Its caller has it already."""
        if self.awaits_first_token:
            self.awaits_first_token = False
            self._append(token_id, model)

    def token_generated(
        self, token_id: int, logprobs: TokenLogprobs | None, model: SimModel
    ) -> None:
        """Adds a token to the answer and to the events. It ends with a stop token or when it is full."""
        generation = self.generation
        assert generation is not None
        self.awaits_first_token = False
        generation.events.put_token(token_id, logprobs, self.first_step_ns)
        needs_kv = self._append(token_id, model)
        stopped = token_id in generation.sampling.stop_token_ids
        if stopped or not needs_kv:
            self.end_answer(stopped=stopped)

    def end_answer(self, *, stopped: bool) -> None:
        """The answer ends after its last token."""
        generation = self.generation
        assert generation is not None
        self.ended = True
        kept = generation.keep(self)
        generation.events.put_end(DecodeEnded(stopped, self.cached, self.tier_tokens, kept))

    def _append(self, token_id: int, model: SimModel) -> bool:
        """Whether the token needs KV. The last one of the longest answer does not."""
        position = len(self.tokens)
        self.tokens.append(token_id)
        if position >= self.capacity:
            return False
        self.hash_sum = model.next_sum(token_id, position, self.hash_sum)
        self.hashes[position] = mix_int(self.hash_sum)
        return True

    def fail(self, failure: HeadraceError) -> None:
        """Stops its senders; ends it with the failure."""
        if self.outgoing is not None:
            self.outgoing.fail(failure)
        if self.generation is not None and not self.ended:
            self.generation.events.put_failure(failure)
        self.ended = True

    def close(self) -> None:
        """Its caller reads nothing more, or nothing is left to compute."""
        self.ended = True


def prefill_sequence(
    work: PrefillWork,
    model: SimModel,
    outgoing: SenderReports,
    block_tokens: int,
    first_token: FirstTokenRequest | None = None,
    *,
    fetches: bool = True,
) -> Sequence:
    """A prompt that is computed and sent. What it may fetch counts only where the engine `fetches`."""
    hashes, hash_sum = _hash_prompt(work, len(work.token_ids), model)
    prefix = work.prefix if fetches else None
    if prefix is not None and prefix.end_token > len(work.token_ids):
        prefix = None
    wanted = None
    if prefix is not None:
        wanted = PrefixParams(prefix.transfer_id, prefix.end_token, prefix.least_tokens)
    tokens = list(work.token_ids)
    return Sequence(
        transfer_id=work.target.transfer_id,
        tokens=tokens,
        prompt_count=len(work.token_ids),
        hashes=hashes,
        hash_sum=hash_sum,
        params=SendParams(work.target, wanted, work.cached_only),
        names=BlockNames(tokens, hashes, block_tokens, work.cache_salt, work.images),
        priority=work.priority,
        bounds=work.bounds,
        outgoing=outgoing,
        first_token=first_token,
        prefix=prefix,
        cached_only=work.cached_only,
    )


def decode_sequence(
    work: DecodeWork,
    sampling: Sampling,
    model: SimModel,
    max_model_len: int,
    block_tokens: int,
    keep: Callable[[Sequence], Kept | None] = lambda sequence: None,
) -> Sequence:
    """A prompt that is answered. The last token of the answer needs no KV. `keep`: see DecodeTerms."""
    total = min(work.prompt_tokens + sampling.max_tokens, max_model_len)
    hashes, hash_sum = _hash_prompt(work, total - 1, model)
    tokens = list(work.token_ids)
    return Sequence(
        transfer_id=work.transfer_id,
        tokens=tokens,
        prompt_count=work.prompt_tokens,
        hashes=hashes,
        hash_sum=hash_sum,
        params=ReceiveParams(work.transfer_id, work.awaits_first_token) if work.remote_kv else None,
        names=BlockNames(tokens, hashes, block_tokens, work.cache_salt, work.images),
        priority=work.priority,
        bounds=work.bounds,
        generation=DecodeTerms(
            sampling, work.remote_kv, work.transferable_tokens, is_plain(sampling), keep
        ),
        awaits_first_token=work.awaits_first_token,
    )


def _hash_prompt(
    work: PrefillWork | DecodeWork, capacity: int, model: SimModel
) -> tuple[U64Array, int]:
    """The prompt's hashes in an array of `capacity` positions, and its hash sum."""
    # So KV and answers depend on the contents of images.
    token_ids = hashed_token_ids(work.token_ids, work.images) if work.images else work.token_ids
    sums = model.prefix_sums(token_ids, base=model.adapter_sum(work.adapter))
    hashes = np.empty(capacity, np.uint64)
    hashes[: len(work.token_ids)] = mix_words(sums)
    return hashes, int(sums[-1])
