"""The API key that commands present."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_cli.client import read_api_key
from headrace_common.errors import ConfigError

KEY, FILE = "HEADRACE_API_KEY", "HEADRACE_API_KEY_FILE"


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    monkeypatch.delenv(FILE, raising=False)


def test_a_key_comes_from_a_variable_or_from_the_file_that_another_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_api_key() == ""
    monkeypatch.setenv(KEY, " of-the-variable\n")
    assert read_api_key() == "of-the-variable"
    monkeypatch.delenv(KEY)
    file = tmp_path / "key"
    file.write_text("of-the-file\n")
    monkeypatch.setenv(FILE, str(file))
    assert read_api_key() == "of-the-file"


def test_a_file_of_keys_and_tenants_is_no_file_of_one_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "api_keys"
    monkeypatch.setenv(FILE, str(file))
    for content in ("secret tenant\n", "\n"):
        file.write_text(content)
        with pytest.raises(ConfigError, match="one API key and nothing else") as refused:
            read_api_key()
        assert "secret" not in refused.value.detail


def test_two_keys_are_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
    monkeypatch.setenv(FILE, "/nowhere")
    with pytest.raises(ConfigError, match="unset one of them") as refused:
        read_api_key()
    assert "secret" not in refused.value.detail
