"""The steps of a change of a worker's adapters. By a real clock, since files are read on threads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest

from headrace.inference.v1.adapter_pb2 import RuntimeAdapter
from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace.worker.v1 import worker_pb2
from headrace_common.errors import (
    Conflict,
    HeadraceError,
    InvalidRequest,
    ProtocolViolation,
    RegistryUnavailable,
    StaleIncarnation,
)
from headrace_common.registry.adapters import Adapter, adapter_to_proto
from headrace_engine.worker.adapters import WorkerAdapters
from headrace_kv.layout import WorkerRef

OLD, NEW = Adapter("poet", "aa"), Adapter("poet", "bb")
ANNOUNCE = worker_pb2.ChangeAdapterRequest(announce=worker_pb2.ChangeAdapterRequest.Announce())
KEEP = worker_pb2.ChangeAdapterRequest(keep=worker_pb2.ChangeAdapterRequest.Keep())


class FakeEngine:
    def __init__(self) -> None:
        self.adapters: tuple[Adapter, ...] = (OLD,)
        self.unloaded: list[Adapter] = []

    async def load_adapter(self, name: str, folder: Path, *, is_3d_lora_weight: bool) -> Adapter:
        self.adapters = (*self.adapters, NEW)
        return NEW

    def unload_adapter(self, adapter: Adapter) -> None:
        self.unloaded.append(adapter)


class Rig:
    """A worker that has joined, and what it has announced."""

    def __init__(self, folder: Path) -> None:
        self.engine = FakeEngine()
        self.adapters = WorkerAdapters(WorkerRef("w", "1"), cast("Any", self.engine), [str(folder)])
        self.announced: list[tuple[Sequence[Adapter], Sequence[RuntimeAdapter]]] = []
        self.failures: list[HeadraceError] = []

    async def announce(
        self, adapters: Sequence[Adapter], runtime: Sequence[RuntimeAdapter]
    ) -> None:
        if self.failures:
            raise self.failures.pop()
        self.announced.append((adapters, runtime))

    async def join(self, *members: registry_pb2.Member, monkeypatch: pytest.MonkeyPatch) -> None:
        async def listed(request: object, timeout: float) -> object:
            return SimpleNamespace(members=members, next_page_token="")

        stub = SimpleNamespace(ListMembers=listed)
        monkeypatch.setattr(registry_pb2_grpc, "RegistryServiceStub", lambda channel: stub)
        channel = cast("grpc.aio.Channel", None)
        await self.adapters.join(channel, "m", self.announce)

    async def change(self, *steps: worker_pb2.ChangeAdapterRequest) -> int:
        """The number of answers to the steps of a caller that ends its stream after them."""

        async def requests() -> AsyncIterator[worker_pb2.ChangeAdapterRequest]:
            for step in steps:
                yield step

        count = 0
        async for _ in self.adapters.change(requests()):
            count += 1
        return count


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    (tmp_path / "poet").mkdir()
    rig = Rig(tmp_path)
    await rig.join(monkeypatch=monkeypatch)
    return rig


def loading(folder: Path, **fields: str) -> worker_pb2.ChangeAdapterRequest:
    given: dict[str, Any] = {
        "incarnation": "1",
        "name": "poet",
        "path": str(folder / "poet"),
        **fields,
    }
    return worker_pb2.ChangeAdapterRequest(change=worker_pb2.AdapterChange(**given))


async def test_a_change_lasts_once_it_is_kept(rig: Rig, tmp_path: Path) -> None:
    assert await rig.change(loading(tmp_path), ANNOUNCE, KEEP) == 2
    assert rig.adapters.announced == (NEW,)
    assert rig.announced == [
        ((NEW,), (RuntimeAdapter(adapter=adapter_to_proto(NEW), path=str(tmp_path / "poet")),))
    ]
    assert rig.engine.unloaded == [OLD]
    await rig.change(loading(tmp_path, path=""), ANNOUNCE, KEEP)
    assert rig.announced[-1] == ((), ())
    assert rig.engine.unloaded == [OLD, NEW]


@pytest.mark.parametrize("announced", [False, True])
async def test_a_stream_that_ends_early_undoes_the_change(
    rig: Rig, tmp_path: Path, announced: bool
) -> None:
    steps = [loading(tmp_path), *([ANNOUNCE] if announced else [])]
    with pytest.raises(ProtocolViolation, match="next step"):
        await rig.change(*steps)
    assert rig.adapters.announced == (OLD,)
    assert rig.announced == ([((NEW,), rig.announced[0][1]), ((OLD,), ())] if announced else [])
    assert rig.engine.unloaded == [NEW]


async def test_a_change_that_the_registry_does_not_get_is_undone(rig: Rig, tmp_path: Path) -> None:
    rig.failures = [RegistryUnavailable("first")]
    with pytest.raises(RegistryUnavailable, match="first"):
        await rig.change(loading(tmp_path), ANNOUNCE, KEEP)
    assert rig.announced == [((OLD,), ())]


async def test_one_change_is_made_at_a_time(rig: Rig, tmp_path: Path) -> None:
    held: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def slow() -> AsyncIterator[worker_pb2.ChangeAdapterRequest]:
        yield loading(tmp_path)
        await held

    first = rig.adapters.change(slow())
    await anext(first)
    with pytest.raises(Conflict, match="w is changing adapter poet"):
        await rig.change(loading(tmp_path), ANNOUNCE, KEEP)
    # The caller has gone.
    await first.aclose()
    assert await rig.change(loading(tmp_path), ANNOUNCE, KEEP) == 2


async def test_wrong_changes_are_refused(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc")
    for change, error in (
        (loading(tmp_path, incarnation="0"), StaleIncarnation),
        (loading(tmp_path, name="a b"), InvalidRequest),
        (loading(tmp_path, path="/" + 4096 * "x"), InvalidRequest),
        *(
            (loading(tmp_path, path=path), InvalidRequest)
            for path in (
                "/etc",
                f"{tmp_path}/../x",
                f"{tmp_path}/link",
                f"{tmp_path}/missing",
                "poet",
            )
        ),
        (KEEP, ProtocolViolation),
    ):
        with pytest.raises(error):
            await rig.change(change, ANNOUNCE, KEEP)
    with pytest.raises(ProtocolViolation):
        await rig.change(loading(tmp_path), KEEP)
    assert rig.adapters.announced == (OLD,)
    closed = WorkerAdapters(WorkerRef("w", "1"), cast("Any", rig.engine), ())
    rig.adapters = closed
    await closed.join(cast("grpc.aio.Channel", None), "m", rig.announce)
    for path in (str(tmp_path / "poet"), ""):
        with pytest.raises(InvalidRequest, match="adapter_folders is empty"):
            await rig.change(loading(tmp_path, path=path), ANNOUNCE, KEEP)


@pytest.mark.parametrize("kind", ["pipe", "link to a file elsewhere", "broken link"])
async def test_an_adapter_is_made_of_files_in_the_allowed_folders(
    rig: Rig, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    file, elsewhere = tmp_path / "poet/adapter_config.json", tmp_path_factory.mktemp("other") / "f"
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(elsewhere)
    if kind == "link to a file elsewhere":
        elsewhere.touch()
    with pytest.raises(InvalidRequest, match=r"adapter_config.json is no file of the worker's"):
        await rig.change(loading(tmp_path), ANNOUNCE, KEEP)
    # As in the cache of a hub, a link may lead to a file beside the folder.
    file.unlink()
    (tmp_path / "blob").touch()
    file.symlink_to(tmp_path / "blob")
    assert await rig.change(loading(tmp_path), ANNOUNCE, KEEP) == 2


@pytest.mark.parametrize("name", ["../poet", "poet/", "a/./b", ".."])
async def test_the_name_of_an_adapter_is_no_path_out_of_a_folder(
    rig: Rig, tmp_path: Path, name: str
) -> None:
    with pytest.raises(InvalidRequest, match="between slashes"):
        await rig.change(loading(tmp_path, name=name), ANNOUNCE, KEEP)


@pytest.mark.parametrize(("digest", "expected"), [("bb", NEW), ("cc", OLD)])
async def test_a_worker_that_joins_loads_what_its_peers_have_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest: str, expected: Adapter
) -> None:
    (tmp_path / "poet").mkdir()
    rig = Rig(tmp_path)
    peers = [
        registry_pb2.Member(
            worker_id=name,
            model=model,
            runtime_adapters=[
                RuntimeAdapter(adapter=adapter_to_proto(Adapter(adapter, digest)), path=str(path))
            ],
        )
        for name, model, adapter, path in (
            ("p", "m", "poet", tmp_path / "poet"),
            ("q", "m", "missing", tmp_path / "missing"),
            ("r", "other", "coder", tmp_path / "poet"),
        )
    ]
    await rig.join(*peers, monkeypatch=monkeypatch)
    # Another adapter than its peers' is none.
    assert rig.adapters.announced == (expected,)
    assert rig.engine.unloaded == [OLD if expected == NEW else NEW]
    assert len(rig.announced) == (expected == NEW)
