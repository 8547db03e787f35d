"""Prompts for vLLM, without vLLM: what its renderer gets, and what is refused."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_common.errors import InvalidRequest
from headrace_engine.interface import PromptImage
from headrace_engine.vllm.service import prompts
from headrace_engine.vllm.service.prompts import engine_prompt, image_hash
from headrace_kv.prefix.images import content_hash
from headrace_text.images import IMAGE_PIXELS_MAX
from tests.image_models import image_file, png_chunk, png_head

CAT = PromptImage(b"cat", content_hash(b"cat"), 1, 3)
DOG = PromptImage(b"dog", content_hash(b"dog"), 5, 2)
TOKENS = (4, 9, 9, 9, 5, 9, 9, 6)


class Renderer:
    """Gives back placeholders at these (offset, length) and these tokens. Keeps the prompts that it gets."""

    def __init__(self, places: list[tuple[int, int]], tokens: tuple[int, ...] = TOKENS) -> None:
        self.asked: list[Any] = []
        self._rendered = {
            "prompt_token_ids": list(tokens),
            "mm_placeholders": {
                "image": [SimpleNamespace(offset=start, length=count) for start, count in places]
            },
        }

    async def render_cmpl_async(self, asked: list[Any], *, skip_mm_cache: bool) -> list[Any]:
        assert skip_mm_cache
        self.asked += asked
        return [self._rendered]


def engine(renderer: Renderer, *, takes_images: bool = True) -> Any:
    model = SimpleNamespace(supports_multimodal_inputs=takes_images)
    return SimpleNamespace(model_config=model, renderer=renderer)


@pytest.fixture(autouse=True)
def _no_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_images(llm: Any, images: list[PromptImage]) -> list[Any]:
        return [one.data for one in images]

    monkeypatch.setattr(prompts, "_open", open_images)


async def test_vllm_expands_one_placeholder_of_each_image() -> None:
    renderer = Renderer([(1, 3), (5, 2)])
    rendered = await engine_prompt(engine(renderer), TOKENS, "aa", [CAT, DOG])
    assert rendered["prompt_token_ids"] == list(TOKENS)
    (asked,) = renderer.asked
    identifiers = asked.pop("multi_modal_uuids")["image"]
    assert asked == {
        "prompt_token_ids": [4, 9, 5, 9, 6],
        "cache_salt": "aa",
        "multi_modal_data": {"image": [b"cat", b"dog"]},
    }
    # Tenants share no entry of vLLM's caches of images.
    assert len({*identifiers, CAT.content_hash.hex()}) == 3
    assert [image_hash(one) for one in identifiers] == [CAT.content_hash, DOG.content_hash]
    assert image_hash(f"poet:{identifiers[0]}") == CAT.content_hash


async def test_text_reaches_vllm_as_it_is() -> None:
    renderer = Renderer([])
    prompt = await engine_prompt(engine(renderer, takes_images=False), TOKENS, "")
    assert prompt == {"prompt_token_ids": list(TOKENS)}
    assert not renderer.asked


@pytest.mark.parametrize(
    ("places", "tokens", "field"),
    [
        ([(1, 4), (6, 2)], TOKENS, "images[0].token_count"),
        ([(1, 3), (4, 2)], TOKENS, "images[1].start_token"),
        ([(1, 3), (5, 2)], (4, 9, 9, 9, 5, 8, 8, 6), "images"),
    ],
)
async def test_other_placeholders_than_the_models_are_refused(
    places: list[tuple[int, int]], tokens: tuple[int, ...], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await engine_prompt(engine(Renderer(places, tokens)), TOKENS, "", [CAT, DOG])
    assert list(refused.value.violations) == [field]


async def test_a_model_of_text_takes_no_images() -> None:
    with pytest.raises(InvalidRequest) as refused:
        await engine_prompt(engine(Renderer([]), takes_images=False), TOKENS, "", [CAT])
    assert list(refused.value.violations) == ["images"]


async def test_the_pixels_of_one_request_are_in_memory_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tenants take turns."""
    opened: list[str] = []

    async def open_images(llm: Any, images: list[PromptImage]) -> list[Any]:
        opened.append(images[0].data.decode())
        await asyncio.sleep(1)
        opened.append("end")
        return images

    monkeypatch.setattr(prompts, "_open", open_images)

    async def ask(tenant: str, number: int) -> None:
        image = PromptImage(f"{tenant}{number}".encode(), b"", 1, 3)
        await engine_prompt(engine(Renderer([(1, 3)])), TOKENS, "", [image], tenant=tenant)

    await asyncio.gather(*(ask("a", number) for number in range(3)), ask("b", 0))
    assert opened == ["a0", "end", "b0", "end", "a1", "end", "a2", "end"]


def test_pixels_are_counted_before_any_is_decoded() -> None:
    side = int(IMAGE_PIXELS_MAX**0.5)
    large, small = png_head(side, side) + image_file()[33:], image_file()
    chunk = png_chunk(b"tEXt", b"a\0b")
    profiled = small[:33] + chunk + small[33:]

    def decoded(*files: bytes) -> list[bytes]:
        images = [PromptImage(one, content_hash(one), 0, 1) for one in files]
        return prompts._decoded(bytes, images)

    assert decoded(large, large) == [large, large]
    assert decoded(profiled) == [small]
    for files in ((large, large, small), (small, png_head(side + 1, side)), (b"no image",)):
        with pytest.raises(InvalidRequest):
            decoded(*files)
