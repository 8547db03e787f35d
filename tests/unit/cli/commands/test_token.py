"""`headrace token`."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from headrace_cli.app import app
from headrace_cli.commands.credentials import PRIVATE_KEY_FILE, PUBLIC_KEYS_FILE
from headrace_common.access.roles import Caller, Role
from headrace_common.access.tokens import HeldToken, TokenVerifier


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["token", *arguments])
    return result.exit_code, result.stderr


def test_a_created_token_proves_its_role(tmp_path: Path) -> None:
    private_key, token = tmp_path / PRIVATE_KEY_FILE, tmp_path / "decode.token"
    assert run("keygen", str(tmp_path)) == (0, "")
    create = ("create", "decode", "--name", "decode-0", "--key", str(private_key))
    assert run(*create, "--output", str(token)) == (0, "")
    verifier = TokenVerifier.from_pem((tmp_path / PUBLIC_KEYS_FILE).read_bytes())
    held = HeldToken.from_text(token.read_text())
    caller = verifier.verify(held.token, held.proof("registry"), ["registry"])
    assert caller == Caller(frozenset({Role.DECODE}), "decode-0")
    assert [path.stat().st_mode & 0o077 for path in (private_key, token)] == [0, 0]
