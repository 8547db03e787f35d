"""The requests inside a sim engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from enum import Enum, auto

import numpy as np

from headrace_common.errors import HeadraceError
from headrace_engine.connector.sender_reports import SenderReports
from headrace_engine.connector.transfers import (
    PrefillTimes,
    PrefixParams,
    ReceiveParams,
    ScheduledRequest,
    SendParams,
)
from headrace_engine.interface import (
    AnswerSink,
    DecodeEnded,
    DecodeTokens,
    DecodeWork,
    PrefillWork,
    TokenLogprobs,
)
from headrace_engine.receipts import RequestCost
from headrace_engine.sim.block_names import BlockNames
from headrace_engine.sim.model.bit_mixer import U64Array, mix_int, mix_words
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.sampling import is_plain
from headrace_kv.messages import Reservation
from headrace_kv.prefix.events import Tier
from headrace_kv.prefix.images import hashed_token_ids
from headrace_kv.tiers.promises import Kept


class Wait(Enum):
    """What a request waits for: copies from tiers, a transfer, and the end of all reads."""

    COPY = auto()
    ARRIVAL = auto()
    QUIET = auto()


class Sequence:
    """A prompt and its answer so far. Others read its attributes, and only its methods change them.

    `computed` tokens have their KV in `block_ids_by_group`. `cached` ones were not computed here. Of these,
    `tier_tokens` were copied from each lower tier. A transfer brings the `transferred` tokens after them.
    `block_tables` holds the same block ids as arrays. `hashes` has room for the `capacity` positions that need KV at
    most; those of `tokens` are filled. `waits`: why no step may compute it. `params`: its transfers, until it has
    blocks. The blocks are in use until `is_releasable`.
    """

    def __init__(
        self,
        work: PrefillWork | DecodeWork,
        transfer_id: str,
        params: SendParams | ReceiveParams | None,
        capacity: int,
        model: SimModel,
        block_tokens: int,
    ) -> None:
        self.transfer_id = transfer_id
        self.priority = work.priority
        self.tokens = list(work.token_ids)
        # So KV and answers depend on the contents of images.
        hashed = hashed_token_ids(work.token_ids, work.images) if work.images else work.token_ids
        sums = model.prefix_sums(hashed, base=model.adapter_sum(work.adapter))
        self.hash_sum = int(sums[-1])
        self.hashes = np.empty(capacity, np.uint64)
        self.hashes[: len(hashed)] = mix_words(sums)
        self.last_hash = int(self.hashes[len(hashed) - 1])
        """That of the last token with KV."""
        self.names = BlockNames(
            self.tokens, self.hashes, block_tokens, work.cache_salt, work.images
        )
        self.capacity = capacity
        self.block_ids_by_group: tuple[tuple[int, ...], ...] = ()
        self.block_tables: tuple[U64Array, ...] = ()
        self.cached = self.transferred = self.computed = 0
        self.tier_tokens: Mapping[Tier, int] = {}
        self.load_failed = self.transfer_failed = self.ended = False
        self.is_partial = False
        """Whether it runs while layers of its KV are on their way."""
        self.waits: set[Wait] = set()
        self._params = params
        self._model = model
        self._planned = False

    @property
    def is_ready(self) -> bool:
        """Whether a step may compute it: it has not ended or failed, and waits for no KV."""
        return not self.ended and not self.waits

    @property
    def is_releasable(self) -> bool:
        """Whether it has ended, and no sender or remote rank uses its blocks (I1, I2)."""
        return self.ended and not self.waits

    def reusable_tokens(self, keeps_state: bool) -> int:
        """How many of its first tokens need no computing when their KV is cached.

        A state can only be computed from the first token on, or received with one token at least.
        """
        return 0 if keeps_state else len(self.tokens)

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
        self.cached += sum(tier_tokens.values())
        if tier_tokens:
            self.waits.add(Wait.COPY)
        if transferred:
            self.waits.add(Wait.ARRIVAL)

    def copies_ended(self, *, failed: bool) -> None:
        """No rank copies into its blocks any more."""
        self.end_wait(Wait.COPY)
        self.load_failed = failed

    def transfer_ended(self, *, failed: bool) -> None:
        """No other worker writes into its blocks any more, or it leaves these."""
        self.end_wait(Wait.ARRIVAL)
        self.transfer_failed = failed

    def layers_begun(self) -> None:
        """The first layers of its KV are in its blocks: it may run."""
        self.is_partial = True
        self.end_wait(Wait.ARRIVAL)
        self.kv_arrived()

    def layers_completed(self) -> None:
        """All layers of its KV are in its blocks."""
        self.is_partial = False

    def end_wait(self, wait: Wait) -> None:
        """It need not wait for this any more."""
        self.waits.discard(wait)

    def kv_arrived(self) -> None:
        """What it does not await any more is in its blocks. Of these tokens, those from tiers come first."""
        if Wait.COPY in self.waits:
            return
        transferred = 0 if Wait.ARRIVAL in self.waits else self.transferred
        self.computed = max(self.computed, self.cached + transferred)

    def blocks_lost(self) -> None:
        """It gives up its blocks, and begins again without transfers."""
        self.block_ids_by_group = self.block_tables = ()
        self.cached = self.transferred = self.computed = 0
        self.tier_tokens = {}
        self._planned = self.load_failed = self.transfer_failed = False

    def take_params(self) -> SendParams | ReceiveParams | None:
        """Its transfers, once: without their KV, it computes all tokens here."""
        params, self._params = self._params, None
        return params

    def part_of_step(self, end_token: int) -> ScheduledRequest:
        """Its tokens from the computed ones up to `end_token`, in a step. The first one states its blocks."""
        blocks = () if self._planned else self.block_ids_by_group
        is_first, self._planned = not self._planned, True
        count = end_token - self.computed
        return ScheduledRequest(self.transfer_id, self.computed, count, blocks, is_first)

    def chunk_computed(self, end_token: int, start_ns: int) -> None:
        """A step that began at `start_ns` has computed the KV of its tokens below `end_token`."""
        self.computed = end_token

    def finished(self, times: PrefillTimes | None, *, copied: bool) -> None:
        """It has ended. With `times` or `copied`, its blocks are in use until senders and copies are quiet."""
        if times is not None or copied:
            self.waits.add(Wait.QUIET)

    def first_token_received(self, token_id: int) -> None:
        """The answer's first token is known. Its caller has it already."""

    def fail(self, failure: HeadraceError) -> None:
        """Ends it with the failure."""
        self.ended = True

    def close(self) -> None:
        """Its caller reads nothing more, or nothing is left to compute."""
        self.ended = True


class Prompt(Sequence):
    """A prompt that is computed and sent. `times`: once it has computed and sent."""

    def __init__(
        self,
        work: PrefillWork,
        outgoing: SenderReports,
        on_first_token: Callable[[DecodeTokens], None] | None,
        model: SimModel,
        block_tokens: int,
    ) -> None:
        found, wanted = work.prefix, None
        if found is not None:
            wanted = PrefixParams(found.transfer_id, found.end_token, found.least_tokens)
        params = SendParams(work.target, wanted, work.cached_only)
        name, count = work.target.transfer_id, len(work.token_ids)
        super().__init__(work, name, params, count, model, block_tokens)
        self.work = work
        self.outgoing = outgoing
        self.on_first_token = on_first_token
        self.times: PrefillTimes | None = None

    def starts_fetch(self, reservation: Reservation) -> bool:
        """See RemotePrefix.start."""
        return self.work.prefix is not None and self.work.prefix.start(reservation)

    def finished(self, times: PrefillTimes | None, *, copied: bool) -> None:
        self.times = times
        super().finished(times, copied=copied)

    def fail(self, failure: HeadraceError) -> None:
        """Stops its senders too."""
        self.outgoing.fail(failure)
        super().fail(failure)


class Answer(Sequence):
    """A prompt that is answered. The last token of the answer needs no KV.

    `is_plain`: whether `plain_token` chooses its tokens. When the answer ends, `keep` promises what is computed, and
    `bill` has what it has cost.
    """

    def __init__(
        self,
        work: DecodeWork,
        model: SimModel,
        max_model_len: int,
        block_tokens: int,
        keep: Callable[[Sequence], Kept | None],
        bill: Callable[[str], RequestCost],
        sink: AnswerSink,
    ) -> None:
        capacity = min(work.prompt_tokens + work.sampling.max_tokens, max_model_len) - 1
        name = work.transfer_id
        params = None
        if work.remote_kv:
            params = ReceiveParams(name, work.awaits_first_token, work.computes_from)
        super().__init__(work, name, params, capacity, model, block_tokens)
        self.work = work
        self.sink = sink
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the answer has ended, with its failure if it has one."""
        self.is_plain = is_plain(work.sampling)
        self.awaits_first_token = work.awaits_first_token
        self.prompt_count = work.prompt_tokens
        self._keep, self._bill = keep, bill
        self._first_step_ns = 0
        self._has_step_tokens = False

    def reusable_tokens(self, keeps_state: bool) -> int:
        """The last token of a prompt is never among them."""
        work = self.work
        if work.sampling.prompt_logprobs is not None:
            return 0
        if keeps_state:
            return max(0, work.transferable_tokens - 1) if work.remote_kv else 0
        # A transfer that brings the first token must not be empty.
        return work.transferable_tokens - (1 if self.awaits_first_token else 0)

    def chunk_computed(self, end_token: int, start_ns: int) -> None:
        self.computed = end_token
        self._first_step_ns = self._first_step_ns or start_ns

    def first_token_received(self, token_id: int) -> None:
        if self.awaits_first_token:
            self.awaits_first_token = False
            self._append(token_id)

    def token_generated(
        self,
        token_id: int,
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        """Adds a token to the answer. It ends with a stop token or when it is full."""
        self.awaits_first_token = False
        if self._has_step_tokens and not logprobs:
            self.sink.add_tokens((token_id,))
        else:
            self._has_step_tokens = self._first_step_ns > 0
            start_ns = self._first_step_ns
            self.sink.put(DecodeTokens((token_id,), logprobs, start_ns, prompt_logprobs))
        needs_kv = self._append(token_id)
        stopped = token_id in self.work.sampling.stop_token_ids
        if stopped or not needs_kv:
            self.end_answer(stopped=stopped)

    def end_answer(self, *, stopped: bool) -> None:
        """The answer ends after its last token."""
        self.ended = True
        if not self.answered.done():
            # So the task of `decode` has ended when that of the sink's end runs.
            self.answered.set_result(None)
        kept, cost = self._keep(self), self._bill(self.transfer_id)
        self.sink.put(DecodeEnded(stopped, self.cached, self.tier_tokens, kept, cost))

    def _append(self, token_id: int) -> bool:
        """Whether the token needs KV. The last one of the longest answer does not."""
        position = len(self.tokens)
        self.tokens.append(token_id)
        if position >= self.capacity:
            return False
        self.hash_sum = self._model.next_sum(token_id, position, self.hash_sum)
        self.hashes[position] = self.last_hash = mix_int(self.hash_sum)
        return True

    def fail(self, failure: HeadraceError) -> None:
        """Its caller gets the failure, unless it has ended before."""
        if not self.ended and not self.answered.done():
            self.answered.set_exception(failure)
        super().fail(failure)
