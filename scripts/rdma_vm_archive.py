"""Writes an initial file system for a kernel: the "newc" cpio format, with root as the owner of all files.

python scripts/rdma_vm_archive.py FOLDER ARCHIVE
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

_MAGIC = "070701"
_END = "TRAILER!!!"
_ALIGNMENT = 4


def write_archive(stream: BinaryIO, entries: Iterable[tuple[str, Path]]) -> None:
    """Writes entries of (name in the archive, path) and the end mark.

    The folders of a name must precede it. Raises ValueError for a path that is no file, folder or symbolic link.
    """
    for number, (name, path) in enumerate(entries, 1):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            data = path.read_bytes()
        elif stat.S_ISLNK(status.st_mode):
            data = os.fsencode(path.readlink())
        elif stat.S_ISDIR(status.st_mode):
            data = b""
        else:
            raise ValueError(f"{path} is no file, folder or symbolic link")
        _write_entry(stream, name, data, number, status.st_mode)
    _write_entry(stream, _END, b"", 0, 0)


def folder_entries(folder: Path) -> Iterator[tuple[str, Path]]:
    """All files and folders below the folder, parents first, sorted."""
    for path in sorted(folder.rglob("*")):
        yield str(path.relative_to(folder)), path


def _write_entry(stream: BinaryIO, name: str, data: bytes, number: int, mode: int) -> None:
    encoded = os.fsencode(name) + b"\0"
    # inode, mode, owner, group, links, time, size, device (2), own device (2), length of the name, checksum
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
    header = _MAGIC + "".join(f"{field:08x}" for field in fields)
    head = header.encode() + encoded
    stream.write(head + bytes(-len(head) % _ALIGNMENT))
    stream.write(data)
    stream.write(bytes(-len(data) % _ALIGNMENT))


def main() -> None:
    """Writes the archive."""
    folder, archive = map(Path, sys.argv[1:])
    with archive.open("wb") as stream:
        write_archive(stream, folder_entries(folder))


if __name__ == "__main__":
    main()
