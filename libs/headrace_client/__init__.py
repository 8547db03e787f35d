"""A client of Headrace for asyncio programs.

    async with Client("127.0.0.1:7050") as client:
        async for piece in client.generate("Once upon a time", max_tokens=64):
            print(piece.text, end="")

Refusals that say when to come again are followed. Where only token ids are wanted and the router allows it, tokens come
from the decode worker directly, past the router: see Client. Services with certificates want `tls=TlsFiles(...)`.
"""

from headrace_client.client import Client, rpc_errors
from headrace_client.requests import build_request
from headrace_common.rpc.channel import TlsFiles

__all__ = ["Client", "TlsFiles", "build_request", "rpc_errors"]
