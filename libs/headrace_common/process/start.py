"""Starts a service's process."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys

_EXIT_MISCONFIGURED = 2
# Requests leave few cycles, so collections find little. Python's own 700 costs a fleet of workers a third of its start.
_GC_THRESHOLDS = (50_000, 20, 20)


def start(module: str, prog: str, extras: tuple[str, ...]) -> None:
    """Imports `module` and runs its `main`. Exits with status 2 when the import needs one of `extras` that is missing.

    Imported objects are never garbage. A collection during the imports would cost a tenth of the start, and each later
    one a pause, so this excludes them from collections.

    Until the service handles SIGINT, it ends the process at once, without a traceback.
    """
    # Otherwise gRPC's core writes a line for each connection that a peer ends. Our own lines state such a failure.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()
    try:
        main = importlib.import_module(module).main
    except ModuleNotFoundError:
        exit_without_extras(prog, extras)
        raise
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    gc.enable()
    main()


def exit_without_extras(prog: str, extras: tuple[str, ...]) -> None:
    """After a failed import: prints that the last of `extras`, which includes the others, is missing.

    Then exits with status 2. Returns when all are installed.
    """
    # They import gRPC, which reads its variables when it is imported.
    from headrace_common.errors import ConfigError
    from headrace_common.extras import missing_extra, require_extra

    for extra in extras:
        try:
            require_extra(prog, extra)
        except ConfigError as error:
            print(missing_extra(prog, extras[-1], error.metadata["module"]), file=sys.stderr)
            sys.exit(_EXIT_MISCONFIGURED)
