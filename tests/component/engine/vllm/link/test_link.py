"""The link between a service and its engine processes, over a real socket; both ends in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from headrace.engine.v1 import link_pb2, link_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.errors import InternalError, StaleIncarnation
from headrace_engine.interface import Arrived, FirstToken, Recompute, Released
from headrace_engine.vllm.link.client import EngineLink
from headrace_engine.vllm.link.messages import (
    keep_answer,
    kept_from_proto,
    read_startup_error,
    report_from_proto,
    report_to_proto,
    terms_from_proto,
    terms_to_proto,
    tier_load_from_proto,
    tier_load_to_proto,
    transfer_event_to_proto,
    write_startup_error,
)
from headrace_engine.vllm.link.server import LinkServer
from headrace_kv.layout import (
    KvDescriptor,
    KvLayout,
    RankMemory,
    WorkerRef,
    layout_to_proto,
    rank_memory_to_proto,
)
from headrace_kv.messages import (
    Reservation,
    SendReport,
    reservation_from_proto,
    reservation_to_proto,
)
from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.load_times import TierLoad
from headrace_kv.tiers.promises import KeepTerms, Kept
from tests.ports import free_port
from tests.transfer_links import sent_link
from tests.waiting import until

LAYOUT = KvLayout.attention(
    model="m:1",
    dtype="float32",
    layer_count=2,
    kv_head_count=4,
    tensor_parallel_size=2,
    block_tokens=32,
    parts={"kv": 4096},
    block_format="vllm-cpu-vec",
)
SENT = sent_link(strategy="direct+gather_scatter")
REPORT = SendReport("x1", 1, "QUEUE_FULL", "too many", (SENT,), 240, "10.0.0.1", "device")
LOADED = TierLoad(Tier.DISK, 3, 0.25, failed=True)
RESERVATION = Reservation("x1", (4, 2), 32, 70, ((3,), (7, 8)))


def memory(rank: int) -> RankMemory:
    return RankMemory(rank, "mooncake", f"h:{rank}", 4096, 8192, ())


def rank_attachment(rank: int) -> link_pb2.Attachment:
    return link_pb2.Attachment(
        rank=rank, layout=layout_to_proto(LAYOUT), memory=rank_memory_to_proto(memory(rank))
    )


@dataclass(slots=True)
class Ends:
    """A server and three connectors with the messages that each has received."""

    server: LinkServer
    messages: list[tuple[int, link_pb2.AttachRequest]]
    lost: list[str]
    links: dict[str, EngineLink] = field(default_factory=dict)
    received: dict[str, list[str | None]] = field(default_factory=dict)

    def attach(self, path: Path, name: str, attachment: link_pb2.Attachment) -> None:
        found = self.received[name] = []
        self.links[name] = EngineLink(
            path, attachment, lambda response: found.append(response.WhichOneof("message"))
        )


async def no_descriptors(ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
    if ref.incarnation == "old":
        raise StaleIncarnation(f"{ref} is gone")
    return KvDescriptor(LAYOUT, (memory(0), memory(1)))


@asynccontextmanager
async def attached(path: Path) -> AsyncIterator[Ends]:
    messages: list[tuple[int, link_pb2.AttachRequest]] = []
    lost: list[str] = []
    server = LinkServer(
        path, lambda rank, message: messages.append((rank, message)), lost.append, no_descriptors
    )
    ends = Ends(server, messages, lost)
    # The connectors start first, as when an engine starts.
    ends.attach(path, "scheduler", link_pb2.Attachment(scheduler=True))
    ends.attach(path, "rank 1", rank_attachment(1))
    ends.attach(path, "rank 0", rank_attachment(0))
    await ends.server.start()
    try:
        yield ends
    finally:
        ends.server.begin_close()
        for link in ends.links.values():
            link.close()
        await ends.server.close()


async def test_neither_end_sends_pings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC closes a connection at the fourth ping that its server does not permit, so an idle link would end."""
    seen: list[str] = []

    def recording(make: Callable[..., Any]) -> Callable[..., Any]:
        def opened(*arguments: Any, options: Any) -> Any:
            seen.extend(name for name, _ in options)
            return make(*arguments, options=options)

        return opened

    monkeypatch.setattr(grpc.aio, "server", recording(grpc.aio.server))
    monkeypatch.setattr(grpc.aio, "insecure_channel", recording(grpc.aio.insecure_channel))
    async with attached(tmp_path / "link") as ends:
        await ends.server.wait_attached(2, timeout_s=10)
    assert "grpc.max_send_message_length" in seen
    assert not [name for name in seen if "ping" in name or "keepalive" in name]


async def test_a_query_gets_its_own_answer_from_the_connector_that_was_asked(
    tmp_path: Path,
) -> None:
    async with attached(tmp_path / "link") as ends:
        await ends.server.wait_attached(2, timeout_s=10)
        query = link_pb2.AttachResponse(
            admit_networks=link_pb2.AdmitNetworks(networks=["10.0.0.7/32"])
        )
        asking = [asyncio.create_task(ends.server.ask_rank(rank, query)) for rank in (0, 1)]
        await until(
            lambda: ends.received["rank 0"] == ends.received["rank 1"] == ["admit_networks"]
        )
        assert ends.received["scheduler"] == []

        def answer(name: str, query_id: int, **failure: str) -> None:
            admitted = link_pb2.NetworksAdmitted(**failure)
            ends.links[name].send(
                link_pb2.AttachRequest(networks_admitted=admitted, answered_query_id=query_id)
            )

        # Neither the answer to another connector's query nor one to no query counts.
        for query_id in (2, 7):
            answer("rank 0", query_id)
        answer("rank 0", 1)
        assert not (await asyncio.wait_for(asking[0], 5)).networks_admitted.reason
        assert not asking[1].done()
        answer("rank 1", 2, reason="QUEUE_FULL", detail="too many networks")
        # A second answer changes nothing.
        answer("rank 1", 2)
        answered = (await asyncio.wait_for(asking[1], 5)).networks_admitted
        assert (answered.reason, answered.detail) == ("QUEUE_FULL", "too many networks")
        assert ends.messages == []


async def test_a_query_fails_when_its_connector_is_lost(tmp_path: Path) -> None:
    async with attached(tmp_path / "link") as ends:
        await ends.server.wait_attached(2, timeout_s=10)
        query = link_pb2.AttachResponse(sample_first=link_pb2.SampleFirst(state=b"row"))
        asking = asyncio.create_task(ends.server.ask_rank(0, query))
        await until(lambda: ends.received["rank 0"] == ["sample_first"])
        ends.links["rank 0"].close()
        with pytest.raises(InternalError, match="rank 0 has ended"):
            await asyncio.wait_for(asking, 5)
        with pytest.raises(InternalError, match="has ended"):
            await ends.server.ask_rank(0, query)


async def test_messages_arrive_at_the_connectors_and_at_the_service(tmp_path: Path) -> None:
    async with attached(tmp_path / "link") as ends:
        descriptor = await ends.server.wait_attached(2, timeout_s=10)
        assert descriptor == KvDescriptor(LAYOUT, (memory(0), memory(1)))
        reserved = link_pb2.AttachRequest(reservation=reservation_to_proto(RESERVATION))
        ends.links["scheduler"].send(reserved)
        await until(lambda: bool(ends.messages))
        report = link_pb2.AttachRequest(report=report_to_proto(REPORT))
        ends.links["rank 1"].send(report)
        await until(lambda: len(ends.messages) == 2)
        assert ends.messages == [(0, reserved), (1, report)]
        ends.server.transfer_event(Arrived("x1"))
        ends.server.request_coming()
        ends.server.send_to_ranks(link_pb2.AttachResponse(stop=link_pb2.Stop(transfer_id="x3")))
        expected = {
            "scheduler": ["transfer_event", "request_coming"],
            "rank 0": ["stop"],
            "rank 1": ["stop"],
        }
        await until(lambda: ends.received == expected, what=lambda: f"{ends.received}")
        assert ends.lost == []


def test_values_are_equal_after_conversion_for_the_link() -> None:
    assert reservation_from_proto(reservation_to_proto(RESERVATION)) == RESERVATION
    assert report_from_proto(report_to_proto(REPORT)) == REPORT
    assert tier_load_from_proto(tier_load_to_proto(LOADED)) == LOADED
    kept = Kept(96, Tier.DISK, 30.5)
    assert kept_from_proto(keep_answer(kept)) == kept
    assert kept_from_proto(keep_answer(None)) is None
    terms = KeepTerms("x1", "aa", 30.5)
    assert terms_from_proto(terms_to_proto(terms)) == terms
    event = transfer_event_to_proto(FirstToken("x1", 7))
    assert (event.transfer_id, event.token_id) == ("x1", 7)
    kinds = {transfer_event_to_proto(kind("x1")).kind for kind in (Arrived, Released, Recompute)}
    assert len({event.kind, *kinds}) == 4


async def test_ranks_find_descriptors_through_the_service(tmp_path: Path) -> None:
    async with attached(tmp_path / "link") as ends:
        await ends.server.wait_attached(2, timeout_s=10)
        link = ends.links["rank 0"]

        async def find(incarnation: str) -> KvDescriptor:
            return await link.find_descriptor(WorkerRef("d0", incarnation), Deadline.after(5))

        def on_link_loop(incarnation: str) -> asyncio.Future[KvDescriptor]:
            return asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(find(incarnation), link.loop)
            )

        assert (await on_link_loop("new")).ranks == (memory(0), memory(1))
        with pytest.raises(StaleIncarnation, match="d0@old is gone"):
            await on_link_loop("old")


async def test_a_connector_that_ends_is_reported_as_lost(tmp_path: Path) -> None:
    async with attached(tmp_path / "link") as ends:
        await ends.server.wait_attached(2, timeout_s=10)
        ends.links["rank 1"].close()
        await until(lambda: bool(ends.lost))
        assert "rank 1" in ends.lost[0]


async def test_missing_ranks_are_reported_with_their_number(tmp_path: Path) -> None:
    async with attached(tmp_path / "link") as ends:
        with pytest.raises(InternalError, match="2 of 3 ranks"):
            await ends.server.wait_attached(3, timeout_s=1)


def test_the_first_startup_error_is_stored_and_read_back(tmp_path: Path) -> None:
    link = tmp_path / "link"
    assert read_startup_error(link) is None
    write_startup_error(link, StaleIncarnation("first", metadata={"a": "b"}))
    write_startup_error(link, InternalError("second"))
    found = read_startup_error(link)
    assert isinstance(found, StaleIncarnation)
    assert (found.detail, found.metadata) == ("first", {"a": "b"})


async def test_a_rank_of_another_host_attaches_by_the_secret_and_its_host_is_named(
    tmp_path: Path,
) -> None:
    address, lost = f"127.0.0.1:{free_port()}", list[str]()
    server = LinkServer(
        tmp_path / "link", lambda *_: None, lost.append, no_descriptors, address, "right"
    )
    link = EngineLink(tmp_path, rank_attachment(0), lambda _: None, address, "right")
    await server.start()
    try:
        found = await server.wait_attached(1, timeout_s=10, with_scheduler=False)
        assert found.ranks == (memory(0),)
        for metadata in (None, (("headrace-link-secret", "wrong"),)):
            async with grpc.aio.insecure_channel(address) as channel:
                # Without a message: gRPC's client fails otherwise where that meets a call that is refused already.
                stranger = link_pb2_grpc.EngineLinkServiceStub(channel).Attach(metadata=metadata)
                with pytest.raises(grpc.aio.AioRpcError, match="no rank of this engine"):
                    await stranger.read()
        link.close()
        await until(lambda: lost == ["the engine's rank 0 on 127.0.0.1 has ended"])
    finally:
        await server.close()
