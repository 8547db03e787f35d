"""Slots for blocks, their seals, and the messages about them: what a rank shares with the process of its pool.

The store is shared and checks nothing. A block with changed bytes, of another key, or of another deployment has no
valid seal, and is not used.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import json
import logging
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from headrace_common.errors import ConfigError, TransferFailed
from headrace_kv.transport.memory import require_available

SEAL_BYTES: Final = 64
_MAGIC: Final = b"HRBLOCK1"
# Magic, bytes of the content, checksum of the content. The tag follows.
_HEAD: Final = struct.Struct("<8sQ16s")
_TAG_BYTES: Final = SEAL_BYTES - _HEAD.size


def seal_of(secret: bytes, name: str, content: memoryview) -> bytes:
    """The seal of a block's content under its name."""
    head = _HEAD.pack(_MAGIC, len(content), xxh3_128_digest(content, _seed(secret)))
    tag = hashlib.blake2s(head + name.encode(), digest_size=_TAG_BYTES, key=secret).digest()
    return head + tag


def is_sealed(secret: bytes, name: str, content: memoryview, seal: bytes) -> bool:
    """Whether the content is what was stored under this name by a worker of the same deployment."""
    return hmac.compare_digest(seal_of(secret, name, content), seal)


def _seed(secret: bytes) -> int:
    return int.from_bytes(secret[:8], "little")


_NAME: Final = "headrace-kv-blocks"
_POPULATE_WRITE: Final = 23
"""An advice of Linux 5.14 and later."""
log = logging.getLogger(__name__)


class SharedArena:
    """`nbytes` of zeroes without a name, which begin at a page. `descriptor` is for other mappings of it."""

    def __init__(self, nbytes: int, setting: str = "kv_host_gib") -> None:
        """Raises ConfigError when the host cannot give as much memory. `setting` is the field that asks for it."""
        require_available(nbytes, setting)
        try:
            self.descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, nbytes)
            self._memory = mmap.mmap(self.descriptor, nbytes)
        except OSError as error:
            raise ConfigError(
                f"no shared memory of {nbytes / 2**30:.1f} GiB for KV blocks: {error.strerror}; lower {setting}",
                metadata={"field": setting},
            ) from error
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)

    def populate_library_mappings(self) -> None:
        """Gives mappings that a library made in this process their pages, so that its writes do not wait for memory.

        Takes about half a second for each GiB. Other threads run meanwhile.
        """
        library = ctypes.CDLL(None, use_errno=True)
        for address, nbytes in self._library_mappings():
            failed = library.madvise(
                ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _POPULATE_WRITE
            )
            if failed:
                reason = os.strerror(ctypes.get_errno())
                log.info("memory for KV blocks gets its pages when it is used: %s", reason)

    def _library_mappings(self) -> Iterator[tuple[int, int]]:
        """(address, bytes) of each, from proc_pid_maps(5)."""
        ours = int(self.bytes.ctypes.data)
        inode = os.fstat(self.descriptor).st_ino
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            addresses, _, _, _, number, *name = line.split(maxsplit=5)
            if int(number) == inode and name and name[0].startswith(f"/memfd:{_NAME} "):
                first, end = (int(address, 16) for address in addresses.split("-"))
                if first != ours:
                    yield first, end - first

    def close(self) -> None:
        """Closes the descriptor. The memory stays while arrays refer to it."""
        os.close(self.descriptor)
        # Another file may get the number.
        self.descriptor = -1


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """One rank's slots for blocks, in shared memory. Slot i starts at i * `slot_bytes`.

    The first `object_bytes` of a slot are stored. The last SEAL_BYTES of these belong to the pool.
    """

    descriptor: int
    slot_bytes: int
    slot_count: int
    object_bytes: int


@dataclass(frozen=True, slots=True)
class Slots:
    """Memory at `address`, cut in slots. See PoolMemory."""

    address: int
    slot_bytes: int
    slot_count: int
    object_bytes: int

    def object_at(self, slot: int) -> int:
        """The address of a slot. Raises TransferFailed for a number that no slot has."""
        if not 0 <= slot < self.slot_count:
            raise TransferFailed(f"there is no slot {slot} among {self.slot_count}")
        return self.address + slot * self.slot_bytes

    def content_of(self, slot: int) -> memoryview:
        """The bytes of a slot before the seal."""
        return self._view(slot)[:-SEAL_BYTES]

    def seal_of(self, slot: int) -> memoryview:
        """The seal of a slot."""
        return self._view(slot)[-SEAL_BYTES:]

    def _view(self, slot: int) -> memoryview:
        array = (ctypes.c_uint8 * self.object_bytes).from_address(self.object_at(slot))
        return memoryview(array).cast("B")


class Mapping:
    """Maps shared memory by its descriptor. The memory is valid while this object exists."""

    def __init__(self, memory: PoolMemory) -> None:
        self._memory = mmap.mmap(memory.descriptor, memory.slot_bytes * memory.slot_count)
        self._first = ctypes.c_uint8.from_buffer(self._memory)
        self.slots = Slots(
            ctypes.addressof(self._first),
            memory.slot_bytes,
            memory.slot_count,
            memory.object_bytes,
        )


PACKET_BYTES_MAX: Final = 192 * 1024
"""Fits the socket's default buffer."""

Operation = Literal["exists", "get", "put"]


@dataclass(frozen=True, slots=True)
class PoolSetup:
    """What a process of the pool starts with. `master` is host:port; `host` is this worker's address.

    `admitted`: networks that may connect to the process, by text. None means every host.
    """

    master: str
    host: str
    secret: bytes
    memories: tuple[PoolMemory, ...]
    protocol: str = "tcp"
    rdma_devices: str = ""
    admitted: tuple[str, ...] | None = ()


@dataclass(frozen=True, slots=True)
class PoolCall:
    """A call of RemotePool."""

    call_id: int
    operation: Operation
    keys: tuple[str, ...]
    memory: int = 0
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolReply:
    """The end of a call. With `lost`, the store has failed, and the process ends."""

    call_id: int
    done: tuple[bool, ...] = ()
    lost: str = ""


READY: Final = PoolReply(0)
"""The first reply, once the process can be called."""


def setup_to_packet(setup: PoolSetup) -> bytes:
    values = {**asdict(setup), "secret": setup.secret.hex()}
    return json.dumps(values, separators=(",", ":")).encode()


def setup_from_packet(packet: bytes) -> PoolSetup:
    values = json.loads(packet)
    values["secret"] = bytes.fromhex(values["secret"])
    values["memories"] = tuple(PoolMemory(**one) for one in values["memories"])
    if values["admitted"] is not None:
        values["admitted"] = tuple(values["admitted"])
    return PoolSetup(**values)


def call_to_packet(call: PoolCall) -> bytes:
    return json.dumps(asdict(call), separators=(",", ":")).encode()


def call_from_packet(packet: bytes) -> PoolCall:
    values: dict[str, Any] = json.loads(packet)
    return PoolCall(**{**values, "keys": tuple(values["keys"]), "slots": tuple(values["slots"])})


def reply_to_packet(reply: PoolReply) -> bytes:
    return json.dumps(asdict(reply), separators=(",", ":")).encode()


def reply_from_packet(packet: bytes) -> PoolReply:
    values: dict[str, Any] = json.loads(packet)
    return PoolReply(**{**values, "done": tuple(values["done"])})
