"""The command `headrace-probe`: one health check, for containers and init systems without a gRPC client."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

from headrace_common import ports
from headrace_common.ports import split_host_port
from headrace_common.process.start import exit_without_extras

_PROG: Final = "headrace-probe"
_TIMEOUT_S: Final = 3.0


def main(argv: Sequence[str] | None = None) -> int:
    """Exits with 0 when the service reports SERVING, with 1 when it does not, and with 2 for a wrong argument."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        split_host_port(given.address)
    except ValueError as error:
        parser.error(f"address {given.address!r}: {error}")
    # Otherwise gRPC writes a line for each connection that is refused.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc
    except ModuleNotFoundError:
        exit_without_extras(_PROG, ("cli",))
        raise
    request = health_pb2.HealthCheckRequest(service=given.service)
    try:
        with grpc.insecure_channel(given.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(request, timeout=given.timeout_s)
    except grpc.RpcError as error:
        # The call that failed is the error.
        problem = f"{error.code().name}: {error.details()}"
    else:
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return 0
        problem = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    print(f"{_PROG}: {given.address} reports {problem}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG, description="Asks a service for its health on its health_listen."
    )
    parser.add_argument(
        "address",
        nargs="?",
        default=f"127.0.0.1:{ports.HEALTH}",
        help="host:port of health_listen (default: %(default)s)",
    )
    parser.add_argument(
        "--service",
        default="",
        help='the empty name: whether the service takes work; "live": whether it runs',
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=_TIMEOUT_S,
        help="seconds to wait for the answer (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
