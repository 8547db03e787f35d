"""`headrace context`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace_cli.app import app
from headrace_cli.contexts.store import contexts_path

SECRET = "sk-live-0123456789"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["context", *arguments])


def secret_file(folder: Path, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_text(SECRET)
    path.chmod(mode)
    return path


def test_contexts_are_added_used_listed_and_removed(tmp_path: Path) -> None:
    token = secret_file(tmp_path)
    added = run("add", "prod", "--router", "10.0.0.5:7050", "--token-file", str(token))
    assert added.exit_code == 0
    assert "unencrypted" in added.stderr
    assert run("use", "prod").exit_code == 0
    document = json.loads(run("list", "--json").stdout)
    assert document["schema"] == "headrace.contexts.v1"
    assert document["current"] == "prod"
    assert document["contexts"][0]["token_file"] == str(token)
    assert document["contexts"][0]["registry"] is None
    assert SECRET not in contexts_path().read_text()
    shown = run("list").stdout
    assert [line.split()[:3] for line in shown.splitlines() if "*" in line] == [
        ["*", "prod", "10.0.0.5:7050"]
    ]
    assert run("remove", "prod").exit_code == 0
    assert json.loads(run("list", "--json").stdout)["contexts"] == []


def test_a_context_is_replaced_only_when_asked() -> None:
    assert run("add", "prod", "--router", "127.0.0.1:1").exit_code == 0
    again = run("add", "prod", "--router", "127.0.0.1:2")
    assert again.exit_code == 2
    assert "--replace" in again.stderr
    assert run("add", "prod", "--router", "127.0.0.1:2", "--replace").exit_code == 0
    assert json.loads(run("list", "--json").stdout)["contexts"][0]["router"] == "127.0.0.1:2"


def test_a_secret_in_place_of_its_file_is_refused_and_not_repeated() -> None:
    refused = run("add", "prod", "--router", "10.0.0.5:7050", "--api-key-file", SECRET)
    assert refused.exit_code == 2
    assert "--api-key-file names no file" in refused.stderr
    assert SECRET not in refused.stderr
    assert not contexts_path().exists()


def test_a_secret_that_others_read_is_refused(tmp_path: Path) -> None:
    token = secret_file(tmp_path, 0o644)
    refused = run("add", "prod", "--router", "10.0.0.5:7050", "--token-file", str(token))
    assert refused.exit_code == 2
    assert "chmod 600" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("add", "prod", "--router", "http://h:1"), "--router is 'http://h:1'"),
        (("add", "prod", "--router", "h:1", "--registry", "h:99999"), "no port 99999"),
        (("add", "local", "--router", "h:1"), "cannot name a context"),
        (("use", "absent"), "there is no context absent"),
        (("remove", "absent"), "there is no context absent"),
    ],
)
def test_wrong_input_is_refused_in_one_line(arguments: tuple[str, ...], words: str) -> None:
    refused = run(*arguments)
    assert refused.exit_code in (1, 2)
    assert words in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert json.loads(run("list", "--json").stdout)["contexts"] == []


def test_half_of_mutual_tls_is_refused(tmp_path: Path) -> None:
    key = secret_file(tmp_path)
    refused = run("add", "prod", "--router", "h:1", "--tls-key-file", str(key))
    assert refused.exit_code == 2
    assert "--tls-authority-file is missing" in refused.stderr
