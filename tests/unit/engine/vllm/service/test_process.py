"""The memory settings of forked engine processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import ctypes, os, resource, sys
from headrace_engine.vllm.service.launch import engine_children

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

with engine_children(keeps_memory=sys.argv[1] == "keeps"):
    child = os.fork()
    if child == 0:
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        for number in range(5):
            before = faults()
            held = ctypes.c_void_p(libc.malloc(64 << 20))
            ctypes.memset(held, 1, 64 << 20)
            libc.free(held)
            print(faults() - before, flush=True)
        os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.parametrize("keeps", [True, False])
def test_freed_memory_is_kept_for_the_next_forward_pass_on_request(keeps: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, "keeps" if keeps else "returns"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    first, *later = map(int, done.stdout.split())
    assert len(later) == 4
    # The number of faults depends on the machine's page size.
    assert all((count < first / 4) == keeps for count in later)
