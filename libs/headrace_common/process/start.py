"""Starts a service's process."""

from __future__ import annotations

import gc
import importlib


def start(module: str) -> None:
    """Imports `module` and runs its `main`.

    What is imported stays for good: to look for garbage in it costs a tenth of the start, and later a pause each time.
    """
    gc.disable()
    main = importlib.import_module(module).main
    gc.freeze()
    gc.enable()
    main()
