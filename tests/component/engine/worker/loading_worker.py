"""A prefill worker with a model that loads for ten minutes, for tests in a separate process.

It prints "loading" before, and "ended" when the load has ended.
"""

from __future__ import annotations

import time
from unittest.mock import patch

from headrace_prefill.main import main


def load(*arguments: object) -> None:
    try:
        print("loading", flush=True)
        # Blocks the event loop, as vLLM does.
        time.sleep(600)
    finally:
        print("ended", flush=True)


if __name__ == "__main__":
    with (
        patch("headrace_engine.vllm.engine.check_config"),
        patch("headrace_engine.vllm.engine.launch", load),
    ):
        main()
