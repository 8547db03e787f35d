"""Loads the codecs of all served models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headrace_text.byte_codec import ByteCodec
from headrace_text.codec import TextCodec
from headrace_text.model_hub import TEXT_FILES, fetch_model, parse_hub_model

SIMULATED_MODEL = "sim"


def load_codecs(models: Mapping[str, str]) -> dict[str, TextCodec]:
    """The codec of each model by served name. `models` maps a served name to a folder, to
    a model on a hub as "hf:OWNER/NAME", or to "sim".

    Raises ConfigError naming the folder at fault.
    """
    return {
        name: ByteCodec() if folder == SIMULATED_MODEL else _load_hugging_face(folder)
        for name, folder in models.items()
    }


def _load_hugging_face(model: str) -> TextCodec:
    # Tokenizers and Jinja are slow to import, and "sim" needs neither.
    from headrace_text.hugging_face import HuggingFaceCodec

    hub_model = parse_hub_model(model)
    return HuggingFaceCodec(
        Path(model) if hub_model is None else fetch_model(hub_model, TEXT_FILES)
    )
