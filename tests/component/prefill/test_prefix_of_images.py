"""Prompts with images on simulated workers: KV and caches depend on their contents."""

from __future__ import annotations

from headrace.inference.v1 import image_pb2
from headrace_common.errors import InvalidRequest
from headrace_kv.prefix.images import content_hash, hashed_token_ids
from tests.component.prefill.fetching import Workers, fetching_workers
from tests.component.prefill.test_prefix_fetch import refusal_of

BEFORE = list(range(100, 120))
PLACEHOLDERS = [7] * 30
BLOCK_TOKENS = 8
ANSWER_TOKENS = 9


def image_of(data: bytes) -> image_pb2.PromptImage:
    return image_pb2.PromptImage(
        data=data,
        content_hash=content_hash(data),
        start_token=len(BEFORE),
        token_count=len(PLACEHOLDERS),
    )


CAT, DOG = image_of(b"a cat"), image_of(b"a dog")


async def turn(
    workers: Workers, image: image_pb2.PromptImage, after: list[int]
) -> tuple[int, tuple[int, ...]]:
    """The start of decode's reservation, and the answer. It must be right for the image."""
    prompt = [*BEFORE, *PLACEHOLDERS, *after]
    found = await workers.run(prompt, ANSWER_TOKENS, [image])
    words = hashed_token_ids(prompt, [image]).tolist()
    assert found.tokens == workers.expected(words, ANSWER_TOKENS)
    return found.start_token, found.tokens


async def test_an_image_is_reused_by_its_content() -> None:
    async with fetching_workers() as workers:
        after = list(range(300, 320))
        start, cat = await turn(workers, CAT, after)
        assert start == 0
        start, dog = await turn(workers, DOG, after)
        assert start == len(BEFORE) // BLOCK_TOKENS * BLOCK_TOKENS
        assert dog != cat
        start, again = await turn(workers, CAT, after)
        assert start > len(BEFORE) + len(PLACEHOLDERS)
        assert again == cat


async def test_a_prefix_is_fetched_up_to_an_image_that_decode_has_in_part() -> None:
    async with fetching_workers() as workers:
        await turn(workers, CAT, [300])
        assert await workers.prefill.reset_prefix_cache()
        start, _ = await turn(workers, CAT, list(range(400, 420)))
        assert len(BEFORE) < start < len(BEFORE) + len(PLACEHOLDERS)
        fetched = [(fetch.reason, fetch.token_count) for fetch in workers.fetches]
        assert fetched == [("", len(BEFORE) // BLOCK_TOKENS * BLOCK_TOKENS)]
        await turn(workers, CAT, list(range(400, 440)))
        assert await workers.prefill.reset_prefix_cache()
        start, _ = await turn(workers, CAT, list(range(400, 441)))
        assert (workers.fetches[-1].reason, workers.fetches[-1].token_count) == ("", start)
        assert start > len(BEFORE) + len(PLACEHOLDERS)


async def test_decode_sends_no_part_of_an_image() -> None:
    async with fetching_workers() as workers:
        await turn(workers, CAT, list(range(300, 320)))
        prompt = [*BEFORE, *PLACEHOLDERS, *range(300, 330)]
        async with workers.reserved(prompt, ANSWER_TOKENS, [CAT]) as request:
            valid = {"transfer_id": request.name, "ticket": workers.ticket(request.name)}
            error = await refusal_of(workers, **valid, end_token=24)
            assert isinstance(error, InvalidRequest)
            assert list(error.violations) == ["end_token"]
            assert (await request.prefill()).reason == ""
            assert len(await request.answer()) == ANSWER_TOKENS
