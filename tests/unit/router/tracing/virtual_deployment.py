"""A router, two decode workers and a prefill worker in virtual time, with real services around scripted engines.

Every time that a trace shows is measured by the product: the engines only wait, and the ways delay messages.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace.kv.v1 import handoff_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.config import ServiceConfig
from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError, NotFound
from headrace_common.telemetry.setup import Telemetry, init_telemetry
from headrace_decode.admission import BlockAdmission, Capacity
from headrace_decode.attempts import Attempts
from headrace_decode.service import DecodeService
from headrace_engine import interface as engine
from headrace_frontend.request.computations import TextThreads
from headrace_kv.layout import WorkerRef, layout_to_proto
from headrace_kv.messages import Reservation, SendReport
from headrace_kv.prefix.events import Tier
from headrace_kv.receive.receiver import Receiver
from headrace_kv.send.writes import LinkRecord
from headrace_kv.transport.base import WriteResult
from headrace_prefill.worker import PrefillWorker
from headrace_router.app import Router
from headrace_router.config import RouterConfig
from headrace_router.tracing.record import span_batches
from headrace_text.load import ByteCodec
from tests.component.decode.scripted_engine import LAYOUT, ScriptedEngine
from tests.kit.openai_app import NoThreads
from tests.local_channel import LocalChannel
from tests.router_key import RouterKey
from tests.virtually import stand_still

RANKS = 4
LAYERS = LAYOUT.layer_count
SLOTS = 2
TOKENS = 12
"""Of an answer."""
USUAL_S = {
    "reserve": 0.0015,
    "batch": 0.0009,
    "handshake": 0.0003,
    "start": 0.0003,
    "step": 0.011,
    "token": 0.011,
    "way": 0.0010,
    **{f"layer {layer}": 0.03 for layer in range(LAYERS)},
    **{f"move {rank}": 0.0015 for rank in range(RANKS)},
    **{f"gather {rank}": 0.0001 for rank in range(RANKS)},
}
"""What the steps take. Each time varies by a quarter."""


class _Forwarded(SpanProcessor):
    """Gives a worker's spans to the router, by the worker's clock."""

    def __init__(self, owner: Deployment, ahead_s: float) -> None:
        self._owner, self._ahead_ns = owner, round(1e9 * ahead_s)

    def on_end(self, span: ReadableSpan) -> None:
        for batch in span_batches(encode_spans([span])):
            for one in batch.spans:
                one.start_time_unix_nano += self._ahead_ns
                one.end_time_unix_nano += self._ahead_ns
            self._owner.router.traces.add_batch(batch)


class Deployment:
    """`faults_s` are seconds that steps take in addition. See `deployment`."""

    def __init__(self, random: Random, policy: registry_pb2.Policy) -> None:
        self.random = random
        self.faults_s: dict[str, float] = defaultdict(float)
        self.tiers: Mapping[Tier, int] = {}
        self.dies_after: int | None = None
        """Tokens of an answer after which its decode worker freezes, for "frozen", and is lost."""
        self.clock_ahead_s = random.uniform(-3.0, 3.0)
        """That of the prefill worker. The decode workers have the opposite."""
        self.key = RouterKey()
        self.channels: dict[str, LocalChannel] = {}
        self.background: list[asyncio.Task[Any]] = []
        settings: Any = {"insecure": True, "traces_sampler": "always_on"}
        config = RouterConfig(model=("sim",), **settings)
        telemetry, codecs = init_telemetry("router", "router-0", config), {"sim": ByteCodec()}
        self.router = Router(config, codecs, telemetry, lambda: policy, lambda: 1, self.key.key)
        self.prefill = PrefillEnd(self)
        self.decodes = [DecodeEnd(self, f"decode-{number}") for number in range(2)]

    def took_s(self, step: str) -> float:
        return USUAL_S[step] * self.random.uniform(0.75, 1.25) + self.faults_s[step]

    async def take(self, step: str) -> None:
        await asyncio.sleep(self.took_s(step))

    def telemetry_of(self, service: str, name: str, ahead_s: float) -> Telemetry:
        telemetry = init_telemetry(service, name, ServiceConfig(traces_sampler="always_on"))
        telemetry.add_processor(_Forwarded(self, ahead_s))
        return telemetry

    async def ask(
        self,
        name: str,
        *,
        tenant: str = "quiet",
        text: str = "x" * 60,
        read_s: float = 0.0,
        sampling: sampling_pb2.SamplingParams | None = None,
        **fields: Any,
    ) -> None:
        """Runs a request to its end, or its error. The client pauses once by `read_s`."""
        pauses_s = [read_s]

        async def write(message: inference_pb2.GenerateResponse) -> None:
            if pauses_s and message.token_ids:
                await asyncio.sleep(pauses_s.pop())

        sampling = sampling or sampling_pb2.SamplingParams()
        sampling.max_tokens = TOKENS
        request = inference_pb2.GenerateRequest(
            request_id=name, text=text, sampling=sampling, **fields
        )
        with suppress(HeadraceError):
            await self.router.runner.run(request, tenant, Deadline.after(300.0), write)
        # The workers' last reports arrive.
        await asyncio.sleep(1.5)


@asynccontextmanager
async def deployment(
    seed: int, maker: Any, ways_s: tuple[float, float] = (0.0, 0.0)
) -> AsyncIterator[Deployment]:
    """`maker` makes the first token. Messages to workers, and from them, take `ways_s` longer than usual."""
    made: Deployment
    encode = ByteCodec.encode

    def encode_slowly(codec: ByteCodec, *arguments: Any, **options: Any) -> Any:
        stand_still(0.0004 + made.faults_s["tokenizer"])
        return encode(codec, *arguments, **options)

    def open_channel(endpoint: str, config: Any) -> Any:
        return made.channels[endpoint].channel

    with (
        mock.patch("headrace_router.app.open_channel", open_channel),
        mock.patch.object(TextThreads, "run", NoThreads.run),
        mock.patch.object(ByteCodec, "encode", encode_slowly),
    ):
        made = Deployment(Random(seed), registry_pb2.Policy(first_token=maker))
        made.faults_s["way to"], made.faults_s["way from"] = ways_s
        made.router.update([one.member for one in made.decodes])
        made.background.append(asyncio.create_task(made.prefill.pull()))
        # The first statuses arrive.
        await asyncio.sleep(1.0)
        yield made
        for task in made.background:
            task.cancel()
        await asyncio.gather(*made.background, return_exceptions=True)
        await made.router.close()


class _Way:
    """Messages in order, each some time on the way."""

    def __init__(self, owner: Deployment, direction: str) -> None:
        self._owner, self._direction = owner, direction
        self._messages: asyncio.Queue[tuple[float, Any]] = asyncio.Queue()

    async def write(self, message: Any) -> None:
        owner = self._owner
        delay_s = owner.took_s("way") + owner.faults_s[f"way {self._direction}"]
        self._messages.put_nowait((time.monotonic() + delay_s, message))

    async def read(self) -> Any:
        due_s, message = await self._messages.get()
        await asyncio.sleep(due_s - time.monotonic())
        return message

    async def fill(self, messages: AsyncIterator[Any]) -> None:
        async for message in messages:
            await self.write(message)

    async def all(self) -> AsyncIterator[Any]:
        while True:
            yield await self.read()


class DecodeEnd(ScriptedEngine):
    """A decode worker, as its channel reaches it."""

    def __init__(self, owner: Deployment, name: str) -> None:
        super().__init__()
        self.owner, self.ref = owner, WorkerRef(name, "ab" * 8)
        self.generating = 0
        self._events: dict[type[engine.TransferEvent], dict[str, asyncio.Event]]
        self._events = defaultdict(lambda: defaultdict(asyncio.Event))
        self.receiver = Receiver(
            ref=self.ref,
            layout=LAYOUT,
            tickets=owner.key.tickets(self.ref, LAYOUT),
            on_released=lambda transfer_id: self.transfer_event(engine.Released(transfer_id)),
        )
        self.attempts = Attempts(
            ref=self.ref,
            engine=self,
            receiver=self.receiver,
            admission=BlockAdmission(
                Capacity(400, 16, self.max_model_len, SLOTS), on_admitted=lambda: None
            ),
            telemetry=owner.telemetry_of("decode", name, -owner.clock_ahead_s),
            ticket_keys=owner.key.known,
        )
        self._service = DecodeService(self.attempts, 300.0)
        self.SetFirstToken = self._service.SetFirstToken
        self.channel = owner.channels[name] = LocalChannel(self)
        self.member = registry_pb2.Member(
            worker_id=name,
            incarnation=self.ref.incarnation,
            endpoint=name,
            role=registry_pb2.Member.ROLE_DECODE,
            model="sim",
            max_num_seqs=SLOTS,
            layout=layout_to_proto(LAYOUT),
            max_model_len=self.max_model_len,
        )

    async def decode(self, work: engine.DecodeWork, sink: engine.AnswerSink) -> None:
        take, name = self.owner.take, work.transfer_id
        await take("reserve")
        if work.remote_kv:
            tokens = work.transferable_tokens
            blocks = tuple(range(1, 1 - (-tokens // 16)))
            sink.put(Reservation(name, blocks, 0, tokens))
            await self._events[engine.Arrived][name].wait()
            if work.awaits_first_token:
                await self._events[engine.FirstToken][name].wait()
        await take("start")
        start_ns = time.monotonic_ns()
        await take("step")
        sink.put(engine.DecodeTokens((65,), step_start_ns=start_ns))
        self.generating += 1
        given = 1 + work.generated_tokens + work.awaits_first_token
        for number in range(given, work.sampling.max_tokens):
            await take("token")
            if number == self.owner.dies_after:
                self.owner.dies_after = None
                await asyncio.sleep(self.owner.faults_s["frozen"])
                self.channel.cut()
            sink.add_tokens((65,))
        self.generating -= 1
        sink.put(engine.DecodeEnded(stopped=False, cached_tokens=0, tier_tokens=self.owner.tiers))

    def transfer_event(self, event: engine.TransferEvent) -> None:
        self._events[type(event)][event.transfer_id].set()

    # The RPCs that a router calls.
    async def Link(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        there, back = _Way(self.owner, "to"), _Way(self.owner, "from")
        answers: Any = SimpleNamespace(write=back.write)
        tasks = [
            asyncio.create_task(there.fill(requests)),
            asyncio.create_task(self._service.Link(there.all(), answers)),
        ]
        try:
            while True:
                response: decode_pb2.LinkResponse = await back.read()
                for one in response.times:
                    one.times.received_unix_ns -= round(self.owner.clock_ahead_s * 1e9)
                yield response
        finally:
            for task in tasks:
                task.cancel()

    async def WatchStatus(self, request: Any, context: Any) -> AsyncIterator[Any]:
        while True:
            status = self.attempts.status()
            status.sent_unix_ns = time.time_ns()
            yield status
            await asyncio.sleep(0.5)

    async def SubscribeKvEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        raise NotFound("this worker has no KV events")
        yield  # type: ignore[unreachable]


class PrefillEnd(ScriptedEngine):
    """A prefill worker with one slot."""

    def __init__(self, owner: Deployment) -> None:
        super().__init__()
        self.owner, self.ref = owner, WorkerRef("prefill-0", "cd" * 8)
        self._running: dict[str, asyncio.Task[prefill_pb2.TaskDone]] = {}
        self._worker = PrefillWorker(
            ref=self.ref,
            engine=self,
            telemetry=owner.telemetry_of("prefill", "prefill-0", owner.clock_ahead_s),
            slot_count=1,
        )

    async def pull(self) -> None:
        queue = self.owner.router.queue
        self.stream = stream = queue.add_worker(self.ref, "sim", LAYOUT)
        queue.add_credits(stream, 1)
        while True:
            message = await stream.outbox.get()
            if message.HasField("cancel"):
                self._running[message.cancel.transfer_id].cancel()
            else:
                self.owner.background.append(asyncio.create_task(self._run(message.task)))

    async def _run(self, task: prefill_pb2.PrefillTask) -> None:
        owner, stream, queue = self.owner, self.stream, self.owner.router.queue
        ahead_ns = round(owner.clock_ahead_s * 1e9)
        await asyncio.sleep(owner.took_s("way") + owner.faults_s["way to"])

        async def on_start() -> None:
            queue.task_started(stream, task.transfer_id)

        def on_first_token(first: prefill_pb2.FirstToken) -> None:
            first.times.received_unix_ns += ahead_ns
            delay_s = owner.took_s("way") + owner.faults_s["way from"]
            asyncio.get_running_loop().call_later(delay_s, queue.first_token_made, stream, first)

        running = asyncio.create_task(self._worker.run(task, on_start, on_first_token))
        self._running[task.transfer_id] = running
        done = await running
        done.times.received_unix_ns += ahead_ns
        await asyncio.sleep(1.3 * owner.took_s("way") + owner.faults_s["way from"])
        queue.task_ended(stream, done)
        queue.add_credits(stream, 1)

    async def prefill(
        self,
        work: engine.PrefillWork,
        on_first_token: Callable[[engine.DecodeTokens], None] | None = None,
        on_report: Callable[[SendReport], None] | None = None,
    ) -> engine.PrefillOutcome:
        owner = self.owner
        await owner.take("batch")
        opening = asyncio.create_task(self._open(work))
        start_ns, ready_ns = time.time_ns(), []
        for layer in range(LAYERS):
            await owner.take(f"layer {layer}")
            ready_ns.append(time.monotonic_ns())
        end_ns = time.time_ns()
        if on_first_token is not None:
            on_first_token(engine.DecodeTokens((65,)))
        reserved_ns, land = await opening
        writes = self._writes(work, ready_ns, reserved_ns)
        landed_ns = max(write.landed_ns for write in writes)
        await asyncio.sleep(max(0.0, 1e-9 * landed_ns - time.monotonic()))
        links = [LinkRecord(writes[LAYERS * rank]) for rank in range(RANKS)]
        for write in writes:
            links[write.destination_rank].add_landed(write, reserved_ns, write.landed_ns)
        reports = tuple(
            SendReport(work.target.transfer_id, rank, "", "", (link.report(),))
            for rank, link in enumerate(links)
        )
        await owner.take("way")
        land()
        for report in reports:
            if on_report is not None:
                on_report(report)
        return engine.PrefillOutcome(0, start_ns, end_ns, reports, tier_tokens=owner.tiers)

    async def _open(self, work: engine.PrefillWork) -> tuple[int, Callable[[], None]]:
        """The handshake and the reservation. Returns its time, and what lands the KV."""
        owner, target = self.owner, work.target
        await owner.take("handshake")
        decode = next(one for one in owner.decodes if one.ref == target.decode)
        answers: asyncio.Queue[handoff_pb2.HandoffResponse] = asyncio.Queue()
        hello = handoff_pb2.Hello(layout=layout_to_proto(LAYOUT))
        hello.worker_id, hello.incarnation = self.ref
        hello.decode_worker_id, hello.decode_incarnation = decode.ref
        peer = decode.receiver.connect(hello, answers.put_nowait, lambda _: None)

        def send(**message: Any) -> None:
            decode.receiver.handle(peer, handoff_pb2.HandoffRequest(**message))

        def land() -> None:
            group = LAYOUT.groups[0]
            size = group.bytes_between(0, target.end_token, heads=group.head_count)
            done = {"transfer_id": target.transfer_id, "end_token": target.end_token}
            layers = [
                handoff_pb2.LayerDone(**done, layer=layer, payload_bytes=size)  # type: ignore[arg-type]
                for layer in range(LAYERS)
            ]
            send(layers_done=handoff_pb2.LayersDone(layers=layers))
            send(quiesced=handoff_pb2.Quiesced(transfer_id=target.transfer_id))

        send(open=handoff_pb2.Open(transfer_id=target.transfer_id, ticket=target.ticket))
        while not (await answers.get()).HasField("reservation"):
            pass
        return time.monotonic_ns(), land

    def _writes(self, work: engine.PrefillWork, ready_ns: list[int], reserved_ns: int) -> list[Any]:
        """The layers that each rank writes to the same rank. All may be on the way, and land in turn."""
        writes = []
        for rank in range(RANKS):
            landed_ns = 0
            for layer, layer_ns in enumerate(ready_ns):
                submitted_ns = max(layer_ns, reserved_ns)
                gather_ns, move_ns = (
                    round(1e9 * self.owner.took_s(f"{what} {rank}")) for what in ("gather", "move")
                )
                landed_ns = max(submitted_ns + gather_ns, landed_ns) + move_ns
                write = SimpleNamespace(layer=layer, destination_rank=rank, session="", runs=(1,))
                write.start_token, write.end_token = 0, work.target.end_token
                write.payload_bytes, write.window_wait_ns, write.ready_ns = 1 << 20, 0, layer_ns
                write.submitted_ns, write.landed_ns = submitted_ns, landed_ns
                write.results = [WriteResult("in_memory", "gather", 1, gather_ns)]
                writes.append(write)
        return writes
