"""A worker. Its engine computes a token alone as it does with others: see hybrids.mend_rotation."""

import runpy

from tests.vllm.hybrids import mend_rotation

if __name__ == "__main__":
    mend_rotation()
    runpy.run_module("headrace_worker", run_name="__main__", alter_sys=True)
