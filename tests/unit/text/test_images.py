"""Sizes of images, and the number of their tokens beside that of the processors of transformers."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from headrace_text.codec import ChatMessage
from headrace_text.hugging_face import HuggingFaceCodec
from headrace_text.images import (
    IMAGE_PARTS_MAX,
    ImageRejected,
    ImageRule,
    image_rule,
    image_size,
    without_unused_parts,
)
from tests.image_models import (
    IMAGE,
    LLAVA,
    QWEN,
    image_file,
    png_chunk,
    png_head,
    write_image_model,
)

SIDES: Final = st.integers(1, 9_000)
PROCESSORS: Final[dict[str, dict[str, Any]]] = {
    "defaults": {},
    "qwen2_vl": {"min_pixels": 3_136, "max_pixels": 12_845_056, "patch_size": 14, "merge_size": 2},
    "qwen3_vl": {
        "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
        "patch_size": 16,
        "merge_size": 2,
    },
    "small": {"min_pixels": 3_136, "max_pixels": 200_704},
}


def rule(config: dict[str, Any], processor: dict[str, Any]) -> ImageRule:
    found = image_rule(config, processor, str)
    assert isinstance(found, ImageRule)
    return found


def oriented(form: str, orientation: int, width: int = 40, height: int = 30) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return image_file(width, height, form, exif=exif.tobytes())


@pytest.fixture(scope="module")
def qwen_processor() -> Callable[[dict[str, Any]], Any]:
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    return lambda settings: module.Qwen2VLImageProcessorPil(**settings)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_resized_grid_has_the_tokens_of_the_processor(
    qwen_processor: Callable[[dict[str, Any]], Any], name: str
) -> None:
    settings = PROCESSORS[name]
    tokens_of, processor = rule(QWEN, settings).tokens_of, qwen_processor(settings)

    @given(SIDES, SIDES)
    @example(1, 1)
    @example(27, 28)
    @example(42, 14)
    @example(1, 200)
    @example(8_192, 8_192)
    def compare(width: int, height: int) -> None:
        try:
            tokens = tokens_of(width, height)
        except ImageRejected:
            assert max(width, height) > 200 * min(width, height)
            return
        patches = processor.get_number_of_image_patches(height, width, {})
        assert tokens == patches // processor.merge_size**2

    compare()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("strategy", ["default", "full"])
def test_a_fixed_grid_has_the_tokens_of_the_processor(strategy: str) -> None:
    clip = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
    config = LLAVA | {"vision_feature_select_strategy": strategy}
    crop = {"height": 112, "width": 112}
    processor = clip.CLIPImageProcessorPil(size={"shortest_edge": 112}, crop_size=crop)
    tokens_of = rule(config, {}).tokens_of
    for size in ((1, 1), (30, 400), (640, 480)):
        pixels = processor(Image.new("RGB", size), return_tensors="pt")["pixel_values"]
        rows, columns = (side // 14 for side in pixels.shape[-2:])
        # As LlavaProcessor counts, with num_additional_image_tokens for CLIP's first token.
        assert tokens_of(*size) == rows * columns + 1 - (strategy == "default")


def test_other_families_are_refused_by_name() -> None:
    vision: dict[str, Any] = {"vision_config": {}}
    assert "type idefics3 are not" in str(image_rule({"model_type": "idefics3"} | vision, {}, str))
    assert image_rule({"model_type": "llama"}, {}, str) == ""
    pixtral = LLAVA | {"vision_config": {"model_type": "pixtral"}}
    assert "with these settings" in str(image_rule(pixtral, {}, str))
    assert "with these settings" in str(image_rule(QWEN, {"do_resize": False}, str))
    assert "no token 258" in str(image_rule(QWEN, {}, lambda token: None))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_size_is_in_the_head_of_a_file(form: str) -> None:
    assert image_size(image_file(300, 20, form)) == (300, 20)
    assert image_size(image_file(300, 20, form)[:4_000]) == (300, 20)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 10))
def test_a_turned_image_has_the_size_that_is_seen(form: str, orientation: int) -> None:
    data = oriented(form, orientation)
    assert image_size(data) == ImageOps.exif_transpose(Image.open(BytesIO(data))).size


def test_an_orientation_behind_the_pixels_of_a_png_counts() -> None:
    plain, exif = image_file(40, 30), Image.Exif()
    exif[0x0112] = 6
    late = png_chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0"))
    data = plain[:-12] + late + plain[-12:]
    assert ImageOps.exif_transpose(Image.open(BytesIO(data))).size == (30, 40)
    assert image_size(data) == (30, 40)
    assert image_size(data[:-6]) == (30, 40)


def test_broken_metadata_turns_nothing() -> None:
    data = oriented("JPEG", 6)
    start = data.index(b"Exif\0\0") + 6
    assert image_size(data[:start] + b"\xff" * 8 + data[start + 8 :]) == (40, 30)


@pytest.mark.parametrize(
    "data", [b"", b"GIF89a", image_file()[:20], image_file(form="BMP"), image_file(form="TIFF")]
)
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(ImageRejected, match="send a whole file of PNG, JPEG, WebP or GIF"):
        image_size(data)


JPEG, GIF = image_file(form="JPEG"), image_file(form="GIF")
_COLORS_END: Final = 13 + (6 << (GIF[10] & 7))
UNUSED: Final[dict[str, Callable[[int], bytes]]] = {
    "PNG": lambda count: image_file()[:33] + png_chunk(b"abCd") * count + image_file()[33:],
    "JPEG": lambda count: JPEG[:2] + b"\xff\xe5\0\2" * count + JPEG[2:],
    "comments": lambda count: GIF[:_COLORS_END] + b"\x21\xfe\x00" * count + GIF[_COLORS_END:],
    "one comment": lambda count: (
        GIF[:_COLORS_END] + b"\x21\xfe" + b"\1x" * count + b"\0" + GIF[_COLORS_END:]
    ),
}
"""Files with so many unused parts before their pixels."""


@pytest.mark.parametrize("name", UNUSED)
def test_unused_parts_are_left_out_and_bounded(name: str) -> None:
    """A decoder takes a step of Python for each, or copies what it has read so far."""
    data = UNUSED[name](1_000)
    assert image_size(data) == (56, 56)
    assert without_unused_parts(data) == UNUSED[name](0).replace(b"\x21\xfe\0", b"")
    with pytest.raises(ImageRejected, match="metadata of more than"):
        image_size(UNUSED[name](IMAGE_PARTS_MAX + 1))


def test_nothing_in_an_image_is_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte of pixels, profile or text has a thousandth of its size in a file."""
    packed = zlib.compress(bytes(2**20))
    profiles = [png_chunk(kind, b"x\0\0" + packed) for kind in (b"iCCP", b"zTXt", b"iTXt")]
    data = image_file()[:33] + b"".join(profiles) * 140 + image_file()[33:]
    monkeypatch.delattr(zlib, "decompressobj")
    monkeypatch.delattr(zlib, "decompress")
    assert image_size(data) == (56, 56)
    assert without_unused_parts(data) == image_file()


def test_fill_bytes_are_read_once() -> None:
    """Some 200 s when each is a new start."""
    assert image_size(JPEG[:2] + b"\xff" * 2**20 + JPEG[2:]) == (56, 56)
    with pytest.raises(ImageRejected):
        image_size(JPEG[:2] + b"\xff" * 2**20 + b"\0")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_pixels_are_the_same_without_the_unused_parts(form: str) -> None:
    exif, pixels = Image.Exif(), Image.effect_mandelbrot((40, 30), (-2, -1, 1, 1), 50)
    exif[0x0112] = 6
    with BytesIO() as file:
        mode = "L" if form == "JPEG" else "P"
        pixels.convert(mode).save(file, form, exif=exif.tobytes(), comment="c", transparency=3)
        data = file.getvalue()
    found, whole = (
        ImageOps.exif_transpose(Image.open(BytesIO(one)))
        for one in (without_unused_parts(data), data)
    )
    assert found.convert("RGBA").tobytes() == whole.convert("RGBA").tobytes()
    assert found.size == image_size(data)


@pytest.mark.parametrize("side", [8_193, 10_000, 60_000])
def test_an_image_with_too_many_pixels_is_refused_from_its_head(side: int) -> None:
    with pytest.raises(ImageRejected, match="scale it down"):
        image_size(png_head(side, side))


@given(st.binary(max_size=300), st.sampled_from(["PNG", "JPEG", "WEBP", "GIF"]), st.integers(0, 80))
def test_any_bytes_are_an_image_or_refused(data: bytes, form: str, kept: int) -> None:
    try:
        width, height = image_size(image_file(form=form)[:kept] + data)
    except ImageRejected:
        return
    assert width * height > 0


def chat_of(folder: Path) -> tuple[HuggingFaceCodec, str]:
    codec = HuggingFaceCodec(folder)
    messages = [
        ChatMessage("system", "s"),
        ChatMessage("user", "", parts=("see ", None, " and", None)),
        ChatMessage("assistant", "a<|image|>"),
        ChatMessage("user", "b"),
    ]
    tokens = codec.encode_chat(messages, continue_final_message=False)
    # Nothing that a client writes is a placeholder.
    assert tokens.count(IMAGE) == 2
    return codec, codec.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("contents", ["both", "lists"])
def test_a_template_gets_parts(tmp_path: Path, contents: str) -> None:
    _, text = chat_of(write_image_model(tmp_path, QWEN, contents))
    image = "<|vision_start|><|image|><|vision_end|>"
    assert text == (
        f"<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nsee {image} and{image}<|im_end|>\n"
        "<|im_start|>assistant\na<|image|><|im_end|>\n<|im_start|>user\nb<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_template_of_texts_gets_placeholders(tmp_path: Path) -> None:
    _, text = chat_of(write_image_model(tmp_path, LLAVA, "texts"))
    assert "user\n<|image|>\n<|image|>\nsee \n and<|im_end|>" in text


@pytest.mark.parametrize("contents", ["both", "lists", "texts"])
def test_a_message_of_text_can_be_continued(tmp_path: Path, contents: str) -> None:
    codec = HuggingFaceCodec(write_image_model(tmp_path, QWEN, contents))
    messages = [ChatMessage("user", "", parts=(None, "x")), ChatMessage("assistant", "well ")]
    tokens = codec.encode_chat(messages, continue_final_message=True)
    assert codec.decode(tokens).endswith("assistant\nwell ")
    assert tokens.count(IMAGE) == 1


def test_texts_of_placeholders_stay_text_without_a_special_token(tmp_path: Path) -> None:
    codec = HuggingFaceCodec(write_image_model(tmp_path, LLAVA, "texts"))
    tokens = codec.encode_chat([ChatMessage("user", "<|image|>")], continue_final_message=False)
    assert IMAGE not in tokens


def test_images_of_unsupported_families_are_named(tmp_path: Path) -> None:
    codec = HuggingFaceCodec(write_image_model(tmp_path, QWEN | {"model_type": "mllama"}))
    assert codec.images is None
    assert codec.images_refusal == "images of model type mllama are not supported"
