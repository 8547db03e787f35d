"""Prefill and decode with different tensor parallelism, compared with vLLM alone."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.vllm.conftest import RunJob
from tests.vllm.pair import BLOCK_TOKENS
from tests.vllm.tensor_parallel import CHUNK_TOKENS, SAMPLING, CellResult, Transferred, prompts

GROUPED = "tiny-llama"
SINGLE = "tiny-llama-mqa"
HEADS = {GROUPED: 4, SINGLE: 1}

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]

# (model, prefill's ranks, decode's ranks, writes per layer): a write carries heads that only one source sends and one
# destination keeps. With one KV head every rank holds a copy of it, and only one of prefill's sends.
PAIRS = [
    (GROUPED, 2, 1, 2),
    (SINGLE, 2, 2, 2),
    pytest.param(GROUPED, 1, 1, 1, marks=pytest.mark.long),
    pytest.param(GROUPED, 1, 2, 2, marks=pytest.mark.long),
    pytest.param(GROUPED, 2, 2, 2, marks=pytest.mark.long),
    pytest.param(SINGLE, 1, 1, 1, marks=pytest.mark.long),
    pytest.param(SINGLE, 1, 2, 2, marks=pytest.mark.long),
    pytest.param(SINGLE, 2, 1, 1, marks=pytest.mark.long),
]


def result_of(run_job: RunJob, model: str, prefill_ranks: int, decode_ranks: int) -> CellResult:
    result = run_job(
        "tests.vllm.tensor_parallel:measure",
        model=model,
        prefill_ranks=prefill_ranks,
        decode_ranks=decode_ranks,
    )
    for name in ("split", "together"):
        result[name] = [Transferred(**values) for values in result[name]]
    return CellResult(**result)


@pytest.mark.parametrize(("model", "prefill_ranks", "decode_ranks", "writes"), PAIRS)
def test_tokens_equal_plain_vllm_and_only_effective_writes_are_made(
    run_job: RunJob, model: str, prefill_ranks: int, decode_ranks: int, writes: int
) -> None:
    result = result_of(run_job, model, prefill_ranks, decode_ranks)
    assert all(len(token_ids) == SAMPLING.max_tokens for token_ids in result.plain)
    assert len({tuple(token_ids) for token_ids in result.plain}) == len(result.plain)
    assert [answer.token_ids for answer in result.split] == result.plain
    assert [answer.token_ids for answer in result.together] == result.plain

    # Every decode rank has an engine of its own, and every prefill rank that sends at all one stream.
    assert len(set(result.decode_sessions)) == decode_ranks
    assert sorted(result.stream_ranks) == list(range(prefill_ranks))

    starts = [0, 0, 0, 512]
    copies = max(1, decode_ranks // HEADS[model])
    for prompt, answer, start in zip(prompts(), result.split, starts, strict=True):
        check_writes(answer, start, len(prompt) - 1, writes, result)
        blocks = -(-(len(prompt) - 1 - start) // BLOCK_TOKENS)
        heads = HEADS[model] * copies
        assert answer.payload_bytes == (
            blocks * result.layer_count * heads * result.head_block_bytes
        )


def check_writes(
    answer: Transferred, start: int, end: int, writes: int, result: CellResult
) -> None:
    """Each layer came in `writes` parts, piece by piece, and nothing came twice."""
    assert (answer.start_token, answer.cached_tokens) == (start, start)
    keys = {(source, destination, layer) for source, destination, layer, _ in answer.sent}
    assert Counter(layer for *_, layer in keys) == dict.fromkeys(range(result.layer_count), writes)
    pieces = sorted({first for *_, first in answer.sent})
    assert pieces == list(range(start, end, CHUNK_TOKENS))
    assert len(answer.sent) == len(keys) * len(pieces) == answer.acknowledgement_count
    assert len({tuple(write) for write in answer.sent}) == len(answer.sent)
    destinations = {destination for _, destination, _ in keys}
    assert destinations == set(range(len(result.decode_sessions)))
