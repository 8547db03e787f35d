"""Starts the router service."""

import os
from importlib.metadata import version

from headrace_common.process.start import start


def main() -> None:
    """Runs until SIGTERM."""
    # The newer engine of gRPC's clients costs almost four more wakes of threads for each message that it reads.
    # Releases without the older one would print a line about an unknown name.
    if version("grpcio").startswith(("1.80.", "1.81.", "1.82.", "1.83.", "1.84.", "1.85.")):
        os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")
    start("headrace_router.main", "headrace-router", ("cli", "router"))


if __name__ == "__main__":
    main()
