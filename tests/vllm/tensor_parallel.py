"""A job: one prefill and one decode engine of any tensor parallelism and any number of pipeline stages."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random
from typing import Any

from headrace_engine.interface import Sampling
from tests.sent_layers import sent_layers
from tests.vllm.hybrids import mend_rotation
from tests.vllm.pair import ENGINE_ARGS, Answer, Pair, reset, running_pair

SAMPLING = Sampling(temperature=0.0, max_tokens=12)
LENGTHS = (40, 161, 700)
CHUNK_TOKENS = 256


@dataclass(slots=True)
class Transferred:
    """One request. `sent`: as [source rank, destination rank, layer, first token]."""

    token_ids: list[int]
    cached_tokens: int
    start_token: int
    payload_bytes: int = 0
    local_bytes: int = 0
    acknowledgement_count: int = 0
    sent: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class CellResult:
    """`plain` are the tokens of vLLM alone, `split` the same prompts over both engines, one after the other.

    `together` are the same once more, side by side, when decode has forgotten them and prefill has not.
    `prefill_starts` and `decode_starts`: the first layer of each stage.
    """

    layer_count: int
    block_tokens: int
    head_block_bytes: int
    prefill_starts: list[int]
    decode_starts: list[int]
    decode_sessions: list[str]
    stream_ranks: list[int]
    plain: list[list[int]]
    split: list[Transferred]
    together: list[Transferred]


def prompts() -> list[list[int]]:
    """One of every length, and one that shares a prefix with the longest one."""
    random = Random(11)
    found = [[random.randrange(3, 500) for _ in range(length)] for length in LENGTHS]
    return [*found, [*found[-1][:512], *(random.randrange(3, 500) for _ in range(77))]]


def transferred(answer: Answer) -> Transferred:
    assert answer.end is not None
    assert answer.reservation is not None
    found = Transferred(answer.token_ids, answer.end.cached_tokens, answer.reservation.start_token)
    if answer.summary is not None and answer.prefill is not None:
        found.payload_bytes = answer.summary.payload_bytes
        found.local_bytes = answer.summary.local_bytes
        found.acknowledgement_count = answer.summary.acknowledgement_count
        found.sent = [
            [sent.rank, sent.link.destination_rank, sent.times.layer, sent.times.start_token]
            for sent in sent_layers(answer.prefill.reports)
        ]
    return found


async def measure(
    model: str,
    prefill_ranks: int,
    decode_ranks: int,
    local_broadcast: bool = True,
    prefill_stages: int = 1,
    decode_stages: int = 1,
    engine_args: str = ENGINE_ARGS,
) -> CellResult:
    """Starts a pair of the model's engines and generates on both. Decode checks the digests of all that it receives.

    The ranks are those of each stage.
    """
    # Latent attention rotates with the kernel that it corrects.
    mend_rotation()
    stream_ranks: list[int] = []
    changes: dict[str, dict[str, object]] = {
        role: {
            "model": model,
            "tensor_parallel_size": ranks,
            "pipeline_parallel_size": stages,
            "max_num_batched_tokens": CHUNK_TOKENS,
            "local_broadcast": local_broadcast,
            "engine_args": engine_args,
            # Digests and local broadcast need 32 MiB on each rank, and the smallest has two layers of one head.
            "num_gpu_blocks_override": 2304,
        }
        for role, ranks, stages in (
            ("prefill", prefill_ranks, prefill_stages),
            ("decode", decode_ranks, decode_stages),
        )
    }
    async with running_pair(digests=True, **changes) as pair:
        record_streams(pair, stream_ranks)
        asked = prompts()
        plain = [(await pair.plain(prompt, SAMPLING)).token_ids for prompt in asked]
        await reset(pair.decode)
        split = [transferred(await pair.split(prompt, SAMPLING)) for prompt in asked]
        await reset(pair.decode)
        together = await asyncio.gather(*(pair.split(prompt, SAMPLING) for prompt in asked))
        descriptor = pair.decode.descriptor
        group = descriptor.layout.groups[0]
        return CellResult(
            layer_count=len(group.layers),
            block_tokens=group.block_tokens,
            head_block_bytes=group.bytes_between(0, descriptor.layout.block_tokens, 1),
            prefill_starts=list(pair.prefill.descriptor.layout.stage_starts),
            decode_starts=list(descriptor.layout.stage_starts),
            decode_sessions=[rank.session for rank in descriptor.ranks],
            stream_ranks=stream_ranks,
            plain=plain,
            split=split,
            together=[transferred(answer) for answer in together],
        )


def record_streams(pair: Pair, ranks: list[int]) -> None:
    """Adds the prefill rank of every handoff stream that is opened to `ranks`."""
    connect = pair.receiver.connect

    def connected(hello: Any, *rest: Any) -> Any:
        ranks.append(hello.rank)
        return connect(hello, *rest)

    pair.receiver.connect = connected  # type: ignore[method-assign, assignment]
