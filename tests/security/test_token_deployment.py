"""A deployment with tokens: it serves, refuses the local key, and goes on while tokens and keys are replaced."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from headrace_cli.client import list_members
from headrace_cli.up.supervisor import Child
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.access.tokens import HeldToken, new_private_key, public_key_of
from headrace_common.errors import Unauthenticated
from headrace_common.rpc.channel import open_channel
from tests.security.test_roles import status_of
from tests.suite.deployment import suite
from tests.suite.load import load
from tests.waiting import until

_SERVICES = (Role.REGISTRY, Role.ROUTER, Role.PREFILL, Role.DECODE, Role.WORKER)
_FOR_OPERATORS = {
    "registry": "/headrace.registry.v1.RegistryService/ListMembers",
    "router": "/headrace.inference.v1.TraceService/ListTraces",
    "prefill": "/headrace.worker.v1.WorkerService/WatchStatus",
    "decode": "/headrace.worker.v1.WorkerService/WatchStatus",
}
# Ten times the second after which a service reads a changed file.
_READ_S = 10.0


class _Credentials:
    """The files of a deployment. Files are replaced as a whole, so that no reader finds half of one."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.keys_file = folder / "token_keys.pem"

    def token_file(self, role: Role) -> Path:
        return self._folder / f"{role}.token"

    def write_tokens(self, private_key: bytes) -> None:
        for role in Role:
            self._write(self.token_file(role), HeldToken.create(private_key, role).text.encode())

    def write_keys(self, *private_keys: bytes) -> None:
        self._write(self.keys_file, b"".join(map(public_key_of, private_keys)))

    def settings(self) -> tuple[tuple[str, str, str], ...]:
        return tuple(
            (role.value, name, str(path))
            for role in _SERVICES
            for name, path in (
                ("token_file", self.token_file(role)),
                ("token_keys_file", self.keys_file),
            )
        )

    def _write(self, path: Path, content: bytes) -> None:
        draft = path.with_suffix(".draft")
        draft.write_bytes(content)
        draft.replace(path)


async def accepts(child: Child, token_file: Path) -> bool:
    """Whether a service takes the operator's token."""
    async with open_channel(child.endpoint, Credentials(token_file=str(token_file))) as channel:
        status = await status_of(channel, _FOR_OPERATORS[child.spec.service], b"")
    return status is not grpc.StatusCode.UNAUTHENTICATED


async def test_tokens_and_keys_are_replaced_while_requests_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = new_private_key(), new_private_key()
    credentials = _Credentials(tmp_path / "credentials")
    credentials.write_keys(old)
    credentials.write_tokens(old)
    async with suite(tmp_path, settings=credentials.settings()) as deployed:
        registry = deployed.deployment.registry

        async def listed() -> bool:
            try:
                return len(await list_members(registry)) == 3
            except Unauthenticated:
                return False

        # The command signs with the local key, which this deployment does not know.
        assert not await listed()
        monkeypatch.setenv("HEADRACE_TOKEN_FILE", str(credentials.token_file(Role.OPERATOR)))
        assert await listed()
        async with load(deployed, streams=2, count=4) as asking:
            credentials.write_keys(old, new)
            new_operator = tmp_path / "new.token"
            new_operator.write_text(HeldToken.create(new, Role.OPERATOR).text)

            async def known_to_all() -> bool:
                children = deployed.deployment.children
                return all([await accepts(child, new_operator) for child in children])

            await until(known_to_all, _READ_S, "the new key")
            credentials.write_tokens(new)
            # A real clock, because nothing shows that every service has read its token.
            await asyncio.sleep(_READ_S)
            credentials.write_keys(new)
            forged = tmp_path / "old.token"
            forged.write_text(HeldToken.create(old, Role.OPERATOR).text)
            monkeypatch.setenv("HEADRACE_TOKEN_FILE", str(forged))

            async def refused() -> bool:
                return not await listed()

            await until(refused, _READ_S, "the end of the old key")
            monkeypatch.setenv("HEADRACE_TOKEN_FILE", str(credentials.token_file(Role.OPERATOR)))
            await until(listed, _READ_S, "the new token")
            await asking.more(1)
