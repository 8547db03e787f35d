"""A client of Headrace.

    async with Client("127.0.0.1:7050") as client:
        async for piece in client.generate("Once upon a time", max_tokens=64):
            print(piece.text, end="")

    with SyncClient("127.0.0.1:7050") as client:
        for piece in client.generate(messages=[("user", "Hello")], top_p=0.9):
            print(piece.text, end="")

The client retries a request that the router rejects with a retry delay. Services with certificates need
`tls=TlsFiles(...)`. Every failure is a HeadraceError, of the class for its reason.
"""

from headrace_client.client import Client, SyncClient, rpc_errors
from headrace_client.requests import Message, SamplingFields, build_request
from headrace_common.access.credentials import TlsFiles
from headrace_common.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Draining,
    HeadraceError,
    InternalError,
    InvalidRequest,
    NoDecodeWorker,
    NotFound,
    PermissionDenied,
    QueueFull,
    Unauthenticated,
    WorkerGone,
)

__all__ = [
    "Cancelled",
    "Client",
    "ConfigError",
    "DeadlineExceeded",
    "Draining",
    "HeadraceError",
    "InternalError",
    "InvalidRequest",
    "Message",
    "NoDecodeWorker",
    "NotFound",
    "PermissionDenied",
    "QueueFull",
    "SamplingFields",
    "SyncClient",
    "TlsFiles",
    "Unauthenticated",
    "WorkerGone",
    "build_request",
    "rpc_errors",
]
