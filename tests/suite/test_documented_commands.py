"""The marked commands of the documents, run as they stand."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest
from cryptography import x509

from headrace_common.access.authorizer import caller_of_certificate, valid_until
from headrace_common.access.roles import Caller, Role
from headrace_frontend.tenants import load_tenants
from tests.documented import Block, blocks_of
from tests.forked_command import Finished, run_forked
from tests.ports import free_port
from tests.security.network_namespaces import require_network_namespaces
from tests.suite.deployment import prompt_of, suite
from tests.unit.test_architecture import ROOT
from tests.unit.test_document_commands import COMMAND_PAGES

COMMAND_S = 60.0
UP_S = 200.0
# What only a shell does.
_SHELL = re.compile(r"[|&;<>$`\n]")
# The addresses of a router and of its HTTP in the examples of all pages.
_ROUTER, _HTTP = "127.0.0.1:7050", "127.0.0.1:7056"
# Programs that the documents call by their paths in a checkout.
_PROGRAMS = ".venv/bin/"
# Ends every process that it started, however it ends itself.
_OWN_NETWORK = (
    *("unshare", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc"),
    "--kill-child",
)
_UP_SCRIPT = """
start=$1; shift
ip link set lo up
bash -c "exec $start" > up.log 2>&1 & up=$!
for ((tries = 0; tries < 600; tries++)); do
    ! grep -q Ctrl-C up.log || break
    kill -0 $up
    sleep 0.1
done
for command in "$@"; do
    echo "$ $command"
    bash -euo pipefail -c "$command" </dev/null
done
kill -TERM $up
wait $up
"""


def blocks(name: str) -> list[Block]:
    found = [block for page in COMMAND_PAGES for block in blocks_of(page) if block.runs == name]
    assert found
    return found


async def run(command: str, folder: Path) -> Finished:
    """Runs a command in `folder`, this process's own. Plain `headrace` commands are forks, which need no imports."""
    command = command.removeprefix(_PROGRAMS)
    if command.startswith("headrace ") and not _SHELL.search(command):
        return await run_forked("headrace_cli", *shlex.split(command)[1:], timeout_s=COMMAND_S)
    process = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", command),
        cwd=folder,
        env={**os.environ, "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(COMMAND_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Finished(process.returncode, out.decode(), err.decode())


async def run_all(
    name: str, folder: Path, addresses: Mapping[str, str] | None = None
) -> dict[str, Finished]:
    """Runs the commands of all blocks with a mark, each once. All must end with a status that their mark allows.

    `folder` must be this process's own, which forks inherit. `addresses` replace those of the examples.
    """
    ended: dict[str, Finished] = {}
    for block in blocks(name):
        for command in block.commands:
            if command in ended:
                continue
            replaced = command
            for old, new in (addresses or {}).items():
                replaced = replaced.replace(old, new)
            ended[command] = await run(replaced, folder)
            where = f"{block.page.name}:{block.line}: {command}"
            shown = ended[command].out + ended[command].err
            assert ended[command].status in block.statuses, f"{where}\n{shown}"
            assert "Traceback" not in shown, f"{where}\n{shown}"
    return ended


@pytest.mark.timeout(300)
async def test_commands_for_a_deployment_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = f"127.0.0.1:{free_port()}"
    settings = (
        ("router", "http_listen", listen),
        ("router", "status_listen", f"127.0.0.1:{free_port()}"),
    )
    (tmp_path / "node_modules").symlink_to(ROOT / "node_modules")
    async with suite(tmp_path, decode_count=2, settings=settings) as it:
        for seed in range(3):
            await it.generate(prompt_of(80, seed), 4)
        monkeypatch.setenv("HEADRACE_ENDPOINT", it.deployment.router)
        monkeypatch.setenv("HEADRACE_REGISTRY", it.deployment.registry)
        monkeypatch.chdir(tmp_path)
        ended = await run_all("sim", tmp_path, {_ROUTER: it.deployment.router, _HTTP: listen})
    assert "time to first token" in ended["headrace trace slowest"].out
    saved = json.loads((tmp_path / "policy.json").read_text())
    assert "tenant_weights" in saved["policy"]


@pytest.mark.timeout(300)
async def test_commands_without_a_deployment_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    await run_all("shell", tmp_path)
    folder = tmp_path / "credentials"
    signed = folder / "decode-1" / "certificate.pem"
    names = x509.load_pem_x509_certificate(signed.read_bytes()).extensions
    uris = names.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
        x509.UniformResourceIdentifier
    )
    assert caller_of_certificate(
        {"peer_uri": [uri.encode() for uri in uris]}, "headrace"
    ) == Caller(frozenset({Role.DECODE}), "decode-1")
    assert (
        valid_until(signed.read_bytes(), b"", (folder / "authority.pem").read_bytes()) is not None
    )
    assert set(load_tenants(str(tmp_path / "api_keys")).by_digest.values()) == {"search", "batch"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page.name == "quickstart.md" else pytest.mark.in_turn)
        for page in COMMAND_PAGES
        if any(block.runs == "up" for block in blocks_of(page))
    ],
    ids=lambda page: page.name,
)
async def test_commands_that_start_a_deployment_run(page: Path, tmp_path: Path) -> None:
    require_network_namespaces()
    start, *others = (
        command.removeprefix(_PROGRAMS)
        for block in blocks_of(page)
        if block.runs == "up"
        for command in block.commands
    )
    assert start.startswith("headrace up --engine sim")
    variables = ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR")
    process = await asyncio.create_subprocess_exec(
        *(*_OWN_NETWORK, "bash", "-euo", "pipefail", "-c", _UP_SCRIPT, "script", start, *others),
        cwd=tmp_path,
        env={
            **{name: value for name, value in os.environ.items() if name not in variables},
            "HOME": str(tmp_path),
            "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}",
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(UP_S):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    shown = f"{out.decode()}\n{(tmp_path / 'up.log').read_text()}"
    assert process.returncode == 0, shown
    assert "Traceback" not in shown, shown
    assert "Ctrl-C" in shown, shown
