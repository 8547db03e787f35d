"""Receivers for the transport conformance suite, in a process of their own or in this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from headrace_kv.transport.base import KvTransport
from headrace_kv.transport.factory import open_transport
from tests.freezing import freeze, thaw
from tests.rdma.device import DEVICE

Bytes = NDArray[np.uint8]

PEER_BYTES = 40 << 20
_COMMAND_TIMEOUT_S = 30.0


class Memory(Protocol):
    """Memory for a transport: host memory here, device memory elsewhere."""

    address: int
    nbytes: int

    def put(self, offset: int, data: Bytes) -> None:
        """Stores bytes at an offset."""

    def get(self, offset: int, nbytes: int) -> Bytes:
        """Reads bytes at an offset."""


class HostMemory:
    """Plain memory of this process, zeroed."""

    def __init__(self, nbytes: int) -> None:
        self._array = np.zeros(nbytes, np.uint8)
        self.address = int(self._array.ctypes.data)
        self.nbytes = nbytes

    def put(self, offset: int, data: Bytes) -> None:
        self._array[offset : offset + len(data)] = data

    def get(self, offset: int, nbytes: int) -> Bytes:
        return self._array[offset : offset + nbytes].copy()


Allocator = Callable[[int], Memory]
ALLOCATORS: dict[str, Allocator] = {"host": HostMemory}
"""Memory classes by name, so that a peer process can select one."""


def digest_of(data: Bytes) -> str:
    # A cryptographic generator takes a second for a peer's memory where every instruction is emulated.
    return xxhash.xxh3_128_hexdigest(data.tobytes())


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """The parameters of a receiver, see open_transport."""

    transport: str
    host: str = "127.0.0.1"
    protocol: str = "auto"
    memory: str = "host"


class Peer(ABC):
    """A receiver with `PEER_BYTES` of registered memory at `address`, and as much unregistered at `hidden_address`."""

    session: str
    address: int
    hidden_address: int

    @abstractmethod
    def command(self, *words: str) -> str:
        """Sends a command, see Receiver.command."""

    @abstractmethod
    def end(self) -> None:
        """Ends the receiver."""

    def digest(self, nbytes: int = PEER_BYTES) -> str:
        """Digest of the first bytes of its memory."""
        return self.command("digest", str(nbytes))

    def zero(self) -> None:
        """Clears its memory."""
        self.command("zero")


class Receiver:
    """The memory and transport behind a peer."""

    def __init__(self, transport: KvTransport, allocate: Allocator) -> None:
        self.transport = transport
        self.memory = allocate(PEER_BYTES)
        self.hidden = allocate(1 << 20)
        self._extra: list[Memory] = []
        self._allocate = allocate
        transport.register(self.memory.address, self.memory.nbytes)
        self.session = transport.session

    def command(self, words: list[str]) -> str:
        """Executes one command. The command "extra" registers more memory and returns its address."""
        match words:
            case ["digest", count]:
                return digest_of(self.memory.get(0, int(count)))
            case ["largest"]:
                return str(self.memory.get(0, self.memory.nbytes).max())
            case ["zero"]:
                self.memory.put(0, np.zeros(self.memory.nbytes, np.uint8))
            case ["hidden"]:
                return digest_of(self.hidden.get(0, self.hidden.nbytes))
            case ["extra"]:
                self._extra.append(self._allocate(1 << 20))
                self.transport.register(self._extra[-1].address, self._extra[-1].nbytes)
                return str(self._extra[-1].address)
            case ["extra_digest"]:
                return digest_of(self._extra[-1].get(0, self._extra[-1].nbytes))
            case ["close"]:
                self.transport.close()
            case _:
                raise ValueError(f"unknown command {words}")
        return "done"


class LocalPeer(Peer):
    """A receiver in this process."""

    def __init__(self, transport: KvTransport, allocate: Allocator) -> None:
        self._receiver = Receiver(transport, allocate)
        self.session = self._receiver.session
        self.address = self._receiver.memory.address
        self.hidden_address = self._receiver.hidden.address

    def command(self, *words: str) -> str:
        return self._receiver.command(list(words))

    def end(self) -> None:
        self._receiver.transport.close()


class ProcessPeer(Peer):
    """A receiver in a process of its own."""

    def __init__(self, settings: PeerSettings, module: str = "tests.rdma.peers") -> None:
        words = [settings.transport, settings.host, settings.protocol, settings.memory]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        try:
            facts = json.loads(self._read())
        except BaseException:
            self.end()
            raise
        self.session = facts["session"]
        self.address = facts["address"]
        self.hidden_address = facts["hidden_address"]

    def command(self, *words: str) -> str:
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)
        return self._read().strip()

    def pause(self) -> None:
        """Stops the process."""
        freeze(self._process.pid)

    def resume(self) -> None:
        """Resumes the process."""
        thaw(self._process.pid)

    def end(self) -> None:
        self._process.kill()
        self._process.wait(timeout=_COMMAND_TIMEOUT_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _read(self) -> str:
        """Reads the next line in braces or of plain words. Libraries may print other lines."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("peer: "):
                return line.removeprefix("peer: ")
        raise RuntimeError("the peer process has ended")


def open_settings(settings: PeerSettings) -> KvTransport:
    """The transport of a peer with host memory."""
    devices = (DEVICE,) if settings.protocol == "rdma" else ()
    return open_transport(
        settings.transport, settings.host, settings.protocol, rdma_devices=devices
    )


def serve(words: list[str], open_peer: Callable[[PeerSettings], KvTransport]) -> None:
    """The receiver behind a ProcessPeer: executes the commands on its input."""
    settings = PeerSettings(*words)
    receiver = Receiver(open_peer(settings), ALLOCATORS[settings.memory])
    facts = {
        "session": receiver.session,
        "address": receiver.memory.address,
        "hidden_address": receiver.hidden.address,
    }
    print("peer:", json.dumps(facts), flush=True)
    for line in sys.stdin:
        print("peer:", receiver.command(line.split()), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1:], open_settings)
