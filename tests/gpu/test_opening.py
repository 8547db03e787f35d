"""Direct and staged transports for tensors of a device, and their order. CPU tensors stand for those of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from headrace_common.errors import ConfigError
from headrace_kv.transport.base import KvTransport
from headrace_kv.transport.factory import open_transport
from headrace_kv.transport.memory import PASSED
from tests.in_memory_transport import KIND, InMemoryTransport

if TYPE_CHECKING:
    from headrace_engine.torch_memory.device_memory import TorchMemory

pytestmark = pytest.mark.vllm


@dataclass
class Opened:
    """The calls of open_transport (kind, protocol, whether staged), and the transports."""

    calls: list[tuple[str, str, bool]]
    transports: list[KvTransport]


class Tensor:
    """A tensor of the CPU that claims to be on a CUDA device."""

    def __init__(self) -> None:
        torch = pytest.importorskip("torch")
        self.device = torch.device("cuda", 0)
        self.data = torch.zeros(4096, dtype=torch.uint8)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    torch = pytest.importorskip("torch")
    from headrace_engine.torch_memory import device_memory, stream_order

    real = device_memory.TorchMemory
    seen = Opened([], [])

    def memory_of(device: Any, *, direct: bool = False) -> TorchMemory:
        memory: TorchMemory = real(torch.device("cpu"), direct=direct)
        hold = memory.hold
        monkeypatch.setattr(memory, "hold", lambda tensor: hold(tensor.data))
        return memory

    def open_one(
        kind: str, host: str, protocol: str = "auto", memory: Any = None, **settings: Any
    ) -> KvTransport:
        seen.calls.append((kind, protocol, memory.staged))
        transport = open_transport(KIND, host, memory=memory)
        seen.transports.append(transport)
        return transport

    monkeypatch.setattr(device_memory, "TorchMemory", memory_of)
    monkeypatch.setattr(device_memory, "open_transport", open_one)
    monkeypatch.setattr(stream_order, "load_driver", object)
    monkeypatch.setattr(stream_order, "open_flush", lambda driver, number: None)
    return seen


def open_one(**settings: Any) -> Any:
    from headrace_engine.torch_memory.device_memory import open_tensor_transport

    return open_tensor_transport(Tensor(), "mooncake", "127.0.0.1", **settings)


def test_memory_is_direct_where_an_adapter_reaches_the_device(opened: Opened) -> None:
    transport, stream_order = open_one()
    assert opened.calls == [("mooncake", "rdma", False)]
    assert "scatter=" in transport.session
    assert type(stream_order).__name__ == "CudaOrder"
    transport.close()


def test_without_an_adapter_the_memory_is_staged(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace_engine.torch_memory import device_memory

    usual: Callable[..., KvTransport] = vars(device_memory)["open_transport"]

    def refuse(
        kind: str, host: str, protocol: str = "auto", *more: Any, **named: Any
    ) -> KvTransport:
        if protocol == "rdma":
            raise ConfigError("this machine has no RDMA device")
        return usual(kind, host, protocol, *more, **named)

    monkeypatch.setattr(device_memory, "open_transport", refuse)
    transport, stream_order = open_one()
    assert opened.calls == [("mooncake", "auto", True)]
    assert "landing=" in transport.session
    assert type(stream_order).__name__ == "CudaOrder"
    transport.close()


def test_memory_that_the_adapter_rejects_is_staged(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = InMemoryTransport.register
    closed: list[InMemoryTransport] = []

    def register(self: InMemoryTransport, base_address: int, nbytes: int) -> None:
        if nbytes == 4096:
            raise ConfigError("Mooncake cannot register 4096 bytes")
        usual(self, base_address, nbytes)

    close = InMemoryTransport.close

    def note(self: InMemoryTransport) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(InMemoryTransport, "register", register)
    monkeypatch.setattr(InMemoryTransport, "close", note)
    transport, _ = open_one()
    assert [staged for _, _, staged in opened.calls] == [False, True]
    assert len(closed) == 1
    assert "landing=" in transport.session
    transport.close()


def test_memory_is_staged_where_writes_cannot_be_ordered(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace_engine.torch_memory import stream_order

    def refuse(driver: object, number: int) -> None:
        raise ConfigError("the device cannot make writes visible")

    monkeypatch.setattr(stream_order, "open_flush", refuse)
    open_one()[0].close()
    assert opened.calls == [("mooncake", "auto", True)]


def test_memory_is_staged_on_request(opened: Opened) -> None:
    open_one(gpu_direct=False)[0].close()
    assert opened.calls == [("mooncake", "auto", True)]


def test_a_cpu_needs_neither_marks_nor_fence() -> None:
    torch = pytest.importorskip("torch")
    from headrace_engine.torch_memory.device_memory import open_tensor_transport

    transport, stream_order = open_tensor_transport(torch.zeros(64), KIND, "127.0.0.1")
    assert stream_order.mark() is PASSED
    stream_order.fence()
    transport.close()
