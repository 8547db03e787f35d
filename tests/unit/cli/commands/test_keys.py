"""Files of API keys."""

from __future__ import annotations

import stat
from pathlib import Path

from typer.testing import CliRunner

from headrace_cli.app import app
from headrace_cli.commands.credentials import add_key
from headrace_common.access.key_file import key_digest, load_keys


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
