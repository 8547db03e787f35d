"""A client of Headrace for asyncio programs.

    async with Client("127.0.0.1:7050") as client:
        async for piece in client.generate("Once upon a time", max_tokens=64):
            print(piece.text, end="")

The client retries a request that the router rejects with a retry delay. For a request of token ids only, and where the
router allows it, it streams from the decode worker directly: see Client. Services with certificates need
`tls=TlsFiles(...)`.
"""

from headrace_client.client import Client, rpc_errors
from headrace_client.requests import build_request
from headrace_common.access.credentials import TlsFiles

__all__ = ["Client", "TlsFiles", "build_request", "rpc_errors"]
