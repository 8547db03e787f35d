"""What workers and routers make of a peer that lies within its role: no bug, and no growth.

Each role sends some hundred messages, or as many as HEADRACE_HOSTILE_MESSAGES says.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace.kv.v1 import handoff_pb2
from headrace.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from headrace.worker.v1 import time_model_pb2, worker_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError
from headrace_common.process.pacing import LoopLoad
from headrace_common.rpc.channel import ServiceChannel
from headrace_common.rpc.field_bounds import bounded, require_bounds
from headrace_kv.layout import WorkerRef, layout_to_proto
from headrace_kv.messages import reservation_from_proto
from headrace_kv.send.stream import CancelReceived, ReservationReceived
from headrace_prefill.pull import PullSession
from headrace_router.decode_link.link import DecodeLink
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.service import QueueService
from headrace_router.prefill_queue.task import TaskTerms
from headrace_router.prefix_cache.directory import KvEventFeed
from headrace_router.prefix_cache.index import PrefixIndex
from headrace_router.workers.connection import WorkerConnection
from headrace_router.workers.dials import Dials
from headrace_router.workers.table import Worker
from tests.component.prefill.test_puller import ScriptedWorker
from tests.kit.link import KeptEvents
from tests.local_channel import LocalContext, ScriptedCalls
from tests.sim_layout import LAYOUT
from tests.spoiled_messages import hostile_messages
from tests.unit.kv.receive.test_receiver import Stage
from tests.unit.kv.send.test_sender import DECODE, Rank

COUNT = int(os.environ.get("HEADRACE_HOSTILE_MESSAGES", "400"))
_PEER = WorkerRef("d0", "a")
_HOUR = Duration(seconds=3_600)


class Hostile(ScriptedCalls):
    """A channel and each of its calls: reads return the messages one after the other, then nothing."""

    def __init__(self, *goods: Message) -> None:
        self._messages = hostile_messages(goods, COUNT, seed=7)
        self.over = asyncio.Event()

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Message:
        return await self.read()

    async def read(self) -> Message:
        await asyncio.sleep(0)
        message = next(self._messages, None)
        if message is None:
            self.over.set()
            await asyncio.Event().wait()
        assert message is not None
        return message

    @property
    def channel(self) -> Any:
        """As services open it."""
        return ServiceChannel(lambda: None, lambda _: self)  # type: ignore[arg-type,return-value]


class _Bugs(logging.Handler):
    """Keeps the records with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(record.getMessage())


@pytest.fixture(autouse=True)
def no_bug() -> Iterator[None]:
    bugs = _Bugs()
    logging.getLogger().addHandler(bugs)
    yield
    logging.getLogger().removeHandler(bugs)
    assert bugs.found == []


async def test_the_status_of_a_hostile_worker() -> None:
    steps = time_model_pb2.StepTimes(fixed_s=0.01, prompt_steps=9, answer_steps=9)
    hostile: Any = Hostile(
        worker_pb2.WatchStatusResponse(
            worker_id="d0",
            incarnation="a",
            state=worker_pb2.WatchStatusResponse.STATE_SERVING,
            total_blocks=64,
            distrusted_workers=[worker_pb2.DistrustedWorker(worker_id="p0")],
            stall=worker_pb2.Stall(age=_HOUR, bound=_HOUR),
            times=time_model_pb2.TimeModel(steps=steps),
        )
    )
    worker = Worker(_PEER, "127.0.0.1:1", "sim", 4_096, 8, LAYOUT)
    loads = 0

    def on_status(connection: WorkerConnection) -> None:
        nonlocal loads
        connection.load()
        loads += 1

    connection = WorkerConnection(
        worker, lambda _: hostile.channel, Dials(), on_status, lambda _: None, b""
    )
    await hostile.over.wait()
    assert loads > COUNT / 2
    await connection.close()


async def test_the_answers_of_a_hostile_worker() -> None:
    tokens = decode_pb2.Tokens(token_ids=[1], logprobs=[sampling_pb2.TokenLogprobs(logprob=-1.0)])
    good = decode_pb2.LinkResponse(
        reserved=[decode_pb2.LinkReserved(stream_id=1)],
        tokens=decode_pb2.LinkTokens(stream_ids=[1], token_counts=[1], token_ids=[5]),
        tokens_with_logprobs=[decode_pb2.LinkTokensWithLogprobs(stream_id=1, tokens=tokens)],
        times=[decode_pb2.LinkTimes(stream_id=1)],
        failures=[decode_pb2.LinkFailure(stream_id=9, status=b"x")],
        finished=[decode_pb2.LinkFinished(stream_id=2)],
    )
    hostile: Any = Hostile(good)
    while not hostile.over.is_set():
        link = DecodeLink(hostile.channel, lambda _: None, LoopLoad())
        for _ in range(3):
            link.open(
                decode_pb2.GenerateRequest(),
                inference_pb2.TokenIds(),
                Deadline.after(1e6),
                {},
                KeptEvents(),
            )
        over = asyncio.create_task(hostile.over.wait())
        while not link.ended and not over.done():
            await asyncio.sleep(0)
        over.cancel()
        await link.close()


async def test_the_cache_events_of_a_hostile_worker() -> None:
    hashing = worker_pb2.KvHashing(key_fingerprint=7, block_tokens=16)
    common: dict[str, Any] = {"incarnation": "a", "tier": worker_pb2.KV_TIER_DEVICE}
    part = worker_pb2.KvSnapshotPart(hashes=bytes(range(16)), last=True)
    events: tuple[dict[str, Any], ...] = (
        {"snapshot": part, "announced_count": 2},
        {"stored": bytes(range(16, 24)), "announced_count": 3},
        {"removed": bytes(range(16, 24)), "announced_count": 2},
        {"heartbeat": worker_pb2.KvHeartbeat(hashing=hashing)},
        {"cleared": worker_pb2.KvCleared()},
    )
    hostile: Any = Hostile(
        *(
            worker_pb2.SubscribeKvEventsResponse(**common, sequence=number, **event)
            for number, event in enumerate(events, start=1)
        )
    )
    index = PrefixIndex()

    def find_index() -> PrefixIndex:
        return index

    feed = KvEventFeed(
        _PEER,
        "127.0.0.1:1",
        find_index,
        lambda _: hostile.channel,
        dials=Dials(),
        event_timeout_s=5.0,
    )
    await hostile.over.wait()
    await feed.close()


async def test_the_tasks_of_a_hostile_router() -> None:
    task = prefill_pb2.PrefillTask(
        transfer_id="x1", token_ids=[1, 2], decode_endpoint="127.0.0.1:1", remaining=_HOUR
    )
    hostile: Any = Hostile(
        prefill_pb2.PullResponse(task=task),
        prefill_pb2.PullResponse(cancel=prefill_pb2.CancelTask(transfer_id="x1")),
    )

    worker: Any = ScriptedWorker()
    stub: Any = prefill_pb2_grpc.PrefillQueueServiceStub(hostile.channel)
    while not hostile.over.is_set():
        session = PullSession(worker, prefill_pb2.Hello(), lambda: None)
        session.grant(4)
        running = asyncio.create_task(session.run(stub))
        over = asyncio.create_task(hostile.over.wait())
        await asyncio.wait({running, over}, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        running.cancel()
        (failure,) = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(failure, HeadraceError | grpc.aio.AioRpcError | asyncio.CancelledError)


async def test_the_reports_of_a_hostile_prefill_worker() -> None:
    layout = layout_to_proto(LAYOUT)
    hello = prefill_pb2.Hello(worker_id="p0", incarnation="a", model="sim", layout=layout)
    done = prefill_pb2.TaskDone(transfer_id="x1", reason="TRANSFER_FAILED", detail="because")
    first = prefill_pb2.FirstToken(transfer_id="x1", token_id=1)
    goods = (
        prefill_pb2.PullRequest(credit=prefill_pb2.Credit(task_count=1)),
        prefill_pb2.PullRequest(started=prefill_pb2.TaskStarted(transfer_id="x1")),
        prefill_pb2.PullRequest(first_token=first),
        prefill_pb2.PullRequest(done=done),
    )
    messages = hostile_messages(goods, COUNT, seed=7)
    queue = PrefillQueue(1_000, sign=lambda task, ref, layout_hash: b"")
    hand_over: Any = None
    service = QueueService(queue, hand_over, lambda: None)
    parse = bounded(prefill_pb2.PullRequest.FromString)

    class Context(LocalContext):
        async def write(self, message: Message) -> None:
            await asyncio.sleep(0)

    async def requests(over: asyncio.Event) -> AsyncIterator[prefill_pb2.PullRequest]:
        yield prefill_pb2.PullRequest(hello=hello)
        for number, message in enumerate(messages):
            if number % 4 == 0:
                # The worker is in the queue by now.
                await asyncio.sleep(0)
                task = prefill_pb2.PrefillTask(transfer_id="x1", token_ids=[1, 2])
                queue.enqueue(task, layout=LAYOUT, terms=TaskTerms(deadline_s=1e6))
            yield parse(message.SerializeToString())
        over.set()

    over = asyncio.Event()
    context: Any = Context()
    while not over.is_set():
        with suppress(HeadraceError):
            await service.Pull(requests(over), context)


async def test_the_handoff_of_a_hostile_prefill_worker() -> None:
    layer = handoff_pb2.LayerDone(transfer_id="x1", end_token=4, payload_bytes=400)
    hidden = handoff_pb2.HiddenState(transfer_id="x1", data=b"x" * 16)
    events: dict[str, Any] = {
        "open": handoff_pb2.Open(transfer_id="x1"),
        "layers_done": handoff_pb2.LayersDone(layers=[layer]),
        "hidden_state": hidden,
        "failed": handoff_pb2.Failed(transfer_id="x0", reason="GONE"),
        "quiesced": handoff_pb2.Quiesced(transfer_id="x0"),
        "commit": handoff_pb2.Commit(transfer_id="x0", payload_bytes=400),
    }
    goods = [handoff_pb2.HandoffRequest(**{name: event}) for name, event in events.items()]
    parse = bounded(handoff_pb2.HandoffRequest.FromString)
    stage = Stage()
    for number, message in enumerate(hostile_messages(goods, COUNT, seed=7)):
        with suppress(HeadraceError):
            stage.receiver.handle(stage.peer, parse(message.SerializeToString()))
        if not stage.transfer.active or stage.ended_streams or number % 500 == 499:
            stage = Stage()


async def test_the_reservations_of_a_hostile_decode_worker() -> None:
    goods = (
        handoff_pb2.HandoffResponse(
            reservation=handoff_pb2.Reservation(transfer_id="x1", block_ids=[0, 1], end_token=4)
        ),
        handoff_pb2.HandoffResponse(cancel=handoff_pb2.Cancel(transfer_id="x0", reason="GONE")),
    )
    rank = Rank()
    for number, message in enumerate(hostile_messages(goods, COUNT, seed=7)):
        if number % 20 == 0:
            rank = Rank()
            rank.connect("x1")
            rank.ready()
        try:
            require_bounds(message)
        except HeadraceError:
            continue
        assert isinstance(message, handoff_pb2.HandoffResponse)
        event: Any = CancelReceived(rank.streams[DECODE], message.cancel)
        if message.HasField("reservation"):
            reservation = reservation_from_proto(message.reservation)
            event = ReservationReceived(rank.streams[DECODE], reservation, message.ByteSize())
        rank.sender.post(event)
        rank.push("x1", 0)
        rank.later(0.01)
