"""Prompts for vLLM, with the images that they contain.

vLLM expands the placeholder of an image to as many as the image has tokens. The router has done so already: here each
run is reduced to one placeholder, and the result is compared with the router's.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from headrace_common.callers.bounds import FewEach
from headrace_common.errors import InvalidRequest
from headrace_engine.interface import PromptImage
from headrace_engine.vllm.service.sampling import request_errors
from headrace_kv.prefix.images import CONTENT_HASH_BYTES, content_hash
from headrace_text.images import (
    IMAGES_PIXELS_MAX,
    ImageRejected,
    image_size,
    without_unused_parts,
)

if TYPE_CHECKING:
    from vllm.inputs import EngineInput, MultiModalInput, TokensPrompt
    from vllm.v1.engine.async_llm import AsyncLLM

_HASH_CHARACTERS = 2 * CONTENT_HASH_BYTES
# The pixels of one request are in memory at a time. A tenant has one request among those that wait for that.
_TURNS, _PIXELS = FewEach(), FewEach()
_DECODER: Final = ThreadPoolExecutor(1, "images")


async def engine_prompt(
    llm: AsyncLLM,
    token_ids: Sequence[int],
    cache_salt: str,
    images: Sequence[PromptImage] = (),
    *,
    tenant: str = "",
) -> TokensPrompt | EngineInput:
    """The prompt for `generate`. vLLM hashes the salt with the first block, so it shares no block with other salts.

    The images of one request are decoded at a time, in turns of `tenant`. Raises InvalidRequest for images that the
    model does not take, or with placeholders other than its own.
    """
    prompt: TokensPrompt = {"prompt_token_ids": list(token_ids)}
    if cache_salt:
        prompt["cache_salt"] = cache_salt
    if not images:
        return prompt
    if not llm.model_config.supports_multimodal_inputs:
        raise InvalidRequest({"images": "the model takes no images: send text only"})
    prompt["prompt_token_ids"] = _with_single_placeholders(token_ids, images)
    prompt["multi_modal_uuids"] = {"image": [_identifier(one, cache_salt) for one in images]}
    async with _TURNS.of(tenant), _PIXELS.of(""):
        try:
            opened = await _open(llm, images)
            prompt["multi_modal_data"] = {"image": opened}
            # Of vLLM's two caches of processed images, this one needs no equal order of requests in both processes.
            (rendered,) = await llm.renderer.render_cmpl_async([prompt], skip_mm_cache=True)
        except request_errors() as error:
            raise InvalidRequest({"images": f"vLLM rejects them: {error}"}) from error
    _check(rendered, token_ids, images)
    return rendered


def image_hash(identifier: str) -> bytes | None:
    """The content hash in an image's identifier, as vLLM's events have it. None when it is not from here."""
    # vLLM may put the name of an adapter before it.
    text = identifier.rpartition(":")[2][:_HASH_CHARACTERS]
    try:
        found = bytes.fromhex(text)
    except ValueError:
        return None
    return found if len(found) == CONTENT_HASH_BYTES else None


def _identifier(image: PromptImage, cache_salt: str) -> str:
    """By it, vLLM names an image in its caches and in the hashes of blocks. Tenants share no entry."""
    return f"{image.content_hash.hex()}{cache_salt}"


def _with_single_placeholders(token_ids: Sequence[int], images: Sequence[PromptImage]) -> list[int]:
    reduced: list[int] = []
    end = 0
    for image in images:
        reduced.extend(token_ids[end : image.start_token + 1])
        end = image.start_token + image.token_count
    return [*reduced, *token_ids[end:]]


async def _open(llm: AsyncLLM, images: Sequence[PromptImage]) -> list[Any]:
    """Decodes the files, on a thread. Raises InvalidRequest, and ValueError as vLLM does."""
    from vllm.multimodal.media.image import ImageMediaIO

    options = llm.model_config.multimodal_config.media_io_kwargs.get("image", {})
    decode = ImageMediaIO(**options).load_bytes
    return await asyncio.get_running_loop().run_in_executor(_DECODER, _decoded, decode, images)


def _decoded(decode: Callable[[bytes], Any], images: Sequence[PromptImage]) -> list[Any]:
    """Raises InvalidRequest, before any pixel is decoded for too many."""
    pixels, files = 0, list[bytes]()
    for number, image in enumerate(images):
        if content_hash(image.data) != image.content_hash:
            raise InvalidRequest({f"images[{number}].content_hash": "must be that of data"})
        try:
            pixels += math.prod(image_size(image.data))
            files.append(without_unused_parts(image.data))
        except ImageRejected as error:
            raise InvalidRequest({f"images[{number}].data": str(error)}) from None
    if pixels > IMAGES_PIXELS_MAX:
        raise InvalidRequest({"images": f"must have {IMAGES_PIXELS_MAX} pixels at most"})
    return list(map(decode, files))


def _check(found: MultiModalInput, token_ids: Sequence[int], images: Sequence[PromptImage]) -> None:
    """Raises InvalidRequest when vLLM's placeholders are not those of the request."""
    places = found["mm_placeholders"]["image"]
    for number, (place, image) in enumerate(zip(places, images, strict=True)):
        if place.length != image.token_count:
            counts = f"{place.length} tokens for this model, not {image.token_count}"
            raise InvalidRequest({f"images[{number}].token_count": f"the image has {counts}"})
        if place.offset != image.start_token:
            raise InvalidRequest(
                {f"images[{number}].start_token": f"its placeholders begin at {place.offset}"}
            )
    if found["prompt_token_ids"] != list(token_ids):
        raise InvalidRequest({"images": "the placeholders in token_ids are not the model's"})
