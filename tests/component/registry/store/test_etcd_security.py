"""etcd with certificates, and with users and passwords."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.registry.v1 import registry_pb2
from headrace_common import reloading
from headrace_common.access.credentials import TlsFiles
from headrace_common.errors import ConfigError
from tests.component.registry.harness import (
    ETCD,
    EtcdServer,
    kv_descriptor,
    reference,
    running_etcd,
    until_renewed,
    worker,
)
from tests.suite.certificates import Authority
from tests.waiting import PATIENCE_S, until

pytestmark = [
    pytest.mark.etcd,
    pytest.mark.skipif(not ETCD.exists(), reason=f"needs {ETCD}: apt-get install etcd-server"),
]

PREFIX = "/mine/"
QUICK = {"store_timeout_s": 1.0, "store_start_timeout_s": 1.5}


def tls_settings(files: TlsFiles) -> dict[str, str]:
    return {
        "store_tls_authority_file": files.tls_authority_file,
        "store_tls_certificate_file": files.tls_certificate_file,
        "store_tls_key_file": files.tls_key_file,
    }


async def test_mutual_tls_refuses_other_certificates(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    with running_etcd(tmp_path, ours.sign("etcd")) as etcd:
        for settings in (
            {},
            {"store_tls_authority_file": str(ours.file)},
            tls_settings(others.sign("stranger")),
            {**tls_settings(ours.sign("again")), "store_tls_authority_file": str(others.file)},
        ):
            rejected = etcd.store(PREFIX, **settings, **QUICK)
            with pytest.raises(ConfigError, match="does not serve"):
                await rejected.start()


def copy_into(files: TlsFiles, other: TlsFiles, *names: str) -> None:
    for name in names:
        Path(getattr(files, name)).write_bytes(Path(getattr(other, name)).read_bytes())


async def test_replaced_certificates_are_used_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reloading, "CHECK_INTERVAL_S", 0.05)
    caplog.set_level(logging.INFO)
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    both = tmp_path / "both.pem"
    files = replace(old.sign("registry"), tls_authority_file=str(both))
    both.write_bytes(old.file.read_bytes() + new.file.read_bytes())
    with running_etcd(tmp_path, old.sign("etcd")) as etcd:
        store = etcd.store(PREFIX, **tls_settings(files))
        await store.start()
        member = worker()
        registration = await store.register(member, 30)
        # etcd now accepts and has certificates of the new authority only.
        etcd.kill()
        etcd.tls = new.sign("etcd")
        etcd.start()
        fresh = new.sign("registry")
        copy_into(files, fresh, "tls_certificate_file")
        # The key does not belong to the new certificate yet.
        await until(
            lambda: "the old content stays in force" in caplog.text, PATIENCE_S, "the wrong pair"
        )
        copy_into(files, fresh, "tls_key_file")

        await until_renewed(store, registration.lease_id)
        other = worker("decode-1")
        await store.register(other, 30)
        # The watch uses the new certificate too.
        await until(lambda: "decode-1" in store.feed.members, PATIENCE_S, "the member")
        # The connections of the second and third certificates stay open.
        endpoint = store._connection.endpoint
        closed: list[object] = []
        first, second = endpoint._clients
        monkeypatch.setattr(first, "close", lambda: closed.append(first))
        copy_into(files, new.sign("registry"), "tls_certificate_file", "tls_key_file")
        await until(lambda: endpoint.client is not second, PATIENCE_S, "a new client")
        assert closed == [first]
        assert endpoint._clients == [second, endpoint.client]
        await store.close()


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    etcd = EtcdServer(tmp_path)
    with pytest.raises(ConfigError, match=r"absent\.pem"):
        etcd.store(store_tls_authority_file=str(tmp_path / "absent.pem"))
    absent, empty = tmp_path / "absent", tmp_path / "empty"
    empty.write_text("\n")
    for file, problem in ((absent, "cannot be read"), (empty, "is empty")):
        with pytest.raises(ConfigError, match=problem):
            etcd.store(store_user="registry", store_password_file=str(file))


class Users:
    """An etcd with authentication. The user `registry` may read and write PREFIX only."""

    def __init__(self, etcd: EtcdServer, folder: Path) -> None:
        self.etcd = etcd
        self.file = folder / "password"
        self.file.write_text("first password\n")
        root_file = folder / "root"
        root_file.write_text("root password")
        self.settings = {"store_user": "registry", "store_password_file": str(self.file)}
        self.root_settings = {"store_user": "root", "store_password_file": str(root_file)}

    async def enable(self) -> None:
        store = self.etcd.store("/any/")
        # Waits until etcd serves.
        await store.start()
        messages = store._connection.endpoint.messages
        end = PREFIX[:-1].encode() + b"0"
        # 2 is READWRITE.
        permission = {"permType": 2, "key": PREFIX.encode(), "range_end": end}
        requests = [
            ("RoleAdd", messages.AuthRoleAddRequest(name="mine")),
            ("RoleAdd", messages.AuthRoleAddRequest(name="root")),
            (
                "RoleGrantPermission",
                messages.AuthRoleGrantPermissionRequest(name="mine", perm=permission),
            ),
            ("UserAdd", messages.AuthUserAddRequest(name="registry", password="first password")),
            ("UserAdd", messages.AuthUserAddRequest(name="root", password="root password")),
            ("UserGrantRole", messages.AuthUserGrantRoleRequest(user="registry", role="mine")),
            ("UserGrantRole", messages.AuthUserGrantRoleRequest(user="root", role="root")),
            ("AuthEnable", messages.AuthEnableRequest()),
        ]
        for name, request in requests:
            await store._connection.call(self._request(messages, name, request))
        await store.close()

    async def as_root(self, name: str, make: Any) -> None:
        """Calls etcd's Auth service as root. `make` builds the request."""
        store = self.etcd.store("/any/", **self.root_settings)
        messages = store._connection.endpoint.messages
        await store._connection.call(self._request(messages, name, make(messages)))
        await store.close()

    @staticmethod
    def _request(messages: Any, name: str, request: Any) -> Any:
        def send(client: Any) -> None:
            stub = messages.AuthStub(client.channel)
            getattr(stub, name)(request, 10, metadata=client.metadata)

        return send


@pytest.fixture
async def users(etcd: EtcdServer, tmp_path: Path) -> Users:
    made = Users(etcd, tmp_path)
    await made.enable()
    return made


async def test_a_user_with_a_password(users: Users, caplog: pytest.LogCaptureFixture) -> None:
    store = users.etcd.store(PREFIX, **users.settings)
    await store.start()
    lease_id = (await store.register(worker(), 30)).lease_id
    await store.put_descriptor(lease_id, reference(worker()), kv_descriptor())
    assert await store.keep_alive(lease_id) is not None
    await store.set_policy(registry_pb2.Policy(retry_budget=5), 0)
    # The watch is authenticated too.
    await until(lambda: store.feed.policy.policy.retry_budget == 5, PATIENCE_S, "the policy")
    assert "serving the last copy" not in caplog.text
    # A lease with keys that the user may not read.
    root = users.etcd.store("/other/", **users.root_settings)
    await root.start()
    foreign = (await root.register(worker("other"), 30)).lease_id
    assert await store.keep_alive(foreign) is None
    await root.close()
    await store.deregister(lease_id)
    assert not store.feed.members
    await store.close()


async def test_refused_users_are_configuration_errors(users: Users, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong password")
    for prefix, settings in (
        (PREFIX, {}),
        (PREFIX, {**users.settings, "store_password_file": str(wrong)}),
        ("/other/", users.settings),
    ):
        store = users.etcd.store(prefix, **settings, **QUICK)
        with pytest.raises(ConfigError, match="check its user, its password file") as raised:
            await store.start()
        assert "wrong password" not in str(raised.value)


async def test_a_token_that_etcd_no_longer_knows_is_replaced(users: Users) -> None:
    store = users.etcd.store(PREFIX, **users.settings)
    await store.start()
    lease_id = (await store.register(worker(), 60)).lease_id
    # A restart ends all tokens.
    users.etcd.kill()
    await asyncio.to_thread(users.etcd.start)
    await until_renewed(store, lease_id)
    # So does a change of the password. The new one is in the file.
    users.file.write_text("second password\n")
    await users.as_root(
        "UserChangePassword",
        lambda messages: messages.AuthUserChangePasswordRequest(
            name="registry", password="second password"
        ),
    )
    assert await store.keep_alive(lease_id) is not None
    revision = await store.set_policy(registry_pb2.Policy(retry_budget=7), 0)
    await until(lambda: store.feed.revision >= revision, PATIENCE_S, "the policy")
    await store.close()


async def test_a_password_for_an_etcd_without_authentication_is_not_needed(
    etcd: EtcdServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "password"
    file.write_text("a password")
    store = etcd.store(PREFIX, store_user="registry", store_password_file=str(file))
    await store.start()
    await store.register(worker(), 30)
    assert caplog.text.count("its authentication is off") == 1
    assert "a password" not in caplog.text
    await store.close()
