"""A job: compares two engines with one, for models with other layers than plain attention."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError
from headrace_engine.interface import Arrived, PrefillWork
from headrace_kv.layout import STATE, TOKENS, KvLayout
from headrace_kv.messages import Reservation
from headrace_kv.model_layout import ModelConfig, kv_layout
from tests.decoding import decoded
from tests.vllm.pair import GREEDY, Answer, Pair, prompt_of, reset, running_pair

CONTEXT_TOKENS = 1024
CHUNK_TOKENS = 512
BLOCK_COUNT = 192
LOGPROBS = replace(GREEDY, logprobs=1)
# In float32, vLLM computes a token alone and with others to within this.
LOGPROB_DIFFERENCE_MAX = 1e-4


@dataclass(frozen=True, slots=True)
class Expected:
    """`kinds` of the layout's groups. `exact`: what vLLM computes for a token hardly depends on the rest of a batch."""

    kinds: tuple[str, ...]
    dtype: str = "float32"
    has_windows: bool = False
    exact: bool = True
    difference_max: float = LOGPROB_DIFFERENCE_MAX
    engine_args: str = ""


MODELS = {
    "tiny-deepseek-v2": Expected((TOKENS,)),
    "tiny-deepseek-v3": Expected((TOKENS,)),
    "tiny-gemma3": Expected((TOKENS, TOKENS), has_windows=True),
    "tiny-gpt-oss": Expected((TOKENS, TOKENS), has_windows=True),
    "tiny-llama4": Expected((TOKENS, TOKENS), has_windows=True),
    "tiny-lfm2": Expected((TOKENS, STATE, STATE)),
    # On a CPU, vLLM's kernels of gated delta nets do not support float32.
    "tiny-qwen3-next": Expected((TOKENS, STATE, STATE, STATE), dtype="bfloat16", exact=False),
    # Heads and their groups are divided differently.
    "tiny-mamba2": Expected((STATE, STATE)),
    # Rounding to 8 bits makes more of a small difference.
    "fp8": Expected((TOKENS,), exact=False, difference_max=0.1, engine_args="--kv-cache-dtype fp8"),
}


class Cases:
    """Requests to one model's engines. Each answer is compared with that of the decode engine alone."""

    def __init__(self, pair: Pair, expected: Expected, config: ModelConfig) -> None:
        self._pair = pair
        self._config = config
        self._expected = expected
        layout = pair.decode.descriptor.layout
        self._block_tokens = layout.block_tokens if layout.block_tokens > 1 else 32
        assert pair.decode._llm is not None
        # On a CPU, vLLM caches no prefixes of latent attention, nor of all kinds of states.
        self._caches_prefixes = pair.decode._llm.vllm_config.cache_config.enable_prefix_caching
        self.differences: dict[str, float] = {}

    async def groups(self) -> None:
        """The layout has the model's groups."""
        layout = self._pair.decode.descriptor.layout
        assert tuple(group.kind for group in layout.groups) == self._expected.kinds, layout
        assert layout.groups[-1].is_windowed == self._expected.has_windows
        if not self._expected.engine_args:
            assert self._sizes(layout) == self._sizes(kv_layout(self._config)), "by config.json"

    def _sizes(self, layout: KvLayout) -> dict[tuple[str, int, int], float]:
        """The bytes of a token of each kind of cache, and of a request of each state."""
        found: dict[tuple[str, int, int], float] = {}
        for group in layout.groups:
            size = group.block_tokens or 1
            each = len(group.layers) * group.bytes_between(0, size, group.head_count) / size
            key = (group.kind, group.window_tokens, group.chunk_tokens)
            found[key] = found.get(key, 0) + each
        return found

    async def lengths(self) -> None:
        """Prompts within a chunk and beyond it, with a last transferred token at the end of a block or not."""
        block = self._block_tokens
        lengths = {1, 2, 5, block, block + 1, block + 2, 3 * block + 1, 500, CHUNK_TOKENS + 1, 700}
        for length in sorted(lengths):
            prompt = prompt_of(length)
            plain = await self._alone(prompt)
            await self._pair.reset()
            # After a whole number of blocks, one engine also computes the last token in a step of its own.
            alone = STATE in self._expected.kinds and length == block + 1
            if self._expected.exact or alone:
                split = await self._pair.split(prompt, LOGPROBS)
                self._same(f"{length} tokens", plain, split)
                assert split.reservation is not None
                ends = (split.reservation.start_token, split.reservation.end_token)
                assert ends == (0, length - 1)
                await self._pair.reset()
            split = await self._pair.split_after_first(prompt, LOGPROBS)
            self._same(f"{length} tokens and the first", plain, split)
            await self._pair.reset()

    async def shared_prefix(self) -> None:
        """Decode fetches the tokens that it has not cached, and always the state."""
        block = self._block_tokens
        shared = prompt_of(2 * block, seed=3)
        for name, tail in (("longer", 200), ("within a block", block // 2), ("a block", block + 1)):
            first, second = shared + prompt_of(block + 9, seed=1), shared + prompt_of(tail, seed=2)
            await self._alone(first)
            plain = await self._alone(second)
            await self._pair.reset()
            await self._split(first)
            split = await self._split(second)
            again = await self._split(second)
            await self._pair.reset()
            self._same(f"a shared prefix, {name}", plain, split)
            self._same(f"a shared prefix, {name}, once more", plain, again)
            assert split.reservation is not None
            # Decode has no window of a prompt's middle, only that of its end.
            slides = self._pair.decode.descriptor.layout.groups[-1].window_tokens > 0
            cached = 2 * block if self._caches_prefixes and not slides else 0
            assert split.reservation.start_token == cached, (name, split.reservation, split.end)

    async def next_turn(self) -> None:
        """Decode has a conversation in its cache, also the windows at its end."""
        if not self._expected.has_windows:
            return
        first = prompt_of(5 * self._block_tokens + 9, seed=4)
        answer = (await self._alone(first)).token_ids
        second = [*first, *answer, *prompt_of(50, seed=6)]
        plain = await self._alone(second)
        await self._pair.reset()
        await self._split(first)
        split = await self._split(second)
        await self._pair.reset()
        self._same("the next turn", plain, split)
        assert split.reservation is not None
        known = len(first) + len(answer) - 1
        assert split.reservation.start_token == known - known % self._block_tokens

    async def windows_sent(self) -> None:
        """Of a window, only the blocks are sent that decode's next token attends to."""
        if not self._expected.has_windows:
            return
        layout = self._pair.decode.descriptor.layout
        end = 20 * self._block_tokens
        split = await self._split(prompt_of(end + 1, seed=8))
        await self._pair.reset()
        assert split.summary is not None
        sizes = [
            len(group.layers)
            * group.bytes_between(group.first_sent_token(0, end), end, group.head_count)
            for group in layout.groups
        ]
        assert split.summary.payload_bytes == sum(sizes)
        assert sizes[1] * 5 < sizes[0]

    async def prefill_has_it(self) -> None:
        """Prefill has a prefix in its cache, and decode has none."""
        prompt = prompt_of(3 * self._block_tokens + 40, seed=5)
        await self._alone(prompt)
        plain = await self._alone(prompt)
        await self._pair.reset()
        await self._split(prompt)
        await reset(self._pair.decode)
        split = await self._split(prompt)
        await self._pair.reset()
        self._same("a prefix that prefill has", plain, split)
        assert split.prefill is not None
        assert (split.prefill.cached_tokens > 0) == self._caches_prefixes

    async def together(self) -> None:
        """Requests in one batch do not touch each other's pages."""
        if not self._expected.exact:
            # vLLM rounds differently in a batch.
            return
        prompts = [prompt_of(length, seed=7) for length in (40, 170, 333, 600)]
        plain = [await self._alone(prompt) for prompt in prompts]
        await self._pair.reset()
        split = await asyncio.gather(*map(self._split, prompts))
        await self._pair.reset()
        for prompt, one, other in zip(prompts, plain, split, strict=True):
            self._same(f"{len(prompt)} tokens in a batch", one, other)

    async def aborts(self) -> None:
        """An abort gives back every block, of all groups, on both sides."""
        pair = self._pair
        prompt = prompt_of(700, seed=9)
        for stage in ("reserved", "sending"):
            work = pair.work(prompt)
            events = decoded(pair.decode, work)
            reservation = await anext(events)
            assert isinstance(reservation, Reservation)
            transfer = pair.receiver.reserve(reservation, Deadline.after(30))
            sending = None
            if stage == "sending":
                sending = asyncio.create_task(
                    pair.prefill.prefill(PrefillWork(tuple(prompt[:-1]), pair.target(reservation)))
                )
                await asyncio.sleep(0.03)
                sending.cancel()
            await events.aclose()
            pair.receiver.cancel(reservation.transfer_id, "CANCELLED", "the client went away")
            with suppress(HeadraceError):
                await transfer.wait()
                pair.decode.transfer_event(Arrived(reservation.transfer_id))
            if sending is not None:
                await asyncio.wait({sending})
                # It may have been done already.
                assert sending.cancelled() or sending.exception() is None
            await pair.reset()

    async def _alone(self, prompt: list[int]) -> Answer:
        return await self._pair.plain(prompt, LOGPROBS)

    async def _split(self, prompt: list[int]) -> Answer:
        if self._expected.exact:
            return await self._pair.split(prompt, LOGPROBS)
        # What decode computes is computed alone in plain vLLM as well, so that both agree to the bit.
        return await self._pair.split_after_first(prompt, LOGPROBS)

    def _same(self, what: str, plain: Answer, split: Answer) -> None:
        assert split.token_ids == plain.token_ids, (
            f"{what}: {split.token_ids} instead of {plain.token_ids}"
        )
        assert len(split.token_ids) == GREEDY.max_tokens
        difference = max(
            abs(one.logprob - other.logprob)
            for one, other in zip(plain.logprobs, split.logprobs, strict=True)
        )
        self.differences[what] = difference
        assert difference < self._expected.difference_max, (
            f"{what}: log probabilities differ by {difference}"
        )


def mend_rotation() -> None:
    """Makes vLLM rotate tensors of shape [tokens, heads * channels].

    Its CPU kernel misreads a single token of shape [tokens, heads, channels]. Plain vLLM then computes a token
    differently alone and together with others.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotate = RotaryEmbedding.forward_cpu

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        flat_key = None if key is None else key.reshape(key.shape[0], -1)
        rotated, rotated_key = rotate(self, positions, query.reshape(len(query), -1), flat_key)
        if rotated_key is not None:
            rotated_key = rotated_key.view(key.shape)
        return rotated.view(query.shape), rotated_key

    RotaryEmbedding.forward_cpu = forward_cpu


@dataclass(frozen=True, slots=True)
class Comparison:
    """The largest difference of log probabilities of each request, and durations."""

    differences: dict[str, float]
    start_s: float
    total_s: float


async def compare(
    model: str, variant: str = "", prefill_stages: int = 1, decode_stages: int = 1
) -> Comparison:
    """Starts the engines and compares them with one. `variant`: a key of MODELS, else the model's own."""
    mend_rotation()
    start_s = time.monotonic()
    expected = MODELS[variant or Path(model).name]
    config: dict[str, object] = {
        "model": model,
        "dtype": expected.dtype,
        "num_gpu_blocks_override": BLOCK_COUNT,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "max_model_len": CONTEXT_TOKENS,
        "engine_args": expected.engine_args,
    }
    async with running_pair(
        prefill=config | {"pipeline_parallel_size": prefill_stages},
        decode=config | {"pipeline_parallel_size": decode_stages},
    ) as pair:
        layouts = [engine.descriptor.layout for engine in (pair.prefill, pair.decode)]
        found = [len(layout.stage_starts) for layout in layouts]
        assert found == [prefill_stages, decode_stages]
        fields = json.loads((Path(model) / "config.json").read_text())
        cases = Cases(pair, expected, ModelConfig.of(fields | {"dtype": expected.dtype}))
        started_s = time.monotonic() - start_s
        parts: tuple[Callable[[], Awaitable[None]], ...] = (
            cases.groups,
            cases.lengths,
            cases.shared_prefix,
            cases.next_turn,
            cases.windows_sent,
            cases.prefill_has_it,
            cases.together,
            cases.aborts,
        )
        for part in parts:
            await part()
        return Comparison(cases.differences, started_s, time.monotonic() - start_s)
