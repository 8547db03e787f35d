"""CPU time of one routing decision by the number of workers: the router's own classes with workers in memory.

    python -m bench.decision [--workers 8,64,512] [--blocks 524288] [--rounds 30] [--output bench/results]

A decision hashes the prompt, looks every worker up in the prefix index, and computes the costs of the decode workers.
It also records the span that explains the choice, and builds the terms for the prefill queue. A quarter as many
prefill workers pull. All workers report load and announce their blocks through the router's own streams, over
channels that are lists. Cells are medians of rounds that alternate between the worker counts. Python's garbage
collector is on.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from bench.route.workload import BLOCK_TOKENS, PROMPT_TOKENS, Tokens, Workload, worker_ref
from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_common.deadlines import Deadline
from headrace_frontend.request.validation import PreparedRequest
from headrace_frontend.running.timeline import RequestTimeline
from headrace_kv.layout.layout import KvLayout, WorkerRef
from headrace_kv.layout.proto import layout_to_proto
from headrace_kv.prefix.events import KvEvent, Tier, event_to_proto
from headrace_router.dispatch.dispatcher import RequestDispatcher
from headrace_router.placement import (
    Candidates,
    KvAware,
    Placement,
    PlacementRequest,
    RoutePolicy,
)
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefix_cache.directory import PrefixCacheDirectory
from headrace_router.tracing.timeline import AttemptTimeline
from headrace_router.tracing.worker_clocks import WorkerClocks
from headrace_router.workers.directory import WorkerDirectory
from headrace_text.load import ByteCodec

MODEL = "bench"
TARGET_GROWTH = 2.0
_ROUND_S = 2e-3
_REPEAT_S = 1.0
_FILL_TIMEOUT_S = 40.0
_LAYOUT = KvLayout.attention(
    model=MODEL,
    dtype="float16",
    layer_count=32,
    kv_head_count=8,
    block_tokens=BLOCK_TOKENS,
    parts={"k": 256, "v": 256},
)


class ListedCall:
    """A stream of messages that are ready. It repeats the last message every second."""

    def __init__(self, messages: list[Any]) -> None:
        self._messages = messages
        self._next = 0

    async def read(self) -> Any:
        if self._next == len(self._messages):
            await asyncio.sleep(_REPEAT_S)
            self._next -= 1
        self._next += 1
        return self._messages[self._next - 1]

    def cancel(self) -> None:
        self._next = 0


class ListedChannel:
    """A channel to a worker: every streaming call returns the messages listed under its name."""

    def __init__(self, answers: dict[str, list[Any]]) -> None:
        self._answers = answers

    def unary_stream(self, path: str, **_: Any) -> Callable[..., ListedCall]:
        return lambda _request, **_: ListedCall(self._answers[path.rpartition("/")[2]])

    def unary_unary(self, path: str, **_: Any) -> Callable[..., None]:
        """Unary calls are made by name only: the benchmark makes none."""
        return lambda _request, **_: None

    async def close(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class _Fixed:
    policy: registry_pb2.Policy


@dataclass(slots=True)
class Site:
    """The parts of a router with `decode_count` decode workers and a quarter as many prefill workers."""

    decode_count: int
    workload: Workload
    view: WorkerDirectory
    prefixes: PrefixCacheDirectory
    queue: PrefillQueue
    generator: RequestDispatcher
    placement: Placement

    @classmethod
    async def made(cls, decode_count: int, block_count: int) -> Site:
        """Fills the index. Raises TimeoutError when it does not fill."""
        count = decode_count + max(1, decode_count // 4)
        workload = Workload(count, block_count, local_hashes=False)
        channels = _channels(workload, count)

        def open_channel(endpoint: str) -> Any:
            return channels[endpoint]

        view = WorkerDirectory(open_channel, b"")
        prefixes = PrefixCacheDirectory(open_channel, lambda: 1, event_timeout_s=_FILL_TIMEOUT_S)
        queue = PrefillQueue(1_024, sign=lambda task, ref, layout_hash: b"")
        placement = KvAware(Random(1))
        generator = RequestDispatcher(
            workers=view,
            queue=queue,
            placement=placement,
            prefixes=prefixes,
            policy=_Fixed(registry_pb2.Policy(local_prefill_max_tokens=64)),
            ticket_key_id=b"",
            migration_wait_s=0.0,
            on_migration=lambda reason: None,
            clocks=WorkerClocks(),
        )
        site = cls(decode_count, workload, view, prefixes, queue, generator, placement)
        members = [_member(number, decode_count) for number in range(count)]
        view.update(members)
        prefixes.update(members)
        for number in range(decode_count, count):
            queue.add_credits(queue.add_worker(worker_ref(number), MODEL, _LAYOUT), 4)
        async with asyncio.timeout(_FILL_TIMEOUT_S):
            for _ in itertools.takewhile(lambda _: not site.filled, itertools.count()):
                await asyncio.sleep(0.05)
        return site

    @property
    def filled(self) -> bool:
        """Whether every worker has reported, and every worker with a part of the graded prompt is in the index."""
        table, tokens = self.view.table(MODEL), self.workload.graded_tokens
        holders = np.count_nonzero(self.prefixes.cached_tokens(table, tokens, ""))
        least = self.decode_count - 1 - self.decode_count // (len(tokens) // BLOCK_TOKENS)
        reported = len(table) == self.decode_count and bool(table.reachable.all())
        return reported and int(holders) >= least

    def ways(self, size: str) -> dict[str, Callable[[], object]]:
        """The operations to time, for a prompt with half of it cached on a quarter of the workers."""
        return self._ways_of(self.workload.query(PROMPT_TOKENS[size], "half"))

    def graded(self) -> dict[str, Callable[[], object]]:
        """The same for a prompt with a different cached depth on every worker."""
        return self._ways_of(self.workload.graded_tokens)

    def _ways_of(self, prompt: Tokens) -> dict[str, Callable[[], object]]:
        """Requests take turns, because the router caches the hashes of the last prompt."""
        requests = [_request(tuple(prompt.tolist())) for _ in range(4)]
        tokens = requests[0].token_ids
        turns, others = itertools.cycle(requests[:2]), itertools.cycle(requests[2:])
        table = self.view.table(MODEL)
        candidates = Candidates(
            table, self.prefixes.cached_tokens(table, tokens, ""), self.queue.pulling_workers()
        )
        wish = inference_pb2.PREFILL_PLACEMENT_UNSPECIFIED
        asked = PlacementRequest(MODEL, len(tokens), wish, RoutePolicy(64), 30.0)
        deadline = Deadline.after(600.0)

        def decide() -> None:
            request = next(turns)
            decision = self.generator.route(request, RequestTimeline[AttemptTimeline](), deadline)
            if decision.remote:
                self.generator.task_terms(decision.worker, request.token_ids, "", deadline)

        def look_up() -> object:
            return self.prefixes.cached_tokens(table, next(others).token_ids, "")

        return {
            "whole decision": decide,
            "hashes and index": look_up,
            "choice": lambda: self.placement.choose(asked, candidates),
        }

    async def close(self) -> None:
        await self.prefixes.close()
        await self.view.close()


def _request(token_ids: tuple[int, ...]) -> PreparedRequest:
    return PreparedRequest(
        request_id="r",
        model=MODEL,
        codec=ByteCodec(),
        token_ids=token_ids,
        sampling=sampling_pb2.SamplingParams(),
        stop_token_ids=(),
        stop_strings=(),
        placement=inference_pb2.PREFILL_PLACEMENT_UNSPECIFIED,
    )


def _member(number: int, decode_count: int) -> registry_pb2.Member:
    ref = worker_ref(number)
    decodes = number < decode_count
    role = registry_pb2.Member.ROLE_DECODE if decodes else registry_pb2.Member.ROLE_PREFILL
    return registry_pb2.Member(
        worker_id=ref.worker_id,
        incarnation=ref.incarnation,
        role=role,
        endpoint=str(ref),
        model=MODEL,
        layout=layout_to_proto(_LAYOUT),
        max_model_len=1 << 18,
        max_num_seqs=64,
    )


def _channels(workload: Workload, count: int) -> dict[str, Any]:
    events: dict[WorkerRef, list[Any]] = {}
    for number in range(count):
        ref = worker_ref(number)
        empty = KvEvent(ref.incarnation, 0, Tier.DEVICE, "snapshot", b"", 0, 0, True)
        events[ref] = [event_to_proto(empty)]
    for part in workload.slices():
        for ref, wire in part.ours:
            events[ref].append(worker_pb2.SubscribeKvEventsResponse.FromString(wire))
    for found in events.values():
        last = found[-1]
        found.append(worker_pb2.SubscribeKvEventsResponse())
        found[-1].CopyFrom(last)
        found[-1].heartbeat.SetInParent()
    random = Random(3)
    return {
        str(ref): ListedChannel(
            {
                "SubscribeKvEvents": found,
                "WatchStatus": [
                    worker_pb2.WatchStatusResponse(
                        worker_id=ref.worker_id,
                        incarnation=ref.incarnation,
                        state=worker_pb2.WatchStatusResponse.STATE_SERVING,
                        running_requests=random.randrange(32),
                        reserved_blocks=random.randrange(4_096),
                        total_blocks=8_192,
                    )
                ],
            }
        )
        for ref, found in events.items()
    }


def in_turns(
    sites: dict[int, dict[str, Callable[[], object]]], rounds: int
) -> dict[str, dict[int, float]]:
    """Medians in µs by way and worker count."""
    spent: dict[tuple[str, int], list[float]] = {}
    calls: dict[tuple[str, int], int] = {}
    for count, ways in sites.items():
        for name, way in ways.items():
            way()
            start_s = time.thread_time()
            way()
            taken_s = time.thread_time() - start_s
            calls[name, count] = max(1, int(_ROUND_S / taken_s))
    for _ in range(rounds):
        for count, ways in sites.items():
            for name, way in ways.items():
                number = calls[name, count]
                start_s = time.thread_time()
                for _ in range(number):
                    way()
                taken_s = time.thread_time() - start_s
                spent.setdefault((name, count), []).append(taken_s * 1e6 / number)
    medians: dict[str, dict[int, float]] = {}
    for (name, count), times in spent.items():
        medians.setdefault(name, {})[count] = statistics.median(times)
    return medians


def render(found: dict[str, dict[str, dict[int, float]]], counts: list[int]) -> str:
    """Markdown with a row for each prompt and way."""
    head = ["prompt", "µs for", *(f"{count} workers" for count in counts), "growth", "target"]
    lines = ["One routing decision, by decode workers", ""]
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for prompt, ways in found.items():
        for name, medians in ways.items():
            growth = medians[counts[-1]] / medians[counts[0]]
            verdict = ""
            if name == "whole decision":
                verdict = f"< {TARGET_GROWTH:g}: {'met' if growth < TARGET_GROWTH else 'missed'}"
            cells = [prompt, name, *(f"{medians[count]:.0f}" for count in counts)]
            lines.append("| " + " | ".join([*cells, f"{growth:.2f}", verdict]) + " |")
    return "\n".join([*lines, ""])


async def measure(counts: list[int], block_count: int, rounds: int) -> str:
    """Builds all sites, then times them in turns."""
    sites = {count: await Site.made(count, block_count) for count in counts}
    gc.collect()
    gc.freeze()
    try:
        found = {}
        for size in PROMPT_TOKENS:
            ways = {count: site.ways(size) for count, site in sites.items()}
            found[f"{size} half"] = in_turns(ways, rounds)
        ways = {count: site.graded() for count, site in sites.items()}
        found["8k graded"] = in_turns(ways, rounds)
        return render(found, counts)
    finally:
        for site in sites.values():
            await site.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="8,64,512", help="decode worker counts")
    parser.add_argument("--blocks", type=int, default=1 << 19, help="blocks over all workers")
    parser.add_argument("--rounds", type=int, default=30, help="of which the median counts")
    parser.add_argument("--output", type=Path, help="folder for decision.md")
    options = parser.parse_args()
    # The workers send nothing while the rounds run.
    logging.disable(logging.WARNING)
    counts = [int(count) for count in options.workers.split(",")]
    text = asyncio.run(measure(counts, options.blocks, options.rounds))
    print(text)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "decision.md").write_text(text)


if __name__ == "__main__":
    main()
