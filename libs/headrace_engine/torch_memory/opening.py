"""Opens a transport for KV tensors of a rank, on any device."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from headrace_common.errors import ConfigError
from headrace_common.limits import write_quiet_s
from headrace_engine.torch_memory.device_memory import TorchMemory
from headrace_engine.torch_memory.event_ordered_sender import EventOrderedSender, Sender
from headrace_engine.torch_memory.order import DeviceOrder, open_order
from headrace_kv.transport.base import KvTransport
from headrace_kv.transport.factory import open_transport
from headrace_kv.transport.networks import Networks

_log = logging.getLogger(__name__)


def open_tensor_transport(
    tensor: Tensor,
    kind: str,
    host: str,
    *,
    gpu_direct: bool = True,
    rdma_devices: Sequence[str] = (),
    admitted: Networks | None = None,
    quiet_s: float = write_quiet_s(),
) -> tuple[KvTransport, DeviceOrder]:
    """A transport of `kind` that has registered the tensor's whole allocation, and its order. See open_transport.

    KV on a device crosses host memory on both sides, unless `gpu_direct` is set and an RDMA adapter reaches the device.
    Raises ConfigError as open_transport and register do.
    """
    if tensor.device.type == "cpu":
        storage = tensor.untyped_storage()
        transport = open_transport(
            kind, host, rdma_devices=rdma_devices, admitted=admitted, quiet_s=quiet_s
        )
        transport.register(storage.data_ptr(), storage.nbytes())
        return transport, open_order(tensor.device, transport.memory)
    if gpu_direct and kind == "mooncake":
        opened = _open_direct(tensor, host, rdma_devices, admitted, quiet_s)
        if opened is not None:
            return opened
    memory = TorchMemory(tensor.device)
    address, nbytes = memory.hold(tensor)
    transport = open_transport(
        kind, host, memory=memory, rdma_devices=rdma_devices, admitted=admitted, quiet_s=quiet_s
    )
    transport.register(address, nbytes)
    return transport, open_order(tensor.device, memory)


def _open_direct(
    tensor: Tensor,
    host: str,
    rdma_devices: Sequence[str],
    admitted: Networks | None,
    quiet_s: float,
) -> tuple[KvTransport, DeviceOrder] | None:
    """A transport without host memory in between. None where that is not possible, which only trying shows."""
    transport: KvTransport | None = None
    try:
        memory = TorchMemory(tensor.device, direct=True)
        order = open_order(tensor.device, memory)
        address, nbytes = memory.hold(tensor)
        transport = open_transport(
            *("mooncake", host, "rdma", memory),
            rdma_devices=rdma_devices,
            admitted=admitted,
            quiet_s=quiet_s,
        )
        transport.register(address, nbytes)
        # Mooncake registers the memory with the adapter when it makes the session.
        transport.session  # noqa: B018
    except ConfigError as error:
        _log.info("KV bytes of %s cross host memory: %s", tensor.device, error)
        if transport is not None:
            transport.close()
        return None
    _log.info("adapters read and write the memory of %s", tensor.device)
    return transport, order


def open_tier_memory(tensor: Tensor) -> TorchMemory | None:
    """The memory of a device for copies to lower tiers, with streams of its own, so that no transfer waits for them.

    None for KV memory that this process reads by address. Raises ConfigError as TorchMemory.hold does.
    """
    if tensor.device.type == "cpu":
        return None
    memory = TorchMemory(tensor.device)
    memory.hold(tensor)
    return memory


def order_sender(sender: Sender, order: DeviceOrder) -> EventOrderedSender | None:
    """A sender in front of `sender` where the forward pass only queues its work. None elsewhere."""
    return EventOrderedSender(sender, order.mark) if order.queues else None
