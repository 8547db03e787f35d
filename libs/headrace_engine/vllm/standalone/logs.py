"""Our records in vLLM's log: nobody else writes them down in vLLM's processes."""

from __future__ import annotations

import logging

OURS = ("headrace_common", "headrace_engine", "headrace_kv")


def join_vllm_log() -> None:
    """Sends what our packages log, at vLLM's level, to where vLLM's own records go."""
    vllm_log = logging.getLogger("vllm")
    for name in OURS:
        ours = logging.getLogger(name)
        ours.setLevel(vllm_log.getEffectiveLevel())
        for handler in vllm_log.handlers:
            if handler not in ours.handlers:
                ours.addHandler(handler)
                ours.propagate = False
