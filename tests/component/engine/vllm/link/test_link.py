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

from headrace.engine.v1 import link_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import InternalError, QueueFull, StaleIncarnation
from headrace_engine.interface import Arrived, Recompute, Released
from headrace_engine.vllm.link.client import EngineLink
from headrace_engine.vllm.link.messages import (
    keep_answer,
    read_startup_error,
    report_to_proto,
    reservation_to_proto,
    tier_load_to_proto,
    write_startup_error,
)
from headrace_engine.vllm.link.server import LinkEvents, LinkServer
from headrace_kv.layout import (
    KvDescriptor,
    KvLayout,
    RankMemory,
    WorkerRef,
    layout_to_proto,
    rank_memory_to_proto,
)
from headrace_kv.manager.load_times import TierLoad
from headrace_kv.manager.promises import KeepTerms, Kept
from headrace_kv.messages import Reservation, SendReport
from headrace_kv.prefix.events import Tier
from headrace_kv.transport.networks import parse_networks
from tests.transfer_links import link_sent
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
SENT = link_sent(strategy="direct+gather_scatter")
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
    reserved: list[Reservation]
    reports: list[SendReport]
    lost: list[str]
    loads: list[tuple[int, TierLoad]]
    starts: list[tuple[str, int]]
    failed: list[tuple[str, bool]]
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
    reserved: list[Reservation] = []
    reports: list[SendReport] = []
    lost: list[str] = []
    loads: list[tuple[int, TierLoad]] = []
    starts: list[tuple[str, int]] = []
    failed: list[tuple[str, bool]] = []
    events = LinkEvents(
        reserved.append,
        reports.append,
        lost.append,
        tier_loaded=lambda rank, load: loads.append((rank, load)),
        step_started=lambda *start: starts.append(start),
        request_failed=lambda *failure: failed.append(failure),
    )
    server = LinkServer(path, events, no_descriptors)
    ends = Ends(server, reserved, reports, lost, loads, starts, failed)
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


async def test_every_rank_confirms_the_networks_that_it_admits(tmp_path: Path) -> None:
    async with attached(tmp_path / "link") as ends:
        await ends.server.wait_attached(2, timeout_s=10)
        networks = parse_networks(["10.0.0.7"])
        admitting = asyncio.create_task(ends.server.admit_networks(networks))
        await until(
            lambda: ends.received["rank 0"] == ends.received["rank 1"] == ["admit_networks"]
        )
        assert ends.received["scheduler"] == []

        def confirm(name: str, update_id: int, **failure: str) -> None:
            admitted = link_pb2.NetworksAdmitted(update_id=update_id, **failure)
            ends.links[name].send(link_pb2.AttachRequest(networks_admitted=admitted))

        confirm("rank 0", 1)
        # The second rank's answer to another update does not count.
        confirm("rank 1", 7)
        await asyncio.sleep(0.1)
        assert not admitting.done()
        confirm("rank 1", 1)
        await asyncio.wait_for(admitting, 5)
        failing = asyncio.create_task(ends.server.admit_networks(networks))
        confirm("rank 0", 2)
        await until(lambda: len(ends.received["rank 1"]) == 2)
        confirm("rank 1", 2, reason="QUEUE_FULL", detail="too many networks")
        confirm("rank 0", 2)
        with pytest.raises(QueueFull, match="too many networks"):
            await asyncio.wait_for(failing, 5)


async def test_the_scheduler_answers_what_becomes_of_a_promise(tmp_path: Path) -> None:
    async with attached(tmp_path / "link") as ends:
        await ends.server.wait_attached(2, timeout_s=10)
        kept = Kept(96, Tier.DISK, 30.5)
        keeping = asyncio.create_task(ends.server.keep(KeepTerms("x1", "aa", 30.5)))
        await until(lambda: ends.received["scheduler"] == ["keep_query"])
        # An answer to another query does not count.
        for answer in (keep_answer(7, None), keep_answer(1, kept), keep_answer(1, None)):
            ends.links["scheduler"].send(link_pb2.AttachRequest(keep_answer=answer))
        assert await asyncio.wait_for(keeping, 5) == kept
        unknown = asyncio.create_task(ends.server.keep(KeepTerms("x2", "aa", 0.0)))
        await until(lambda: len(ends.received["scheduler"]) == 2)
        ends.links["scheduler"].send(link_pb2.AttachRequest(keep_answer=keep_answer(2, None)))
        assert await asyncio.wait_for(unknown, 5) is None


async def test_a_rank_answers_each_sample_or_is_lost(tmp_path: Path) -> None:
    async with attached(tmp_path / "link") as ends:
        await ends.server.wait_attached(2, timeout_s=10)
        sampling = [
            asyncio.create_task(ends.server.sample_first(link_pb2.SampleFirst(state=b"row")))
            for _ in range(2)
        ]
        await until(lambda: ends.received["rank 0"] == ["sample_first"] * 2)
        assert ends.received["rank 1"] == []
        # The second answer is for a call that has ended, or was never made.
        for number in (2, 9):
            sampled = link_pb2.FirstSampled(number=number, token_id=5)
            ends.links["rank 0"].send(link_pb2.AttachRequest(first_sampled=sampled))
        assert (await asyncio.wait_for(sampling[1], 5)).token_id == 5
        assert not sampling[0].done()
        ends.links["rank 0"].close()
        with pytest.raises(InternalError, match="rank 0 has ended"):
            await asyncio.wait_for(sampling[0], 5)


async def test_messages_arrive_at_the_connectors_and_at_the_service(tmp_path: Path) -> None:
    async with attached(tmp_path / "link") as ends:
        descriptor = await ends.server.wait_attached(2, timeout_s=10)
        assert descriptor == KvDescriptor(LAYOUT, (memory(0), memory(1)))
        ends.links["scheduler"].send(
            link_pb2.AttachRequest(reserved=reservation_to_proto(RESERVATION))
        )
        ends.links["rank 1"].send(link_pb2.AttachRequest(report=report_to_proto(REPORT)))
        ends.links["rank 1"].send(link_pb2.AttachRequest(tier_loaded=tier_load_to_proto(LOADED)))
        started = link_pb2.StepStarted(transfer_id="x1", monotonic_ns=7)
        ends.links["scheduler"].send(link_pb2.AttachRequest(step_started=started))
        for load_failed in (True, False):
            failure = link_pb2.RequestFailed(transfer_id="x9", load_failed=load_failed)
            ends.links["scheduler"].send(link_pb2.AttachRequest(request_failed=failure))
        await until(lambda: bool(ends.reserved and ends.reports and ends.loads and ends.starts))
        await until(lambda: ends.failed == [("x9", True), ("x9", False)])
        assert (ends.reserved, ends.reports) == ([RESERVATION], [REPORT])
        assert ends.loads == [(1, LOADED)]
        assert ends.starts == [("x1", 7)]
        ends.server.transfer_event(Arrived("x1"))
        ends.server.transfer_event(Released("x2"))
        ends.server.request_coming()
        ends.server.stop("x3")
        ends.server.transfer_event(Recompute("x4"))
        expected = {
            "scheduler": ["transfer_event", "transfer_event", "request_coming", "transfer_event"],
            "rank 0": ["stop"],
            "rank 1": ["stop"],
        }
        await until(lambda: ends.received == expected, what=lambda: f"{ends.received}")
        assert ends.lost == []


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
