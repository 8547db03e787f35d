"""Times copies of KV blocks between KV memory and main memory, beside one copy of as many adjacent bytes.

    python -m bench.tier_copies [--device cpu] [--blocks 64] [--rounds 20] [--output bench/results]

KV memory is that of one rank, in blocks of 16 tokens: 32 layers, 8 KV heads of 128 channels, bfloat16. Layers lie one
after the other, as in vLLM. Blocks are random ones, and main memory has each in one piece. For a device, the one copy
is from or to page-locked memory. Ways alternate within a round. Then a matrix product runs again and again, alone and
while blocks are copied without a pause.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from bench.placement.report import percentile
from headrace_engine.torch_memory.device_memory import open_tier_memory
from headrace_engine.torch_memory.stream_order import mark_compute
from headrace_kv.layout import KvLayout, RankMemory
from headrace_kv.prefix.events import Tier
from headrace_kv.shard_map import HEAD_OUTER, place_regions
from headrace_kv.tiers.copier import TierCopier
from headrace_kv.tiers.tiers import TierCopy

LAYOUT: Final = KvLayout.attention(
    model="m",
    dtype="bfloat16",
    layer_count=32,
    kv_head_count=8,
    block_tokens=16,
    parts={"kv": 512},
    block_format="token_outer",
)
MATRIX_SIDE: Final = {"cuda": 8_192, "cpu": 512}
STORE, LOAD = "to main memory", "to KV memory"
WAYS: Final = (STORE, LOAD)


@dataclass(slots=True)
class Times:
    """Seconds of each round, by way, and of each step, by whether it ran beside copies."""

    tiers_s: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    limit_s: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    step_s: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})


class Rig:
    """KV memory of a device, its tiers, and memory for the limit."""

    def __init__(self, device: torch.device, block_count: int, memory_block_count: int) -> None:
        placed = place_regions(LAYOUT, 0, (memory_block_count,), HEAD_OUTER)
        self.device = device
        self.data = torch.ones(placed.arena_bytes, dtype=torch.uint8, device=device)
        memory = open_tier_memory(self.data)
        storage = self.data.untyped_storage()
        self.copier = TierCopier(
            LAYOUT,
            RankMemory(0, "", "", storage.data_ptr(), storage.nbytes(), placed.regions),
            {Tier.HOST: block_count},
            device_memory=memory,
        )
        self.block_count = block_count
        self._blocks = range(memory_block_count)
        self.nbytes = block_count * self.copier.block_bytes
        pinned = device.type == "cuda"
        self.adjacent = torch.ones(self.nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._random = random.Random(1)

    def copy(self, way: str) -> None:
        """Copies other blocks each time."""
        blocks = tuple(self._random.sample(self._blocks, self.block_count))
        host = tuple(range(self.block_count))
        mark = mark_compute(self.device)
        if way == STORE:
            self.copier.copy(TierCopy(Tier.DEVICE, Tier.HOST, blocks, host), mark)
        else:
            self.copier.copy(TierCopy(Tier.HOST, Tier.DEVICE, host, blocks), mark)

    def copy_adjacent(self, way: str) -> None:
        """One copy of as many bytes."""
        part = self.data[: self.nbytes]
        target, source = (self.adjacent, part) if way == STORE else (part, self.adjacent)
        target.copy_(source, non_blocking=True)
        self.settle()

    def settle(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def timed(run: Callable[[], None]) -> float:
    start_s = time.monotonic()
    run()
    return time.monotonic() - start_s


def measure(rig: Rig, rounds: int) -> Times:
    """All rounds, after two that are not counted."""
    times = Times()
    for number in range(-2, rounds):
        into = times if number >= 0 else Times()
        for way in WAYS:
            into.tiers_s[way].append(timed(lambda way=way: rig.copy(way)))  # type: ignore[misc]
            into.limit_s[way].append(timed(lambda way=way: rig.copy_adjacent(way)))  # type: ignore[misc]
    side = MATRIX_SIDE[rig.device.type]
    matrix = torch.rand((side, side), device=rig.device).to(torch.bfloat16)

    def step() -> None:
        torch.mm(matrix, matrix)
        rig.settle()

    for number in range(-2, rounds):
        into = times if number >= 0 else Times()
        for beside in (False, True):
            into.step_s[beside] += steps_s(rig, step, beside=beside)
    return times


def steps_s(rig: Rig, step: Callable[[], None], *, beside: bool) -> list[float]:
    """Seconds of some steps, with `beside` while a thread copies blocks both ways."""
    stop = threading.Event()

    def copy() -> None:
        while not stop.is_set():
            for way in WAYS:
                rig.copy(way)

    thread = threading.Thread(target=copy)
    if beside:
        thread.start()
    try:
        return [timed(step) for _ in range(10)]
    finally:
        stop.set()
        if beside:
            thread.join()


def report(rig: Rig, times: Times) -> str:
    mib = rig.nbytes / 2**20
    lines = [
        f"| {rig.block_count} blocks, {mib:.0f} MiB | tiers, p50, ms | GB/s | one copy, p50, ms | GB/s | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for way in WAYS:
        ours, limit = (percentile(found[way], 0.5) for found in (times.tiers_s, times.limit_s))
        figures = [f"{1e3 * ours:.2f}", f"{rig.nbytes / ours / 1e9:.1f}"]
        figures += [f"{1e3 * limit:.2f}", f"{rig.nbytes / limit / 1e9:.1f}", f"{ours / limit:.2f}"]
        lines.append(f"| {' | '.join([way, *figures])} |")
    alone, beside = (percentile(times.step_s[one], 0.5) for one in (False, True))
    lines += [
        "",
        "| steps of computing | p50, ms | p90, ms | p50 / alone |",
        "|---|---|---|---|",
    ]
    for name, one, p50 in (("alone", False, alone), ("beside copies", True, beside)):
        p90 = percentile(times.step_s[one], 0.9)
        lines.append(f"| {name} | {1e3 * p50:.2f} | {1e3 * p90:.2f} | {p50 / alone:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--device", default="cpu", help="torch's name of the device")
    parser.add_argument("--blocks", type=int, default=64, help="blocks of a copy")
    parser.add_argument("--memory-blocks", type=int, default=1024, help="blocks of KV memory")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rig = Rig(device, arguments.blocks, arguments.memory_blocks)
    drawn = report(rig, measure(rig, arguments.rounds))
    rig.copier.close()
    print(drawn)
    if arguments.output:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "One core of a CPU"
        head = f"# Copies of KV blocks to and from main memory\n\n{name}. Made by `python -m bench.tier_copies`."
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "tier_copies.md").write_text(f"{head}\n\n{drawn}\n")


if __name__ == "__main__":
    main()
