"""Entry point of the `headrace` command."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys

from headrace_common.process.start import exit_without_extras
from headrace_common.version import version

EXIT_INTERRUPTED = 130


def main() -> None:
    """Runs the command. Ctrl-C ends it without a traceback, also while its modules are imported."""
    # gRPC's own lines would stand before ours, which state the same failure.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:] == ["--version"]:
        # Without the extra cli, too.
        print(f"headrace {version()}")
        return
    try:
        app = importlib.import_module("headrace_cli.app").app
    except ModuleNotFoundError:
        exit_without_extras("headrace", ("cli",))
        raise
    signal.signal(signal.SIGINT, handler)
    # Where the terminal has no block characters, drawings have "?".
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="headrace")
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
