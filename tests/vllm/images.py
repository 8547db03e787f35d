"""Jobs: answers to prompts with images, of vLLM alone and of two engines."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import HeadraceError, InvalidRequest, TransferFailed
from headrace_engine.interface import DecodeWork, PrefillWork, Sampling
from headrace_engine.vllm.compat import extra_config
from headrace_kv.messages import Reservation
from headrace_kv.prefix.images import content_hash, hashed_token_ids
from tests.decoding import decoded
from tests.vllm.canary import Watched
from tests.vllm.image_prompts import FAMILIES, PROMPTS, WIDE, Family, Picture, Prompt, text
from tests.vllm.pair import (
    BLOCK_TOKENS,
    GREEDY,
    TIMEOUT_S,
    Answer,
    Pair,
    reset,
    running_pair,
)
from tests.vllm.plain import engine_of
from tests.vllm.test_kv_events import hasher_of, until_announced

CONTEXT_TOKENS = 2048
SAMPLED = replace(GREEDY, temperature=0.9, seed=11)
SALTS = ("aa", "bb")


@dataclass(frozen=True, slots=True)
class Answers:
    """By name of the prompt: greedy and sampled tokens."""

    greedy: dict[str, list[int]]
    sampled: dict[str, list[int]]


async def alone(model: str) -> Answers:
    """The answers of vLLM alone."""
    llm = engine_of(model, max_model_len=CONTEXT_TOKENS, limit_mm_per_prompt={"video": 0})
    from vllm import SamplingParams

    family = FAMILIES[Path(model).name]

    def answers(sampling: Sampling) -> dict[str, list[int]]:
        params = SamplingParams(
            temperature=sampling.temperature,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            ignore_eos=True,
        )
        found = {}
        for name, parts in PROMPTS.items():
            (output,) = llm.generate(family.collapsed(parts), params, use_tqdm=False)
            found[name] = list(output.outputs[0].token_ids)
        return found

    return Answers(answers(GREEDY), answers(SAMPLED))


class EncoderCounts:
    """Counts the images that each role's engine encodes. Make it before the engines' processes are forked."""

    def __init__(self) -> None:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        self._counts = {role: multiprocessing.Value("i", 0) for role in ("prefill", "decode")}
        encode = GPUModelRunner._execute_mm_encoder

        def counting(runner: Any, scheduler_output: Any) -> Any:
            scheduled = scheduler_output.scheduled_encoder_inputs
            role = extra_config(runner.vllm_config)["role"]
            self._counts[role].value += sum(map(len, scheduled.values()))
            return encode(runner, scheduler_output)

        GPUModelRunner._execute_mm_encoder = counting

    def of(self, role: str) -> int:
        found: int = self._counts[role].value
        return found


@dataclass(slots=True)
class Found:
    """What each way of computing has answered, by its name and that of the prompt. `encoded`: images of decode."""

    greedy: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    sampled: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    encoded_for_handovers: int = 0
    encoded_for_local: int = 0
    compared: dict[str, str] = field(default_factory=dict)
    """Outcomes of the canary."""


class Cases:
    """Requests to one model's engines."""

    def __init__(self, pair: Pair, family: Family, counts: EncoderCounts) -> None:
        self._pair = pair
        self._counts = counts
        self.prompts = {name: family.prompt(parts) for name, parts in PROMPTS.items()}
        self.found = Found()

    async def local(self, prompt: Prompt, sampling: Sampling = GREEDY, **more: Any) -> Answer:
        """Generates on decode alone."""
        return await self._pair.plain(prompt.token_ids, sampling, images=prompt.images, **more)

    async def split(self, prompt: Prompt, sampling: Sampling = GREEDY, **more: Any) -> Answer:
        """Hands the prompt over. Decode encodes no image for it."""
        before = self._counts.of("decode")
        answer = await self._pair.split(prompt.token_ids, sampling, images=prompt.images, **more)
        self.found.encoded_for_handovers += self._counts.of("decode") - before
        return answer

    def _work(self, prompt: Prompt, **more: Any) -> DecodeWork:
        return self._pair.work(prompt.token_ids, images=prompt.images, **more)

    async def cold(self) -> None:
        """Each prompt with empty caches, on decode alone and handed over."""
        for name, prompt in self.prompts.items():
            for way, run in (("local", self.local), ("handed over", self.split)):
                await self._pair.reset()
                before = self._counts.of("decode")
                answer = await run(prompt)
                self.found.greedy.setdefault(way, {})[name] = answer.token_ids
                if run == self.local:
                    self.found.encoded_for_local += self._counts.of("decode") - before
                await self._pair.reset()
                self.found.sampled.setdefault(way, {})[name] = (
                    await run(prompt, SAMPLED)
                ).token_ids

    async def warm(self) -> None:
        """Each prompt with what the others have left in both caches, or in decode's or prefill's only."""
        engines = {"decode": self._pair.decode, "prefill": self._pair.prefill}
        for emptied in ("neither", *engines):
            await self._pair.reset()
            for name, prompt in self.prompts.items():
                await self.split(prompt)
                if emptied in engines:
                    await reset(engines[emptied])
                answer = await self.split(prompt)
                way = f"warm, {emptied} emptied"
                self.found.greedy.setdefault(way, {})[name] = answer.token_ids

    async def together(self) -> None:
        """All prompts at once."""
        await self._pair.reset()
        names = [name for name in self.prompts if name != "many images"]
        answers = await asyncio.gather(*(self.split(self.prompts[name]) for name in names))
        self.found.greedy["together"] = {
            name: answer.token_ids for name, answer in zip(names, answers, strict=True)
        }

    async def continued(self) -> None:
        """An answer that another worker has begun."""
        await self._pair.reset()
        prompt, whole = self.prompts["two images"], self.found.greedy["local"]["two images"]
        answer = await self.split(prompt, generated=whole[:5])
        self.found.greedy["continued"] = {"two images": [*whole[:5], *answer.token_ids]}

    async def reservations(self) -> None:
        """Decode reserves what it lacks, which may begin within an image. Another image or salt hits nothing."""
        await self._pair.reset()
        first = self.prompts["an image that ends within a block"]
        await self.split(first)
        for name, start in (
            ("that image before other text", len(first.token_ids) // BLOCK_TOKENS * BLOCK_TOKENS),
            ("an image", 0),
        ):
            answer = await self.split(self.prompts[name])
            assert answer.reservation is not None
            assert answer.reservation.start_token == start, (name, answer.reservation)
        image = self.prompts["an image"]
        other = replace(image.images[0], data=Picture(9, 5, 7).data)
        other = replace(other, content_hash=content_hash(other.data))
        answer = await self.split(replace(image, images=(other,)))
        assert answer.reservation is not None
        assert answer.reservation.start_token == 0
        for salt in SALTS:
            answer = await self.split(image, cache_salt=salt)
            assert answer.reservation is not None
            assert answer.reservation.start_token == 0

    async def compared(self) -> None:
        """Decode computes blocks of each prompt again."""
        watched = Watched(self._pair)
        for name, prompt in self.prompts.items():
            await self._pair.reset()
            answer = await self.split(prompt)
            await watched.ended(prompt.token_ids, answer, images=prompt.images)
            for comparison in watched.comparisons:
                self.found.compared[name] = f"{comparison.outcome}, {comparison.difference}"
            watched.comparisons.clear()

    async def next_turn(self) -> None:
        """A conversation about an image: decode has everything but the new text."""
        await self._pair.reset()
        prompt = self.prompts["two images"]
        answer = await self.split(prompt)
        second = prompt + answer.token_ids + text(40, 40)
        known = len(prompt.token_ids) + len(answer.token_ids) - 1
        turn = await self.split(second)
        assert turn.reservation is not None
        assert turn.reservation.start_token == known // BLOCK_TOKENS * BLOCK_TOKENS
        await self._pair.reset()
        assert turn.token_ids == (await self.local(second)).token_ids

    async def killed_prefill(self) -> None:
        """A prefill that ends while it sends costs the attempt. The next attempt, and the fallback, answer alike."""
        await self._pair.reset()
        prompt = self.prompts["an image in two chunks"]
        work = self._work(prompt)
        events = decoded(self._pair.decode, work)
        reservation = await anext(events)
        assert isinstance(reservation, Reservation)
        receiver = self._pair.receiver
        handle, sent = receiver.handle, asyncio.Event()
        transfer = self._pair.reserve(reservation)

        def lose_layers(peer: Any, request: handoff_pb2.HandoffRequest) -> None:
            if request.WhichOneof("message") == "layers_done":
                sent.set()
            else:
                handle(peer, request)

        receiver.handle = lose_layers  # type: ignore[method-assign]
        target = self._pair.target(reservation)
        task = asyncio.create_task(
            self._pair.prefill.prefill(PrefillWork(work.token_ids[:-1], target, images=work.images))
        )
        await asyncio.wait_for(sent.wait(), TIMEOUT_S)
        task.cancel()
        await asyncio.wait({task})
        receiver.handle = handle  # type: ignore[method-assign]
        receiver.cancel(work.transfer_id, TransferFailed.reason, "prefill was killed")
        with pytest.raises(HeadraceError):
            await transfer.wait()
        with pytest.raises(TransferFailed):
            await anext(events)
        ways = {"after a killed prefill": self.split, "in place of a killed prefill": self.local}
        for way, run in ways.items():
            answer = await run(prompt)
            self.found.greedy[way] = {"an image in two chunks": answer.token_ids}

    async def preempted(self) -> None:
        """More answers than the blocks hold: vLLM preempts some, and computes them again."""
        await self._pair.reset()
        prompt, long = self.prompts["many images"], replace(GREEDY, max_tokens=140)
        encoded = self.found.encoded_for_handovers
        answers = await asyncio.gather(
            *(self.split(prompt, long, cache_salt=f"{number:02x}") for number in range(7))
        )
        # Preempted prompts are encoded here.
        self.found.encoded_for_handovers = encoded
        await self._pair.reset()
        alone = await self.local(prompt, long)
        assert [answer.token_ids for answer in answers] == [alone.token_ids] * 7

    async def announced(self) -> None:
        """Both engines announce blocks under the hashes that routers compute."""
        hashers = [hasher_of(engine) for engine in (self._pair.decode, self._pair.prefill)]
        for salt in ("", *SALTS):
            await self._pair.reset()
            wanted: set[int] = set()
            for prompt in self.prompts.values():
                await self.split(prompt, cache_salt=salt)
                words = hashed_token_ids(prompt.token_ids[:-1], prompt.images)
                wanted.update(hashers[0].hashes(words, hashers[0].root_of(salt)))
            for engine in (self._pair.decode, self._pair.prefill):
                await until_announced(engine, wanted.issubset)

    async def refused(self) -> None:
        """Images that the model would read otherwise are refused by name."""
        prompt = self.prompts["an image"]
        image = prompt.images[0]
        broken, cut = b"no image", image.data[: len(image.data) // 2]
        for field_name, changed in {
            "images[0].token_count": replace(image, token_count=image.token_count - 1),
            "images[0].content_hash": replace(image, data=WIDE.data),
            "images[0].data": replace(image, data=broken, content_hash=content_hash(broken)),
            "images": replace(image, data=cut, content_hash=content_hash(cut)),
        }.items():
            for remote_kv in (False, True):
                work = self._work(replace(prompt, images=(changed,)), remote_kv=remote_kv)
                with pytest.raises(InvalidRequest) as caught:
                    await anext(decoded(self._pair.decode, work))
                assert list(caught.value.violations) == [field_name]


@cache
def engine_settings(model: str) -> dict[str, object]:
    return {"model": model, "num_gpu_blocks_override": 192, "max_model_len": CONTEXT_TOKENS}


PARTS: dict[str, Callable[[Cases], Awaitable[None]]] = {
    "cold": Cases.cold,
    "warm": Cases.warm,
    "together": Cases.together,
    "continued": Cases.continued,
    "reservations": Cases.reservations,
    "next_turn": Cases.next_turn,
    "compared": Cases.compared,
    "killed_prefill": Cases.killed_prefill,
    "preempted": Cases.preempted,
    "announced": Cases.announced,
    "refused": Cases.refused,
}


async def compare(model: str, parts: Sequence[str] = tuple(PARTS)) -> Found:
    """Starts the engines and has them answer. `parts`: the cases, by their names."""
    os.environ["OMP_NUM_THREADS"] = "1"
    counts = EncoderCounts()
    config = engine_settings(model)
    async with running_pair(prefill=config, decode=config) as pair:
        cases = Cases(pair, FAMILIES[Path(model).name], counts)
        for part in parts:
            await PARTS[part](cases)
        return cases.found
