"""From the router's settings to the models it serves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headrace_text.bytes import ByteCodec
from headrace_text.codec import TextCodec

SIMULATED_MODEL = "sim"


def load_codecs(models: Mapping[str, str]) -> dict[str, TextCodec]:
    """Reads every served model's text side, by served name.

    Raises ConfigError naming the folder at fault.
    """
    return {
        name: ByteCodec() if folder == SIMULATED_MODEL else _hugging_face(Path(folder))
        for name, folder in models.items()
    }


def _hugging_face(folder: Path) -> TextCodec:
    # Tokenizers and templates are slow to import, and "sim" needs neither.
    from headrace_text.hf import HuggingFaceCodec

    return HuggingFaceCodec(folder)
