"""The commands of docs/operations/backup.md save and restore the records of a real etcd."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.registry.v1 import registry_pb2
from tests.component.registry.harness import EtcdServer, running_etcd
from tests.documented import blocks_of
from tests.unit.test_architecture import ROOT

PAGE = ROOT / "docs" / "operations" / "backup.md"
COMMAND_S = 60.0

pytestmark = [
    pytest.mark.etcd,
    pytest.mark.skipif(
        shutil.which("etcdctl") is None, reason="needs etcdctl: apt-get install etcd-client"
    ),
]


async def test_a_restored_snapshot_has_the_policy(tmp_path: Path) -> None:
    commands = [
        command for block in blocks_of(PAGE) if block.runs == "etcd" for command in block.commands
    ]
    save, *_, restore = commands
    assert "snapshot save" in save
    assert "snapshot restore" in restore
    with running_etcd(tmp_path) as server:
        await set_retries(server, 7)
        for command in commands:
            run(command, tmp_path, f"127.0.0.1:{server.port}")
        # A later change is not in the snapshot.
        await set_retries(server, 3)
    restored = EtcdServer(tmp_path / "restored")
    try:
        restored.start()
        assert await retries(restored) == 7
    finally:
        restored.kill()


def run(command: str, folder: Path, etcd: str) -> None:
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env={**os.environ, "ETCD": etcd, "ETCDCTL_API": "3"},
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_S,
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"


async def set_retries(server: EtcdServer, count: int) -> None:
    store = server.store()
    await store.start()
    try:
        await store.set_policy(registry_pb2.Policy(retry_budget=count), 0)
    finally:
        await store.close()


async def retries(server: EtcdServer) -> int:
    store = server.store()
    await store.start()
    try:
        return store.feed.policy.policy.retry_budget
    finally:
        await store.close()
