"""Images of prompts through whole deployments."""

from __future__ import annotations

from pathlib import Path

from headrace.inference.v1 import image_pb2, inference_pb2, sampling_pb2
from tests.image_models import image_file, write_image_model
from tests.suite.deployment import Suite, suite
from tests.waiting import until

LOCAL = inference_pb2.PREFILL_PLACEMENT_LOCAL
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
# 256 tokens each: eight blocks.
RED, BLUE = (image_file(448, 448, color=color) for color in ("red", "blue"))
IMAGE_TOKENS = 256
BLOCK = 32
COUNT = 8


def about(
    image: bytes,
    placement: inference_pb2.PrefillPlacement.ValueType = (
        inference_pb2.PREFILL_PLACEMENT_UNSPECIFIED
    ),
    text: str = "What is it?",
) -> inference_pb2.GenerateRequest:
    parts = [
        image_pb2.ContentPart(image=image_pb2.Image(data=image)),
        image_pb2.ContentPart(text=text),
    ]
    return inference_pb2.GenerateRequest(
        chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", parts=parts)]),
        sampling=sampling_pb2.SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True),
        prefill_placement=placement,
    )


async def cached_tokens(it: Suite, image: bytes) -> dict[str, int]:
    """The tokens of a prompt with the image that the router finds on each decode worker."""
    candidates = (await it.operator.explain(about(image))).candidates
    return {one.worker_id: one.cached_tokens for one in candidates}


async def test_answers_and_caches_depend_on_images(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    settings = (("router", "model", f"sim={write_image_model(folder)}"),)
    async with suite(tmp_path, prefill_count=1, decode_count=2, settings=settings) as it:
        remote = await it.ask(about(RED, REMOTE))
        assert remote.last.usage.transferred_tokens > IMAGE_TOKENS
        home = remote.last.timing.decode_worker_id

        async def known() -> bool:
            return (await cached_tokens(it, RED))[home] >= IMAGE_TOKENS

        await until(known, 15.0, f"{home} has the image", 0.02)
        # An image of equal size has equal tokens, and nothing of the other's cache.
        assert max((await cached_tokens(it, BLUE)).values()) < BLOCK
        other = await it.ask(about(BLUE, REMOTE))
        assert other.last.usage.prompt_tokens == remote.last.usage.prompt_tokens
        assert other.last.usage.decode_cached_tokens < BLOCK
        assert other.token_ids != remote.token_ids
        again = await it.ask(about(RED))
        assert again.token_ids == remote.token_ids
        assert again.last.timing.decode_worker_id == home
        assert again.last.usage.decode_cached_tokens >= IMAGE_TOKENS
        local = await it.ask(about(BLUE, LOCAL))
        assert local.token_ids == other.token_ids
        it.kill("prefill-0")
        alone = await it.ask(about(BLUE, text="Why?"))
        assert len(alone.token_ids) == COUNT
