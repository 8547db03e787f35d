"""What the tests of clients need of a router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from headrace.decode.v1 import decode_pb2
from headrace_common.errors import DecodeFull
from tests.kit.workers import FakeDecode, reply
from tests.suite.certificates import Authority

KEY = "the-key-of-a-tenant"


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
    """A script of a decode worker that rejects its first request and answers every other."""
    if len(worker.requests) == 1:
        raise DecodeFull("no room", metadata={"resource": DecodeFull.BLOCKS}, retry_after_s=0.05)
    async for event in reply("ok")(worker, request):
        yield event
