"""A service's process logs no lines of gRPC's core."""

from __future__ import annotations

import asyncio
import struct
import sys
import textwrap
from pathlib import Path

CALLER = """
    import asyncio
    import sys

    import grpc
    import grpc.aio

    async def call():
        async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
            try:
                await channel.unary_unary("/kiln.Kiln/Fire")(b"", timeout=5)
            except grpc.aio.AioRpcError as error:
                print(error.code().name)

    def main():
        asyncio.run(call())
"""
SETTINGS_FRAME = b"\0\0\0\x04\0\0\0\0\0"
PING_TIMEOUT = 11
PREFACE_BYTES, FRAME_HEAD_BYTES, HEADERS = 24, 9, 1


async def test_a_peer_that_ends_a_connection_causes_no_line(tmp_path: Path) -> None:
    (tmp_path / "caller.py").write_text(textwrap.dedent(CALLER))
    refusal = struct.pack(">II", 0, PING_TIMEOUT) + b"ping_timeout"
    goaway = len(refusal).to_bytes(3, "big") + b"\x07\0\0\0\0\0" + refusal

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SETTINGS_FRAME)
        await reader.readexactly(PREFACE_BYTES)
        kind = -1
        while kind != HEADERS:
            head = await reader.readexactly(FRAME_HEAD_BYTES)
            kind = head[3]
            await reader.readexactly(int.from_bytes(head[:3], "big"))
        writer.write(goaway)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    code = "from headrace_common.process.start import start; start('caller', 'kiln', ())"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, f"127.0.0.1:{port}"),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": ":".join([str(tmp_path), *sys.path])},
    )
    async with asyncio.timeout(30):
        output, errors = await process.communicate()
    server.close()
    assert output == b"UNAVAILABLE\n"
    assert errors == b""
