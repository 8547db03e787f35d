"""Files of the planner's settings: the page's examples, and what is wrong with a file."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from headrace_common.errors import ConfigError
from headrace_planner.settings import PlannerSettings, WorkerProfile, read_settings

PAGE = (Path(__file__).parents[3] / "docs" / "planner.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)
    return str(found)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[load]\nprefill_up_queue = 0.1\ndecode_up_load = -1", "decode_up_load"),
        ("[load]\nprefill_up_queue = 0.1", "must be below prefill_up_queue"),
        ("[load", "no valid TOML"),
    ],
)
def test_what_is_wrong_with_settings_is_named(tmp_path: Path, content: str, words: str) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_settings(wrong)


def test_the_examples_of_the_page_are_valid() -> None:
    """The settings on the page are the defaults."""
    assert PlannerSettings.model_validate(tomllib.loads(block("toml"))) == PlannerSettings()
    assert WorkerProfile.model_validate_json(block("json")).steps.knows_prompts
