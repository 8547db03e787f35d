"""The same prefix blocks of many workers in the event formats of both indexes. For route.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace_kv.layout import WorkerRef
from headrace_kv.prefix.events import KvEvent, Tier, event_to_proto, pack_hashes, xor_of
from headrace_kv.prefix.hashing import PrefixHasher, root_hash

BLOCK_TOKENS = 16
EVENT_BLOCKS = 32
PROMPT_TOKENS = {"8k": 8_192, "32k": 32_768, "128k": 131_072}
KINDS = ("full", "half", "miss")
SLICES = 16
# Events arrive at some ten thousand per second, heartbeats once per second.
_HEARTBEAT_SLICES = 8
_SHARED_PROMPTS, _SHARED_BLOCKS, _OWN_BLOCKS = 64, 256, 512
_VOCABULARY = 150_000

HASHER = PrefixHasher(root_hash(1, "bench", BLOCK_TOKENS), BLOCK_TOKENS)

Tokens = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Chain:
    """Consecutive blocks from a prompt's first on: their chained hashes, and the peer's unchained ones."""

    hashes: list[int]
    local: list[int]

    def first(self, count: int) -> Chain:
        return Chain(self.hashes[:count], self.local[:count])


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice of all events. `ours` and `peer` hold a worker and a message each."""

    block_count: int
    ours: list[tuple[WorkerRef, bytes]]
    peer: list[tuple[int, bytes]]


@dataclass(slots=True)
class _Feed:
    """The running digest of one worker's events."""

    sequence: int = 0
    count: int = 0
    xor: int = 0
    lines: list[tuple[int | None, Chain]] = field(default_factory=list)


class Workload:
    """A quarter of the workers hold the whole longest prompt. All workers share prompts and have their own.

    For `graded`, another prompt of 8k, every worker holds a different depth.
    """

    def __init__(self, worker_count: int, block_count: int, local_hashes: bool) -> None:
        self.worker_count = worker_count
        self._random = np.random.default_rng(7)
        self._with_local = local_hashes
        self.longest = self.tokens(max(PROMPT_TOKENS.values()))
        self.graded_tokens = self.tokens(PROMPT_TOKENS["8k"])
        longest = self._hashed(self.longest)
        graded = self._hashed(self.graded_tokens)
        shared = [self._made_up(_SHARED_BLOCKS) for _ in range(_SHARED_PROMPTS)]
        self._feeds = [_Feed() for _ in range(worker_count)]
        for worker, feed in enumerate(self._feeds):
            left = block_count // worker_count
            depth = len(graded.hashes) * (worker + 1) // worker_count
            chains = [graded.first(depth)]
            if worker % 4 == 0:
                chains.append(longest)
            picked = min(len(shared), left // 2 // _SHARED_BLOCKS)
            chains += [shared[i] for i in self._random.permutation(_SHARED_PROMPTS)[:picked]]
            left -= picked * _SHARED_BLOCKS
            while left > 0:
                chains.append(self._made_up(min(_OWN_BLOCKS, left)))
                left -= _OWN_BLOCKS
            for chain in chains:
                self._cut(feed, chain)

    def tokens(self, count: int) -> Tokens:
        return self._random.integers(0, _VOCABULARY, count, dtype=np.uint32)

    def query(self, tokens: int, kind: str) -> Tokens:
        """A prompt that its workers hold completely, to the half, or not at all."""
        known = {"full": tokens, "half": tokens // 2, "miss": 0}[kind]
        return np.concatenate([self.longest[:known], self.tokens(tokens - known)])

    def slices(self) -> Iterable[Slice]:
        """All events with alternating workers, encoded as on the wire."""
        depth = max(len(feed.lines) for feed in self._feeds)
        turns = [
            (worker, *feed.lines[turn])
            for turn in range(depth)
            for worker, feed in enumerate(self._feeds)
            if turn < len(feed.lines)
        ]
        size = -(-len(turns) // SLICES)
        for start in range(0, len(turns), size):
            part = turns[start : start + size]
            ours = [self._ours(worker, chain) for worker, _, chain in part]
            if start // size % _HEARTBEAT_SLICES == _HEARTBEAT_SLICES - 1:
                ours += [self._heartbeat(worker) for worker in range(self.worker_count)]
            peer = [(worker, _peer_event(start, parent, chain)) for worker, parent, chain in part]
            yield Slice(
                sum(len(chain.hashes) for _, _, chain in part),
                ours,
                peer if self._with_local else [],
            )

    def _hashed(self, tokens: Tokens) -> Chain:
        hashes = HASHER.hashes(tokens)
        return Chain(hashes, _peer_hashes(tokens) if self._with_local else hashes)

    def _made_up(self, count: int) -> Chain:
        words = self._random.integers(0, 2**64, 2 * count, dtype=np.uint64).tolist()
        return Chain(words[:count], words[count:])

    def _cut(self, feed: _Feed, chain: Chain) -> None:
        for start in range(0, len(chain.hashes), EVENT_BLOCKS):
            part = slice(start, start + EVENT_BLOCKS)
            parent = chain.hashes[start - 1] if start else None
            feed.lines.append((parent, Chain(chain.hashes[part], chain.local[part])))

    def _ours(self, worker: int, chain: Chain) -> tuple[WorkerRef, bytes]:
        feed = self._feeds[worker]
        feed.sequence += 1
        feed.count += len(chain.hashes)
        feed.xor ^= xor_of(chain.hashes)
        ref = worker_ref(worker)
        event = KvEvent(
            ref.incarnation,
            feed.sequence,
            Tier.DEVICE,
            "stored",
            pack_hashes(chain.hashes),
            feed.count,
            feed.xor,
        )
        return ref, event_to_proto(event).SerializeToString()

    def _heartbeat(self, worker: int) -> tuple[WorkerRef, bytes]:
        feed, ref = self._feeds[worker], worker_ref(worker)
        event = KvEvent(
            ref.incarnation, feed.sequence, Tier.DEVICE, "heartbeat", b"", feed.count, feed.xor
        )
        return ref, event_to_proto(event).SerializeToString()


def worker_ref(worker: int) -> WorkerRef:
    return WorkerRef(f"decode-{worker}", "5f0c2a7b9d3e")


def _peer_hashes(tokens: Tokens) -> list[int]:
    from dynamo.llm import (  # type: ignore[import-not-found, unused-ignore]
        compute_block_hash_for_seq,
    )

    hashes: list[int] = compute_block_hash_for_seq(tokens.tolist(), BLOCK_TOKENS)
    return hashes


def _peer_event(number: int, parent: int | None, chain: Chain) -> bytes:
    blocks: Sequence[dict[str, int]] = [
        {"block_hash": block, "tokens_hash": local}
        for block, local in zip(chain.hashes, chain.local, strict=True)
    ]
    stored = {"parent_hash": parent, "blocks": blocks}
    event = {"event_id": number, "data": {"stored": stored}}
    return json.dumps(event, separators=(",", ":")).encode()
