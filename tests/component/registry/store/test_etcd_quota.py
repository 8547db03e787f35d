"""An etcd that has reached its quota: what the error says helps, and members that have registered stay."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_common.errors import RegistryUnavailable
from tests.component.registry.harness import ETCD, EtcdServer, running_etcd, worker

pytestmark = pytest.mark.etcd
QUOTA_BYTES = 256 * 1024
FILLING = "x" * 50_000
COMMAND_S = 20.0


@pytest.fixture
def small(tmp_path: Path) -> Iterator[EtcdServer]:
    if not ETCD.exists() or shutil.which("etcdctl") is None:
        pytest.skip("needs etcd and etcdctl: apt-get install etcd-server etcd-client")
    with running_etcd(tmp_path, quota_bytes=QUOTA_BYTES) as server:
        yield server


def etcdctl(
    server: EtcdServer, *arguments: str, given: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["etcdctl", f"--endpoints=127.0.0.1:{server.port}", *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        env={**os.environ, "ETCDCTL_API": "3"},
        check=False,
    )


async def test_the_error_of_an_etcd_at_its_quota_names_what_ends_it(small: EtcdServer) -> None:
    store = small.store()
    await store.start()
    registered = await store.register(worker("decode-0"), 60)
    for number in range(20):
        if etcdctl(small, "put", f"filling/{number}", given=FILLING).returncode:
            break
    else:
        pytest.fail("etcd has no quota")
    with pytest.raises(RegistryUnavailable) as raised:
        await store.register(worker("decode-1"), 60)
    text = raised.value.detail
    assert "database space exceeded" in text
    assert "raise its --quota-backend-bytes, then run 'etcdctl alarm disarm'" in text
    assert "password" not in text
    assert await store.keep_alive(registered.lease_id) is not None

    # What the error says.
    assert etcdctl(small, "del", "filling/", "--prefix").returncode == 0
    status = json.loads(etcdctl(small, "endpoint", "status", "--write-out=json").stdout)
    revision = status[0]["Status"]["header"]["revision"]
    for arguments in (("compact", str(revision)), ("defrag",), ("alarm", "disarm")):
        done = etcdctl(small, *arguments)
        assert done.returncode == 0, (arguments, done.stderr)
    await store.register(worker("decode-1"), 60)
    assert set(store.members) == {"decode-0", "decode-1"}
    await store.close()
