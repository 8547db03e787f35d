"""The LoRA adapters that a worker announces, and their changes while it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import grpc.aio

from headrace.inference.v1.adapter_pb2 import RuntimeAdapter
from headrace.registry.v1 import registry_pb2_grpc
from headrace.worker.v1 import worker_pb2
from headrace_common.errors import (
    Conflict,
    HeadraceError,
    InvalidRequest,
    ProtocolViolation,
    StaleIncarnation,
)
from headrace_common.limits import ADAPTER_CHANGE_S
from headrace_common.registry.adapters import (
    ADAPTER_NAME_REMEDY,
    ADAPTER_PATH_BYTES_MAX,
    ADAPTERS_MAX,
    Adapter,
    adapter_from_proto,
    adapter_to_proto,
    is_adapter_name,
)
from headrace_common.registry.duties import all_members
from headrace_common.registry.link import CALL_TIMEOUT_S
from headrace_common.rpc.status import error_from_rpc
from headrace_kv.layout import WorkerRef

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headrace_engine.interface import Engine

_LOG = logging.getLogger(__name__)
_NOT_ALLOWED: Final = (
    "this worker's setting adapter_folders is empty, so its adapters cannot change"
)

Announce: TypeAlias = Callable[[Sequence[Adapter], Sequence[RuntimeAdapter]], Awaitable[None]]
"""Registers the worker with these adapters, of which some were loaded at run time."""
ChangeAdapter: TypeAlias = Callable[
    [AsyncIterator[worker_pb2.ChangeAdapterRequest]],
    AsyncGenerator[worker_pb2.ChangeAdapterResponse, None],
]


class WorkerAdapters:
    """What routers may send requests for. The engine may have more: those that running requests name."""

    def __init__(self, ref: WorkerRef, engine: Engine, folders: Iterable[str]) -> None:
        """Adapters are loaded from `folders` only. The engine's own are announced once it has started."""
        self._ref = ref
        self._engine = engine
        self._folders = tuple(Path(folder) for folder in folders)
        self._own: dict[str, Adapter] | None = None
        """By name; None until `join`."""
        self._runtime: dict[str, RuntimeAdapter] = {}
        self._followers: list[Callable[[Sequence[Adapter]], None]] = []
        self._announce: Announce | None = None
        self._joined = asyncio.Event()
        self._changing = ""

    @property
    def announced(self) -> tuple[Adapter, ...]:
        """The adapters, by name."""
        return tuple(sorted(self._by_name.values()))

    @property
    def _by_name(self) -> dict[str, Adapter]:
        if self._own is not None:
            return self._own
        return {adapter.name: adapter for adapter in self._engine.adapters}

    def follow(self, follower: Callable[[Sequence[Adapter]], None]) -> None:
        """Calls `follower` with the announced adapters at every change."""
        self._followers.append(follower)

    async def join(self, registry: grpc.aio.Channel, model: str, announce: Announce) -> None:
        """The worker has registered: loads what live workers of its model have loaded at run time, and announces that.

        What cannot be loaded is logged. Changes wait until this has returned.
        """
        self._announce = announce
        self._own = self._by_name
        try:
            if self._folders:
                await self._load_those_of_peers(registry, model)
        finally:
            self._joined.set()

    async def change(
        self, requests: AsyncIterator[worker_pb2.ChangeAdapterRequest]
    ) -> AsyncGenerator[worker_pb2.ChangeAdapterResponse, None]:
        """Answers the steps of a change. The change is undone when this ends before `keep` arrives.

        Raises InvalidRequest, StaleIncarnation, Conflict, ProtocolViolation, or what registering raises.
        """
        change = (await _next_step(requests, "change")).change
        self._check(change)
        await self._joined.wait()
        with self._only_change(change.name):
            wanted = await self._prepare(change)
            new = None if wanted is None else adapter_from_proto(wanted.adapter)
            old, old_runtime = self._by_name.get(change.name), self._runtime.get(change.name)
            answer = worker_pb2.ChangeAdapterResponse(
                adapter=None if new is None else adapter_to_proto(new)
            )
            kept = announced = False
            try:
                yield answer
                await _next_step(requests, "announce")
                announced = True
                await self._set(change.name, new, wanted)
                yield answer
                await _next_step(requests, "keep")
                kept = True
                _LOG.info("adapter %s: %s", change.name, "unloaded" if new is None else "loaded")
            finally:
                if announced and not kept:
                    await asyncio.shield(self._undo(change.name, old, old_runtime))
                unused = old if kept else new
                if unused is not None and unused not in self._by_name.values():
                    self._engine.unload_adapter(unused)

    async def _undo(self, name: str, old: Adapter | None, runtime: RuntimeAdapter | None) -> None:
        _LOG.warning("the change of adapter %s is undone", name)
        try:
            await self._set(name, old, runtime)
        except HeadraceError as error:
            _LOG.warning("the registry gets the adapters of %s later: %s", self._ref, error.detail)

    def _check(self, change: worker_pb2.AdapterChange) -> None:
        if change.incarnation != self._ref.incarnation:
            raise StaleIncarnation(
                f"this is {self._ref}, not incarnation {change.incarnation or '(none)'}",
                metadata={"worker_id": self._ref.worker_id, "incarnation": self._ref.incarnation},
            )
        if not is_adapter_name(change.name):
            raise InvalidRequest({"name": ADAPTER_NAME_REMEDY})
        if len(change.path.encode()) > ADAPTER_PATH_BYTES_MAX:
            raise InvalidRequest({"path": f"give at most {ADAPTER_PATH_BYTES_MAX} bytes"})

    @contextmanager
    def _only_change(self, name: str) -> Iterator[None]:
        if self._changing:
            raise Conflict(
                f"{self._ref.worker_id} is changing adapter {self._changing}; try again in a moment",
                metadata={"worker_id": self._ref.worker_id, "adapter": self._changing},
            )
        self._changing = name
        try:
            yield
        finally:
            self._changing = ""

    async def _prepare(self, change: worker_pb2.AdapterChange) -> RuntimeAdapter | None:
        """The loaded adapter, None after unloading. Raises InvalidRequest."""
        if change.path:
            return await self._load(change.name, change.path, change.is_3d_lora_weight)
        if change.name in self._by_name and not self._folders:
            raise InvalidRequest({"name": _NOT_ALLOWED})
        return None

    async def _load(self, name: str, path: str, is_3d_lora_weight: bool) -> RuntimeAdapter:
        """Loads an adapter that is not announced yet. Raises InvalidRequest."""
        folder = await asyncio.to_thread(self._allowed_folder, path)
        if name not in self._by_name and len(self._by_name) >= ADAPTERS_MAX:
            raise InvalidRequest({"name": f"the worker has {ADAPTERS_MAX} adapters: unload one"})
        adapter = await self._engine.load_adapter(name, folder, is_3d_lora_weight=is_3d_lora_weight)
        return RuntimeAdapter(
            adapter=adapter_to_proto(adapter), path=path, is_3d_lora_weight=is_3d_lora_weight
        )

    def _allowed_folder(self, path: str) -> Path:
        """The folder without links. Blocks. Raises InvalidRequest."""
        if not self._folders:
            raise InvalidRequest({"path": _NOT_ALLOWED})
        try:
            folder = Path(path).resolve(strict=True)
            allowed = [one.resolve() for one in self._folders]
        except (OSError, ValueError, RuntimeError) as error:
            raise InvalidRequest({"path": f"{path} cannot be opened: {error}"}) from error
        if not Path(path).is_absolute() or not any(folder.is_relative_to(one) for one in allowed):
            listed = ", ".join(map(str, self._folders))
            raise InvalidRequest(
                {"path": f"{path} is not in one of this worker's adapter_folders: {listed}"}
            )
        for file in folder.iterdir():
            # Reading a pipe would never end.
            target = file.resolve()
            inside = any(target.is_relative_to(one) for one in allowed)
            if not inside or not (target.is_file() or target.is_dir()):
                remedy = "is no file of the worker's adapter_folders: replace it by a copy"
                raise InvalidRequest({"path": f"{file} {remedy}"})
        return folder

    async def _set(
        self, name: str, adapter: Adapter | None, runtime: RuntimeAdapter | None
    ) -> None:
        """Announces an adapter, or none of this name. Raises what registering raises."""
        assert self._own is not None
        assert self._announce is not None, "changes wait for join"
        for known in (self._own, self._runtime):
            known.pop(name, None)
        if adapter is not None:
            self._own[name] = adapter
        if runtime is not None:
            self._runtime[name] = runtime
        for follower in self._followers:
            follower(self.announced)
        await self._announce(self.announced, tuple(self._runtime.values()))

    async def _load_those_of_peers(self, registry: grpc.aio.Channel, model: str) -> None:
        try:
            stub = registry_pb2_grpc.RegistryServiceStub(registry)
            members = await all_members(stub, CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as rpc_error:
            error = error_from_rpc(rpc_error)
            _LOG.warning("the adapters of other workers stay unknown: %s", error.detail)
            return
        wanted: dict[str, RuntimeAdapter] = {}
        for member in members:
            if member.model == model and member.worker_id != self._ref.worker_id:
                for message in member.runtime_adapters:
                    wanted.setdefault(message.adapter.name, message)
        for one in wanted.values():
            await self._load_as_peers(one)

    async def _load_as_peers(self, one: RuntimeAdapter) -> None:
        wanted, name = adapter_from_proto(one.adapter), one.adapter.name
        if self._by_name.get(name) == wanted:
            return
        try:
            found = await self._load(name, one.path, one.is_3d_lora_weight)
            if found.adapter != one.adapter:
                self._engine.unload_adapter(adapter_from_proto(found.adapter))
                raise InvalidRequest({"path": f"{one.path} has another adapter than other workers"})
            replaced = self._by_name.get(name)
            await self._set(name, wanted, found)
        except HeadraceError as error:
            _LOG.warning("adapter %s of other workers is not loaded: %s", name, error.detail)
            return
        if replaced is not None:
            self._engine.unload_adapter(replaced)
        _LOG.info("adapter %s: loaded, as on other workers", name)


async def _next_step(
    requests: AsyncIterator[worker_pb2.ChangeAdapterRequest], step: str
) -> worker_pb2.ChangeAdapterRequest:
    """Raises ProtocolViolation when it is another one, or none comes in time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(ADAPTER_CHANGE_S):
            async for request in requests:
                if request.WhichOneof("step") == step:
                    return request
                break
    raise ProtocolViolation(f"the next step of a change of adapters is {step}")
