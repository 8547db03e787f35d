"""Events are lost, duplicated and reordered at random. No worker has credit for missing blocks for longer than one
repair interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.worker.v1 import worker_pb2
from headrace_engine.prefix_event_log import PrefixEventLog
from headrace_kv.layout import WorkerRef
from headrace_kv.prefix.events import KvEvent, event_from_proto, event_to_proto
from headrace_router.prefix_cache.index import ApplyResult, PrefixIndex

WORKERS = 4
# The prompts form a tree with forks. The hash of a block depends on its path.
FORKS = (0, 3, 7)
PROMPT_BLOCKS = 14


def block_hash(fork: int, position: int) -> int:
    """The hash of a block. Prompts share the blocks before their fork."""
    own = fork if position >= FORKS[fork] else 0
    return (own * 1_000 + position + 1) * 0x9E3779B97F4A7C15 % 2**64


PROMPTS = [
    [block_hash(fork, position) for position in range(PROMPT_BLOCKS)] for fork in range(len(FORKS))
]
BLOCKS = sorted({block for prompt in PROMPTS for block in prompt})


@dataclass
class Worker:
    """One worker, the blocks of its engine, and its event stream to the router."""

    ref: WorkerRef
    publisher: PrefixEventLog
    held: set[int] = field(default_factory=set)
    stream: list[KvEvent] = field(default_factory=list)

    def depth(self, prompt: Sequence[int]) -> int:
        """The model: how many blocks, from the first on, the engine could use."""
        for depth, block in enumerate(prompt):
            if block not in self.held:
                return depth
        return len(prompt)


class Deployment:
    """Workers, an index, and a network that loses, duplicates and reorders events."""

    def __init__(self) -> None:
        self.index = PrefixIndex(slots_max=32)
        self.workers = [self.start(number, 0) for number in range(WORKERS)]

    def start(self, number: int, incarnation: int) -> Worker:
        ref = WorkerRef(f"w{number}", f"i{incarnation}")
        self.index.add_worker(ref)
        # A short replay buffer: a replay repairs some gaps, a snapshot the others.
        worker = Worker(ref, PrefixEventLog(ref.incarnation, replay_hashes_max=12))
        worker.stream += worker.publisher.snapshot()
        return worker

    def restart(self, number: int) -> None:
        old = self.workers[number].ref
        self.index.remove_worker(old)
        self.workers[number] = self.start(number, int(old.incarnation[1:]) + 1)

    def deliver(self, worker: Worker, events: Sequence[KvEvent]) -> bool:
        """Delivers events over the wire. Returns whether the index needs a new subscription."""
        needs_resync = False
        for event in events:
            wire = event_to_proto(event).SerializeToString()
            received = event_from_proto(worker_pb2.SubscribeKvEventsResponse.FromString(wire))
            needs_resync |= self.index.apply(worker.ref, received) is ApplyResult.NEEDS_RESYNC
        return needs_resync

    def repair_interval(self) -> None:
        """Reads all streams to their ends, sends heartbeats, and subscribes again where needed."""
        for worker in self.workers:
            self.deliver(worker, worker.stream)
            worker.stream.clear()
            for _ in range(3):
                if not self.deliver(worker, worker.publisher.heartbeats()):
                    break
                since = self.index.resume_after(worker.ref)
                missing = worker.publisher.replay(since) if since else None
                if missing is None:
                    missing = worker.publisher.snapshot()
                self.deliver(worker, missing)
            else:
                raise AssertionError("three subscriptions do not repair it")
        self.index.sweep(16)

    def check(self) -> None:
        for prompt in PROMPTS:
            blocks = self.index.find(prompt)
            slots = [self.index.slot(worker.ref) for worker in self.workers]
            expected = [worker.depth(prompt) for worker in self.workers]
            assert [blocks[slot] for slot in slots] == expected
            assert blocks.sum() == sum(expected)


def change(worker: Worker, kind: str, fork: int, start: int, count: int) -> None:
    """The engine stores or evicts blocks, also in the middle of a prompt."""
    prompt = PROMPTS[fork]
    blocks = prompt[start : start + count]
    if kind == "store" and blocks:
        worker.held |= set(blocks)
        worker.stream += worker.publisher.stored(prompt[start - 1] if start else None, blocks)
    elif kind == "remove":
        worker.held -= set(blocks)
        worker.stream += worker.publisher.removed(blocks)
    elif kind == "clear":
        worker.held.clear()
        worker.stream += worker.publisher.cleared()


def disturb(deployment: Deployment, worker: Worker, kind: str, position: int, count: int) -> None:
    """The network changes the stream, or the worker restarts."""
    stream = worker.stream
    part = slice(position, position + count)
    if kind == "lose":
        del stream[part]
    elif kind == "double":
        stream[position:position] = stream[part]
    elif kind == "reorder":
        stream[part] = reversed(stream[part])
    elif kind == "delay":
        held_back, stream[part] = stream[part], []
        stream += held_back
    elif kind == "deliver":
        deployment.deliver(worker, stream[part])
        del stream[part]
    elif kind == "restart":
        deployment.restart(int(worker.ref.worker_id[1:]))


ENGINE = ("store", "remove", "clear")
# Repeated kinds have more weight: a cache that is often cleared tests little.
KINDS = ["store"] * 6 + ["remove"] * 3 + ["clear", "restart", "repair"]
KINDS += ["lose", "double", "reorder", "delay", "deliver"]

steps = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, WORKERS - 1),
        st.integers(0, len(FORKS) - 1),
        st.integers(0, PROMPT_BLOCKS - 1),
        st.integers(1, PROMPT_BLOCKS),
    ),
    min_size=5,
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(steps=steps)
def test_no_credit_for_missing_blocks_remains_after_a_repair_interval(
    steps: list[tuple[str, int, int, int, int]],
) -> None:
    deployment = Deployment()
    for kind, number, fork, start, count in steps:
        worker = deployment.workers[number]
        if kind == "repair":
            deployment.repair_interval()
            deployment.check()
        elif kind in ENGINE:
            change(worker, kind, fork, start, count)
        else:
            disturb(deployment, worker, kind, start % 5, count % 5 + 1)
    deployment.repair_interval()
    deployment.check()
    for worker in deployment.workers:
        worker_blocks = [block for block in BLOCKS if worker.held and block in worker.held]
        worker.stream += worker.publisher.removed(worker_blocks)
        worker.held.clear()
    deployment.repair_interval()
    deployment.check()
    for _ in range(100):
        if not deployment.index.sweep(16):
            break
    assert deployment.index.block_count == 0
