"""Starts a service's process."""

from __future__ import annotations

import gc
import importlib
import signal


def start(module: str) -> None:
    """Imports `module` and runs its `main`.

    Imported objects are never garbage. A collection during the imports would cost a tenth of the start, and each later
    one a pause, so this excludes them from collections.

    Until the service handles SIGINT, it ends the process at once, without a traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()
    main = importlib.import_module(module).main
    gc.freeze()
    gc.enable()
    main()
