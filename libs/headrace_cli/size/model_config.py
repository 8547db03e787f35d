"""Reads the config.json of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from headrace_common.errors import ConfigError
from headrace_text.model_hub import fetch_model, parse_hub_model

_CONFIG: Final = "config.json"
_CONFIG_BYTES_MAX: Final = 1 << 20


def read_model_config(model: str) -> dict[str, Any]:
    """The config.json of a file, a folder, or "hf:OWNER/NAME" on a hub. Raises ConfigError with the remedy."""
    try:
        hub_model = parse_hub_model(model)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    path = Path(model) if hub_model is None else fetch_model(hub_model, (_CONFIG,))
    if path.is_dir():
        path /= _CONFIG
    try:
        with path.open("rb") as file:
            content = file.read(_CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; name a config.json or a model's folder"
        ) from error
    if len(content) > _CONFIG_BYTES_MAX:
        raise ConfigError(f"{path} has more than {_CONFIG_BYTES_MAX} bytes: name a config.json")
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: name a config.json") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not an object: name a config.json")
    return config
