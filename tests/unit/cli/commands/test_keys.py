"""Files of API keys."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace_cli.app import app
from headrace_cli.commands.credentials import add_key
from headrace_common.access.key_file import key_digest, load_keys
from headrace_common.errors import ConfigError


def test_each_call_adds_a_key_that_a_router_accepts(tmp_path: Path) -> None:
    file = tmp_path / "credentials" / "api_keys"
    made = CliRunner().invoke(app, ["keys", "create", "search", "--file", str(file)])
    assert made.exit_code == 0
    first = made.stdout.strip()
    assert first not in made.stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text(file.read_text().rstrip("\n"))
    second = add_key(file, "batch")
    assert load_keys(str(file), "api_keys_file").current() == {
        key_digest(first.encode()): "search",
        key_digest(second.encode()): "batch",
    }


@pytest.mark.parametrize(
    "content", ["-----BEGIN CERTIFICATE-----\n", "one-word\n", "a line of text\n", "\0\xff"]
)
def test_another_file_is_refused_and_not_changed(tmp_path: Path, content: str) -> None:
    file = tmp_path / "file"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError):
        add_key(file, "search")
    assert file.read_text(encoding="latin-1") == content
