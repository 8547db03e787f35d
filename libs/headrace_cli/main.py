"""Entry point of the `headrace` command."""

from __future__ import annotations

import importlib
import signal
import sys

from headrace_common.process.start import exit_without_extras

EXIT_INTERRUPTED = 130


def main() -> None:
    """Runs the command. Ctrl-C ends it without a traceback, also while its modules are imported."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        app = importlib.import_module("headrace_cli.app").app
    except ModuleNotFoundError:
        exit_without_extras("headrace", ("cli",))
        raise
    signal.signal(signal.SIGINT, handler)
    try:
        app(prog_name="headrace")
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
