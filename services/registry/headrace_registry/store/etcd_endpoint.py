"""One endpoint of etcd: its channel, and the token of its user."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc.aio
from google.protobuf.message import Message

from headrace.etcd.v3 import etcd_pb2
from headrace_common.access.credentials import TlsFiles
from headrace_common.access.tls import check_files
from headrace_common.errors import ConfigError
from headrace_common.reloading import ReloadedFiles

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Response = TypeVar("_Response", bound=Message)

# Pings detect a dead connection. etcd rejects more than one in 5 s.
_CHANNEL_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
)
# Every endpoint would answer a request in the same way.
_REFUSALS: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)
UNREACHABLE_REMEDY: Final = "is it running and does it have a leader?"
_ACCESS_REMEDY: Final = "check its user, its password file and the user's permissions."
# Above its quota, etcd refuses all writes until the alarm is disarmed.
_QUOTA_REMEDY: Final = (
    "etcd is at a limit of its own: with 'database space exceeded', compact and defragment it or raise its "
    "--quota-backend-bytes, then run 'etcdctl alarm disarm'."
)
# etcd's words for a request without a token, or with one from before a change of users or roles.
_TOKEN_NEEDED: Final = (
    "etcdserver: user name is empty",
    "etcdserver: revision of auth store is old",
)


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """How to reach etcd. Empty files mean plaintext, an empty user means no authentication."""

    endpoints: tuple[tuple[str, int], ...]
    timeout_s: float
    tls: TlsFiles
    user: str = ""
    password_file: str = ""

    def password(self) -> str:
        """Reads the password's file, so that a changed password needs no restart. Raises ConfigError."""
        try:
            password = Path(self.password_file).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"store_password_file {self.password_file} cannot be read ({type(error).__name__}): "
                "name a readable text file",
                metadata={"store_password_file": self.password_file},
            ) from error
        if not password:
            raise ConfigError(
                f"store_password_file {self.password_file} is empty: write the password of store_user into it",
                metadata={"store_password_file": self.password_file},
            )
        return password


class EtcdEndpoint:
    """One endpoint of etcd. Connects on first use.

    When TLS files change, the next call opens a new channel, which presents the new certificate. Calls and the watch
    end on the old one.
    """

    def __init__(self, access: EtcdAccess, host: str, port: int) -> None:
        """Raises ConfigError when a file cannot be read."""
        self.name = f"{host}:{port}"
        self._access = access
        self._authenticating = asyncio.Lock()
        self._token: str | None = None
        if access.user:
            access.password()
        self._channel = ReloadedFiles([path for path in astuple(access.tls) if path], self._connect)

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel for the next call."""
        return self._channel.current()

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """By which etcd recognizes the user. A call credential would do the same, but gRPC sends none in plaintext."""
        return (("token", self._token),) if self._token else ()

    async def call(self, method: str, request: Message, response: type[_Response]) -> _Response:
        """Calls a method of the package etcdserverpb. Raises AioRpcError."""
        unary = self.channel.unary_unary(
            f"/etcdserverpb.{method}", type(request).SerializeToString, response.FromString
        )
        answer: _Response = await unary(
            request, timeout=self._access.timeout_s, metadata=self._metadata
        )
        return answer

    def stream(
        self,
        method: str,
        request: type[Message],
        response: type[Message],
        *metadata: tuple[str, str],
        timeout_s: float | None = None,
    ) -> Any:
        """A stream of requests and responses."""
        start = self.channel.stream_stream(
            f"/etcdserverpb.{method}", request.SerializeToString, response.FromString
        )
        return start(timeout=timeout_s, metadata=(*metadata, *self._metadata))

    async def run(self, function: Callable[[EtcdEndpoint], Awaitable[_T]]) -> _T:
        """Calls `function`, and authenticates first where a user is set.

        Raises EtcdCallFailed. A call that etcd refuses because of its token is repeated once with a new token.
        """
        try:
            if self._access.user and self._token is None:
                await self._authenticate(None)
            token = self._token
            try:
                return await function(self)
            except grpc.aio.AioRpcError as error:
                if not (self._access.user and _needs_token(error)):
                    raise
            await self._authenticate(token)
            return await function(self)
        except grpc.aio.AioRpcError as error:
            refused = error.code() in _REFUSALS
            remedy = _remedy_of(error.code()) if refused else UNREACHABLE_REMEDY
            raise EtcdCallFailed(cause_of(error), remedy, refused=refused) from error
        except ConfigError as error:
            raise EtcdCallFailed(error.detail, _ACCESS_REMEDY, refused=True) from error

    async def close(self) -> None:
        """Closes the connection. Calls in progress fail."""
        await self.channel.close()

    def _connect(self) -> grpc.aio.Channel:
        """A channel with the files of now. Raises ConfigError."""
        tls = self._access.tls
        check_files(tls, "store_")
        if not any(astuple(tls)):
            return grpc.aio.insecure_channel(self.name, _CHANNEL_OPTIONS)
        files = (tls.tls_authority_file, tls.tls_key_file, tls.tls_certificate_file)
        contents = (Path(path).read_bytes() if path else None for path in files)
        return grpc.aio.secure_channel(
            self.name, grpc.ssl_channel_credentials(*contents), _CHANNEL_OPTIONS
        )

    async def _authenticate(self, refused: str | None) -> None:
        """Gets a token in place of `refused`, unless another call has done so."""
        async with self._authenticating:
            if self._token != refused:
                return
            request = etcd_pb2.AuthenticateRequest(
                name=self._access.user, password=self._access.password()
            )
            self._token = ""
            try:
                answer = await self.call(
                    "Auth/Authenticate", request, etcd_pb2.AuthenticateResponse
                )
                self._token = answer.token
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                    self._token = refused
                    raise
                _log.warning("etcd at %s needs no password: its authentication is off", self.name)


class EtcdCallFailed(Exception):
    """A call to an endpoint failed. `refused`: every other endpoint would refuse it too."""

    def __init__(self, cause: str, remedy: str, *, refused: bool) -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy
        self.refused = refused


def cause_of(error: grpc.aio.AioRpcError) -> str:
    """One line about an error of gRPC."""
    return f"{error.code().name}: {error.details()}"


def _remedy_of(code: grpc.StatusCode) -> str:
    """What to do about a call that etcd refuses."""
    return _QUOTA_REMEDY if code is grpc.StatusCode.RESOURCE_EXHAUSTED else _ACCESS_REMEDY


def _needs_token(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.UNAUTHENTICATED or error.details() in _TOKEN_NEEDED
