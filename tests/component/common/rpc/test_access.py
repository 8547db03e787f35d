"""The listeners of a server: what each serves, and when it reads a request."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from headrace_common.access.credentials import TlsFiles
from headrace_common.access.roles import TOKEN_KEY, Role
from headrace_common.access.tokens import create_token, new_private_key, public_key_of
from headrace_common.config import ServiceConfig
from headrace_common.errors import HeadraceError, InvalidRequest, PermissionDenied, Unauthenticated
from headrace_common.rpc.channel import MESSAGE_BYTES_MAX, open_channel
from headrace_common.rpc.server import GrpcServer, InternalTimes
from headrace_common.rpc.status import error_from_rpc
from tests.suite.certificates import Authority
from tests.waiting import until

_SERVICE = "headrace.registry.v1.RegistryService"
_SET_POLICY = f"/{_SERVICE}/SetPolicy"
_WATCH = f"/{_SERVICE}/Watch"
_CONVERSE = f"/{_SERVICE}/ListMembers"


class Recorded:
    """Handlers of a unary and of a streaming RPC, and the requests that were parsed."""

    def __init__(self) -> None:
        self.parsed: list[bytes] = []

    def parse(self, data: bytes) -> bytes:
        self.parsed.append(data[:10])
        return data

    async def answer(self, request: bytes, context: Any) -> bytes:
        return b"answer to " + request

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"answer to " + request
        if request == b"hold":
            await asyncio.Event().wait()
        yield b"end"

    async def converse(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield b"answer to " + request

    def handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            _SERVICE,
            {
                "SetPolicy": grpc.unary_unary_rpc_method_handler(self.answer, self.parse, None),
                "ListMembers": grpc.stream_stream_rpc_method_handler(
                    self.converse, self.parse, None
                ),
                "Watch": grpc.unary_stream_rpc_method_handler(self.stream, self.parse, None),
            },
        )


@asynccontextmanager
async def serving(
    config: ServiceConfig, recorded: Recorded | None = None, **options: Any
) -> AsyncIterator[str]:
    """Runs a server with the handlers. Yields its internal address."""
    server = GrpcServer(config, (), **options)
    server.server.add_generic_rpc_handlers([(recorded or Recorded()).handlers()])
    try:
        yield await server.start()
    finally:
        await server.stop(None)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
async def served(authority: Authority) -> AsyncIterator[tuple[Recorded, str]]:
    """A server with mutual TLS, and its internal address."""
    recorded = Recorded()
    config = ServiceConfig(**asdict(authority.sign("registry", "registry")))
    async with serving(config, recorded) as endpoint:
        yield recorded, endpoint


async def error_of(endpoint: str, identity: TlsFiles, method: str, data: bytes) -> HeadraceError:
    async with open_channel(endpoint, identity) as channel:
        start: Any = channel.unary_stream(method)
        return await error_of_call(start(data, timeout=20))


@pytest.mark.parametrize("method", [_SET_POLICY, _WATCH])
async def test_a_request_is_read_after_the_certificate_is_checked(
    served: tuple[Recorded, str], authority: Authority, method: str
) -> None:
    recorded, endpoint = served
    body = bytes(MESSAGE_BYTES_MAX - 1_000)
    error = await error_of(endpoint, authority.sign("client"), method, body)
    assert isinstance(error, Unauthenticated)
    error = await error_of(endpoint, authority.sign("registry-1", "registry"), method, body)
    assert isinstance(error, PermissionDenied)
    # Only URIs name roles.
    spelled = ("spiffe://tests/headrace/operator",)
    for other in (authority.sign("h", hosts=spelled), authority.sign("e", emails=spelled)):
        assert isinstance(await error_of(endpoint, other, method, body), Unauthenticated)
    assert recorded.parsed == []
    async with open_channel(endpoint, authority.sign("operator", "operator")) as channel:
        if method == _WATCH:
            call: Any = channel.unary_stream(method)
            assert [one async for one in call(b"hi", timeout=20)] == [b"answer to hi", b"end"]
        else:
            call = channel.unary_unary(method)
            assert await call(b"hi", timeout=20) == b"answer to hi"
    assert recorded.parsed == [b"hi"]


async def test_a_refused_caller_need_not_send_its_request(
    served: tuple[Recorded, str], authority: Authority
) -> None:
    _, endpoint = served
    async with open_channel(endpoint, authority.sign("client")) as channel:
        call: Any = channel.stream_stream(_SET_POLICY)(timeout=20)
        error = await asyncio.wait_for(error_of_call(call), 10)
    assert isinstance(error, Unauthenticated)


async def test_a_permitted_caller_without_a_request_gets_an_error(
    served: tuple[Recorded, str], authority: Authority
) -> None:
    _, endpoint = served
    async with open_channel(endpoint, authority.sign("operator", "operator")) as channel:
        call: Any = channel.stream_stream(_SET_POLICY)(timeout=20)
        await call.done_writing()
        error = await error_of_call(call)
    assert isinstance(error, InvalidRequest)
    assert "missing" in error.violations["request"]


async def test_an_open_stream_ends_after_the_key_of_its_token_was_removed(tmp_path: Path) -> None:
    keys = [new_private_key(), new_private_key()]
    file = tmp_path / "keys.pem"
    file.write_bytes(b"\n".join(map(public_key_of, keys)))
    config = ServiceConfig(token_keys_file=str(file))
    tokens = [create_token(key, Role.OPERATOR, "", 600) for key in keys]
    async with (
        serving(config, times=InternalTimes(credential_check_s=0.1)) as endpoint,
        grpc.aio.insecure_channel(endpoint) as channel,
    ):
        call: Any = channel.unary_stream(_WATCH)
        ending, going_on = (
            call(b"hold", metadata=((TOKEN_KEY, token),), timeout=60) for token in tokens
        )
        assert await ending.read() == await going_on.read() == b"answer to hold"
        file.write_bytes(public_key_of(keys[1]))
        assert isinstance(await error_of_call(ending), Unauthenticated)
        assert not going_on.done()
        going_on.cancel()


@pytest.mark.parametrize(("cause", "requests"), [("expired", "one"), ("not trusted", "many")])
async def test_an_open_stream_ends_when_its_certificate_is_no_longer_valid(
    tmp_path: Path, authority: Authority, cause: str, requests: str
) -> None:
    other = Authority(tmp_path / "other")
    files = authority.sign("registry", "registry")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.file.read_bytes() + other.file.read_bytes())
    config = ServiceConfig(**asdict(replace(files, tls_authority_file=str(trusted))))
    # Long enough for a handshake on a slow machine.
    valid_for = dt.timedelta(seconds=4) if cause == "expired" else dt.timedelta(days=1)
    ending_files = other.sign("operator-0", "operator", valid_for)
    ending_files = replace(ending_files, tls_authority_file=files.tls_authority_file)
    async with (
        serving(config, times=InternalTimes(credential_check_s=0.1)) as endpoint,
        open_channel(endpoint, ending_files) as ending_channel,
        open_channel(endpoint, authority.sign("operator-1", "operator")) as other_channel,
    ):
        ending, going_on = (
            held_stream(channel, requests) for channel in (ending_channel, other_channel)
        )
        assert await ending.read() == await going_on.read() == b"answer to hold"
        if cause == "not trusted":
            trusted.write_bytes(authority.file.read_bytes())
        error = await asyncio.wait_for(error_of_call(ending), 20)
        assert isinstance(error, Unauthenticated)
        assert ("expired at" if cause == "expired" else "no authority") in error.detail
        assert not going_on.done()
        # The connection is open, and its next stream is refused too. A stream of several requests
        # may see gRPC's own INTERNAL here: its client's first message meets the ended call.
        again = await error_of_call(held_stream(ending_channel, "one"))
        assert isinstance(again, Unauthenticated)
        going_on.cancel()


def held_stream(channel: grpc.aio.Channel, requests: str) -> Any:
    """A stream that has begun and does not end by itself."""
    if requests == "one":
        single: Any = channel.unary_stream(_WATCH)
        return single(b"hold", timeout=60)

    async def sent() -> AsyncIterator[bytes]:
        yield b"hold"
        await asyncio.Event().wait()

    several: Any = channel.stream_stream(_CONVERSE)
    return several(sent(), timeout=60)


async def error_of_call(call: Any) -> HeadraceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return error_from_rpc(caught.value)


def _accepted_on(port: int) -> list[Any]:
    """The open connections to a port of this process."""
    found = psutil.Process().net_connections("tcp")
    return [
        one for one in found if one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED
    ]


async def test_a_connection_of_the_deployment_ends_by_its_age_and_its_streams_go_on() -> None:
    times = InternalTimes(connection_age_s=0.5)
    async with (
        serving(ServiceConfig(insecure=True), times=times) as endpoint,
        grpc.aio.insecure_channel(endpoint) as channel,
    ):
        port = int(endpoint.rpartition(":")[2])
        watch: Any = channel.unary_stream(_WATCH)
        held = watch(b"hold", timeout=60)
        assert await held.read() == b"answer to hold"
        answer: Any = channel.unary_unary(_SET_POLICY)

        async def on_another_connection() -> bool:
            assert await answer(b"hi", timeout=20) == b"answer to hi"
            return len(_accepted_on(port)) > 1

        await until(on_another_connection, 30, "another connection", 0.1)
        assert not held.done()
        held.cancel()
