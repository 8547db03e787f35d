"""The files and batches of clients in one folder: the data of each, and its state as JSON.

One thread does all that may wait for the disk, in the order of the calls. So the end of a call is that of the earlier
ones. Paths are made of ids that this module has made, and of nothing that a client has sent.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from headrace_common.errors import ConfigError, InternalError
from headrace_frontend.request.computations import Result

FILE: Final = "file-"
BATCH: Final = "batch_"
OUTPUTS: Final = ("output", "error")
"""The files that a batch writes."""
ENDED: Final = ("failed", "completed", "expired", "cancelled")
"""The states of batches that run no more."""
_OUR_FILE: Final = re.compile(r"((?:file-|batch_)[0-9a-f]{32})\.jsonl?(?:\.new)?")
# What each entry counts beside its data, which bounds their number: a batch has 100 errors and its metadata.
_ENTRY_BYTES: Final = 32_768


def new_id(kind: str) -> str:
    """An id that no client can guess."""
    return kind + secrets.token_hex(16)


@dataclass(slots=True, eq=False)
class Entry:
    """A file or a batch. Clients get `shown`. `kept` is stored beside it."""

    tenant: str
    shown: dict[str, Any]
    kept: dict[str, Any] = field(default_factory=dict)
    data_bytes: int = 0

    @property
    def id(self) -> str:
        """Its id."""
        return str(self.shown["id"])

    def change(self, **fields: Any) -> None:
        """Replaces what clients get."""
        self.shown.update(fields)

    @property
    def ended(self) -> bool:
        """Whether it is a batch that runs no more."""
        return self.shown.get("status") in ENDED


class BatchFolder:
    """Owns the folder, which no other process may use. One event loop owns it, and its thread.

    `bytes_max` bounds the bytes of all tenants. A tenant may have as many of them as are free still.
    """

    def __init__(self, path: Path, bytes_max: int) -> None:
        """Reads what an earlier process has left. Raises ConfigError."""
        self._path = path
        self._bytes_max = bytes_max
        self._bytes: Counter[str] = Counter()
        self._entries: dict[str, Entry] = {}
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._load()
        except BlockingIOError as error:
            raise ConfigError(
                f"batch_folder: another process uses {path}; give each router a folder of its own"
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"batch_folder: cannot use {path}: {error}") from error
        self._thread = ThreadPoolExecutor(1, "batches")

    def _load(self) -> None:
        known: set[str] = set()
        found = [path for path in self._path.iterdir() if _OUR_FILE.fullmatch(path.name)]
        states = [json.loads(path.read_bytes()) for path in found if path.suffix == ".json"]
        for state in sorted(states, key=lambda one: one["shown"]["created_at"]):
            path = self.path(state["shown"]["id"])
            entry = Entry(**state, data_bytes=path.stat().st_size if path.exists() else 0)
            self._entries[entry.id] = entry
            self._bytes[entry.tenant] += _ENTRY_BYTES + entry.data_bytes
            known.add(entry.id)
            if not entry.ended:
                known |= {entry.kept[name] for name in OUTPUTS if name in entry.kept}
        for path in found:
            # Of an upload, a batch or a change that did not end.
            if path.stem not in known:
                path.unlink()

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of work that may wait for the disk. Raises InternalError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except OSError as error:
            raise InternalError(f"batch_folder has failed: {error.strerror}") from error

    def path(self, entry_id: str) -> Path:
        """The data of an entry."""
        return self._path / f"{entry_id}.jsonl"

    def find(self, tenant: str, entry_id: str) -> Entry | None:
        """A tenant's entry."""
        entry = self._entries.get(entry_id)
        return entry if entry is not None and entry.tenant == tenant else None

    def entries(self, kind: str = "", tenant: str | None = None) -> Sequence[Entry]:
        """Those of a kind, of one tenant or of all: the newest first."""
        return [
            one
            for one in reversed(self._entries.values())
            if one.id.startswith(kind) and tenant in (None, one.tenant)
        ]

    def has_room(self, tenant: str, size: int = _ENTRY_BYTES) -> bool:
        """Whether a tenant may store so many more bytes."""
        return self._bytes[tenant] + self._bytes.total() + 2 * size <= self._bytes_max

    def count(self, tenant: str, size: int) -> None:
        """So many more bytes of a tenant's data are stored, or fewer."""
        self._bytes[tenant] += size

    async def save(self, entry: Entry) -> None:
        """Stores the state of an entry, which may be new. Its data is counted already."""
        if entry.id not in self._entries:
            self._entries[entry.id] = entry
            self._bytes[entry.tenant] += _ENTRY_BYTES
        state = {"tenant": entry.tenant, "shown": entry.shown, "kept": entry.kept}
        data = json.dumps(state).encode()
        await self.run(lambda: self._write_state(entry.id, data))

    async def remove(self, entry: Entry) -> None:
        """Removes an entry with its data."""
        if self._entries.pop(entry.id, None) is not None:
            self._bytes[entry.tenant] -= _ENTRY_BYTES + entry.data_bytes
            await self.run(lambda: self._unlink(self._state(entry.id), self.path(entry.id)))

    def close(self) -> None:
        """Waits for the thread, and gives the folder back."""
        self._thread.shutdown()
        os.close(self._lock)

    def _state(self, entry_id: str) -> Path:
        return self._path / f"{entry_id}.json"

    def _write_state(self, entry_id: str, data: bytes) -> None:
        path = self._state(entry_id)
        new = path.with_name(f"{path.name}.new")
        _write(new, data, os.O_TRUNC)
        new.replace(path)
        self.sync()

    def sync(self) -> None:
        """The names in the folder outlast a crash of the machine. For the thread."""
        folder = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _unlink(self, *paths: Path) -> None:
        for path in paths:
            path.unlink(missing_ok=True)


class DataFile:
    """Data that grows. What is appended during a write is written together."""

    def __init__(self, folder: BatchFolder, tenant: str, file_id: str) -> None:
        self.folder, self.tenant, self.file_id = folder, tenant, file_id
        self.path = folder.path(file_id)
        self.size = 0
        self._waiting: list[bytes] = []
        self._writing = asyncio.Lock()

    async def append(self, *parts: bytes, lasting: bool = True) -> None:
        """Returns when the parts are in the file. `lasting`: they outlast a crash of the machine."""
        self._waiting += parts
        async with self._writing:
            if not self._waiting:
                return
            data, self._waiting = b"".join(self._waiting), []
            self.count(len(data))
            await self.folder.run(lambda: self._write(data, lasting=lasting))

    def count(self, size: int) -> None:
        """It has so many more bytes, or fewer."""
        self.size += size
        self.folder.count(self.tenant, size)

    async def remove(self) -> None:
        """Removes what was written."""
        self.count(-self.size)
        await self.folder.run(lambda: self.path.unlink(missing_ok=True))

    def _write(self, data: bytes, *, lasting: bool) -> None:
        _write(self.path, data, os.O_APPEND, lasting=lasting)
        if lasting:
            self.folder.sync()


def _write(path: Path, data: bytes, flag: int, *, lasting: bool = True) -> None:
    # Its owner alone may read it.
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | flag, 0o600)
    size = os.fstat(descriptor).st_size
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if lasting:
                file.flush()
                os.fsync(descriptor)
    except OSError:
        # A full disk may have a part of it, which the next line would continue.
        os.truncate(path, size)
        raise
