"""The process that calls the store for one worker: `python -m headrace_kv.pool.process DESCRIPTOR`.

A call of Mooncake can stand still for longer than any request may wait. It can hold Python's lock meanwhile, and write
into memory after it has failed. The worker ends this process then, which ends all three.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from headrace_common.errors import ConfigError, TransferFailed
from headrace_common.tasks import lower_priority
from headrace_kv.pool.memory import (
    PACKET_BYTES_MAX,
    READY,
    Mapping,
    PoolCall,
    PoolReply,
    Slots,
    call_from_packet,
    is_sealed,
    reply_to_packet,
    seal_of,
    setup_from_packet,
)
from headrace_kv.pool.store import PRESENT, STORED, MooncakeStore
from headrace_kv.transport.guard import parse_networks

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
