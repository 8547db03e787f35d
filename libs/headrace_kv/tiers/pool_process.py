"""The process that calls the store for one worker: `python -m headrace_kv.tiers.pool_process DESCRIPTOR`.

A call of Mooncake can stand still for longer than any request may wait. It can hold Python's lock meanwhile, and write
into memory after it has failed. The worker ends this process then, which ends all three.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import json
import logging
import mmap
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from headrace_common.errors import ConfigError, TransferFailed
from headrace_common.tasks import lower_priority
from headrace_kv.transport.guard import (
    Networks,
    open_listeners,
    parse_networks,
    resolve_host,
    restrict_listeners,
)
from headrace_kv.transport.memory import require_available
from headrace_kv.transport.mooncake import without_known_lines

SEAL_BYTES: Final = 64
_MAGIC: Final = b"HRBLOCK1"
# Magic, bytes of the content, checksum of the content. The tag follows.
_HEAD: Final = struct.Struct("<8sQ16s")
_TAG_BYTES: Final = SEAL_BYTES - _HEAD.size


def seal_of(secret: bytes, name: str, content: memoryview) -> bytes:
    """The seal of a block's content under its name."""
    seed = int.from_bytes(secret[:8], "little")
    head = _HEAD.pack(_MAGIC, len(content), xxh3_128_digest(content, seed))
    return head + hashlib.blake2s(head + name.encode(), digest_size=_TAG_BYTES, key=secret).digest()


def is_sealed(secret: bytes, name: str, content: memoryview, seal: bytes) -> bool:
    """Whether the content is what was stored under this name by a worker of the same deployment."""
    return hmac.compare_digest(seal_of(secret, name, content), seal)


log = logging.getLogger(__name__)
_NAME: Final = "headrace-kv-blocks"
_POPULATE_WRITE: Final = 23
"""An advice of Linux 5.14 and later."""


class SharedArena:
    """`nbytes` of zeroes without a name, which begin at a page. `descriptor` is for other mappings of it."""

    def __init__(self, nbytes: int, setting: str = "kv_host_gib") -> None:
        """Raises ConfigError when the node cannot give as much memory. `setting` is the field that asks for it."""
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
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            if f" /memfd:{_NAME} " not in line:
                continue
            first, end = (int(place, 16) for place in line.split(maxsplit=1)[0].split("-"))
            if first != self.bytes.ctypes.data and library.madvise(
                ctypes.c_void_p(first), ctypes.c_size_t(end - first), _POPULATE_WRITE
            ):
                reason = os.strerror(ctypes.get_errno())
                log.info("memory for KV blocks gets its pages when it is used: %s", reason)

    def close(self) -> None:
        """Closes the descriptor. The memory stays while arrays refer to it."""
        os.close(self.descriptor)
        # Another file may get the number.
        self.descriptor = -1


class PoolMemory(NamedTuple):
    """One rank's slots for blocks, in shared memory. Slot i starts at i * `slot_bytes`.

    The first `object_bytes` of a slot are stored. The last SEAL_BYTES of these belong to the pool.
    """

    descriptor: int
    slot_bytes: int
    slot_count: int
    object_bytes: int


class Slots:
    """Maps a rank's slots by their descriptor. The memory is valid while this object exists."""

    def __init__(self, memory: PoolMemory) -> None:
        self._memory = memory
        self._mapping = mmap.mmap(memory.descriptor, memory.slot_bytes * memory.slot_count)
        self.bytes = memoryview(self._mapping)
        """All slots."""
        self.address = ctypes.addressof(ctypes.c_uint8.from_buffer(self._mapping))
        """Of the first slot."""
        self.object_bytes = memory.object_bytes

    def address_of(self, slot: int) -> int:
        """The address of a slot. Raises TransferFailed for a number that no slot has, as the other methods do."""
        return self.address + self._start(slot)

    def content_of(self, slot: int) -> memoryview:
        """The bytes of a slot before the seal."""
        return self.bytes[self._start(slot) :][: self.object_bytes - SEAL_BYTES]

    def seal_of(self, slot: int) -> memoryview:
        """The seal of a slot."""
        return self.bytes[self._start(slot) :][self.object_bytes - SEAL_BYTES : self.object_bytes]

    def _start(self, slot: int) -> int:
        if not 0 <= slot < self._memory.slot_count:
            raise TransferFailed(f"there is no slot {slot} among {self._memory.slot_count}")
        return slot * self._memory.slot_bytes


PACKET_BYTES_MAX: Final = 192 * 1024
"""Fits the socket's default buffer."""

Operation = Literal["exists", "get", "put"]


class PoolSetup(NamedTuple):
    """What a process of the pool starts with. `master` is host:port; `address` is this worker's. `secret` is in hex.

    `admitted`: networks that may connect to the process, by text. None means every machine.
    """

    master: str
    address: str
    secret: str
    memories: Sequence[PoolMemory]
    protocol: str = "tcp"
    rdma_devices: str = ""
    admitted: Sequence[str] | None = ()


class PoolCall(NamedTuple):
    """A call of RemotePool."""

    call_id: int
    operation: Operation
    keys: Sequence[str]
    places: Sequence[str] = ("",)
    memory: int = 0
    slots: Sequence[int] = ()


class PoolReply(NamedTuple):
    """The end of a call. With `lost`, the store has failed, and the process ends.

    The first reply, with id 0, comes once the process can be called.
    """

    call_id: int
    done: Sequence[bool] = ()
    lost: str = ""


def packet_of(message: PoolSetup | PoolCall | PoolReply) -> bytes:
    """A message as JSON: the list of its fields."""
    return json.dumps(message, separators=(",", ":")).encode()


STORED: Final = 0
PRESENT: Final = -705
"""Status codes of Mooncake Store."""

# The client allocates from it only in calls that copy, which are not used here. It must not be empty.
_OWN_BUFFER_BYTES: Final = 16 << 20
_METADATA: Final = "P2PHANDSHAKE"
_SETTLED_S: Final = 0.05


class MooncakeStore:
    """A client of the master at `master`. It reads and writes memory by address, which was registered before.

    Packets to its ports are admitted from `sources` only, and to `address` only. None admits every source. Raises
    TransferFailed when the master does not answer or refuses.
    """

    def __init__(
        self,
        address: str,
        master: str,
        *,
        protocol: str,
        rdma_devices: str = "",
        sources: Networks | None = None,
    ) -> None:
        from mooncake.store import MooncakeDistributedStore

        known = open_listeners()
        self._store: Any = MooncakeDistributedStore()
        self._protocol = protocol
        with without_known_lines():
            code = self._store.setup(
                address, _METADATA, 0, _OWN_BUFFER_BYTES, protocol, rdma_devices, master
            )
        admitted = resolve_host(address)
        restrict_listeners(known, admitted, sources)
        # Mooncake opens a port on a thread of its own.
        time.sleep(_SETTLED_S)
        restrict_listeners(known, admitted, sources)
        if code != 0:
            raise TransferFailed(f"the store at {master} cannot be used (code {code})")

    def offer(self, memory: SharedArena) -> None:
        """Lets all clients of the master store objects there. Raises TransferFailed."""
        path, nbytes = f"/proc/self/fd/{memory.descriptor}", len(memory.bytes)
        code = self._store.mount_segment(path, nbytes, 0, self._protocol)["ret"]
        if code != 0:
            raise TransferFailed(f"Mooncake cannot offer {nbytes} bytes (code {code})")

    def register(self, memories: Sequence[Slots]) -> None:
        """Lets calls use this memory. Raises TransferFailed."""
        for memory in memories:
            nbytes = len(memory.bytes)
            code = self._store.register_buffer(memory.address, nbytes)
            if code != 0:
                raise TransferFailed(f"Mooncake cannot register {nbytes} bytes (code {code})")

    def exist(self, keys: list[str]) -> list[int]:
        """1 for a key that is there, 0 for one that is not, else a status code."""
        return cast("list[int]", self._store.batch_is_exist(keys))

    def get(self, keys: list[str], addresses: list[int], nbytes: int) -> list[int]:
        """Reads objects of at most `nbytes` each. Returns their sizes, or a status code."""
        return cast("list[int]", self._store.batch_get_into(keys, addresses, [nbytes] * len(keys)))

    def put(self, keys: list[str], addresses: list[int], nbytes: int) -> list[int]:
        """Stores objects. Returns STORED or a status code."""
        return cast("list[int]", self._store.batch_put_from(keys, addresses, [nbytes] * len(keys)))

    def remove(self, keys: list[str]) -> None:
        """Removes objects, if they are there."""
        self._store.batch_remove(keys, True)


_EXIT_LOST: Final = 3
_LOST: Final = range(-999, -799)
"""Transfers and calls that failed: the store itself is lost, not a block."""
_STEP_BLOCKS: Final = 64
_STEP_BYTES: Final = 32 << 20
_QUERY_OBJECTS: Final = 512


class BlockClient:
    """Seals what it stores, and checks what it reads. One thread reads; others may store from other slots meanwhile.

    Every call raises TransferFailed when the store is lost.
    """

    def __init__(self, store: MooncakeStore, memories: Sequence[Slots], secret: bytes) -> None:
        self._store = store
        self._memories = memories
        self._secret = secret

    def exists(self, keys: Sequence[str], places: Sequence[str] = ("",)) -> list[bool]:
        """Whether the store has each block: an object for every place, with the name place + key.

        Blocks after the first one that is missing are perhaps not asked for: a prefix needs all before it.
        """
        found: list[bool] = []
        step = max(1, _QUERY_OBJECTS // len(places))
        while len(found) < len(keys) and all(found):
            part = keys[len(found) : len(found) + step]
            present = self._present([place + key for key in part for place in places])
            found += [
                all(present[start : start + len(places)])
                for start in range(0, len(present), len(places))
            ]
        return found + [False] * (len(keys) - len(found))

    def get(self, memory: int, keys: Sequence[str], slots: Sequence[int]) -> list[bool]:
        """Reads blocks. Blocks after the first one that is missing are not read: a prefix needs all before it."""
        target, read = self._memories[memory], list[bool]()
        for part in self._steps(target, keys, slots):
            read += self._read(target, part)
            if not all(read):
                break
        return read + [False] * (len(keys) - len(read))

    def put(self, memory: int, keys: Sequence[str], slots: Sequence[int]) -> list[bool]:
        """Stores the blocks that the store lacks."""
        source, done = self._memories[memory], list[bool]()
        for part in self._steps(source, keys, slots):
            stored = dict(zip(part, self._present(list(part)), strict=True))
            missing = {key: slot for key, slot in part.items() if not stored[key]}
            for key, slot in missing.items():
                source.seal_of(slot)[:] = seal_of(self._secret, key, source.content_of(slot))
            codes = self._call(self._store.put, source, missing) if missing else []
            for key, code in zip(missing, codes, strict=True):
                stored[key] = code in (STORED, PRESENT)
            done += stored.values()
        return done

    def _present(self, names: list[str]) -> list[bool]:
        codes = self._store.exist(names)
        if any(code < 0 for code in codes):
            raise TransferFailed(f"the store cannot be asked (code {min(codes)})")
        return [code == 1 for code in codes]

    def _read(self, memory: Slots, part: Mapping[str, int]) -> list[bool]:
        """Whether each slot has its block. Removes objects that are not what was stored."""
        codes = self._call(self._store.get, memory, part)
        whole = [
            code == memory.object_bytes
            and is_sealed(self._secret, key, memory.content_of(slot), bytes(memory.seal_of(slot)))
            for code, (key, slot) in zip(codes, part.items(), strict=True)
        ]
        refused = [
            key
            for key, code, good in zip(part, codes, whole, strict=True)
            if code >= 0 and not good
        ]
        if refused:
            # Another worker can store the right block then.
            self._store.remove(refused)
        return whole

    @staticmethod
    def _steps(
        memory: Slots, keys: Sequence[str], slots: Sequence[int]
    ) -> Iterator[dict[str, int]]:
        """The slots by key, some at a time."""
        step = max(1, min(_STEP_BLOCKS, _STEP_BYTES // memory.object_bytes))
        for start in range(0, len(keys), step):
            yield dict(zip(keys[start : start + step], slots[start : start + step], strict=True))

    @staticmethod
    def _call(
        call: Callable[[list[str], list[int], int], list[int]],
        memory: Slots,
        part: Mapping[str, int],
    ) -> list[int]:
        addresses = [memory.address_of(slot) for slot in part.values()]
        codes = call(list(part), addresses, memory.object_bytes)
        if len(codes) != len(part) or any(code in _LOST for code in codes):
            raise TransferFailed(f"the store has failed (code {min(codes, default=0)})")
        return codes


def serve(channel: socket.socket, open_store: Callable[..., MooncakeStore] = MooncakeStore) -> None:
    """Serves one worker until it closes the channel. Raises TransferFailed when the store cannot be used.

    Reads and stores run beside each other, each in the order of the calls.
    """
    setup = PoolSetup(*json.loads(channel.recv(PACKET_BYTES_MAX)))
    memories = [Slots(PoolMemory(*one)) for one in setup.memories]
    store = open_store(
        setup.address,
        setup.master,
        protocol=setup.protocol,
        rdma_devices=setup.rdma_devices,
        sources=None if setup.admitted is None else parse_networks(setup.admitted),
    )
    store.register(memories)
    client = BlockClient(store, memories, bytes.fromhex(setup.secret))

    def execute(call: PoolCall) -> list[bool]:
        if call.operation == "exists":
            return client.exists(call.keys, call.places)
        move = client.get if call.operation == "get" else client.put
        return move(call.memory, call.keys, call.slots)

    def answer(call: PoolCall) -> None:
        try:
            reply = PoolReply(call.call_id, execute(call))
        except TransferFailed as error:
            reply = PoolReply(call.call_id, lost=error.detail)
        channel.send(packet_of(reply))

    reads = ThreadPoolExecutor(1, "reads")
    # Requests wait for reads, and for no store.
    stores = ThreadPoolExecutor(1, "stores", initializer=lower_priority)
    channel.send(packet_of(PoolReply(0)))
    while packet := channel.recv(PACKET_BYTES_MAX):
        call = PoolCall(*json.loads(packet))
        thread = stores if call.operation == "put" else reads
        # Logs what `answer` does not expect.
        thread.submit(answer, call).add_done_callback(Future.result)


def main(arguments: list[str]) -> int:
    """Serves the worker at the other end of a socket. Returns the exit status."""
    # Ctrl-C is for the worker, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=int(arguments[0]))
    try:
        serve(channel)
    except (ConfigError, TransferFailed) as error:
        channel.send(packet_of(PoolReply(0, lost=error.detail)))
        return _EXIT_LOST
    return 0


if __name__ == "__main__":
    # Mooncake's threads may stand still, and the end of the process must not wait for them.
    os._exit(main(sys.argv[1:]))
