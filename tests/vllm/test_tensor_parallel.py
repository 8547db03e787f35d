"""Prefill and decode with different tensor parallelism, compared with vLLM alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from headrace_kv.shard_map import shards
from tests.vllm.conftest import RunJob
from tests.vllm.pair import STEPS_AHEAD
from tests.vllm.tensor_parallel import CHUNK_TOKENS, SAMPLING, CellResult, Transferred, prompts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@dataclass(frozen=True, slots=True)
class Model:
    """`computes_whole`: vLLM computes its prompts in one step, and caches none."""

    kv_heads: int
    computes_whole: bool = False


GROUPED = "tiny-llama"
SINGLE = "tiny-llama-mqa"
# As many KV heads as heads: 12.
MANY = "tiny-llama-mha"
LATENT = "tiny-deepseek-v2"
LATENT_WIDE = "tiny-deepseek-wide"
MODELS = {
    GROUPED: Model(4),
    SINGLE: Model(1),
    MANY: Model(12),
    LATENT: Model(1, computes_whole=True),
    LATENT_WIDE: Model(1, computes_whole=True),
}

# (model, prefill's ranks, decode's ranks, writes per layer): a write carries heads that only one source sends and one
# destination keeps. With one KV head every rank holds a copy of it. Only one of prefill's sends. Only one of decode's
# receives, and copies to the others.
PAIRS = [
    pytest.param(GROUPED, 2, 1, 2, marks=pytest.mark.core),
    (SINGLE, 2, 2, 1),
    (LATENT, 2, 1, 1),
    (GROUPED, 1, 1, 1),
    (GROUPED, 1, 2, 2),
    (GROUPED, 2, 2, 2),
    (SINGLE, 1, 1, 1),
    (SINGLE, 1, 2, 1),
    (SINGLE, 2, 1, 1),
    (LATENT_WIDE, 1, 2, 1),
    (MANY, 3, 1, 3),
    # Ranks of 4 heads to ranks of 6: the middle one's heads are divided.
    (MANY, 3, 2, 4),
    (GROUPED, 4, 1, 4),
    (GROUPED, 1, 4, 4),
    # More ranks than heads.
    (SINGLE, 4, 1, 1),
]


def result_of(
    run_job: RunJob, model: str, prefill_ranks: int, decode_ranks: int, **changes: int | str
) -> CellResult:
    result = run_job(
        "tests.vllm.tensor_parallel:measure",
        model=model,
        prefill_ranks=prefill_ranks,
        decode_ranks=decode_ranks,
        **changes,
    )
    for name in ("split", "together"):
        result[name] = [Transferred(**values) for values in result[name]]
    return CellResult(**result)


@pytest.mark.parametrize(("model", "prefill_ranks", "decode_ranks", "writes"), PAIRS)
def test_tokens_equal_plain_vllm_and_only_effective_writes_are_made(
    run_job: RunJob, model: str, prefill_ranks: int, decode_ranks: int, writes: int
) -> None:
    result = result_of(run_job, model, prefill_ranks, decode_ranks)
    check(result, model, prefill_ranks, decode_ranks, writes)


def test_steps_are_planned_ahead_of_ranks_that_compute(run_job: RunJob) -> None:
    """Ranks are processes of their own: one step computes while vLLM handles the results of another."""
    result = result_of(run_job, GROUPED, 2, 1, engine_args=STEPS_AHEAD)
    check(result, GROUPED, 2, 1, 2)


def check(
    result: CellResult, model: str, prefill_ranks: int, decode_ranks: int, writes: int
) -> None:
    """Answers equal those of vLLM alone, and every layer crossed in `writes` parts. The ranks are those of a stage."""
    assert all(len(token_ids) == SAMPLING.max_tokens for token_ids in result.plain)
    assert len({tuple(token_ids) for token_ids in result.plain}) == len(result.plain)
    assert [answer.token_ids for answer in result.split] == result.plain
    assert [answer.token_ids for answer in result.together] == result.plain

    # Every decode rank has an engine of its own, and every prefill rank that sends at all one stream.
    assert len(set(result.decode_sessions)) == decode_ranks * len(result.decode_starts)
    every_prefill_rank = range(prefill_ranks * len(result.prefill_starts))
    assert sorted(result.stream_ranks) == list(every_prefill_rank)
    # Ranks that hold the same heads take turns.
    senders = {source for answer in result.split for source, *_ in answer.sent}
    assert senders == set(every_prefill_rank)

    shape = MODELS[model]
    starts = [0, 0, 0, 0 if shape.computes_whole else 512]
    held = shards(decode_ranks, shape.kv_heads)
    copied = sum((shard.copies - 1) * len(shard.heads) for shard in held)
    for prompt, answer, start in zip(prompts(), result.split, starts, strict=True):
        end = len(prompt) - 1
        step = end if shape.computes_whole else CHUNK_TOKENS
        check_writes(answer, range(start, end, step), writes, result)
        tokens = end - start if shape.computes_whole else -(-(end - start) // result.block_tokens)
        unit_bytes = result.head_block_bytes
        if shape.computes_whole:
            unit_bytes //= result.block_tokens
        head_bytes = tokens * result.layer_count * unit_bytes
        assert answer.payload_bytes == shape.kv_heads * head_bytes
        assert answer.local_bytes == copied * head_bytes


def check_writes(answer: Transferred, starts: range, writes: int, result: CellResult) -> None:
    """Each layer came in `writes` parts, piece by piece from `starts`, and nothing came twice."""
    assert (answer.start_token, answer.cached_tokens) == (starts.start, starts.start)
    keys = {(source, destination, layer) for source, destination, layer, _ in answer.sent}
    assert Counter(layer for *_, layer in keys) == dict.fromkeys(range(result.layer_count), writes)
    pieces = sorted({first for *_, first in answer.sent})
    assert pieces == list(starts)
    assert len(answer.sent) == len(keys) * len(pieces) == answer.acknowledgement_count
    assert len({tuple(write) for write in answer.sent}) == len(answer.sent)
    destinations = {destination for _, destination, _ in keys}
    assert destinations == set(range(len(result.decode_sessions)))


def test_without_local_broadcast_each_rank_receives_its_own_bytes(run_job: RunJob) -> None:
    result = result_of(run_job, SINGLE, 1, 2, local_broadcast=False)
    assert [answer.token_ids for answer in result.split] == result.plain
    assert {answer.local_bytes for answer in result.split} == {0}
    for answer in result.split:
        destinations = {(destination, layer) for _, destination, layer, _ in answer.sent}
        assert len(destinations) == 2 * result.layer_count
