"""Models that are named by their id on a Hugging Face hub, as "hf:OWNER/NAME" or "hf:OWNER/NAME@REVISION"."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace_common.errors import ConfigError

log = logging.getLogger(__name__)

PREFIX: Final = "hf:"
TEXT_FILES: Final = ("*.json", "*.jinja", "tokenizer.model")
"""What a router needs of a model."""
MODEL_FILES: Final = (*TEXT_FILES, "*.safetensors")
"""What a worker needs. No pickled weights: loading them runs code."""
_ANSWER_TIMEOUT_S: Final = 10.0
_ID = re.compile(
    r"(?P<owner>[\w.-]{1,96})/(?P<name>[\w.-]{1,96})(?:@(?P<revision>[\w][\w./-]{0,127}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class HubModel:
    """`repository` is OWNER/NAME. `revision` is a branch, tag or commit; empty means the main branch."""

    repository: str
    revision: str = ""

    @property
    def name(self) -> str:
        """NAME."""
        return self.repository.partition("/")[2]


def parse_hub_model(text: str) -> HubModel | None:
    """The model, or None for a text that does not begin with "hf:". Raises ValueError naming the expected form."""
    if not text.startswith(PREFIX):
        return None
    match = _ID.fullmatch(text.removeprefix(PREFIX))
    if match is None:
        raise ValueError(f"write {text!r} as hf:OWNER/NAME or hf:OWNER/NAME@REVISION")
    return HubModel(f"{match['owner']}/{match['name']}", match["revision"] or "")


def fetch_model(model: HubModel, files: Sequence[str]) -> Path:
    """The folder of the model's files, downloaded where the hub's cache lacks them. Blocks.

    `files` are patterns. The variables of huggingface_hub apply: HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE, HF_TOKEN.
    Raises ConfigError with the cause.
    """
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError as exc:
        raise _wrong(
            model, "huggingface_hub is not installed: install it, or name a folder"
        ) from exc
    log.info("model %s: checking the hub for its files", model.repository)
    try:
        return Path(
            snapshot_download(
                model.repository,
                revision=model.revision or None,
                allow_patterns=list(files),
                etag_timeout=_ANSWER_TIMEOUT_S,
            )
        )
    # The errors of the hub's answers, of its cache, and of ids that it does not accept.
    except (OSError, ValueError) as exc:
        # A request's failure is the cause of one that names the missing files.
        cause = " ".join(str(exc.__cause__ or exc).split())[:300]
        raise _wrong(
            model,
            f"{cause}; check the name, HF_TOKEN for a model with restricted access, and the "
            "network, or name a folder",
        ) from exc


def _wrong(model: HubModel, detail: str) -> ConfigError:
    return ConfigError(
        f"model {PREFIX}{model.repository} cannot be fetched: {detail}",
        metadata={"field": "model", "model": model.repository},
    )
