"""What a rank needs for KV tensors, wherever they are."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from headrace_engine.torch_memory.device_memory import TorchMemory
from headrace_engine.torch_memory.gated_sender import GatedSender, Sender
from headrace_engine.torch_memory.streams import mark_compute
from headrace_kv.transport.base import KvTransport
from headrace_kv.transport.factory import open_transport


def open_tensor_transport(tensor: Tensor, kind: str, host: str) -> KvTransport:
    """A transport of `kind` with the tensor's whole allocation registered; see open_transport.

    What lies on a device crosses host memory on both sides. Raises ConfigError as open_transport and register do.
    """
    if tensor.device.type == "cpu":
        storage = tensor.untyped_storage()
        transport = open_transport(kind, host)
        transport.register(storage.data_ptr(), storage.nbytes())
        return transport
    memory = TorchMemory(tensor.device)
    address, nbytes = memory.hold(tensor)
    transport = open_transport(kind, host, memory=memory)
    transport.register(address, nbytes)
    return transport


def gate(sender: Sender, device: torch.device) -> GatedSender | None:
    """What to feed instead of the sender where the forward pass only queues its work; None for the CPU."""
    if device.type == "cpu":
        return None
    return GatedSender(sender, functools.partial(mark_compute, device))
