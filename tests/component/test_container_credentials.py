"""The credentials that docker/credentials.sh creates for compose.yaml."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

from headrace_common.access.roles import Role
from headrace_common.access.tokens import HeldToken, TokenVerifier
from tests.unit.test_architecture import ROOT

SERVICES = {
    "registry": "",
    "router": "",
    "prefill": "prefill-0",
    "decode": "decode-0",
    "planner": "",
    "operator": "",
}
_TIMEOUT_S = 120
# The script starts 13 commands. `headrace token` alone is imported in a fraction of the time.
_PROGRAM = f"""import sys
sys.path[:0] = {[path for path in sys.path if path]}
import typer
from headrace_cli.commands import credentials
from headrace_cli.output import register
app = typer.Typer()
register(app, {{"": (credentials.keygen, credentials.create_token_file)}})
app()
"""


def _create(folder: Path, programs: Path) -> None:
    subprocess.run(
        ["/bin/sh", ROOT / "docker" / "credentials.sh", folder],
        env={"PATH": f"{programs}:/usr/bin:/bin"},
        check=True,
        timeout=_TIMEOUT_S,
    )


def test_each_service_gets_its_token_and_no_private_key(tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "headrace").write_text(f"#!{sys.executable}\n{_PROGRAM}")
    (programs / "headrace").chmod(0o755)
    folder = tmp_path / "credentials"
    # An interrupted first start has written the private key only. The next one begins again.
    (folder / "key").mkdir(parents=True)
    (folder / "key" / "token_key.pem").write_text("half of a key")
    _create(folder, programs)
    first = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {str(path.relative_to(folder)) for path in first} == {
        *(f"{service}/{name}" for service in SERVICES for name in ("token", "token_keys.pem")),
        *("key/token_key.pem", "key/token_keys.pem"),
    }
    verifier = TokenVerifier.from_pem(first[folder / "key" / "token_keys.pem"])
    for service, worker in SERVICES.items():
        token = folder / service / "token"
        held = HeldToken.from_text(token.read_text())
        caller = verifier.verify(held.token, held.proof("here"), ["here"])
        assert caller.roles == {Role(service)}
        assert caller.name == worker
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert first[folder / service / "token_keys.pem"] == first[folder / "key/token_keys.pem"]
    assert stat.S_IMODE((folder / "key" / "token_key.pem").stat().st_mode) == 0o600

    # Another start keeps the key.
    (folder / "router" / "token").unlink()
    _create(folder, programs)
    assert (folder / "key/token_key.pem").read_bytes() == first[folder / "key/token_key.pem"]
    held = HeldToken.from_text((folder / "router" / "token").read_text())
    assert verifier.verify(held.token, held.proof("here"), ["here"]).roles == {Role.ROUTER}
