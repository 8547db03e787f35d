"""Tensors as the memory of the transport conformance suite, in this process and in that of a peer."""

from __future__ import annotations

import functools
import sys

import torch

from headrace_engine.torch_memory.device_memory import TorchMemory
from headrace_kv.transport.base import KvTransport
from headrace_kv.transport.factory import open_transport
from tests.rdma.harness import Harness
from tests.rdma.peers import ALLOCATORS, Bytes, Peer, PeerSettings, ProcessPeer, serve

DIRECT = "direct"


@functools.cache
def memory_of(device: str) -> TorchMemory:
    """The memory that all transports of this process share. `device` is torch's name with a number.

    DIRECT is memory of the CPU that stands for a device's memory in reach of transports.
    """
    if device == DIRECT:
        return TorchMemory(torch.device("cpu"), direct=True)
    return TorchMemory(torch.device(device))


class TensorMemory:
    """A zeroed tensor that transports reach through host memory only."""

    def __init__(self, nbytes: int, device: str) -> None:
        place = "cpu" if device == DIRECT else device
        self._data = torch.zeros(nbytes, dtype=torch.uint8, device=place)
        self.address, self.nbytes = memory_of(device).hold(self._data)
        self._settle()

    def put(self, offset: int, data: Bytes) -> None:
        self._data[offset : offset + len(data)] = torch.from_numpy(data).to(self._data.device)
        self._settle()

    def get(self, offset: int, nbytes: int) -> Bytes:
        data: Bytes = self._data[offset : offset + nbytes].cpu().numpy().copy()
        return data

    def _settle(self) -> None:
        # Transports copy on streams of their own.
        if self._data.device.type == "cuda":
            torch.cuda.synchronize(self._data.device)


DEVICES = ("cpu", DIRECT, "cuda:0")
ALLOCATORS.update({device: functools.partial(TensorMemory, device=device) for device in DEVICES})


def open_staged(settings: PeerSettings) -> KvTransport:
    """The transport of a peer with a tensor as its memory."""
    memory = memory_of(settings.memory)
    return open_transport(settings.transport, settings.host, settings.protocol, memory)


class TensorHarness(Harness):
    """Tensors on both sides. With `processes`, which are slow, each peer is a process that imports torch."""

    def __init__(self, settings: PeerSettings, *, processes: bool) -> None:
        super().__init__(settings)
        self.crosses_processes = processes

    def new_transport(self) -> KvTransport:
        return open_staged(self.settings)

    def new_peer(self) -> Peer:
        if not self.crosses_processes:
            return super().new_peer()
        peer = ProcessPeer(self.settings, module="tests.gpu.tensors")
        self._peers.append(peer)
        return peer


if __name__ == "__main__":
    serve(sys.argv[1:], open_staged)
