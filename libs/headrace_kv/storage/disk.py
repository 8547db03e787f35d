"""Blocks of KV in a file, each with a checksum in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xxhash import xxh3_64_intdigest

from headrace_common.errors import ConfigError, TransferFailed
from headrace_kv.transport.packing import Bytes


class DiskStorage:
    """`block_count` blocks of `block_bytes` bytes each, in a file without a name: it ends with this process.

    Raises ConfigError when the file cannot have its size in that folder. One thread calls it.
    """

    def __init__(self, folder: Path, block_bytes: int, block_count: int) -> None:
        self._block_bytes = block_bytes
        self._checksums: dict[int, int] = {}
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, block_bytes * block_count)
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            size_gib = block_bytes * block_count / 2**30
            raise ConfigError(
                f"no file of {size_gib:.1f} GiB can be made in {folder}: {error.strerror}; make room there, name "
                "another folder, or take fewer blocks",
                metadata={"field": "disk_folder", "value": str(folder)},
            ) from error

    def write(self, block: int, content: Bytes) -> None:
        """Replaces a block. Raises TransferFailed; the block then has no content."""
        self._checksums.pop(block, None)
        with _failures(f"writing block {block}"):
            done = os.pwrite(self._descriptor, content.data, block * self._block_bytes)
            if done != self._block_bytes:
                raise TransferFailed(f"{done} of {self._block_bytes} bytes reached the disk")
        self._checksums[block] = xxh3_64_intdigest(content.data)

    def read(self, block: int, target: Bytes) -> None:
        """Reads a block. Raises TransferFailed when it has no content, or other content than was written."""
        checksum = self._checksums.get(block)
        if checksum is None:
            raise TransferFailed(f"block {block} was not written to the disk")
        with _failures(f"reading block {block}"):
            done = os.preadv(self._descriptor, [target.data], block * self._block_bytes)
        if done != self._block_bytes or xxh3_64_intdigest(target.data) != checksum:
            raise TransferFailed(f"block {block} has other bytes on the disk than were written")

    def close(self) -> None:
        """Frees the space."""
        os.close(self._descriptor)
        # Another file may get the number.
        self._descriptor = -1


@contextmanager
def _failures(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TransferFailed(f"{what} on the disk failed: {error.strerror}") from error
