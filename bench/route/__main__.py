"""Compares the router's prefix index with Dynamo's RadixTree (its Python binding), in turns in one process.

    python -m bench.route [--workers 8,64,512] [--blocks 524288] [--rounds 30] [--memory-blocks 1048576]
        [--output bench/results]

Dynamo's columns need `pip install ai-dynamo-runtime==1.6.1` in the environment that runs this. Without it they are
left out. A lookup finds the cached depth of a prompt on each worker. It starts from ready hashes, from token ids as a
list, or from the u32 array of the tokenizer. The binding takes lists, so the array is for ours only. Each index
answers in its own form: ours is the array over workers that placement uses, Dynamo's a dictionary. Ingest decodes
32-block events from their bytes on the wire: ours protobuf with digests checked, Dynamo's the JSON of its binding.
Encoding is not measured. Every round runs each way for half a millisecond or once. Cells are medians of the rounds'
means. Python's garbage collector is on. Dynamo's own front end does not use this binding and is not measured.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.route.report import Report, render
from bench.route.workload import (
    BLOCK_TOKENS,
    HASHER,
    KINDS,
    PROMPT_TOKENS,
    Tokens,
    Workload,
    worker_ref,
)
from headrace.worker.v1 import worker_pb2
from headrace_kv.prefix.events import KvEvent, Tier, event_from_proto
from headrace_router.prefix_cache.index import ApplyResult, PrefixIndex

_ROUND_US = 500.0
_RESIDENT_BYTES_PER_PAGE = 4096


def peer_installed() -> bool:
    return importlib.util.find_spec("dynamo") is not None


def once_us(way: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    way()
    return (time.perf_counter() - start_s) * 1e6


def in_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Medians in µs."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    calls: dict[str, int] = {}
    for name, way in ways.items():
        once_us(way)
        calls[name] = max(1, int(_ROUND_US / once_us(way)))
    for _ in range(rounds):
        for name, way in ways.items():
            start_s = time.perf_counter()
            for _ in range(calls[name]):
                way()
            spent[name].append((time.perf_counter() - start_s) * 1e6 / calls[name])
    return {name: statistics.median(times) for name, times in spent.items()}


def empty_index(worker_count: int) -> PrefixIndex:
    """Adds workers with empty caches."""
    index = PrefixIndex()
    for worker in range(worker_count):
        ref = worker_ref(worker)
        index.add_worker(ref)
        index.apply(ref, KvEvent(ref.incarnation, 0, Tier.DEVICE, "snapshot", b"", 0, 0, True))
    return index


def ingest(workload: Workload, index: PrefixIndex, tree: Any, report: Report) -> None:
    """Fills both indexes in alternating slices. Medians of the slices' rates in million blocks/s."""
    parse = worker_pb2.SubscribeKvEventsResponse.FromString
    rates: dict[str, list[float]] = {"ours": [], "Dynamo": []}

    def fill_ours() -> None:
        for ref, wire in part.ours:
            result = index.apply(ref, event_from_proto(parse(wire)))
            if result is not ApplyResult.APPLIED:
                raise SystemExit(f"{ref}: {result}")

    def fill_peer() -> None:
        for worker, line in part.peer:
            tree.apply_event(worker, line)

    for number, part in enumerate(workload.slices()):
        ways = [("ours", fill_ours), ("Dynamo", fill_peer)]
        for name, way in ways if number % 2 else reversed(ways):
            if name == "ours" or tree is not None:
                rates[name].append(part.block_count / once_us(way))
    report.ingest[workload.worker_count] = {
        name: statistics.median(found) for name, found in rates.items() if found
    }


def look_up(
    tokens: Tokens, worker_count: int, index: PrefixIndex, tree: Any, rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Medians of lookups with hashes ready, and from tokens, after a check that all ways agree."""
    slots = [index.slot(worker_ref(number)) for number in range(worker_count)]
    listed, words, hashes = tokens.tolist(), array("I", tokens.tobytes()), HASHER.hashes(tokens)
    ready: dict[str, Callable[[], Any]] = {"ours": lambda: index.find(hashes)}
    whole: dict[str, Callable[[], Any]] = {
        "ours, list": lambda: index.find(HASHER.lazy(listed)),
        "ours, array": lambda: index.find(HASHER.lazy(words)),
    }
    expected = ready["ours"]()[slots].tolist()
    if tree is not None:
        from dynamo.llm import (  # type: ignore[import-not-found, unused-ignore]
            compute_block_hash_for_seq as local_hashes,
        )

        local = local_hashes(listed, BLOCK_TOKENS)
        ready["Dynamo"] = lambda: tree.find_matches(local).scores
        whole["Dynamo"] = lambda: tree.find_matches(local_hashes(listed, BLOCK_TOKENS)).scores
        theirs = {key[0]: depth for key, depth in ready["Dynamo"]().items()}
        if [theirs.get(number, 0) for number in range(worker_count)] != expected:
            raise SystemExit("the two indexes disagree")
    if any(whole[name]()[slots].tolist() != expected for name in ("ours, list", "ours, array")):
        raise SystemExit("our own ways disagree")
    return in_turns(ready, rounds), in_turns(whole, rounds)


def measure(worker_count: int, block_count: int, rounds: int, report: Report) -> None:
    tree: Any = None
    if peer_installed():
        from dynamo.llm import RadixTree

        tree = RadixTree()
    index = empty_index(worker_count)
    workload = Workload(worker_count, block_count, tree is not None)
    ingest(workload, index, tree, report)
    gc.collect()
    gc.freeze()
    for size, tokens in PROMPT_TOKENS.items():
        for kind in KINDS:
            query = workload.query(tokens, kind)
            ready, whole = look_up(query, worker_count, index, tree, rounds)
            report.ready[worker_count, size, kind] = ready
            report.whole[worker_count, size, kind] = whole
    ready, whole = look_up(workload.graded_tokens, worker_count, index, tree, rounds)
    report.ready[worker_count, "8k", "graded"] = ready
    report.whole[worker_count, "8k", "graded"] = whole


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _RESIDENT_BYTES_PER_PAGE


def measure_memory(which: str, block_count: int) -> None:
    """Memory that the blocks of one worker add to a process of its own. Prints bytes per block."""
    workload = Workload(1, block_count, which == "Dynamo")
    index = empty_index(1)
    tree: Any = None
    if which == "Dynamo":
        from dynamo.llm import RadixTree

        tree = RadixTree()
    slices = list(workload.slices())
    blocks = sum(part.block_count for part in slices)
    before = resident_bytes()
    parse = worker_pb2.SubscribeKvEventsResponse.FromString
    longest_us = 0.0
    for part in slices:
        if tree is not None:
            for worker, line in part.peer:
                tree.apply_event(worker, line)
        else:
            for ref, wire in part.ours:
                start_s = time.perf_counter()
                index.apply(ref, event_from_proto(parse(wire)))
                longest_us = max(longest_us, (time.perf_counter() - start_s) * 1e6)
    grown = resident_bytes() - before
    del slices
    gc.collect()
    gc.freeze()
    pause_us = once_us(gc.collect)
    start_s = time.perf_counter()
    index.remove_worker(worker_ref(0))
    index.sweep()
    first_sweep_us = (time.perf_counter() - start_s) * 1e6
    slice_us = statistics.median(once_us(index.sweep) for _ in range(50))
    print(grown / blocks, pause_us, longest_us, first_sweep_us, slice_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="8,64,512", help="worker counts")
    parser.add_argument(
        "--blocks", type=int, default=1 << 19, help="blocks over all workers, less the prompts"
    )
    parser.add_argument("--rounds", type=int, default=30, help="of which the median counts")
    parser.add_argument(
        "--memory-blocks", type=int, default=1 << 20, help="blocks of the memory measurement"
    )
    parser.add_argument("--output", type=Path, help="folder for route.md")
    parser.add_argument("--memory-of", choices=["ours", "Dynamo"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        measure_memory(options.memory_of, options.memory_blocks)
        return
    report = Report(memory_blocks=options.memory_blocks)
    for which in ["ours", "Dynamo"] if peer_installed() else ["ours"]:
        answer = subprocess.run(
            [
                *(sys.executable, "-m", "bench.route", "--memory-of", which),
                f"--memory-blocks={options.memory_blocks}",
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        report.memory[which] = tuple(map(float, answer.stdout.split()))
    for worker_count in map(int, options.workers.split(",")):
        measure(worker_count, options.blocks, options.rounds, report)
        gc.unfreeze()
    text = render(report)
    print(text)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "route.md").write_text(text)


if __name__ == "__main__":
    main()
