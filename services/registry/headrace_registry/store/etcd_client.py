"""Calls to etcd at one endpoint after the other, with the token of a user, and a watch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import grpc.aio
from google.protobuf.message import Message

from headrace.etcd.v1 import etcd_pb2
from headrace_common.access.credentials import TlsFiles
from headrace_common.access.tls import tls_identity
from headrace_common.errors import ConfigError, RegistryUnavailable
from headrace_common.rpc.channel import open_channel

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Response = TypeVar("_Response", bound=Message)
_Metadata: TypeAlias = tuple[tuple[str, str], ...]
Start: TypeAlias = Callable[[str], Awaitable[_Result]]
"""Makes a call at an endpoint."""

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
_SERVICES: Final = "/etcdserverpb."
_OPERATIONS_MAX: Final = 256
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
_UNREACHABLE_REMEDY: Final = "is it running and does it have a leader?"
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
# A member of the cluster that has lost its leader ends the watch. Otherwise it would be silent.
_REQUIRE_LEADER: Final = ("hasleader", "true")


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """How to reach etcd. `endpoints` are "host:port". Without files, plaintext; without a user, no authentication."""

    endpoints: tuple[str, ...]
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


class EtcdClient:
    """Calls the endpoints of one etcd. One event loop owns it.

    All calls go to one endpoint until it fails. Then they go to the next one, and a watch of the first ends.
    """

    def __init__(self, access: EtcdAccess) -> None:
        """Raises ConfigError when a file cannot be read."""
        self.name = ",".join(access.endpoints)
        self._access = access
        self._active = 0
        self._serving = ""
        """The endpoint of the last call that succeeded."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tokens: dict[str, str] = {}
        self._authenticating = asyncio.Lock()
        self._watch: tuple[str, Any] | None = None
        """The endpoint and the call of the last watch."""
        self._operations = 0
        if access.user:
            access.password()
        if access.tls.encrypts:
            try:
                tls_identity(access.tls)
            except ConfigError as error:
                raise ConfigError(f"store: {error.detail}", metadata=error.metadata) from error

    @property
    def endpoint(self) -> str:
        """The endpoint that the next call goes to."""
        return self._access.endpoints[self._active]

    @asynccontextmanager
    async def operation(self) -> AsyncIterator[None]:
        """Bounds the calls of a block, which may be several. Raises RegistryUnavailable when they take too long."""
        if self._operations >= _OPERATIONS_MAX:
            raise self._unavailable(f"{self._operations} calls are waiting")
        self._operations += 1
        try:
            async with asyncio.timeout(2 * self._access.timeout_s):
                yield
        except TimeoutError:
            raise self._unavailable("no response in time") from None
        finally:
            self._operations -= 1

    async def call(
        self,
        method: str,
        request: Message,
        response_type: type[_Response],
        *,
        repeatable: bool = True,
    ) -> _Response:
        """Calls a method such as "KV/Range". As `at_endpoints`."""
        return await self.at_endpoints(
            lambda endpoint: self._unary(endpoint, method, request, response_type),
            repeatable=repeatable,
        )

    async def renew(
        self, requests: Sequence[etcd_pb2.LeaseKeepAliveRequest]
    ) -> list[etcd_pb2.LeaseKeepAliveResponse]:
        """The responses to several renewals, on one stream. As `at_endpoints`."""

        async def start(endpoint: str) -> list[etcd_pb2.LeaseKeepAliveResponse]:
            make_call: Any = self._channel(endpoint).stream_stream(
                f"{_SERVICES}Lease/LeaseKeepAlive",
                request_serializer=etcd_pb2.LeaseKeepAliveRequest.SerializeToString,
                response_deserializer=etcd_pb2.LeaseKeepAliveResponse.FromString,
            )
            call = make_call(
                iter(requests), timeout=self._access.timeout_s, metadata=self._metadata(endpoint)
            )
            return [response async for response in call]

        return await self.at_endpoints(start)

    async def at_endpoints(self, start: Start[_Result], *, repeatable: bool = True) -> _Result:
        """The result of a call. When an endpoint fails, a `repeatable` call is made again at the next one.

        Raises RegistryUnavailable, with the status as `grpc_code` in its metadata.
        """
        tries = 0
        while True:
            tries += 1
            endpoint = self.endpoint
            try:
                result = await self._with_token(endpoint, start)
            except ConfigError as error:
                raise self._unavailable(f"{endpoint}: {error.detail}", _ACCESS_REMEDY) from error
            except grpc.aio.AioRpcError as error:
                code, cause = error.code(), f"{error.code().name}: {error.details()}"
                refused = code in _REFUSALS
                if not refused:
                    self._leave(endpoint)
                if refused or not repeatable or tries == len(self._access.endpoints):
                    remedy = _ACCESS_REMEDY if refused else _UNREACHABLE_REMEDY
                    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                        remedy = _QUOTA_REMEDY
                    raise self._unavailable(f"{endpoint}: {cause}", remedy, code) from error
            else:
                self._served(endpoint)
                return result

    async def watch(
        self, first_key: bytes, end_key: bytes, start_revision: int
    ) -> AsyncGenerator[etcd_pb2.WatchResponse, None]:
        """etcd's messages about the keys from one up to another. The first confirms the watch.

        Raises RegistryUnavailable when the watch ends.
        """
        endpoint = self.endpoint
        make_call: Any = self._channel(endpoint).stream_stream(
            f"{_SERVICES}Watch/Watch",
            request_serializer=etcd_pb2.WatchRequest.SerializeToString,
            response_deserializer=etcd_pb2.WatchResponse.FromString,
        )
        created = etcd_pb2.WatchCreateRequest(
            key=first_key, range_end=end_key, start_revision=start_revision
        )
        call = make_call(metadata=(_REQUIRE_LEADER, *self._metadata(endpoint)))
        self._watch = endpoint, call
        try:
            async with asyncio.timeout(self._access.timeout_s):
                await call.write(etcd_pb2.WatchRequest(create_request=created))
                response = await call.read()
            while response is not grpc.aio.EOF:
                yield response
                response = await call.read()
            raise RegistryUnavailable("etcd ended the watch")
        except TimeoutError:
            raise RegistryUnavailable("etcd does not confirm a watch in time") from None
        except grpc.aio.AioRpcError as error:
            cause = f"{error.code().name}: {error.details()}"
            raise RegistryUnavailable(f"the watch of etcd broke ({cause})") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RegistryUnavailable(f"etcd at {endpoint} fails") from None
        finally:
            call.cancel()

    async def close(self) -> None:
        """Closes the connections; calls in progress fail."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = open_channel(endpoint, self._access.tls, _CHANNEL_OPTIONS)
        return self._channels[endpoint]

    def _metadata(self, endpoint: str) -> _Metadata:
        """By which etcd recognizes the user. None without a user, or without authentication."""
        token = self._tokens.get(endpoint, "")
        return (("token", token),) if token else ()

    async def _unary(
        self, endpoint: str, method: str, request: Message, response_type: type[_Response]
    ) -> _Response:
        make_call: Any = self._channel(endpoint).unary_unary(
            _SERVICES + method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=response_type.FromString,
        )
        response: _Response = await make_call(
            request, timeout=self._access.timeout_s, metadata=self._metadata(endpoint)
        )
        return response

    async def _with_token(self, endpoint: str, start: Start[_Result]) -> _Result:
        """Authenticates first where a user is set. Repeats a call once that etcd refuses because of its token."""
        user = self._access.user
        if user and endpoint not in self._tokens:
            await self._authenticate(endpoint, None)
        token = self._tokens.get(endpoint)
        try:
            return await start(endpoint)
        except grpc.aio.AioRpcError as error:
            stale = error.code() is grpc.StatusCode.UNAUTHENTICATED
            if not user or not (stale or error.details() in _TOKEN_NEEDED):
                raise
        await self._authenticate(endpoint, token)
        return await start(endpoint)

    async def _authenticate(self, endpoint: str, refused: str | None) -> None:
        """Gets a token in place of `refused`, unless another task has done so."""
        async with self._authenticating:
            if self._tokens.get(endpoint) != refused:
                return
            request = etcd_pb2.AuthenticateRequest(
                name=self._access.user, password=self._access.password()
            )
            # A token that etcd refuses would have the call refused.
            self._tokens.pop(endpoint, None)
            try:
                granted = await self._unary(
                    endpoint, "Auth/Authenticate", request, etcd_pb2.AuthenticateResponse
                )
                self._tokens[endpoint] = granted.token
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise
                _log.warning("etcd at %s needs no password: its authentication is off", endpoint)
                self._tokens[endpoint] = ""

    def _leave(self, failed: str) -> None:
        """The next calls go to another endpoint, if there is one."""
        if len(self._access.endpoints) == 1 or self.endpoint != failed:
            return
        self._active = (self._active + 1) % len(self._access.endpoints)
        if self._watch is not None and self._watch[0] == failed:
            self._watch[1].cancel()

    def _served(self, endpoint: str) -> None:
        if endpoint != self.endpoint or endpoint == self._serving:
            return
        if self._serving:
            _log.warning("etcd at %s serves in place of %s, which failed", endpoint, self._serving)
        self._serving = endpoint

    def _unavailable(
        self,
        cause: str,
        remedy: str = _UNREACHABLE_REMEDY,
        code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE,
    ) -> RegistryUnavailable:
        return RegistryUnavailable(
            f"etcd at {self.name} does not serve ({cause}): {remedy}",
            metadata={"store": f"etcd://{self.name}", "cause": cause, "grpc_code": code.name},
        )
