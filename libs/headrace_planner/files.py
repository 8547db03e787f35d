"""The files of the planner's user: settings as TOML, and a worker's profile as JSON."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from headrace_common.errors import ConfigError
from headrace_planner.profile import WorkerProfile
from headrace_planner.settings import PlannerSettings

_Model = TypeVar("_Model", bound=BaseModel)


def read_settings(path: Path | None) -> PlannerSettings:
    """The settings of a file, or the defaults. Raises ConfigError that names every wrong field."""
    if path is None:
        return PlannerSettings()
    try:
        content = tomllib.loads(_text_of(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: no valid TOML: {error}") from None
    return _validated(PlannerSettings, path, content)


def read_profile(path: Path | None) -> WorkerProfile | None:
    """The profile of a file, or None. Raises ConfigError that names every wrong field."""
    if path is None:
        return None
    try:
        content = json.loads(_text_of(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: no valid JSON: {error}") from None
    return _validated(WorkerProfile, path, content)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; name a file that can"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: no text in UTF-8: {error}") from None


def _validated(model: type[_Model], path: Path, content: object) -> _Model:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, problem['loc'])) or 'all'}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_input=False)
        ]
        raise ConfigError(f"{path}: " + "; ".join(problems)) from None
