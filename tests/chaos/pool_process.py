"""The process of a chaos worker that calls the remote pool: some of the blocks that it reads have another byte.

Started in place of `headrace_kv.tiers.pool_process`, with the variables of the worker. It imports as little as that.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace_kv.tiers import pool_process as process
from headrace_kv.tiers.pool_process import SEAL_BYTES, BlockClient, MooncakeStore

MODULE = "tests.chaos.pool_process"


class Blocks:
    """Counts what this process moves, in one file of the run's reports, and changes what it reads."""

    def __init__(self, faults: dict[str, Any], reports: Path) -> None:
        self._changed_share: float = faults["pool_changed"]
        self._random = random.Random(f"{faults['seed']}/{os.getpid()}")
        self._counts: Counter[str] = Counter()
        self._file = reports / f"pool-{os.getpid()}.json"

    def install(self) -> None:
        """Replaces methods of the product by ones that count and change."""
        read, get, store = MooncakeStore.get, BlockClient.get, BlockClient.put

        def read_changed(
            pool: MooncakeStore, keys: list[str], addresses: list[int], nbytes: int
        ) -> list[int]:
            codes = read(pool, keys, addresses, nbytes)
            for code, address in zip(codes, addresses, strict=True):
                if code == nbytes and self._random.random() < self._changed_share:
                    self._change(address + self._random.randrange(nbytes - SEAL_BYTES))
            return codes

        def counted_get(
            client: BlockClient, memory: int, keys: Sequence[str], slots: Sequence[int]
        ) -> list[bool]:
            done = get(client, memory, keys, slots)
            self._count("blocks from the pool", sum(done))
            return done

        def counted_put(
            client: BlockClient, memory: int, keys: Sequence[str], slots: Sequence[int]
        ) -> list[bool]:
            done = store(client, memory, keys, slots)
            self._count("blocks in the pool", sum(done))
            return done

        _put(MooncakeStore, "get", read_changed)
        _put(BlockClient, "get", counted_get)
        _put(BlockClient, "put", counted_put)

    def _change(self, address: int) -> None:
        byte = ctypes.c_uint8.from_address(address)
        byte.value ^= 1
        self._counts["blocks changed in the pool"] += 1

    def _count(self, what: str, count: int) -> None:
        self._counts[what] += count
        # This process may be killed at any time.
        self._file.write_text(json.dumps(self._counts), encoding="utf-8")


def _put(owner: Any, name: str, value: object) -> None:
    setattr(owner, name, value)


def main() -> int:
    faults = json.loads(os.environ["HEADRACE_CHAOS"])
    if faults["break_part"] == "pool_seal":
        _put(process, "is_sealed", lambda *_: True)
    Blocks(faults, Path(os.environ["HEADRACE_CHAOS_REPORTS"])).install()
    return process.main(sys.argv[1:])


if __name__ == "__main__":
    # Mooncake's threads may stand still, and the end of the process must not wait for them.
    os._exit(main())
