"""The ways to move bytes between two processes that data_plane.py compares, each with its receiving process."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_kv.copy_plan import Runs
from headrace_kv.transport.base import WriteResult
from headrace_kv.transport.factory import open_transport
from headrace_kv.transport.mooncake import configure_environment

Bytes = NDArray[np.uint8]
Indices = NDArray[np.int64]

KIB, MIB = 1024, 1024 * 1024
PIECE_BYTES = MIB
TIMEOUT_S = 60.0
OURS = ("mooncake",)
KINDS = (*OURS, "raw_mooncake", "raw_tcp", "nixl_auto", "nixl_tcp")
HOST = "127.0.0.1"


def block_orders(total: int, block: int) -> tuple[Indices, Indices]:
    """Source and destination block of each copy. Both sides compute the same."""
    count = total // block
    random = np.random.default_rng(block)
    return random.permutation(count), random.permutation(count)


def digest_of(data: Bytes) -> str:
    return hashlib.blake2b(data.data, digest_size=16).hexdigest()


# The receiving processes.


def serve_raw_tcp(memory: Bytes, staging: Bytes) -> dict[str, Any]:
    listener = socket.create_server((HOST, 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while head := connection.recv(16, socket.MSG_WAITALL):
                block = int(head)
                _, destinations = block_orders(len(memory), block)
                view = memory.data
                pieces = [view[i * block : (i + 1) * block] for i in destinations.tolist()]
                move_vectors(connection.recvmsg_into, pieces)
                connection.sendall(b"k")

    threading.Thread(target=serve, daemon=True).start()
    return {"port": listener.getsockname()[1]}


def serve_raw_mooncake(memory: Bytes, staging: Bytes) -> dict[str, Any]:
    engine = new_mooncake(memory, staging)
    KEPT.append(engine)
    return {"session": f"{HOST}:{engine.get_rpc_port()}"}


def serve_ours(kind: str, memory: Bytes) -> dict[str, Any]:
    transport = open_transport(kind, HOST, "tcp")
    transport.register(memory.ctypes.data, memory.nbytes)
    KEPT.append(transport)
    return {"session": transport.session}


def serve_nixl(memory: Bytes) -> dict[str, Any]:
    agent = new_nixl("receiver", memory)
    KEPT.append(agent)
    return {"metadata": agent.get_agent_metadata().hex()}


KEPT: list[Any] = []
"""The memory and sockets of a receiving process."""


def receive(kind: str, total: int) -> None:
    """Prints the address of the memory, then executes commands from standard input."""
    memory, staging = np.ones(total, np.uint8), np.ones(total, np.uint8)
    if kind in OURS:
        facts = serve_ours(kind, memory)
    elif kind.startswith("nixl"):
        facts = serve_nixl(memory)
    else:
        facts = {"raw_tcp": serve_raw_tcp, "raw_mooncake": serve_raw_mooncake}[kind](
            memory, staging
        )
    send_reply(facts | {"memory": memory.ctypes.data, "staging": staging.ctypes.data})
    for line in sys.stdin:
        match line.split():
            case ["scatter", block]:
                _, destinations = block_orders(total, int(block))
                size = len(destinations) * int(block)
                start_s = time.perf_counter()
                rows = memory[:size].reshape(-1, int(block))
                rows[destinations] = staging[:size].reshape(-1, int(block))
                send_reply(time.perf_counter() - start_s)
            case ["zero"]:
                memory[:] = 0
                send_reply("done")
            case ["digest"]:
                send_reply(digest_of(memory))
    os._exit(0)


def send_reply(value: object) -> None:
    print("reply", json.dumps(value), flush=True)


# The sending side.


class Receiver:
    """A receiving process."""

    def __init__(self, kind: str, total: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.data_plane.ways", kind, str(total)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.facts = self._read_reply()

    def ask(self, command: str) -> Any:
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)
        return self._read_reply()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def _read_reply(self) -> Any:
        assert self.process.stdout is not None
        # The end of the process ends the reading.
        limit = threading.Timer(TIMEOUT_S, self.process.kill)
        limit.start()
        try:
            for line in self.process.stdout:
                if line.startswith("reply "):
                    return json.loads(line.removeprefix("reply "))
        finally:
            limit.cancel()
        raise RuntimeError(f"a receiving process has ended, or sent no reply in {TIMEOUT_S:g} s")


class Way(ABC):
    """One way to move the bytes. `measure` returns seconds by column."""

    def __init__(self, kind: str, source: Bytes) -> None:
        self.kind = kind
        self.source = source
        self.receiver = Receiver(kind, len(source))
        self.facts = self.receiver.facts

    def runs(self, block: int) -> Runs:
        sources, destinations = block_orders(len(self.source), block)
        return Runs(
            self.source.ctypes.data + sources * block,
            self.facts["memory"] + destinations * block,
            np.full(len(sources), block, np.int64),
        )

    @abstractmethod
    def prepare(self, block: int) -> None:
        """Prepares blocks of this size outside the measured time."""

    @abstractmethod
    def write(self) -> None:
        """Moves everything once."""

    def measure(self, block: int) -> dict[str, float]:
        start_s = time.perf_counter()
        self.write()
        return {self.kind: time.perf_counter() - start_s}

    def check(self, block: int) -> None:
        """Writes once and compares all bytes."""
        self.receiver.ask("zero")
        self.write()
        sources, destinations = block_orders(len(self.source), block)
        size = len(sources) * block
        expected = np.zeros(len(self.source), np.uint8)
        rows = expected[:size].reshape(-1, block)
        rows[destinations] = self.source[:size].reshape(-1, block)[sources]
        if self.receiver.ask("digest") != digest_of(expected):
            raise RuntimeError(f"{self.kind}: bytes differ at {block} bytes")


class Ours(Way):
    """KvTransport.submit with as many writes under way as a sender would have."""

    submitted_bytes = 4 * MIB

    def __init__(self, kind: str, source: Bytes) -> None:
        super().__init__(kind, source)
        self.transport = open_transport(kind, HOST, "tcp")
        self.transport.register(source.ctypes.data, source.nbytes)
        self.how: set[str] = set()

    def prepare(self, block: int) -> None:
        planned = self.runs(block)
        limit = min(self.transport.byte_limit, self.submitted_bytes)
        self.pieces = list(planned.batches(self.transport.entry_limit, limit))
        self.how.clear()

    def write(self) -> None:
        pending: deque[Future[WriteResult]] = deque()
        for piece in self.pieces:
            if len(pending) == self.transport.pending_limit:
                self._note(pending.popleft().result(TIMEOUT_S))
            pending.append(self.transport.submit(self.facts["session"], piece, TIMEOUT_S))
        for future in pending:
            self._note(future.result(TIMEOUT_S))

    def _note(self, written: WriteResult) -> None:
        self.how.add(f"{written.transport} {written.strategy}")


class RawMooncake(Way):
    """The TransferEngine alone: run by run, and packed by hand."""

    def __init__(self, kind: str, source: Bytes) -> None:
        super().__init__(kind, source)
        self.staging = np.ones(len(source), np.uint8)
        self.engine = new_mooncake(source, self.staging)

    def prepare(self, block: int) -> None:
        planned = self.runs(block)
        self.lists = [
            (
                part.source_addresses.tolist(),
                part.destination_addresses.tolist(),
                part.lengths.tolist(),
            )
            for part in planned.batches(1000, 1 << 40)
        ]
        size = planned.payload_bytes
        offsets = range(0, size, PIECE_BYTES)
        self.pieces = (
            [self.staging.ctypes.data + offset for offset in offsets],
            [self.facts["staging"] + offset for offset in offsets],
            [min(PIECE_BYTES, size - offset) for offset in offsets],
        )

    def write(self) -> None:
        for part in self.lists:
            self._call(part)

    def measure(self, block: int) -> dict[str, float]:
        measured = super().measure(block)
        sources, _ = block_orders(len(self.source), block)
        size = len(sources) * block
        start_s = time.perf_counter()
        rows = self.source[:size].reshape(-1, block)
        np.take(rows, sources, axis=0, out=self.staging[:size].reshape(-1, block), mode="clip")
        staged_s = time.perf_counter()
        self._call(self.pieces)
        sent_s = time.perf_counter()
        scatter_s = self.receiver.ask(f"scatter {block}")
        measured["raw_mooncake_packed"] = sent_s - start_s + scatter_s
        measured["raw_mooncake_staged"] = sent_s - staged_s
        return measured

    def _call(self, lists: tuple[list[int], list[int], list[int]]) -> None:
        code = self.engine.batch_transfer_sync_write(self.facts["session"], *lists)
        if code:
            raise RuntimeError(f"Mooncake returned {code}")


class RawTcp(Way):
    """One socket, vectored on both sides, from and into the blocks."""

    def __init__(self, kind: str, source: Bytes) -> None:
        super().__init__(kind, source)
        self.socket = socket.create_connection((HOST, self.facts["port"]))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def prepare(self, block: int) -> None:
        sources, _ = block_orders(len(self.source), block)
        view = self.source.data
        self.block = block
        self.vectors = [view[i * block : (i + 1) * block] for i in sources.tolist()]

    def write(self) -> None:
        self.socket.sendall(str(self.block).encode().ljust(16))
        move_vectors(self.socket.sendmsg, self.vectors)
        self.socket.recv(1)


class Nixl(Way):
    """NIXL over UCX. UCX_TLS selects the transport."""

    def __init__(self, kind: str, source: Bytes) -> None:
        super().__init__(kind, source)
        self.agent = new_nixl("sender", source)
        self.peer = self.agent.add_remote_agent(bytes.fromhex(self.facts["metadata"]))

    def prepare(self, block: int) -> None:
        planned = self.runs(block)
        zeros = np.zeros(len(planned), np.int64)
        self.local, self.remote = (
            np.stack([addresses, planned.lengths, zeros], axis=1).astype(np.uint64)
            for addresses in (planned.source_addresses, planned.destination_addresses)
        )

    def write(self) -> None:
        local = self.agent.get_xfer_descs(self.local, "DRAM")
        remote = self.agent.get_xfer_descs(self.remote, "DRAM")
        handle = self.agent.initialize_xfer("WRITE", local, remote, self.peer, b"")
        state = self.agent.transfer(handle)
        deadline_s = time.monotonic() + TIMEOUT_S
        while state != "DONE":
            if state == "ERR" or time.monotonic() > deadline_s:
                raise RuntimeError(f"NIXL is in state {state}")
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)


def move_vectors(call: Callable[[list[memoryview]], Any], vectors: list[memoryview]) -> None:
    """Sends or receives vectors by a socket call until all are done."""
    position = 0
    while position < len(vectors):
        part = list(vectors[position : position + 512])
        position += len(part)
        while part:
            done = call(part)
            count = done if isinstance(done, int) else done[0]
            if not count:
                raise RuntimeError("the connection has ended")
            while part and count >= len(part[0]):
                count -= len(part.pop(0))
            if part and count:
                part[0] = part[0][count:]


def new_mooncake(*memories: Bytes) -> Any:
    configure_environment("tcp")
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("Mooncake does not start")
    for memory in memories:
        if engine.register_memory(memory.ctypes.data, memory.nbytes):
            raise RuntimeError("Mooncake does not register")
    return engine


def new_nixl(name: str, memory: Bytes) -> Any:
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return agent


WAYS: dict[str, type[Way]] = {
    **dict.fromkeys(OURS, Ours),
    "raw_mooncake": RawMooncake,
    "raw_tcp": RawTcp,
    "nixl_auto": Nixl,
    "nixl_tcp": Nixl,
}


if __name__ == "__main__":
    receive(sys.argv[1], int(sys.argv[2]))
