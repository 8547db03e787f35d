"""Compares the cost of one RPC with and without roles, in turns in one process.

    python -m bench.access [--calls 2000] [--rounds 8] [--output bench/results]

Client and server share the process, and the RPC does nothing. A cell is CPU time for each call, of client and server
together: the median of the rounds. Ratios compare variants of one round.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_common.access.credentials import Credentials, TlsFiles
from headrace_common.access.roles import Role
from headrace_common.access.tokens import create_token, new_private_key, public_key_of
from headrace_common.config import ServiceConfig
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.server import GrpcServer
from tests.suite.certificates import Authority

PLAIN, TOKEN, TLS, TLS_ROLE = "plaintext", "plaintext, token", "TLS", "TLS, role"


class _Registry(registry_pb2_grpc.RegistryServiceServicer):
    """Returns an empty policy. Other RPCs are not implemented."""

    async def GetPolicy(  # noqa: N802 - the RPC's name
        self, request: registry_pb2.GetPolicyRequest, context: object
    ) -> registry_pb2.GetPolicyResponse:
        return registry_pb2.GetPolicyResponse()


def variants(folder: Path) -> dict[str, tuple[ServiceConfig, Credentials]]:
    """Settings of the server and credentials of the client, by variant."""
    key = new_private_key()
    token_file, keys_file = folder / "router.token", folder / "keys.pem"
    token_file.write_text(create_token(key, Role.ROUTER, "", 3_600))
    keys_file.write_bytes(public_key_of(key))
    authority = Authority(folder / "authority")
    server, client = authority.sign("registry", "registry"), authority.sign("router", "router")
    tls = {name: getattr(server, name) for name in TlsFiles.__dataclass_fields__}
    return {
        PLAIN: (ServiceConfig(insecure=True), Credentials()),
        TOKEN: (
            ServiceConfig(token_keys_file=str(keys_file)),
            Credentials(token_file=str(token_file)),
        ),
        TLS: (ServiceConfig(insecure=True, **tls), Credentials(client)),
        TLS_ROLE: (ServiceConfig(**tls), Credentials(client)),
    }


async def measure(calls: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of CPU for each call, by variant and round."""
    taken_us: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stubs: dict[str, Any] = {}
        for name, (config, credentials) in variants(folder).items():
            server = GrpcServer(config, ())
            registry_pb2_grpc.add_RegistryServiceServicer_to_server(
                _Registry(),  # type: ignore[abstract]
                server.server,
            )
            endpoint = await server.start()
            stack.push_async_callback(server.server.stop, None)
            channel = await stack.enter_async_context(open_channel(endpoint, credentials))
            stubs[name] = registry_pb2_grpc.RegistryServiceStub(channel)
            await stubs[name].GetPolicy(registry_pb2.GetPolicyRequest())
        for _ in range(rounds):
            for name, stub in stubs.items():
                start_s = time.process_time()
                for _ in range(calls):
                    await stub.GetPolicy(registry_pb2.GetPolicyRequest())
                spent_us = (time.process_time() - start_s) * 1e6 / calls
                taken_us.setdefault(name, []).append(spent_us)
    return taken_us


def render(taken_us: Mapping[str, list[float]]) -> str:
    """A table: the median of each variant, and its ratio to the one without roles."""
    lines = ["| variant | CPU a call, µs | ratio | without roles |", "|---|---|---|---|"]
    for name, base in ((PLAIN, PLAIN), (TOKEN, PLAIN), (TLS, TLS), (TLS_ROLE, TLS)):
        pairs = zip(taken_us[name], taken_us[base], strict=True)
        ratio = statistics.median(one / other for one, other in pairs)
        lines.append(f"| {name} | {statistics.median(taken_us[name]):.0f} | {ratio:.3f} | {base} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints the table, and writes it to the output folder as access.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("bench/results"))
    given = parser.parse_args()
    head = f"One empty unary RPC: {given.rounds} rounds of {given.calls} calls\n\n"
    text = head + render(asyncio.run(measure(given.calls, given.rounds)))
    print(text, end="")
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "access.md").write_text(text)


if __name__ == "__main__":
    main()
