"""Turns side by side on engines with little KV memory, while a disk changes what is stored there."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import psutil

from headrace_common.errors import TransferFailed
from headrace_engine.interface import Sampling, StructuredOutputs
from tests.vllm.pair import GREEDY, Answer, Pair, prompt_of
from tests.waiting import until

# More than main memory holds.
BEGINNINGS = 12
PROMPTS = 24
TURNS = 48
AT_ONCE = 3
TRIES_MAX = 6
QUIET_S = 60.0
SHORT = replace(GREEDY, max_tokens=4)
# vLLM ends such requests with the same kind of error when their form is wrong.
CONSTRAINED = replace(SHORT, structured_outputs=StructuredOutputs("regex", "[a-z ]{1,80}"))


async def storm(pair: Pair, disk_folder: Path, seed: int = 1) -> Counter[str]:
    """Counts what happened: answers that were right or wrong, attempts that failed, and clients that went away.

    `disk_folder` is that of decode's disk. After some turns, all blocks on it change.
    """
    numbers = random.Random(seed)
    prompts = [_prompt(numbers, number) for number in range(PROMPTS)]
    expected = []
    samplings = [CONSTRAINED if number % 2 else SHORT for number in range(PROMPTS)]
    for prompt, sampling in zip(prompts, samplings, strict=True):
        await until(pair.decode.reset_prefix_cache)
        expected.append((await pair.plain(prompt, sampling)).token_ids)
    counts: Counter[str] = Counter()
    places = asyncio.Semaphore(AT_ONCE)

    async def turn(index: int, *, split: bool, leaves_after_s: float | None) -> None:
        async with places:
            asking = asyncio.create_task(
                _answer(pair, prompts[index], samplings[index], counts, split=split)
            )
            if leaves_after_s is not None:
                await asyncio.wait({asking}, timeout=leaves_after_s)
                asking.cancel()
            answer = (await asyncio.gather(asking, return_exceptions=True))[0]
            if isinstance(answer, asyncio.CancelledError):
                counts["left"] += 1
            elif isinstance(answer, BaseException):
                raise answer
            else:
                counts["right" if answer.token_ids == expected[index] else "wrong"] += 1

    turns = []
    for number in range(TURNS):
        split = numbers.random() < 0.4
        leaves = not split and numbers.random() < 0.25
        after_s = numbers.uniform(0.0, 0.2) if leaves else None
        turns.append(turn(numbers.randrange(PROMPTS), split=split, leaves_after_s=after_s))
        if number and number % (TURNS // 3) == 0:
            await asyncio.gather(*turns)
            turns = []
            counts["blocks changed"] += change_every_page(disk_folder)
    await asyncio.gather(*turns)
    engines = (pair.decode, pair.prefill)
    await until(lambda: not any(one.usage().used_blocks for one in engines), QUIET_S)
    return counts


def _prompt(numbers: random.Random, number: int) -> list[int]:
    beginning = prompt_of(320, 1_000 + number % BEGINNINGS)
    return beginning[: numbers.randrange(96, 320)] + prompt_of(numbers.randrange(1, 40), number)


async def _answer(
    pair: Pair, prompt: list[int], sampling: Sampling, counts: Counter[str], *, split: bool
) -> Answer:
    """Tries again after failures, as a router does."""
    for _ in range(TRIES_MAX):
        with suppress(TransferFailed):
            return await (pair.split(prompt, sampling) if split else pair.plain(prompt, sampling))
        counts["failed"] += 1
        counts["failed with a form"] += sampling.structured_outputs is not None
    raise TransferFailed(f"{TRIES_MAX} attempts have failed")


def change_every_page(folder: Path) -> int:
    """Inverts a byte in each page of the files in `folder` that engine processes have open. Returns how many."""
    changed = 0
    for path in _open_files(folder):
        with closing(path.open("r+b", buffering=0)) as file:
            for start in range(0, os.fstat(file.fileno()).st_size, 4096):
                (byte,) = os.pread(file.fileno(), 1, start)
                os.pwrite(file.fileno(), bytes((byte ^ 0xFF,)), start)
                changed += 1
    return changed


def truncate_files(folder: Path) -> int:
    """Empties the files in `folder` that engine processes have open. Returns how many."""
    files = list(_open_files(folder))
    for path in files:
        os.truncate(path, 0)
    return len(files)


def _open_files(folder: Path) -> Iterator[Path]:
    seen: set[int] = set()
    for process in psutil.Process().children(recursive=True):
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                if link.readlink().is_relative_to(folder) and link.stat().st_ino not in seen:
                    seen.add(link.stat().st_ino)
                    yield link
