"""Write models/tiny-qwen2-vl and models/tiny-llava: small random models that take images.

With --bench, only models/bench-qwen2-vl: the first family with 100 million parameters.

An image becomes a number of tokens that depends on its size (Qwen2-VL, with positions in three dimensions), or always
the same number (LLaVA). The bytes are always the same, because the weights come from a seeded generator.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.clip import CLIPVisionConfig
from transformers.models.llama import LlamaConfig
from transformers.models.llava import LlavaConfig
from transformers.models.qwen2_vl import Qwen2VLConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import (
    Qwen2VLTextConfig,
    Qwen2VLVisionConfig,
)

from make_tiny_model import POSITIONS, SEED, SPECIAL_TOKENS, build_tokenizer
from model_files import (
    WEIGHTS_FILE,
    is_complete,
    new_directory,
    write_generation_config,
    write_json,
    write_tokenizer,
)

MODELS = Path(__file__).resolve().parent.parent / "models"
HIDDEN = 128
VISION_HIDDEN = 64
PATCH_PIXELS = 14
# With the tokens for images, in rows of 64.
VOCABULARY = 576
LOGITS_GAIN = 4.0
IMAGE_GAIN = 2.0
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
# OpenAI's mean and deviation of CLIP, which both families use.
NORMALIZATION: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
}


@dataclass(frozen=True, slots=True)
class Family:
    """`tokens`: those that it adds to the vocabulary. `image`: the text of an image in a chat."""

    tokens: tuple[str, ...]
    image: str
    config: Callable[[dict[str, int]], PreTrainedConfig]
    processor: dict[str, Any]
    image_processor: dict[str, Any]


def qwen2_vl(ids: dict[str, int]) -> PreTrainedConfig:
    """Positions in three dimensions. Four patches become a token."""
    return Qwen2VLConfig(
        text_config=Qwen2VLTextConfig(
            **TEXT,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [4, 6, 6],
            },
        ),
        vision_config=Qwen2VLVisionConfig(
            depth=2,
            embed_dim=VISION_HIDDEN,
            hidden_size=HIDDEN,
            num_heads=2,
            patch_size=PATCH_PIXELS,
            spatial_merge_size=2,
            temporal_patch_size=2,
        ),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        dtype="float32",
    )


def llava(ids: dict[str, int]) -> PreTrainedConfig:
    """CLIP before a Llama. An image has 64 tokens."""
    return LlavaConfig(
        text_config=LlamaConfig(**TEXT),
        vision_config=CLIPVisionConfig(
            hidden_size=VISION_HIDDEN,
            intermediate_size=2 * VISION_HIDDEN,
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=8 * PATCH_PIXELS,
            patch_size=PATCH_PIXELS,
            projection_dim=VISION_HIDDEN,
        ),
        image_token_index=ids["<image>"],
        image_seq_length=64,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
        dtype="float32",
    )


FAMILIES: dict[str, Family] = {
    "tiny-qwen2-vl": Family(
        tokens=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        image="<|vision_start|><|image_pad|><|vision_end|>",
        config=qwen2_vl,
        processor={"processor_class": "Qwen2VLProcessor"},
        image_processor={
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
            "do_resize": True,
            # From 4 to 256 tokens.
            "min_pixels": 4 * (2 * PATCH_PIXELS) ** 2,
            "max_pixels": 256 * (2 * PATCH_PIXELS) ** 2,
            "patch_size": PATCH_PIXELS,
            "temporal_patch_size": 2,
            "merge_size": 2,
        },
    ),
    "tiny-llava": Family(
        tokens=("<image>",),
        image="<image>\n",
        config=llava,
        processor={
            "processor_class": "LlavaProcessor",
            "image_token": "<image>",
            "patch_size": PATCH_PIXELS,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
        image_processor={
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "do_resize": True,
            "size": {"shortest_edge": 8 * PATCH_PIXELS},
            "do_center_crop": True,
            "crop_size": {"height": 8 * PATCH_PIXELS, "width": 8 * PATCH_PIXELS},
        },
    ),
}


def bench_config(ids: dict[str, int]) -> PreTrainedConfig:
    """About 100 million parameters."""
    config = qwen2_vl(ids)
    text, vision = config.get_text_config(), config.vision_config
    text.hidden_size = vision.hidden_size = 576
    text.intermediate_size, text.num_hidden_layers = 1536, 30
    text.num_attention_heads, text.num_key_value_heads = 9, 3
    text.rope_parameters["mrope_section"] = [8, 12, 12]
    text.layer_types = ["full_attention"] * 30
    vision.depth, vision.embed_dim, vision.num_heads = 4, 384, 6
    return config


BENCH: dict[str, Family] = {
    "bench-qwen2-vl": replace(
        FAMILIES["tiny-qwen2-vl"],
        config=bench_config,
        # An image of 1,024 x 1,024 pixels has 1,369 tokens.
        image_processor=FAMILIES["tiny-qwen2-vl"].image_processor
        | {"max_pixels": 1_400 * (2 * PATCH_PIXELS) ** 2},
    )
}


def chat_template(image: str) -> str:
    """Turns with text, or with parts of text and images."""
    return (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['content'] is string %}{{ message['content'] }}"
        "{% else %}{% for part in message['content'] %}"
        f"{{% if part['type'] == 'image' %}}{{{{ {image!r} }}}}"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
        "{{ '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def spread_weights(model: PreTrainedModel) -> None:
    """Scales each matrix to preserve the scale of its input, so that the next token depends on prompt and images."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() < 2:
                continue
            gain = 1.0 / math.sqrt(math.prod(weights.shape[1:]))
            if "embed_tokens" in name:
                gain = 1.0
            elif name.startswith("lm_head"):
                gain *= LOGITS_GAIN
            elif "merger" in name or "projector" in name:
                gain *= IMAGE_GAIN
            weights.normal_(std=gain, generator=generator)


def rename_tower(path: Path) -> None:
    """Gives the vision tower of LLaVA the names that published models have."""
    tensors = {
        name.replace("vision_tower.", "vision_tower.vision_model.", 1): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


def write_model(target: Path, family: Family) -> None:
    """Writes the folder of one model."""
    torch.manual_seed(SEED)
    tokenizer = build_tokenizer()
    tokens = [*SPECIAL_TOKENS, *family.tokens]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in tokens]
    )
    ids = tokenizer.get_vocab()
    config = family.config({token: ids[token] for token in tokens})
    for part in (config, config.get_text_config()):
        part.bos_token_id = tokenizer.token_to_id("<|im_start|>")
        part.eos_token_id = part.pad_token_id = tokenizer.token_to_id("<|im_end|>")
    model = AutoModelForImageTextToText.from_config(config)
    spread_weights(model)
    with new_directory(target) as directory:
        model.save_pretrained(directory)
        rename_tower(directory / WEIGHTS_FILE)
        template = chat_template(family.image)
        write_tokenizer(
            directory,
            tokenizer,
            special_tokens=tokens,
            chat_template=template,
            max_length_tokens=POSITIONS,
        )
        write_generation_config(directory, tokenizer)
        write_json(directory / "preprocessor_config.json", NORMALIZATION | family.image_processor)
        write_json(directory / "processor_config.json", family.processor)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=MODELS, help="directory to write into")
    parser.add_argument("--bench", action="store_true", help="the model of bench.images")
    arguments = parser.parse_args()
    folder = arguments.models
    for name, family in (BENCH if arguments.bench else FAMILIES).items():
        target = folder / name
        if not is_complete(target):
            write_model(target, family)
        print(f"[model] {target} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
