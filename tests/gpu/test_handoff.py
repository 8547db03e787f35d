"""A whole transfer between tensors, with layers that the device writes long after the forward pass queued them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from headrace_engine.torch_memory.event_ordered_sender import EventOrderedSender
from headrace_kv.transport.base import KvTransport
from headrace_kv.transport.factory import open_transport
from tests.component.kv.harness import BLOCK_TOKENS, LentTransport, heads_of, make_layout, running
from tests.in_memory_transport import KIND
from tests.waiting import until


class TensorTransport(LentTransport):
    """A staged transport. Its buffer is a tensor of the CPU."""

    def __init__(self) -> None:
        torch = pytest.importorskip("torch")
        from headrace_engine.torch_memory.device_memory import TorchMemory

        memory = TorchMemory(torch.device("cpu"))
        self._lender = open_transport(KIND, "127.0.0.1", memory=memory)
        self.name = self._lender.name
        self.quiet_after_failure_s = self._lender.quiet_after_failure_s
        tensor = torch.zeros(1 << 20, dtype=torch.uint8)
        self.buffer = tensor.numpy()
        self._lender.register(*memory.hold(tensor))

    def close(self) -> None:
        self.close_lender()


class Device:
    """A device that the test advances."""

    def __init__(self) -> None:
        self.queued = 0
        self.done = 0

    def mark(self) -> Mark:
        self.queued += 1
        return Mark(self, self.queued)


@dataclass(frozen=True)
class Mark:
    device: Device
    position: int

    def query(self) -> bool:
        return self.device.done >= self.position


def open_tensors(role: str, rank: int) -> KvTransport:
    return TensorTransport()


@pytest.mark.vllm
@pytest.mark.parametrize("prefill_tp, decode_tp", [(2, 1), (1, 2)])
async def test_layers_are_read_once_they_are_written(prefill_tp: int, decode_tp: int) -> None:
    prefill, decode = make_layout(prefill_tp, layers=4), make_layout(decode_tp, layers=4)
    token_count = 3 * BLOCK_TOKENS + 2
    source_blocks = (7, 9, 2, 30)
    async with running(prefill, decode, open_tensors) as rig:
        truth = rig.truth[:, :, list(source_blocks)]
        for arena in rig.sources:
            arena.cells[:] = 0
        transfer = rig.reserve(token_count)
        devices = [Device() for _ in rig.senders]
        ordered = [EventOrderedSender(s, d.mark) for s, d in zip(rig.senders, devices, strict=True)]
        rig.senders, senders = ordered, rig.senders  # type: ignore[assignment]  # fed like senders
        rig.open(rig.target(transfer))
        rig.push(transfer.transfer_id, source_blocks, 0, token_count)
        rig.finish(transfer.transfer_id)
        rig.senders = senders
        for layer in range(prefill.layer_count):
            for rank, (arena, device) in enumerate(zip(rig.sources, devices, strict=True)):
                held = truth[layer][:, :, heads_of(prefill, rank)]
                arena.cells[layer][:, list(source_blocks)] = held
                device.done = layer + 1
            written = layer + 1
            await until(
                lambda written=written: all(  # type: ignore[misc]
                    arena.cells[:written].any(axis=(1, 2, 3, 4)).all() for arena in rig.destinations
                )
            )
            assert not any(arena.cells[written:].any() for arena in rig.destinations)
        await rig.received(transfer, source_blocks)
        for sender in ordered:
            sender.close()
