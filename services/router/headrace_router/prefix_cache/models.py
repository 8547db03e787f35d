"""What the workers of every model have cached, as their own events say."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import grpc.aio
import numpy as np
from numpy.typing import NDArray

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.layout.proto import layout_from_proto
from headrace_kv.prefix.events import Tier
from headrace_kv.prefix.hashing import (
    PrefixHasher,
    PromptHashes,
    TokenIds,
    key_fingerprint,
    prefix_hasher,
)
from headrace_router.prefix_cache.event_stream import SILENCE_S, KvEventFeed
from headrace_router.prefix_cache.index import SLOTS_MAX, PrefixIndex
from headrace_router.prefix_cache.lookup import Depths
from headrace_router.workers.table import LoadTable, Numbers

_LOG = logging.getLogger(__name__)

HOST_CREDIT: Final = 0.75
DISK_CREDIT: Final = 0.25
# A worker has a second slot while a snapshot comes in, and its old ones until they are swept.
_WORKERS_MAX: Final = SLOTS_MAX // 2
_UPKEEP_INTERVAL_S: Final = 0.25
# Between two slices of a sweep, so that requests come first.
_SWEEP_PAUSE_S: Final = 0.002
_HASHABLE: Final = (list, tuple, array, bytes, memoryview, np.ndarray)
_ROLES: Final = (registry_pb2.Member.ROLE_PREFILL, registry_pb2.Member.ROLE_DECODE)


@dataclass(frozen=True, slots=True)
class _Followed:
    """What a feed is made of. Another one means another feed."""

    ref: WorkerRef
    endpoint: str
    model: str
    block_tokens: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where a table's workers are in an index: `rows[i]` of the table has bit `slots[i]`."""

    table: LoadTable
    generation: int
    slots: NDArray[np.intp]
    rows: NDArray[np.intp]


class PrefixCacheDirectory:
    """Follows all workers into one index for each model and block size. One event loop owns it.

    `prefix_hash_key` returns the deployment's, 0 while it is not known, which leaves everybody without credit. Blocks
    in slower tiers count for less: a `host_credit` or `disk_credit` of their tokens.
    """

    def __init__(
        self,
        open_channel: Callable[[str], grpc.aio.Channel],
        prefix_hash_key: Callable[[], int],
        *,
        host_credit: float = HOST_CREDIT,
        disk_credit: float = DISK_CREDIT,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._open_channel = open_channel
        self._prefix_hash_key = prefix_hash_key
        self._credits = (host_credit, disk_credit)
        self._silence_s = silence_s
        self._feeds: dict[_Followed, KvEventFeed] = {}
        self._faults: dict[WorkerRef, str] = {}
        self._scopes: dict[str, dict[int, ModelIndex]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._upkeep: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def faults(self) -> Mapping[WorkerRef, str]:
        """Workers whose caches cannot count, because they name blocks otherwise than this router does, and how."""
        return self._faults

    @property
    def key_fingerprint(self) -> int:
        """Of the key that prompts are hashed under; 0 while there is none."""
        return key_fingerprint(self._prefix_hash_key())

    def update(self, members: Iterable[registry_pb2.Member]) -> None:
        """Follows these members, and nobody else. Nothing happens after `close`."""
        if self._closed:
            return
        wanted = {_followed(member) for member in members if member.role in _ROLES}
        for gone in set(self._feeds) - wanted:
            self._end(self._feeds.pop(gone))
            self._faults.pop(gone.ref, None)
        used = Counter((followed.model, followed.block_tokens) for followed in self._feeds)
        for followed in wanted - set(self._feeds):
            key = (followed.model, followed.block_tokens)
            if used[key] >= _WORKERS_MAX:
                _LOG.warning("%s gets no credit for its cache: there are too many", followed.ref)
                continue
            used[key] += 1
            scope = self._scope(followed.model, followed.block_tokens)
            self._feeds[followed] = KvEventFeed(
                followed.ref,
                followed.endpoint,
                scope.index,
                self._open_channel,
                self._silence_s,
                partial(self._note_hashing, followed),
            )
        self._scopes = {
            model: kept
            for model, scopes in self._scopes.items()
            if (kept := {size: scope for size, scope in scopes.items() if used[model, size]})
        }
        if self._upkeep is None:
            self._upkeep = asyncio.create_task(self._keep_up(), name="prefix-index-upkeep")

    def cached_tokens(self, table: LoadTable, token_ids: TokenIds | Sequence[int]) -> Numbers:
        """What of the prompt each worker of the table holds. Shape [worker]."""
        found: Numbers = np.zeros(len(table))
        if table.workers:
            for scope, prompt in self._prompts(table.workers[0].model, token_ids):
                places = scope.places(table)
                if len(places.rows):
                    tiers = [scope.index.blocks(depths) for depths in scope.depths(prompt)]
                    blocks = self._credited(tiers)
                    found[places.rows] = blocks[places.slots] * scope.block_tokens
        return found

    def cached_refs(
        self, model: str, token_ids: TokenIds | Sequence[int], refs: Collection[WorkerRef]
    ) -> dict[WorkerRef, int]:
        """The same for a few workers of a model, whatever their role; those that hold none are left out."""
        found: dict[WorkerRef, int] = {}
        for scope, prompt in self._prompts(model, token_ids):
            among = scope.among(refs)
            device, *slower = (_only(among, depths) for depths in scope.depths(prompt))
            if not any(slower):
                found |= scope.index.scores(
                    [(blocks * scope.block_tokens, mask) for blocks, mask in device]
                )
                continue
            scores = [scope.index.scores(depths) for depths in (device, *slower)]
            for ref in set().union(*scores):
                blocks = self._credited([np.array(score.get(ref, 0.0)) for score in scores])
                found[ref] = int(blocks * scope.block_tokens)
        return found

    async def close(self) -> None:
        """Ends every stream."""
        self._closed = True
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.wait([self._upkeep])
        for feed in self._feeds.values():
            self._end(feed)
        self._feeds.clear()
        if self._closing:
            await asyncio.wait(self._closing)

    def _note_hashing(self, followed: _Followed, theirs: worker_pb2.KvHashing) -> None:
        """Says once what keeps a worker's cache from counting."""
        ours = worker_pb2.KvHashing(
            key_fingerprint=self.key_fingerprint, block_tokens=followed.block_tokens
        )
        if theirs == ours or not ours.key_fingerprint:
            self._faults.pop(followed.ref, None)
            return
        fault = f"it hashes {_hashing_in_words(theirs)}, this router {_hashing_in_words(ours)}"
        if self._faults.get(followed.ref) != fault:
            self._faults[followed.ref] = fault
            _LOG.warning("%s gets no credit for its cache: %s", followed.ref, fault)

    def _prompts(
        self, model: str, token_ids: TokenIds | Sequence[int]
    ) -> Iterable[tuple[ModelIndex, PromptHashes]]:
        key = self._prefix_hash_key()
        scopes = self._scopes.get(model)
        if not key or not scopes:
            return
        if not isinstance(token_ids, _HASHABLE):
            token_ids = list(token_ids)
        for scope in scopes.values():
            yield scope, scope.prompt(key, token_ids)

    def _credited(self, tiers: Sequence[Numbers]) -> Numbers:
        """Blocks of each tier, which contain the faster ones', as blocks of the fastest."""
        total = reached = tiers[0]
        for credit, blocks in zip(self._credits, tiers[1:], strict=True):
            deeper = np.maximum(reached, blocks)
            total = total + credit * (deeper - reached)
            reached = deeper
        return total

    def _scope(self, model: str, block_tokens: int) -> ModelIndex:
        scopes = self._scopes.setdefault(model, {})
        if block_tokens not in scopes:
            scopes[block_tokens] = ModelIndex(model, block_tokens)
        return scopes[block_tokens]

    def _end(self, feed: KvEventFeed) -> None:
        closing = feed.close()
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _keep_up(self) -> None:
        while True:
            await asyncio.sleep(_UPKEEP_INTERVAL_S)
            for feed in self._feeds.values():
                feed.check_silence()
            scopes = [scope for sizes in self._scopes.values() for scope in sizes.values()]
            for scope in scopes:
                await scope.sweep()


class ModelIndex:
    """One model in blocks of one size."""

    def __init__(self, model: str, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.index = PrefixIndex()
        self._model = model
        self._hasher: PrefixHasher | None = None
        self._rows: _Rows | None = None
        self._tokens: object = None
        self._prompt: PromptHashes | None = None
        self._found: list[Depths] = []
        self._found_for: PromptHashes | None = None
        self._found_at = 0
        self._refs: object = None
        self._refs_generation = 0
        self._refs_mask = 0

    def prompt(self, key: int, token_ids: TokenIds) -> PromptHashes:
        """A request asks more than once in a row: what was hashed for it stays while its tokens cannot change."""
        if self._prompt is None or self._tokens is not token_ids:
            prompt = self._hasher_of(key).lazy(token_ids)
            if not isinstance(token_ids, tuple):
                return prompt
            self._tokens, self._prompt = token_ids, prompt
        return self._prompt

    def among(self, refs: Collection[WorkerRef]) -> int:
        """The bits of these workers. Remembered for a set that cannot change, and while nobody's slot does."""
        if self._refs is not refs or self._refs_generation != self.index.generation:
            mask = self.index.mask(refs)
            if not isinstance(refs, frozenset):
                return mask
            self._refs, self._refs_generation = refs, self.index.generation
            self._refs_mask = mask
        return self._refs_mask

    def _hasher_of(self, key: int) -> PrefixHasher:
        """The key never changes once it is known."""
        if self._hasher is None:
            self._hasher = prefix_hasher(key, self._model, self.block_tokens)
        return self._hasher

    def depths(self, prompt: PromptHashes) -> list[Depths]:
        """By tier, fastest first, how deep anybody holds the prompt.

        Remembered while nothing changes: a request asks for its decode and its prefill workers in a row.
        """
        if self._found_for is not prompt or self._found_at != self.index.change_count:
            self._found = [self.index.find_prompt(prompt, tier=tier) for tier in Tier]
            self._found_for, self._found_at = prompt, self.index.change_count
        return self._found

    def places(self, table: LoadTable) -> _Rows:
        """Remembered for as long as neither the table nor anybody's slot changes."""
        known = self._rows
        if known is None or known.table is not table or known.generation != self.index.generation:
            known = self._rows = self._find_places(table)
        return known

    async def sweep(self) -> None:
        """Clears what workers that left have left behind, in small slices."""
        more = True
        while more:
            more = self.index.sweep()
            await asyncio.sleep(_SWEEP_PAUSE_S if more else 0)

    def _find_places(self, table: LoadTable) -> _Rows:
        row_of = {worker.ref: row for row, worker in enumerate(table.workers)}
        mask = self.index.mask(row_of)
        return _Rows(
            table=table,
            generation=self.index.generation,
            slots=self.index.slots(mask),
            rows=np.array([row_of[ref] for ref in self.index.refs(mask)], np.intp),
        )


def _only(among: int, depths: Depths) -> Depths:
    return [(blocks, common) for blocks, mask in depths if (common := mask & among)]


def _hashing_in_words(hashing: worker_pb2.KvHashing) -> str:
    return f"blocks of {hashing.block_tokens} tokens under key {hashing.key_fingerprint:08x}"


def _followed(member: registry_pb2.Member) -> _Followed:
    return _Followed(
        WorkerRef(member.worker_id, member.incarnation),
        member.endpoint,
        member.model,
        layout_from_proto(member.layout).block_tokens,
    )
