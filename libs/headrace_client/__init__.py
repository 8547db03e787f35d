"""A client of Headrace for asyncio programs.

    async with Client("127.0.0.1:7050") as client:
        async for piece in client.generate("Once upon a time", max_tokens=64):
            print(piece.text, end="")

Refusals that say when to come again are followed. Where only token ids are wanted and the router allows it, tokens come
from the decode worker directly, past the router: see Client.
"""

from headrace_client.client import Client, rpc_errors
from headrace_client.requests import build_request

__all__ = ["Client", "build_request", "rpc_errors"]
