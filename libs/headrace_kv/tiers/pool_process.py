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
import queue
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from headrace_common.errors import ConfigError, TransferFailed
from headrace_common.tasks import lower_priority
from headrace_kv.transport.memory import require_available
from headrace_kv.transport.mooncake.known_lines import without_known_lines
from headrace_kv.transport.mooncake.listen_filter import (
    open_listeners,
    resolve_host,
    restrict_listeners,
)
from headrace_kv.transport.networks import Networks, parse_networks

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


STORED: Final = 0
ABSENT: Final = -704
PRESENT: Final = -705
"""Status codes of Mooncake Store."""

# The client allocates from it only in calls that copy, which are not used here. It must not be empty.
_OWN_BUFFER_BYTES: Final = 16 << 20
_METADATA: Final = "P2PHANDSHAKE"
_SETTLED_S: Final = 0.05


class MooncakeStore:
    """A client of the master at `master`. It reads and writes memory by address, which was registered before.

    Packets to its ports are admitted from `sources` only, and to `host` only. None admits every source. Raises
    TransferFailed when the master does not answer or refuses.
    """

    def __init__(
        self,
        host: str,
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
                host, _METADATA, 0, _OWN_BUFFER_BYTES, protocol, rdma_devices, master
            )
        self._restrict(known, host, sources)
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
            code = self._store.register_buffer(
                memory.address, memory.slot_bytes * memory.slot_count
            )
            if code != 0:
                raise TransferFailed(
                    f"Mooncake cannot register {memory.slot_bytes * memory.slot_count} bytes (code {code})"
                )

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

    def close(self) -> None:
        """Leaves the store. The memory that it has offered is gone then."""
        self._store.close()

    @staticmethod
    def _restrict(known: Collection[int], host: str, sources: Networks | None) -> None:
        addresses = resolve_host(host)
        restrict_listeners(known, addresses, sources)
        # Mooncake opens a port on a thread of its own.
        time.sleep(_SETTLED_S)
        restrict_listeners(known, addresses, sources)


_EXIT_LOST: Final = 3
_LOST: Final = range(-999, -799)
"""Transfers and calls that failed: the store itself is lost, not a block."""
_STEP_BLOCKS: Final = 64
_STEP_BYTES: Final = 32 << 20


class BlockClient:
    """Seals what it stores, and checks what it reads. One thread reads; others may store from other slots meanwhile.

    Every call raises TransferFailed when the store is lost.
    """

    def __init__(self, store: MooncakeStore, memories: Sequence[Slots], secret: bytes) -> None:
        self._store = store
        self._memories = memories
        self._secret = secret

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Whether the store has each key."""
        found: list[int] = []
        for start in range(0, len(keys), _STEP_BLOCKS * 8):
            found += self._store.exist(list(keys[start : start + _STEP_BLOCKS * 8]))
        if any(code < 0 for code in found):
            raise TransferFailed(f"the store cannot be asked (code {min(found)})")
        return [code == 1 for code in found]

    def get(self, memory: int, keys: Sequence[str], slots: Sequence[int]) -> list[bool]:
        """Reads blocks. Blocks after the first one that is missing are not read: a prefix needs all before it."""
        target = self._memories[memory]
        read: list[bool] = []
        for part, places in self._steps(target, keys, slots):
            whole = self._read(target, part, places)
            read += whole
            if not all(whole):
                break
        return read + [False] * (len(keys) - len(read))

    def put(self, memory: int, keys: Sequence[str], slots: Sequence[int]) -> list[bool]:
        """Stores the blocks that the store lacks."""
        source = self._memories[memory]
        known = self.exists(keys)
        missing = [
            (key, slot)
            for key, slot, is_known in zip(keys, slots, known, strict=True)
            if not is_known
        ]
        stored: set[str] = set()
        wanted, places = [key for key, _ in missing], [slot for _, slot in missing]
        for part, chosen in self._steps(source, wanted, places):
            for key, slot in zip(part, chosen, strict=True):
                source.seal_of(slot)[:] = seal_of(self._secret, key, source.content_of(slot))
            codes = self._call(self._store.put, source, part, chosen)
            stored.update(
                key for key, code in zip(part, codes, strict=True) if code in (STORED, PRESENT)
            )
        return [is_known or key in stored for key, is_known in zip(keys, known, strict=True)]

    def _read(self, memory: Slots, keys: list[str], slots: list[int]) -> list[bool]:
        """Whether each slot has its block. Removes objects that are not what was stored."""
        codes = self._call(self._store.get, memory, keys, slots)
        whole = [
            code == memory.object_bytes and self._has_seal(memory, key, slot)
            for code, key, slot in zip(codes, keys, slots, strict=True)
        ]
        refused = [
            key
            for key, code, good in zip(keys, codes, whole, strict=True)
            if code >= 0 and not good
        ]
        if refused:
            # Another worker can store the right block then.
            self._store.remove(refused)
        return whole

    def _has_seal(self, memory: Slots, key: str, slot: int) -> bool:
        return is_sealed(self._secret, key, memory.content_of(slot), bytes(memory.seal_of(slot)))

    @staticmethod
    def _steps(
        memory: Slots, keys: Sequence[str], slots: Sequence[int]
    ) -> Iterator[tuple[list[str], list[int]]]:
        step = max(1, min(_STEP_BLOCKS, _STEP_BYTES // memory.object_bytes))
        for start in range(0, len(keys), step):
            yield list(keys[start : start + step]), list(slots[start : start + step])

    @staticmethod
    def _call(
        call: Callable[[list[str], list[int], int], list[int]],
        memory: Slots,
        keys: list[str],
        slots: list[int],
    ) -> list[int]:
        codes = call(keys, [memory.object_at(slot) for slot in slots], memory.object_bytes)
        if len(codes) != len(keys) or any(code in _LOST for code in codes):
            raise TransferFailed(f"the store has failed (code {min(codes, default=0)})")
        return codes


class PoolProcess:
    """Serves one worker. Reads and stores run beside each other, each in the order of the calls."""

    def __init__(self, channel: socket.socket) -> None:
        """Connects to the store. Raises TransferFailed."""
        self._channel = channel
        setup = setup_from_packet(channel.recv(PACKET_BYTES_MAX))
        self._mappings = [Mapping(memory) for memory in setup.memories]
        memories = [mapping.slots for mapping in self._mappings]
        store = MooncakeStore(
            setup.host,
            setup.master,
            protocol=setup.protocol,
            rdma_devices=setup.rdma_devices,
            sources=None if setup.admitted is None else parse_networks(setup.admitted),
        )
        store.register(memories)
        self._client = BlockClient(store, memories, setup.secret)
        self._reads: queue.SimpleQueue[PoolCall] = queue.SimpleQueue()
        self._stores: queue.SimpleQueue[PoolCall] = queue.SimpleQueue()
        for work, name in ((self._read, "reads"), (self._store, "stores")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def run(self) -> None:
        """Returns when the worker has ended or closed the channel."""
        self._send(READY)
        while packet := self._channel.recv(PACKET_BYTES_MAX):
            call = call_from_packet(packet)
            (self._stores if call.operation == "put" else self._reads).put(call)

    def _read(self) -> None:
        self._work(self._reads)

    def _store(self) -> None:
        # Requests wait for reads, and for no store.
        lower_priority()
        self._work(self._stores)

    def _work(self, calls: queue.SimpleQueue[PoolCall]) -> None:
        while True:
            call = calls.get()
            try:
                done = self._execute(call)
            except TransferFailed as error:
                self._send(PoolReply(call.call_id, lost=error.detail))
                continue
            self._send(PoolReply(call.call_id, tuple(done)))

    def _execute(self, call: PoolCall) -> list[bool]:
        if call.operation == "exists":
            return self._client.exists(call.keys)
        if call.operation == "get":
            return self._client.get(call.memory, call.keys, call.slots)
        return self._client.put(call.memory, call.keys, call.slots)

    def _send(self, reply: PoolReply) -> None:
        self._channel.send(reply_to_packet(reply))


def main(arguments: list[str]) -> int:
    """Serves the worker at the other end of a socket. Returns the exit status."""
    # Ctrl-C is for the worker, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=int(arguments[0]))
    try:
        PoolProcess(channel).run()
    except (ConfigError, TransferFailed) as error:
        channel.send(reply_to_packet(PoolReply(0, lost=error.detail)))
        return _EXIT_LOST
    return 0


if __name__ == "__main__":
    # Mooncake's threads may stand still, and the end of the process must not wait for them.
    os._exit(main(sys.argv[1:]))
