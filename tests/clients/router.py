"""What the tests of clients need of a router."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import sampling_pb2
from headrace_common.errors import InternalError, QueueFull
from headrace_text.codec import TextCodec
from headrace_text.load import ByteCodec
from tests.kit.router import Rig
from tests.kit.workers import FakeDecode, finished, reply, reserved
from tests.suite.certificates import Authority

KEY = "the-key-of-a-tenant"
FAILS = "<fails>"
"""A text after which the worker fails."""


@asynccontextmanager
async def scripted(
    answer: Callable[[str, decode_pb2.GenerateRequest], str],
    *,
    codec: TextCodec | None = None,
    context: int = 100_000,
    **settings: Any,
) -> AsyncIterator[str]:
    """The URL of a router. Its model answers by a function of the prompt's text and the request.

    The context is what Claude Code needs, which asks for 32,000 tokens after a prompt of some 77,000 bytes.
    """
    words = codec or ByteCodec()

    async def run(worker: FakeDecode, request: decode_pb2.GenerateRequest) -> AsyncIterator[Any]:
        yield reserved(request)
        text = answer(words.decode(list(request.token_ids)), request)
        for token in words.encode(text.removesuffix(FAILS)):
            yield decode_pb2.Tokens(token_ids=[token])
        if text.endswith(FAILS):
            raise InternalError("the worker has failed as scripted")
        ended = finished(request)
        ended.reason = sampling_pb2.FINISH_REASON_STOP
        yield ended

    rig = await Rig(codec=codec, http_listen="127.0.0.1:0", **settings).start()
    rig.policy.retry_budget = 0
    server = rig.http_server()
    try:
        decode = await rig.add_decode(run)
        decode.change_member(max_model_len=context)
        rig.refresh()
        server.start()
        yield server.url
    finally:
        await server.stop()
        await rig.close()


def secured_listen(folder: Path, authority: Authority) -> dict[str, Any]:
    """Settings of a router for clients with an API key and without a certificate.

    Writes the files "key" and "wrong" into `folder`, each with one key.
    """
    served = authority.sign("web")
    keys = folder / "keys"
    keys.write_text(f"{KEY} tenant\n")
    (folder / "key").write_text(f"{KEY}\n")
    (folder / "wrong").write_text("another-key\n")
    return {
        "listen_tls_certificate_file": served.tls_certificate_file,
        "listen_tls_key_file": served.tls_key_file,
        "client_certificates": "false",
        "api_keys_file": str(keys),
    }


async def full_at_first(
    worker: FakeDecode, request: decode_pb2.GenerateRequest
) -> AsyncIterator[Any]:
    """A script of a decode worker that rejects its first request, which the router does not repeat."""
    if len(worker.requests) == 1:
        raise QueueFull("no room", metadata={"resource": "blocks"}, retry_after_s=0.05)
    async for event in reply("ok")(worker, request):
        yield event
