"""One endpoint of etcd: its client, and the token of its user."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, Final, TypeVar

import grpc

from headrace_common.access.credentials import TlsFiles
from headrace_common.access.tls import check_files
from headrace_common.errors import ConfigError
from headrace_common.reloading import ReloadedFiles, read_text

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

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
        password = read_text("store_password_file", self.password_file).rstrip("\r\n")
        if not password:
            raise ConfigError(
                f"store_password_file {self.password_file} is empty: write the password of store_user into it",
                metadata={"store_password_file": self.password_file},
            )
        return password


class EtcdEndpoint:
    """One endpoint of etcd, through an etcd3 client. Connects on first use. Any thread may call it.

    When TLS files change, the next call makes a new client, which presents the new certificate. Calls and watches in
    progress end on the old one, which is closed at the next change.
    """

    def __init__(self, etcd3: Any, access: EtcdAccess, host: str, port: int) -> None:
        """Raises ConfigError when a file cannot be read."""
        self.name = f"{host}:{port}"
        self.messages: Any = etcd3.etcdrpc
        self._etcd3 = etcd3
        self._host, self._port = host, port
        self._errors: tuple[type[Exception], ...] = (etcd3.Etcd3Exception, grpc.RpcError)
        self._access = access
        self._authenticating = threading.Lock()
        self._token: str | None = None
        self._clients: list[Any] = []
        """The client in use last. Before it, the one that it replaced."""
        if access.user:
            access.password()
        self._client = ReloadedFiles([path for path in astuple(access.tls) if path], self._connect)

    @property
    def client(self) -> Any:
        """The client for the next call."""
        return self._client.current()

    @property
    def token_metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata by which etcd recognizes the user. None before the first call, or without a user."""
        return (("token", self._token),) if self._token else ()

    def run(self, function: Callable[[Any], _T]) -> _T:
        """Calls `function` with the client, which authenticates first where a user is set. Blocks.

        Raises EtcdCallFailed. A call that etcd refuses because of its token is repeated once with a new token.
        """
        try:
            if self._access.user and self._token is None:
                self._authenticate(None)
            token = self._token
            try:
                return function(self.client)
            except self._errors as error:
                if not (self._access.user and _needs_token(error)):
                    raise
            self._authenticate(token)
            return function(self.client)
        except self._errors as error:
            code = code_of(error)
            refused = code in _REFUSALS
            remedy = _remedy_of(code) if refused else UNREACHABLE_REMEDY
            raise EtcdCallFailed(cause_of(error), remedy, refused=refused) from error
        except ConfigError as error:
            raise EtcdCallFailed(error.detail, _ACCESS_REMEDY, refused=True) from error

    def close(self) -> None:
        """Closes the connection. Calls in progress fail."""
        for client in self._clients:
            client.close()

    def _connect(self) -> Any:
        """A client with the files of now. Raises ConfigError."""
        tls = self._access.tls
        check_files(tls, "store_")
        client: Any = self._etcd3.client(
            host=self._host,
            port=self._port,
            timeout=self._access.timeout_s,
            grpc_options=_CHANNEL_OPTIONS,
            ca_cert=tls.tls_authority_file or None,
            cert_cert=tls.tls_certificate_file or None,
            cert_key=tls.tls_key_file or None,
        )
        self._present_token(client)
        *closed, replaced = self._clients or [None]
        for old in closed:
            old.close()
        self._clients = [client] if replaced is None else [replaced, client]
        return client

    def _authenticate(self, refused: str | None) -> None:
        """Gets a token in place of `refused`, unless another thread has done so."""
        with self._authenticating:
            if self._token != refused:
                return
            request = self.messages.AuthenticateRequest(
                name=self._access.user, password=self._access.password()
            )
            stub = self.messages.AuthStub(self.client.channel)
            try:
                token = str(stub.Authenticate(request, self._access.timeout_s).token)
            except grpc.RpcError as error:
                if code_of(error) is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise
                _log.warning("etcd at %s needs no password: its authentication is off", self.name)
                token = ""
            self._token = token
            self._present_token(self.client)

    def _present_token(self, client: Any) -> None:
        # A call credential would do the same, but gRPC sends none over plaintext.
        client.metadata = self.token_metadata


class EtcdCallFailed(Exception):
    """A call to an endpoint failed. `refused`: every other endpoint would refuse it too."""

    def __init__(self, cause: str, remedy: str, *, refused: bool) -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy
        self.refused = refused


def code_of(error: BaseException) -> grpc.StatusCode | None:
    """gRPC's status code of an error of etcd3 or gRPC."""
    call = _call_of(error)
    return None if call is None else call.code()


def cause_of(error: BaseException) -> str:
    """One line about an error of etcd3 or gRPC."""
    call = _call_of(error)
    if call is not None:
        return f"{call.code().name}: {call.details()}"
    return str(error) or type(error).__name__


def _remedy_of(code: grpc.StatusCode | None) -> str:
    """What to do about a call that etcd refuses."""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return _QUOTA_REMEDY
    return _ACCESS_REMEDY


def _call_of(error: BaseException) -> grpc.Call | None:
    # etcd3 raises its own exceptions while it handles gRPC's, which have the details.
    candidates: tuple[Any, ...] = (error, error.__context__)
    for candidate in candidates:
        if isinstance(candidate, grpc.Call):
            return candidate
    return None


def _needs_token(error: BaseException) -> bool:
    call = _call_of(error)
    if call is None:
        return False
    return call.code() is grpc.StatusCode.UNAUTHENTICATED or call.details() in _TOKEN_NEEDED
