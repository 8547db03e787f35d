"""Starts a service's process."""

from __future__ import annotations

import gc
import importlib


def start(module: str) -> None:
    """Imports `module` and runs its `main`.

    Imported objects are never garbage. A collection during the imports would cost a tenth of the start, and each later
    one a pause, so this excludes them from collections.
    """
    gc.disable()
    main = importlib.import_module(module).main
    gc.freeze()
    gc.enable()
    main()
