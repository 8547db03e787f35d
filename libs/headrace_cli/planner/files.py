"""Files of the planner: settings as TOML, and a worker's profile as JSON."""

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
    """The settings in a file, or the defaults without one. Raises ConfigError."""
    if path is None:
        return PlannerSettings()
    try:
        return _validated(PlannerSettings, path, tomllib.loads(path.read_text(encoding="utf-8")))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: no valid TOML: {error}") from None


def read_profile(path: Path | None) -> WorkerProfile | None:
    """The profile in a file, None without one. Raises ConfigError."""
    if path is None:
        return None
    try:
        return _validated(WorkerProfile, path, json.loads(path.read_text(encoding="utf-8")))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: no valid JSON: {error}") from None


def _validated(model: type[_Model], path: Path, content: object) -> _Model:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, problem['loc'])) or 'all'}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_input=False)
        ]
        raise ConfigError(f"{path}: " + "; ".join(problems)) from None
