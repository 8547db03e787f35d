"""Every RPC of every service receives invalid messages. The processes reject them, stay alive and answer correctly."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import (
    adapter_service_pb2,
    inference_pb2,
    load_pb2,
    sampling_pb2,
    store_pb2,
    trace_pb2,
)
from headrace.kv.v1 import handoff_pb2, layout_pb2, prefix_pb2
from headrace.planner.v1 import planner_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_cli.client import list_members
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.access.table import ROLES, Listener
from headrace_common.deadlines import Deadline
from headrace_common.registry.descriptors import DescriptorCache
from headrace_common.rpc.channel import open_blocking_channel, open_channel
from headrace_kv.layout import WorkerRef, layout_from_proto
from tests.channels import permitted_metadata, role_metadata
from tests.router_key import RouterKey
from tests.suite.deployment import Suite, greedy, prompt_of, suite
from tests.suite.fuzz import Fuzz, mostly

EXAMPLES = 25
CALL_S = 0.15
READ_MAX = 3
GROWTH_BYTES_MAX = 64 * 1024 * 1024
LEFT_OPEN = 60
# Leases and quarantines last for seconds. A slow machine has messages left to reject.
EMPTY_S = 60.0
LIVE = ("live-0", "live-1")
ROUTER = RouterKey()
BUGS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
SERVICES: dict[str, tuple[ServiceDescriptor, ...]] = {
    "router": (
        inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
        adapter_service_pb2.DESCRIPTOR.services_by_name["AdapterService"],
        store_pb2.DESCRIPTOR.services_by_name["StoreService"],
        load_pb2.DESCRIPTOR.services_by_name["LoadService"],
        trace_pb2.DESCRIPTOR.services_by_name["TraceService"],
        prefill_pb2.DESCRIPTOR.services_by_name["PrefillQueueService"],
    ),
    "registry": (registry_pb2.DESCRIPTOR.services_by_name["RegistryService"],),
    "planner": (planner_pb2.DESCRIPTOR.services_by_name["PlannerService"],),
    "prefill-0": (worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],),
    "decode-0": (
        decode_pb2.DESCRIPTOR.services_by_name["DecodeService"],
        handoff_pb2.DESCRIPTOR.services_by_name["HandoffService"],
        prefix_pb2.DESCRIPTOR.services_by_name["PrefixService"],
        worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
    ),
}


@dataclass(slots=True)
class Target:
    """One process under test. `good` holds valid messages by message type."""

    name: str
    process_id: int
    channels: dict[Listener, grpc.Channel]
    fuzz: Fuzz
    good: dict[str, list[Message]]
    incarnation: str
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def fire_at(self, method: MethodDescriptor, channel: grpc.Channel) -> None:
        """Sends examples. Each gets a status in time, and never INTERNAL."""
        kind = method.input_type
        goods = self.good.get(kind.full_name, [])
        one = self.fuzz.messages(kind)
        if goods:
            one = mostly(st.one_of(list(map(self.fuzz.spoiled, goods))), one)
        most = 6 if method.client_streaming else 1
        calls = st.lists(one, min_size=1, max_size=most)
        begun: st.SearchStrategy[list[Message]] = st.just([])
        if goods and method.client_streaming:
            hello = goods[0]
            begun = mostly(
                st.one_of(st.just(hello), self.fuzz.spoiled(hello)).map(lambda m: [m]), begun
            )

        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(begun, calls, st.booleans())
        def fire(first: list[Message], messages: list[Message], half_closes: bool) -> None:
            self._call(method, channel, [self._fresh(m) for m in (*first, *messages)], half_closes)

        fire()

    def _fresh(self, message: Message) -> Message:
        """Replaces fields that would make later examples fail early or end the worker."""
        if isinstance(message, decode_pb2.GenerateRequest) and message.transfer_id == "fresh":
            message.transfer_id = f"fresh-{next(self.numbers)}"
        if isinstance(message, decode_pb2.LinkRequest):
            for opened in message.opens:
                self._fresh(opened.request)
        if isinstance(message, worker_pb2.DrainRequest) and message.incarnation == self.incarnation:
            message.incarnation = "f" * 16
        return message

    def _call(
        self,
        method: MethodDescriptor,
        channel: grpc.Channel,
        messages: list[Message],
        half_closes: bool,
    ) -> None:
        service = method.containing_service
        path = f"/{service.full_name}/{method.name}"
        codec: dict[str, Callable[..., Any]] = {
            "request_serializer": lambda message: message.SerializeToString(),
            "response_deserializer": message_factory.GetMessageClass(method.output_type).FromString,
        }
        options: dict[str, Any] = {"timeout": CALL_S, "metadata": permitted_metadata(path)}
        over = threading.Event()

        def requests() -> Iterator[Message]:
            yield from messages
            if not half_closes:
                over.wait(2 * CALL_S)

        call: Any
        match method.client_streaming, method.server_streaming:
            case True, True:
                call = channel.stream_stream(path, **codec)(requests(), **options)
            case False, True:
                call = channel.unary_stream(path, **codec)(messages[0], **options)
            case _:
                call = iter([channel.unary_unary(path, **codec).future(messages[0], **options)])
        failure: grpc.RpcError | None = None
        try:
            for response in itertools.islice(call, READ_MAX):
                if isinstance(response, grpc.Future):
                    response.result()
        except grpc.RpcError as error:
            failure = error
        finally:
            over.set()
            if isinstance(call, grpc.RpcContext):
                call.cancel()
        if failure is not None:
            said = f"{path}: {failure.code()}: {failure.details()}: {messages}"
            assert failure.code() not in BUGS, said
            lost = failure.code() is grpc.StatusCode.UNAVAILABLE
            assert not lost or failure.trailing_metadata(), said

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process_id}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def good_messages(
    members: dict[str, registry_pb2.Member],
    descriptor: layout_pb2.KvDescriptor,
) -> dict[str, list[Message]]:
    """Valid messages by type."""
    prefill, decode = members["prefill-0"], members["decode-0"]
    named = registry_pb2.MemberRef(worker_id=decode.worker_id, incarnation=decode.incarnation)
    asked = greedy(prompt_of(20, 1), 4)
    stranger = registry_pb2.Member()
    stranger.CopyFrom(decode)
    stranger.worker_id, stranger.incarnation = "stranger", "0123456789abcdef"
    stranger.endpoint = "127.0.0.1:9"
    hello = handoff_pb2.Hello(
        worker_id="stranger",
        incarnation=stranger.incarnation,
        layout=prefill.layout,
        decode_worker_id=decode.worker_id,
        decode_incarnation=decode.incarnation,
    )
    ticket = ROUTER.ticket(
        LIVE[0],
        prefill=WorkerRef(hello.worker_id, hello.incarnation),
        decode=WorkerRef(decode.worker_id, decode.incarnation),
        layout=layout_from_proto(decode.layout),
    )
    landed = handoff_pb2.LayerDone(transfer_id=LIVE[0], end_token=19, payload_bytes=304)
    failed = handoff_pb2.Failed(transfer_id=LIVE[1], reason="TRANSFER_FAILED", detail="x")
    commit = handoff_pb2.HandoffRequest(commit=handoff_pb2.Commit(transfer_id=LIVE[0]))
    task_done = prefill_pb2.PullRequest(done=prefill_pb2.TaskDone(transfer_id=LIVE[0]))
    messages: list[Message] = [
        asked,
        inference_pb2.RouteRequest(request=asked),
        trace_pb2.ListTracesRequest(page_size=2),
        prefill_pb2.PullRequest(
            hello=prefill_pb2.Hello(
                worker_id="stranger",
                incarnation=stranger.incarnation,
                model="sim",
                layout=prefill.layout,
            )
        ),
        prefill_pb2.PullRequest(credit=prefill_pb2.Credit(task_count=3)),
        task_done,
        prefill_pb2.PullRequest(batch=prefill_pb2.PullRequestBatch(requests=[task_done] * 2)),
        decode_request("fresh", decode.incarnation),
        decode_pb2.LinkRequest(
            opens=[
                decode_pb2.LinkOpen(
                    stream_id=1,
                    request=decode_request("fresh", decode.incarnation),
                    timeout=Duration(seconds=1),
                    credit_tokens=2,
                )
            ],
            credits=[decode_pb2.LinkCredit(stream_id=1, credit_tokens=8)],
        ),
        decode_pb2.LinkRequest(cancelled_stream_ids=[1]),
        decode_pb2.SetFirstTokenRequest(transfer_id=LIVE[0], incarnation=decode.incarnation),
        handoff_pb2.HandoffRequest(hello=hello),
        handoff_pb2.HandoffRequest(open=handoff_pb2.Open(transfer_id=LIVE[0], ticket=ticket)),
        handoff_pb2.HandoffRequest(layers_done=handoff_pb2.LayersDone(layers=[landed])),
        commit,
        handoff_pb2.HandoffRequest(batch=handoff_pb2.HandoffRequestBatch(requests=[commit] * 2)),
        handoff_pb2.HandoffRequest(failed=failed),
        handoff_pb2.HandoffRequest(quiesced=handoff_pb2.Quiesced(transfer_id=LIVE[1])),
        worker_pb2.WatchStatusRequest(max_interval=Duration(seconds=1)),
        worker_pb2.SubscribeKvEventsRequest(incarnation=decode.incarnation),
        registry_pb2.RegisterRequest(member=stranger, ttl=Duration(seconds=2)),
        registry_pb2.KeepAliveRequest(lease_id="x"),
        registry_pb2.PutKvDescriptorRequest(member=named, lease_id="x", descriptor=descriptor),
        registry_pb2.GetKvDescriptorRequest(member=named),
        registry_pb2.SetPolicyRequest(policy=registry_pb2.Policy(tenant_weights={"a": 2.0})),
    ]
    by_type: dict[str, list[Message]] = {}
    for message in messages:
        by_type.setdefault(message.DESCRIPTOR.full_name, []).append(message)
    return by_type


def decode_request(transfer_id: str, incarnation: str) -> decode_pb2.GenerateRequest:
    return decode_pb2.GenerateRequest(
        request_id="r",
        transfer_id=transfer_id,
        incarnation=incarnation,
        token_ids=prompt_of(20, 2),
        sampling=sampling_pb2.SamplingParams(max_tokens=4),
        remote_prefill=True,
        ticket_key_id=ROUTER.key_id,
    )


@contextlib.contextmanager
def waiting_attempts(channel: grpc.Channel, incarnation: str) -> Iterator[None]:
    """Attempts that wait for their KV under the ids in LIVE. Fuzzed messages use these ids too."""
    path = "/headrace.decode.v1.DecodeService/Link"
    link = channel.stream_stream(
        path,
        request_serializer=decode_pb2.LinkRequest.SerializeToString,
        response_deserializer=decode_pb2.LinkResponse.FromString,
    )
    metadata = permitted_metadata(path)
    watch = channel.unary_stream(
        "/headrace.worker.v1.WorkerService/WatchStatus",
        request_serializer=worker_pb2.WatchStatusRequest.SerializeToString,
        response_deserializer=worker_pb2.WatchStatusResponse.FromString,
    )(
        worker_pb2.WatchStatusRequest(ticket_public_key=ROUTER.key.public.public_key),
        metadata=role_metadata(Role.ROUTER),
    )
    next(watch)
    opens = [
        decode_pb2.LinkOpen(
            stream_id=number, request=decode_request(name, incarnation), credit_tokens=1
        )
        for number, name in enumerate(LIVE, 1)
    ]
    requests = iter([decode_pb2.LinkRequest(opens=opens)])
    call = link(requests, timeout=60, metadata=metadata)
    try:
        reserved = 0
        while reserved < len(LIVE):
            reserved += len(next(call).reserved)
        yield
    finally:
        watch.cancel()
        call.cancel()


def opened_and_left(endpoint: str) -> list[socket.socket]:
    """Connections that carry random bytes only."""
    host, _, port = endpoint.partition(":")
    left = [socket.create_connection((host, int(port)), timeout=5) for _ in range(LEFT_OPEN)]
    for number, connection in enumerate(left):
        if number % 3:
            connection.sendall(
                os.urandom(64) if number % 3 == 1 else b"PRI * HTTP/2.0\r\n\r\nSM\r\n"
            )
    return left


async def targets_of(it: Suite) -> list[Target]:
    members = {m.worker_id: m for m in await list_members(it.deployment.registry)}
    decode = members["decode-0"]
    registry = open_channel(it.deployment.registry, Credentials(role=Role.PREFILL))
    descriptors = DescriptorCache(registry)
    descriptor = await descriptors.get(decode.worker_id, decode.incarnation, Deadline.after(5))
    await descriptors.close()
    await registry.close()
    good = good_messages(members, descriptor)
    ids = [m.incarnation for m in members.values()]
    fuzz = Fuzz(["sim", "stranger", "decode-0", "prefill-0", "router", *LIVE, *ids])
    found = []
    for name in SERVICES:
        child = it.child(name)
        channels = {Listener.INTERNAL: open_blocking_channel(child.endpoint)}
        if child.client_endpoint:
            channels[Listener.CLIENT] = open_blocking_channel(child.client_endpoint)
        incarnation = members[name].incarnation if name in members else ""
        found.append(Target(name, child.process.pid, channels, fuzz, good, incarnation))
    return found


async def answers_right(it: Suite, seed: int) -> None:
    for placement in (
        inference_pb2.PREFILL_PLACEMENT_REMOTE,
        inference_pb2.PREFILL_PLACEMENT_LOCAL,
    ):
        prompt = prompt_of(60, seed)
        outcome = await it.generate(prompt, 6, placement=placement)
        assert outcome.token_ids == it.expected(prompt, 6)


async def test_bad_peers_and_bad_messages_end_no_process_and_grow_none(tmp_path: Path) -> None:
    settings = (
        # Every bad message is processed, however many come.
        ("decode", "quarantine_s", "1"),
        ("decode", "lease_ttl_s", "1"),
    )
    async with suite(tmp_path, settings=settings, planner=True) as it:
        await answers_right(it, 1)
        targets = await targets_of(it)
        before = {target.name: target.resident_bytes() for target in targets}
        left: list[socket.socket] = []
        try:
            for target in targets:
                child = it.child(target.name)
                for endpoint in filter(None, (child.endpoint, child.client_endpoint)):
                    left += opened_and_left(endpoint)
            # Most of the time is spent waiting for answers that do not come.
            await asyncio.gather(*(asyncio.to_thread(fire_all, target) for target in targets))
            await answers_right(it, 2)
        finally:
            for connection in left:
                connection.close()
            for target in targets:
                for channel in target.channels.values():
                    channel.close()
        for target in targets:
            assert it.child(target.name).running, target.name
            grown = target.resident_bytes() - before[target.name]
            assert grown < GROWTH_BYTES_MAX, f"{target.name} grew by {grown} bytes"
            log = it.child(target.name).spec.log_file.read_text()
            assert "Traceback" not in log, (
                f"{target.name}: {log[log.index('Traceback') - 500 :][:3000]}"
            )
        await it.wait_empty("decode-0", EMPTY_S)
        await it.wait_empty("prefill-0", EMPTY_S)
        await answers_right(it, 3)


def fire_all(target: Target) -> None:
    waiting = (
        waiting_attempts(target.channels[Listener.INTERNAL], target.incarnation)
        if target.name == "decode-0"
        else contextlib.nullcontext()
    )
    with waiting:
        for service in SERVICES[target.name]:
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                for listener, channel in target.channels.items():
                    if path in ROLES[listener]:
                        target.fire_at(method, channel)
