"""Answers that another engine has begun, compared with those of one vLLM."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headrace_common.errors import TransferFailed
from headrace_engine.interface import DecodeTokens, FirstHiddenState, Released, Sampling
from headrace_kv.messages import Reservation
from tests.decoding import decoded
from tests.vllm.conftest import ON_PAIR, RunJob
from tests.vllm.pair import BLOCK_TOKENS, CHUNK_TOKENS, GREEDY, Answer, Pair, prompt_of

pytestmark = ON_PAIR

SEEDED = Sampling(
    temperature=0.9,
    top_p=0.95,
    top_k=50,
    min_p=0.01,
    presence_penalty=0.7,
    frequency_penalty=0.5,
    repetition_penalty=1.3,
    seed=1234,
    max_tokens=12,
    logprobs=2,
)
PENALIZED = replace(GREEDY, presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.8)
SAMPLINGS = {"greedy": replace(GREEDY, logprobs=3), "seeded": SEEDED, "penalized": PENALIZED}
EVERYTHING = SAMPLINGS | {
    "hot": Sampling(temperature=1.7, seed=77, max_tokens=12, logprobs=0),
    "top_k": Sampling(temperature=1.0, top_k=5, seed=3, max_tokens=12, logprobs=20),
    "min_p": Sampling(temperature=1.2, min_p=0.2, seed=4, max_tokens=12),
    "top_p": Sampling(temperature=1.2, top_p=0.5, seed=5, max_tokens=12, repetition_penalty=1.9),
    "nearly greedy": Sampling(temperature=1e-6, seed=5, max_tokens=12, presence_penalty=2.0),
}
EDGES = (1, 2, 31, 32, 127, 128, 2 * CHUNK_TOKENS + 100)
# How the first token comes about.
FIRST = {"prefill": Pair.split_after_first, "hidden": Pair.split_from_hidden_state}
by_each = pytest.mark.parametrize("maker", FIRST)


def assert_same(answer: Answer, plain: Answer) -> None:
    """Equal tokens, finish reason, and log probabilities except for rounding."""
    assert answer.token_ids == plain.token_ids
    assert len(answer.logprobs) == len(plain.logprobs)
    for one, other in zip(answer.logprobs, plain.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert [token for token, _ in one.alternatives] == [
            token for token, _ in other.alternatives
        ]
    assert answer.end is not None
    assert plain.end is not None
    assert answer.end.stopped == plain.end.stopped


async def plain_of(pair: Pair, prompt: list[int], sampling: Sampling) -> Answer:
    plain = await pair.plain(prompt, sampling)
    await pair.reset()
    return plain


# Continued answers.


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
@pytest.mark.parametrize("generated", [0, 1, 5])
async def test_a_continued_answer_equals_an_uninterrupted_one(
    pair: Pair, name: str, remote: bool, generated: int
) -> None:
    prompt, sampling = prompt_of(70), SAMPLINGS[name]
    plain = await plain_of(pair, prompt, sampling)
    run = pair.split if remote else pair.plain
    rest = await run(prompt, sampling, plain.token_ids[:generated])
    await pair.reset()
    plain.token_ids, plain.logprobs = plain.token_ids[generated:], plain.logprobs[generated:]
    assert_same(rest, plain)


@pytest.mark.parametrize("length", [BLOCK_TOKENS * 2 - 2, BLOCK_TOKENS * 2 - 1, BLOCK_TOKENS * 2])
async def test_answers_continue_at_the_edges_of_blocks(pair: Pair, length: int) -> None:
    prompt = prompt_of(length)
    plain = await plain_of(pair, prompt, GREEDY)
    for run in (pair.plain, pair.split):
        rest = await run(prompt, GREEDY, plain.token_ids[:2])
        again = await run(prompt, GREEDY, plain.token_ids[:2])
        await pair.reset()
        assert rest.token_ids == again.token_ids == plain.token_ids[2:]


async def test_a_stop_token_and_the_last_token_end_a_continued_answer(pair: Pair) -> None:
    prompt = prompt_of(50)
    plain = await plain_of(pair, prompt, GREEDY)
    generated = plain.token_ids[:3]
    last = await pair.plain(prompt, replace(GREEDY, max_tokens=4), generated)
    assert last.token_ids == plain.token_ids[3:4]
    assert last.end is not None
    assert not last.end.stopped
    stop = replace(GREEDY, stop_token_ids=(plain.token_ids[4],))
    stopped = await pair.plain(prompt, stop, generated)
    await pair.reset()
    assert stopped.token_ids == plain.token_ids[3:5]
    assert stopped.end is not None
    assert stopped.end.stopped


# The first token from prefill, or from its hidden state.


@pytest.mark.core
@by_each
@pytest.mark.parametrize("name", EVERYTHING)
async def test_an_answer_after_a_first_token_equals_plain_vllm(
    pair: Pair, name: str, maker: str
) -> None:
    prompt, sampling = prompt_of(300), EVERYTHING[name]
    plain = await plain_of(pair, prompt, sampling)
    for late in (False, True):
        answer = await FIRST[maker](pair, prompt, sampling, late=late)
        await pair.reset()
        assert_same(answer, plain)
        assert answer.reservation is not None
        assert (answer.reservation.start_token, answer.reservation.end_token) == (0, 300)


@by_each
@pytest.mark.parametrize("length", EDGES)
async def test_the_first_token_at_the_edges_of_blocks_and_chunks(
    pair: Pair, length: int, maker: str
) -> None:
    """vLLM draws once per chunk, which must not advance the random state."""
    prompt = prompt_of(length)
    plain = await plain_of(pair, prompt, SEEDED)
    # The second time, both have most of it cached.
    for _ in range(2):
        answer = await FIRST[maker](pair, prompt, SEEDED)
        assert_same(answer, plain)
        assert answer.reservation is not None
        assert answer.reservation.end_token == length
    await pair.reset()


@by_each
@pytest.mark.parametrize("count", [1, 2])
async def test_an_answer_that_ends_at_once_leaves_no_blocks(
    pair: Pair, count: int, maker: str
) -> None:
    """The cache can be emptied only once every block is free."""
    prompt = prompt_of(90)
    plain = await plain_of(pair, prompt, GREEDY)
    stop = (plain.token_ids[count - 1],)
    for sampling in (replace(GREEDY, max_tokens=count), replace(GREEDY, stop_token_ids=stop)):
        answer = await FIRST[maker](pair, prompt, sampling)
        await pair.reset()
        if maker == "prefill" and count == 1:
            # Decode does not get a token that ends the answer.
            assert answer.token_ids == plain.token_ids[:1]
        else:
            assert_same(answer, await plain_of(pair, prompt, sampling))
            assert len(answer.token_ids) == count


@pytest.mark.core
async def test_many_at_once_get_their_own_hidden_states(pair: Pair) -> None:
    """Their chunks share steps, also with requests that want none."""
    prompts = [prompt_of(length) for length in (40, 700, 3, 96, 333, 64)]
    plain = [await plain_of(pair, prompt, SEEDED) for prompt in prompts]
    runs = (pair.split_from_hidden_state, pair.split_after_first, pair.split_from_hidden_state)
    answers = await asyncio.gather(
        *(runs[number % 3](prompt, SEEDED) for number, prompt in enumerate(prompts))
    )
    await pair.reset()
    for answer, alone in zip(answers, plain, strict=True):
        assert_same(answer, alone)


async def test_unseeded_tokens_from_hidden_state_differ(pair: Pair) -> None:
    prompt, hot = prompt_of(20), Sampling(temperature=2.0, max_tokens=1)
    first = [(await pair.split_from_hidden_state(prompt, hot)).token_ids[0] for _ in range(6)]
    await pair.reset()
    assert len(set(first)) > 1


async def test_an_abort_after_the_first_token_leaves_no_blocks(pair: Pair) -> None:
    work = pair.work(prompt_of(200), awaits_first_token=True, from_hidden_state=True)
    reader = decoded(pair.decode, work)
    assert isinstance(await anext(reader), Reservation)
    assert pair.decode.hidden_format is not None
    state = bytes(pair.decode.hidden_format.nbytes)
    pair.decode.transfer_event(FirstHiddenState(work.transfer_id, state))
    assert isinstance(await anext(reader), DecodeTokens)
    await reader.aclose()
    pair.decode.transfer_event(Released(work.transfer_id))
    await pair.reset()


async def test_a_hidden_state_of_another_size_is_rejected(pair: Pair) -> None:
    work = pair.work(prompt_of(20), awaits_first_token=True, from_hidden_state=True)
    reader = decoded(pair.decode, work)
    await anext(reader)
    pair.decode.transfer_event(FirstHiddenState(work.transfer_id, bytes(40)))
    with pytest.raises(TransferFailed, match="40 bytes"):
        await anext(reader)
    pair.decode.transfer_event(Released(work.transfer_id))
    await pair.reset()


@pytest.mark.parametrize(
    (
        "model",
        "prefill_ranks",
        "decode_ranks",
        "stages",
        "decode_blocks",
        "lengths",
        "answer_tokens",
    ),
    [
        # These blocks hold at most four of the six whole answers.
        pytest.param("tiny-llama", 1, 1, 1, 24, [60], 100, id="preempted"),
        pytest.param("tiny-llama", 1, 2, 1, 64, [60], 40, id="two-ranks"),
        pytest.param("tiny-llama", 2, 1, 1, 64, [60], 40, id="two-prefill-ranks"),
        pytest.param("tiny-llama", 1, 1, 2, 24, [60], 100, id="two-stages"),
        pytest.param(
            "SmolLM2-135M-Instruct",
            *(1, 1, 1, 128, [33, 600], 16),
            id="trained",
            marks=[pytest.mark.timeout(300)],
        ),
    ],
)
async def test_answers_continue_with_preemption_ranks_and_trained_weights(
    run_job: RunJob,
    model: str,
    prefill_ranks: int,
    decode_ranks: int,
    stages: int,
    decode_blocks: int,
    lengths: list[int],
    answer_tokens: int,
) -> None:
    result = await asyncio.to_thread(
        run_job,
        "tests.vllm.first_tokens:compare",
        model=model,
        prefill_ranks=prefill_ranks,
        decode_ranks=decode_ranks,
        stages=stages,
        decode_blocks=decode_blocks,
        lengths=lengths,
        answer_tokens=answer_tokens,
    )
    alone = result["alone"]
    assert all(len(answer) == answer_tokens for answer in alone)
    assert result["answers"] == dict.fromkeys(
        ("continued", "split", "after_first", "from_hidden_state"), alone
    )
