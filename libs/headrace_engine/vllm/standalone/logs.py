"""Adds our log records to vLLM's log. vLLM's processes configure no other handler for them."""

from __future__ import annotations

import logging

PACKAGES = ("headrace_common", "headrace_engine", "headrace_kv")


def join_vllm_log() -> None:
    """Sends the log records of our packages to vLLM's handlers, at vLLM's level."""
    vllm_log = logging.getLogger("vllm")
    for name in PACKAGES:
        ours = logging.getLogger(name)
        ours.setLevel(vllm_log.getEffectiveLevel())
        for handler in vllm_log.handlers:
            if handler not in ours.handlers:
                ours.addHandler(handler)
                ours.propagate = False
