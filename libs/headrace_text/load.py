"""Loads the codecs of all served models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headrace_text.byte_codec import ByteCodec
from headrace_text.codec import TextCodec

SIMULATED_MODEL = "sim"


def load_codecs(models: Mapping[str, str]) -> dict[str, TextCodec]:
    """The codec of each model by served name. `models` maps a served name to a folder, or to "sim".

    Raises ConfigError naming the folder at fault.
    """
    return {
        name: ByteCodec() if folder == SIMULATED_MODEL else _load_hugging_face(Path(folder))
        for name, folder in models.items()
    }


def _load_hugging_face(folder: Path) -> TextCodec:
    # Tokenizers and Jinja are slow to import, and "sim" needs neither.
    from headrace_text.hugging_face import HuggingFaceCodec

    return HuggingFaceCodec(folder)
