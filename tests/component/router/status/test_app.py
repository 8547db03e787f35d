"""The status page over HTTP: its bytes for every caller, its data for operators only."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import cast

import pytest

from headrace_common.access.authorizer import Authorizer
from headrace_common.access.credentials import Credentials, TlsFiles
from headrace_common.access.roles import STATUS_AUDIENCE, Role
from headrace_common.access.tokens import (
    create_token,
    load_local_key,
    new_private_key,
    public_key_of,
)
from headrace_common.errors import ConfigError
from headrace_common.http.bounds import HttpBounds
from headrace_common.http.server import HttpServer
from headrace_common.rpc.channel import open_channel
from headrace_router.adapters import AdapterChanges, no_registry
from headrace_router.status.app import StatusApp
from headrace_router.status.reader import StatusReader
from headrace_router.workers.table import LoadTable
from tests.component.common.http.test_server import config_of
from tests.suite.certificates import Authority

DOCUMENT = b'{"secret":"topology"}'


class FixedReader:
    async def read(self) -> bytes:
        return DOCUMENT


@asynccontextmanager
async def served(**settings: str) -> AsyncIterator[str]:
    """Serves a page, and yields its host:port."""
    config = config_of(status_listen="127.0.0.1:0", **settings)
    app = StatusApp(
        cast("StatusReader", FixedReader()),
        Authorizer.from_config(config, [STATUS_AUDIENCE]),
        AdapterChanges(no_registry, open_channel, ("sim",), lambda model: LoadTable(())),
    )
    server = HttpServer(
        app,
        config.status_listen,
        setting="status_listen",
        tls=config.status_tls,
        bounds=HttpBounds(config.connections_max()),
    )
    server.start()
    try:
        yield server.url.partition("://")[2]
    finally:
        await server.stop()


async def get(
    address: str, path: str, token: str = "", tls: TlsFiles | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    """The status, headers and body of a response."""
    context: ssl.SSLContext | None = None
    if tls is not None:
        context = ssl.create_default_context(cafile=tls.tls_authority_file)
        if tls.tls_certificate_file:
            context.load_cert_chain(tls.tls_certificate_file, tls.tls_key_file)
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    line = f"{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n"
    writer.write((line + (f"headrace-token: {token}\r\n" if token else "") + "\r\n").encode())
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    writer.close()
    first, *rest = head.decode().split("\r\n")
    return (
        int(first.split()[1]),
        {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)},
        body,
    )


def local_token(role: Role) -> str:
    return create_token(load_local_key(), role, "", 60)


async def test_only_the_role_operator_gets_the_document() -> None:
    async with served() as address:
        status, _, body = await get(address, "/status.json")
        assert status == 401
        message = json.loads(body)["error"]["message"]
        assert "operator" in message
        assert "headrace status" in message
        assert b"topology" not in body
        for role in Role:
            status, headers, body = await get(address, "/status.json", local_token(role))
            if role is Role.OPERATOR:
                assert (status, body) == (200, DOCUMENT)
                assert headers["cache-control"] == "no-store"
            else:
                assert status == 403
                assert b"topology" not in body
        operator = Credentials(role=Role.OPERATOR)
        page_token = operator.page_token(address)
        assert (await get(address, "/status.json", page_token))[0] == 200
        (_, token), (_, proof) = operator.metadata_for(address)
        for refused in (token, f"{token}~{proof}"):
            assert (await get(address, "/status.json", refused))[0] == 401
        foreign = create_token(new_private_key(), Role.OPERATOR, "", 60)
        assert (await get(address, "/status.json", foreign))[0] == 401


async def test_the_page_has_no_data_and_may_load_nothing_else() -> None:
    async with served() as address:
        status, headers, body = await get(address, "/")
        assert status == 200
        assert b"topology" not in body
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe-inline" not in policy
        assert policy.count("'sha256-") == 2
        assert (await get(address, "/other"))[0] == 404
        assert (await get(address, "/status.json", method="POST"))[0] == 405


async def test_a_certificate_proves_the_role(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    files = authority.sign("router", "router")
    async with served(**asdict(files)) as address:
        operator = authority.sign("someone", "operator")
        assert (await get(address, "/status.json", tls=operator))[0] == 200
        decode = authority.sign("decode-0", "decode")
        assert (await get(address, "/status.json", tls=decode))[0] == 403
        with pytest.raises((ssl.SSLError, ConnectionError, IndexError)):
            await get(
                address,
                "/status.json",
                tls=TlsFiles(tls_authority_file=files.tls_authority_file),
            )


async def test_with_tokens_a_browser_needs_no_certificate(tmp_path: Path) -> None:
    files = Authority(tmp_path / "authority").sign("router", "router")
    key = new_private_key()
    keys = tmp_path / "keys.pem"
    keys.write_bytes(public_key_of(key))
    trusting = TlsFiles(tls_authority_file=files.tls_authority_file)
    async with served(token_keys_file=str(keys), **asdict(files)) as address:
        token = create_token(key, Role.OPERATOR, "", 60)
        assert (await get(address, "/status.json", token, trusting))[0] == 200
        assert (await get(address, "/status.json", "", trusting))[0] == 401
        prefill = create_token(key, Role.PREFILL, "", 60)
        assert (await get(address, "/status.json", prefill, trusting))[0] == 403


def test_it_is_closed_by_default_and_needs_credentials_off_loopback() -> None:
    assert config_of().status_listen == ""
    with pytest.raises(ConfigError, match=r"status_listen is 0\.0\.0\.0:7057.*token_keys_file"):
        config_of(status_listen="0.0.0.0:7057")
    config_of(status_listen="0.0.0.0:7057", insecure="true")
