"""The marked commands of the documents, run as they stand."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
from pathlib import Path

import pytest

from headrace_cli.records import PolicyRecord
from headrace_frontend.tenants import load_tenants
from tests.documented import Block, blocks_of
from tests.forked_command import Finished, run_forked
from tests.suite.deployment import prompt_of, suite
from tests.unit.test_architecture import ROOT
from tests.unit.test_document_commands import MARKED_PAGES

COMMAND_S = 60.0
# What only a shell does.
_SHELL = re.compile(r"[|&;<>$`\n]")
_MODEL = {
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}


def blocks(name: str) -> list[Block]:
    found = [block for page in MARKED_PAGES for block in blocks_of(page) if block.runs == name]
    assert found
    return found


async def run(command: str, folder: Path) -> Finished:
    """Runs a command in `folder`, this process's own. Plain `headrace` commands are forks, which need no imports."""
    if command.startswith("headrace ") and not _SHELL.search(command):
        return await run_forked("headrace_cli", *shlex.split(command)[1:], timeout_s=COMMAND_S)
    process = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", command),
        cwd=folder,
        env={**os.environ, "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(COMMAND_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Finished(process.returncode, out.decode(), err.decode())


async def run_all(name: str, folder: Path) -> dict[str, Finished]:
    """Runs the commands of all blocks with a mark, each once. All must end with a status that their mark allows.

    `folder` must be this process's own, which forks inherit.
    """
    ended: dict[str, Finished] = {}
    for block in blocks(name):
        for command in block.commands:
            if command in ended:
                continue
            ended[command] = await run(command, folder)
            where = f"{block.page.name}:{block.line}: {command}"
            shown = ended[command].out + ended[command].err
            assert ended[command].status in block.statuses, f"{where}\n{shown}"
            assert "Traceback" not in shown, f"{where}\n{shown}"
    return ended


@pytest.mark.timeout(300)
async def test_commands_for_a_deployment_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with suite(tmp_path, decode_count=2) as it:
        for seed in range(3):
            await it.generate(prompt_of(80, seed), 4)
        monkeypatch.setenv("HEADRACE_ENDPOINT", it.deployment.router)
        monkeypatch.setenv("HEADRACE_REGISTRY", it.deployment.registry)
        monkeypatch.chdir(tmp_path)
        ended = await run_all("sim", tmp_path)
    assert "time to first token" in ended["headrace trace slowest"].out
    policy = json.loads((tmp_path / "policy.json").read_text())
    assert policy["schema"] == PolicyRecord.schema
    assert "tenant_weights" in policy


@pytest.mark.timeout(300)
async def test_commands_without_a_deployment_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(_MODEL))
    ended = await run_all("shell", tmp_path)
    pair = next(ended[command] for command in ended if command.startswith("headrace doctor pair"))
    assert "planned pair" in pair.out
    assert set(load_tenants(str(tmp_path / "api_keys")).by_digest.values()) == {"search", "batch"}
