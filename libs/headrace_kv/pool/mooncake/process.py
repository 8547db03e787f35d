"""The process that calls Mooncake Store for one worker: `python -m headrace_kv.pool.mooncake.process DESCRIPTOR`.

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
from typing import Final

from headrace_common.errors import ConfigError, TransferFailed
from headrace_common.process.niceness import lower_priority
from headrace_kv.pool.block_client import BlockClient
from headrace_kv.pool.mapping import Mapping
from headrace_kv.pool.mooncake.messages import (
    PACKET_BYTES_MAX,
    READY,
    PoolCall,
    PoolReply,
    call_from_packet,
    reply_to_packet,
    setup_from_packet,
)
from headrace_kv.pool.mooncake.store import MooncakeStore
from headrace_kv.transport.networks import parse_networks

_EXIT_LOST: Final = 3


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
            return self._client.get(call.memory, call.keys, call.slots, call.shard)
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
