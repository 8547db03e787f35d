"""Jobs: engines that compute received blocks again, on honest pairs and on pairs with a planted fault."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from opentelemetry import trace
from safetensors.torch import load_file, save_file

from headrace_decode.attempt import DecodeAttempt
from headrace_decode.canary import Canary, Comparison
from headrace_engine.interface import Arrived, BlockErrors, Engine, PromptImage, ReceivedBlock
from headrace_engine.vllm.model_folder import SAMPLE_BYTES
from headrace_engine.vllm.service import launch
from headrace_kv.copy_plan import CopyPlanner
from headrace_kv.messages import Reservation, reserved_span
from headrace_kv.receive.verification import DigestChecks
from headrace_kv.shard_map import Edge
from tests.decoding import decoded
from tests.vllm.pair import BLOCK_TOKENS, GREEDY, Answer, Pair, running_pair

SHORT = replace(GREEDY, max_tokens=2)
# Blocks of a rank that are mapped for the test need 32 MiB.
BLOCK_COUNT = 2304


class Watched:
    """A pair with a canary on its decode engine, which the jobs call as the decode service does."""

    def __init__(
        self, pair: Pair, interval_requests: int = 1, checks: DigestChecks | None = None
    ) -> None:
        self.pair = pair
        self.comparisons: list[Comparison] = []
        self.errors: list[BlockErrors] = []
        self._compared = asyncio.Event()
        assert pair.decode.compares_blocks
        engine = SimpleNamespace(
            descriptor=pair.decode.descriptor,
            compare_block=self._compare_block,
            reset_prefix_cache=pair.decode.reset_prefix_cache,
        )
        self.canary = Canary(
            cast("Engine", engine),
            interval_requests,
            on_compared=self._on_compared,
            checks=checks,
            random=Random(1),
        )
        self.canary.watch(lambda: True, pair.receiver.lease_holders)

    async def _compare_block(self, block: ReceivedBlock) -> BlockErrors | None:
        errors = await self.pair.decode.compare_block(block)
        if errors is not None:
            self.errors.append(errors)
        return errors

    def _on_compared(self, comparison: Comparison) -> None:
        self.comparisons.append(comparison)
        self._compared.set()

    async def ended(
        self,
        prompt: Sequence[int],
        answer: Answer,
        overwrite: Callable[[], None] = lambda: None,
        images: tuple[PromptImage, ...] = (),
    ) -> None:
        """A request has ended. Returns once it is compared. `overwrite` is called between its arrival and its end."""
        self._compared.clear()
        attempt = SimpleNamespace(
            work=self.pair.work(prompt, images=images),
            summary=answer.summary,
            reservation=answer.reservation,
            span=trace.INVALID_SPAN,
        )
        self.canary.attempt_arrived(cast("DecodeAttempt", attempt))
        for rested in self.canary._resting.values():
            assert rested.digests is not None
            await asyncio.wrap_future(rested.digests)
        overwrite()
        self.canary.attempt_closed(cast("DecodeAttempt", attempt))
        assert answer.reservation is not None
        if not self.canary._draw_received(attempt.work, answer.reservation):
            # No whole block ends outside an image.
            return
        async with asyncio.timeout(60):
            await self._compared.wait()


@dataclass(frozen=True, slots=True)
class Honest:
    """`largest`: the largest difference of each layer. `blocks` were compared in `comparisons`."""

    comparisons: int
    blocks: int
    dropped: int
    alarms: list[str]
    largest: list[float]


async def honest(
    model: str,
    requests: int,
    engine_args: str = "",
    dtype: str = "float32",
    ranks: int = 1,
    tasks: int = 4,
    limit_s: float = 300.0,
) -> Honest:
    """Requests with chunks and shared prefixes, each compared. Prefill has `ranks` ranks, decode has one.

    Each of the `tasks` has a canary of its own, so that engines compute several requests and blocks at a time. No
    request starts after `limit_s`.
    """
    config: dict[str, object] = {
        "model": model,
        "dtype": dtype,
        "num_gpu_blocks_override": 1024,
        "max_num_batched_tokens": 128,
        "engine_args": engine_args,
    }
    async with running_pair(
        prefill=config | {"tensor_parallel_size": ranks}, decode=config
    ) as pair:
        end_s = time.monotonic() + limit_s

        async def run(number: int) -> Watched:
            watched = Watched(pair)
            random = Random(number)
            shared = [[random.randrange(3, 500) for _ in range(300)] for _ in range(8)]
            for _ in range(requests // tasks):
                if time.monotonic() > end_s:
                    break
                # Some are longer than a chunk, and some begin as an earlier one.
                fresh = [random.randrange(3, 500) for _ in range(random.randrange(40, 250))]
                prompt = shared[random.randrange(8)][: random.randrange(0, 300)] + fresh
                answer = await pair.split(prompt, SHORT)
                if answer.summary is not None and _whole(answer.reservation):
                    await watched.ended(prompt, answer)
            return watched

        return _result(await asyncio.gather(*map(run, range(tasks))))


def _whole(reservation: Reservation | None) -> bool:
    assert reservation is not None
    return reservation.end_token // BLOCK_TOKENS > -(-reservation.start_token // BLOCK_TOKENS)


def _result(watched: Sequence[Watched]) -> Honest:
    largest: dict[int, float] = {}
    all_errors = [errors for one in watched for errors in one.errors]
    for errors in all_errors:
        for (layer, _), error in errors.items():
            largest[layer] = max(error, largest.get(layer, 0.0))
    comparisons = [comparison for one in watched for comparison in one.comparisons]
    return Honest(
        comparisons=len(comparisons),
        blocks=len(all_errors),
        dropped=sum(not one.block_count for one in comparisons),
        alarms=[str(one.difference) for one in comparisons if one.difference],
        largest=[largest[layer] for layer in sorted(largest)],
    )


@dataclass(frozen=True, slots=True)
class Found:
    """`requests` until the pair was rejected. `layers` and `heads` are those of both differences."""

    requests: int
    layers: list[int]
    heads: list[int]
    detail: str
    before: list[str] = field(default_factory=list)
    """Differences before the fault was planted."""


async def planted_in_model(model: str, fault: str, layer: int = 0, dtype: str = "float32") -> Found:
    """A prefill engine with a changed copy of the model, from its first request on. `fault`: "rope" or "weights"."""
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder, Path(model).name)
        shutil.copytree(model, changed)
        if fault == "rope":
            _change_config(changed)
            # This fault stands for one of the code, which no fingerprint shows.
            launch.fingerprint_with = lambda *_: "one"  # type: ignore[attr-defined]
        else:
            change_weights(changed, layer)
        async with running_pair(
            prefill={"model": str(changed), "dtype": dtype}, decode={"model": model, "dtype": dtype}
        ) as pair:
            watched = Watched(pair)
            return await _until_rejected(watched, lambda prompt: pair.split(prompt, SHORT))


def _change_config(folder: Path) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    parameters = config.get("rope_parameters") or config
    parameters["rope_theta"] = 8 * parameters.get("rope_theta", 10000.0)
    file.write_text(json.dumps(config))


def change_weights(folder: Path, layer: int) -> None:
    """Other values of a layer's V, except for those that the fingerprint samples: the middle of each tensor."""
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        name = f"model.layers.{layer}.self_attn.v_proj.weight"
        if name in weights:
            old = weights[name].flatten()
            noise = torch.randn(old.shape, generator=torch.Generator().manual_seed(3))
            other = (noise * old.float().std()).to(old.dtype)
            kept = slice(len(old) // 2 - SAMPLE_BYTES, len(old) // 2 + SAMPLE_BYTES)
            other[kept] = old[kept]
            weights[name] = other.reshape(weights[name].shape)
            save_file(weights, file, metadata={"format": "pt"})


async def planted_in_memory(
    model: str, fault: str, layer: int = 0, engine_args: str = "", dtype: str = "float32"
) -> Found:
    """A fault in what has arrived, after twelve honest requests."""
    config: dict[str, object] = {
        "model": model,
        "dtype": dtype,
        "num_gpu_blocks_override": BLOCK_COUNT,
        "engine_args": engine_args,
    }
    async with running_pair(prefill=config, decode=config) as pair:
        watched = Watched(pair)
        for number in range(12):
            prompt = prompt_of_blocks(100 + number)
            await watched.ended(prompt, await pair.split(prompt, SHORT))
        before = [str(one.difference) for one in watched.comparisons if one.difference]
        found = await _until_rejected(
            watched, lambda prompt: _split_with_fault(pair, prompt, fault, layer)
        )
        return replace(found, before=before)


def prompt_of_blocks(seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(3, 500) for _ in range(3 * BLOCK_TOKENS + 5)]


async def _until_rejected(watched: Watched, split: Callable[[list[int]], Any]) -> Found:
    watched.comparisons.clear()
    requests = 0
    while not watched.canary.corrupt_senders.rejected and requests < 3:
        prompt = prompt_of_blocks(requests)
        answer = await split(prompt)
        requests += 1
        await watched.ended(prompt, answer)
    found = [one.difference for one in watched.comparisons if one.difference]
    return Found(
        requests,
        [one.layer for one in found],
        [one.head for one in found],
        " ".join(watched.canary.corrupt_senders.rejected.values()),
    )


@dataclass(frozen=True, slots=True)
class Overwritten:
    """Outcomes of the comparisons: of honest requests, after a write, and of a prompt that reuses written blocks."""

    honest: list[str]
    written: list[str]
    reused: list[str]
    rejected: list[str]


async def overwritten(model: str) -> Overwritten:
    """Writes into received blocks beside any reservation, while a request runs, and while they are cached only."""
    config: dict[str, object] = {"model": model, "num_gpu_blocks_override": BLOCK_COUNT}
    async with running_pair(digests="sums", prefill=config, decode=config) as pair:
        watched = Watched(pair, checks=pair.checks)

        def outcomes() -> list[str]:
            found = [one.outcome for one in watched.comparisons]
            watched.comparisons.clear()
            return found

        def write(answer: Answer) -> None:
            assert answer.reservation is not None
            _plant(pair, answer.reservation, "stale", 0)

        for number in range(4):
            prompt = prompt_of_blocks(number)
            await watched.ended(prompt, await pair.split(prompt, SHORT))
        honest = outcomes()
        prompt = prompt_of_blocks(10)
        answer = await pair.split(prompt, SHORT)
        await watched.ended(prompt, answer, lambda: write(answer))
        written = outcomes()
        shared = prompt_of_blocks(11)
        write(await pair.split(shared, SHORT))
        longer = [*shared[: 3 * BLOCK_TOKENS], *prompt_of_blocks(12)]
        await watched.ended(longer, await pair.split(longer, SHORT))
        reused = outcomes()
        rejected = [one.worker_id for one in watched.canary.corrupt_senders.rejected]
        await watched.canary.close()
        return Overwritten(honest, written, reused, rejected)


async def _split_with_fault(pair: Pair, prompt: list[int], fault: str, layer: int) -> Answer:
    """As Pair.split, with a fault in the second block of a layer, or of all layers."""
    answer = Answer()
    work = pair.work(prompt, SHORT)
    async with _closing(decoded(pair.decode, work)) as events:
        async for event in events:
            answer.take(event)
            if isinstance(event, Reservation):
                answer.prefill, answer.summary = await pair.hand_over(work.token_ids, event)
                _plant(pair, event, fault, layer)
                pair.decode.transfer_event(Arrived(work.transfer_id))
    return answer


@asynccontextmanager
async def _closing(events: Any) -> AsyncIterator[Any]:
    try:
        yield events
    finally:
        await events.aclose()


def _plant(pair: Pair, reservation: Reservation, fault: str, layer: int) -> None:
    group = pair.decode.descriptor.layout.groups[0]
    heads = range(group.head_count)
    if fault == "heads":
        for number in range(3):
            first, second = (_Head(pair, reservation, layer, number, head) for head in (0, 1))
            values = first.read()
            first.write(second.read())
            second.write(values)
    elif fault == "stale":
        # The second block of every layer has what the first one has.
        for one in group.layers:
            for head in heads:
                values = _Head(pair, reservation, one, 0, head).read()
                _Head(pair, reservation, one, 1, head).write(values)
    else:
        for number in range(3):
            for head in heads:
                place = _Head(pair, reservation, layer, number, head)
                place.write(_rescaled(place.read()))


def _rescaled(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """8-bit values that were divided by another scale."""
    numbers = torch.from_numpy(values.copy()).view(torch.float8_e4m3fn).float()
    other = (1.5 * numbers).to(torch.float8_e4m3fn).view(torch.uint8)
    return cast("npt.NDArray[np.uint8]", other.numpy())


class _Head:
    """The bytes of a head of a block in decode's memory."""

    def __init__(
        self, pair: Pair, reservation: Reservation, layer: int, number: int, head: int
    ) -> None:
        descriptor = pair.decode.descriptor
        self._memory = pair.decode.landed_memories[0]
        start = number * BLOCK_TOKENS
        span = reserved_span(descriptor.layout, reservation, 0, start, start + BLOCK_TOKENS)
        planner = CopyPlanner(descriptor.ranks[0], descriptor.ranks[0])
        runs = planner.plan(Edge(0, 0, head, head, 1), layer, span)
        self._addresses, self._lengths = runs.destination_addresses, runs.lengths

    def read(self) -> npt.NDArray[np.uint8]:
        target = self._memory.allocate(int(self._lengths.sum()))
        self._memory.gather(self._addresses, self._lengths, target)
        return target

    def write(self, values: npt.NDArray[np.uint8]) -> None:
        self._memory.scatter(values, self._addresses, self._lengths)
