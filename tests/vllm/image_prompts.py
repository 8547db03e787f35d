"""Prompts with images, as the engines and vLLM take them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

from PIL import Image

from headrace_engine.interface import PromptImage
from headrace_kv.prefix.images import content_hash
from tests.vllm.pair import prompt_of

UNIT_PIXELS = 28
LLAVA_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of `width` times `height` units, of random pixels."""

    seed: int
    width: int
    height: int

    @property
    def image(self) -> Image.Image:
        size = (self.width * UNIT_PIXELS, self.height * UNIT_PIXELS)
        pixels = random.Random(self.seed).randbytes(3 * size[0] * size[1])
        return Image.frombytes("RGB", size, pixels)

    @property
    def data(self) -> bytes:
        file = BytesIO()
        self.image.save(file, "PNG")
        return file.getvalue()


Part = list[int] | Picture
"""Tokens or an image."""
SMALL, WIDE, LARGE = Picture(1, 5, 7), Picture(2, 9, 3), Picture(3, 16, 16)


def text(length: int, seed: int) -> list[int]:
    return prompt_of(length, seed)


PROMPTS: dict[str, tuple[Part, ...]] = {
    "text": (text(40, 1),),
    "an image": (text(10, 2), SMALL, text(30, 3)),
    "an image first": (SMALL, text(30, 4)),
    "an image before the last token": (text(50, 5), WIDE, text(1, 6)),
    "an image that ends within a block": (text(5, 7), SMALL, text(3, 8)),
    "that image before other text": (text(5, 7), SMALL, text(60, 9)),
    "two images": (text(20, 10), SMALL, text(5, 11), WIDE, text(20, 12)),
    "two images that touch": (text(20, 13), WIDE, SMALL, text(20, 14)),
    "one image twice": (text(20, 15), SMALL, text(40, 16), SMALL, text(20, 17)),
    "an image in two chunks": (text(450, 18), LARGE, text(40, 19)),
    "many images": (
        *(part for seed in range(8) for part in (text(30, 20 + seed), Picture(seed, 8, 8))),
        text(10, 30),
    ),
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for the engines."""

    token_ids: tuple[int, ...]
    images: tuple[PromptImage, ...]

    def __add__(self, tokens: Sequence[int]) -> Prompt:
        return replace(self, token_ids=(*self.token_ids, *tokens))


@dataclass(frozen=True, slots=True)
class Family:
    """How a model writes images. `placeholder` stands between `before` and `after`."""

    placeholder: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def token_count(self, picture: Picture) -> int:
        return picture.width * picture.height if self.before else LLAVA_TOKENS

    def prompt(self, parts: Sequence[Part]) -> Prompt:
        """With expanded placeholders."""
        tokens: list[int] = []
        images: list[PromptImage] = []
        for part in parts:
            if not isinstance(part, Picture):
                tokens += part
                continue
            tokens += self.before
            data, count = part.data, self.token_count(part)
            images.append(PromptImage(data, content_hash(data), len(tokens), count))
            tokens += [self.placeholder] * count
            tokens += self.after
        return Prompt(tuple(tokens), tuple(images))

    def collapsed(self, parts: Sequence[Part]) -> dict[str, Any]:
        """As vLLM takes it."""
        tokens: list[int] = []
        for part in parts:
            tokens += (
                [*self.before, self.placeholder, *self.after] if isinstance(part, Picture) else part
            )
        pictures = [part.image for part in parts if isinstance(part, Picture)]
        media = {"multi_modal_data": {"image": pictures}} if pictures else {}
        return {"prompt_token_ids": tokens, **media}


FAMILIES = {
    "tiny-qwen2-vl": Family(514, before=(512,), after=(513,)),
    "tiny-llava": Family(512),
}
