"""Forged handoffs in a live deployment. The attacker knows the transfer: it is a client that asked for it.

It reserves blocks by a request of its own, and claims that their KV has landed. The prefix of the
prompt would stay in the decode worker's cache, for all other clients.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace.prefill.v1 import prefill_pb2
from headrace.registry.v1 import registry_pb2
from headrace_cli.client import list_members
from headrace_common.access.credentials import Credentials
from headrace_common.access.local_key import load_local_key
from headrace_common.access.roles import Role
from headrace_common.access.tokens import create_token
from headrace_common.rpc.channel import open_channel
from headrace_common.tickets.direct_request import decode_request_of
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.layout.proto import layout_from_proto
from tests.router_key import RouterKey
from tests.security.bystander import ROOT, bystander
from tests.security.forger import Plan
from tests.security.test_roles import status_of
from tests.suite.deployment import DEADLINE_S, Suite, greedy, prompt_of, suite

SETTINGS = (("router", "look_aside", "true"), ("decode", "model", "sim:decode_step_s=0.01"))
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
PULL = "/headrace.prefill.v1.PrefillQueueService/Pull"
COUNT = 8
_ATTACK_S = 60.0


async def forge(plan: Plan) -> list[str]:
    """Runs the forger. Returns its lines."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.security.forger", plan.to_json()),
        cwd=ROOT,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(_ATTACK_S):
        output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode().splitlines()


class Reservation:
    """A direct request with reserved blocks. Its prompt is not queued yet."""

    def __init__(self, suite: Suite, direct: inference_pb2.DirectRequest, call: Any) -> None:
        self._suite = suite
        self.direct = direct
        self._call = call
        self.reserved = decode_pb2.Reserved()

    async def read(self) -> None:
        self.reserved = (await self._call.read()).reserved
        assert self.reserved.start_token < self.reserved.end_token

    async def finish(self) -> tuple[int, ...]:
        """Queues the prompt, and returns the tokens."""
        stub: Any = inference_pb2_grpc.InferenceServiceStub(self._suite.channel)
        done = await stub.Prefill(
            inference_pb2.PrefillRequest(direct=self.direct, start_token=self.reserved.start_token),
            timeout=DEADLINE_S,
        )
        assert done.worker_id == "prefill-0"
        tokens: list[int] = []
        while isinstance(event := await self._call.read(), decode_pb2.GenerateResponse):
            tokens += event.tokens.token_ids
        return tuple(tokens)


async def reserve(
    deployed: Suite, decode: grpc.aio.Channel, prompt: list[int], count: int
) -> Reservation:
    stub: Any = inference_pb2_grpc.InferenceServiceStub(deployed.channel)
    request = inference_pb2.RouteRequest(request=greedy(prompt, count, REMOTE))
    routed = await stub.Route(request, timeout=DEADLINE_S)
    assert routed.direct.remote_prefill
    generate: Any = decode_pb2_grpc.DecodeServiceStub(decode).Generate
    reservation = Reservation(
        deployed, routed.direct, generate(decode_request_of(routed.direct), timeout=DEADLINE_S)
    )
    await reservation.read()
    return reservation


def plan_of(
    reservation: Reservation, members: Mapping[str, registry_pb2.Member], token: str = ""
) -> Plan:
    """A plan that presents as tickets everything that the attacker has or can make."""
    direct, reserved = reservation.direct, reservation.reserved
    decode, prefill = members["decode-0"], members["prefill-0"]
    own = WorkerRef("prefill-9", "9" * 16)
    forger = RouterKey()
    self_signed = forger.ticket(
        direct.transfer_id,
        prefill=own,
        decode=WorkerRef(decode.worker_id, decode.incarnation),
        layout=layout_from_proto(decode.layout),
    )
    return Plan(
        endpoint=decode.endpoint,
        token=token,
        worker_id=own.worker_id,
        incarnation=own.incarnation,
        decode_worker_id=decode.worker_id,
        decode_incarnation=decode.incarnation,
        layout=prefill.layout.SerializeToString().hex(),
        transfer_id=direct.transfer_id,
        start_token=reserved.start_token,
        end_token=reserved.end_token,
        tickets=["", direct.ticket.hex(), self_signed.hex()],
    )


@pytest.mark.core
async def test_no_forged_handoff_changes_an_answer_or_the_prefix_cache(tmp_path: Path) -> None:
    token = create_token(load_local_key(), Role.PREFILL, "prefill-9", 600)
    token_file = tmp_path / "prefill-9.token"
    token_file.write_text(token)
    prompt = prompt_of(100, 7)
    async with suite(tmp_path, prefill_count=1, decode_count=1, settings=SETTINGS) as deployed:
        members = {m.worker_id: m for m in await list_members(deployed.deployment.registry)}
        async with (
            bystander(deployed) as client,
            grpc.aio.insecure_channel(members["decode-0"].client_endpoint) as decode,
        ):
            reservation = await reserve(deployed, decode, prompt, COUNT)
            plan = plan_of(reservation, members)
            # Without a credential.
            assert await forge(plan) == ["UNAUTHENTICATED"]
            async with grpc.aio.insecure_channel(members["router-0"].endpoint) as channel:
                status = await status_of(channel, PULL)
                assert status is grpc.StatusCode.UNAUTHENTICATED
            # With a prefill worker's credential, as the worker that will have the task.
            impostor = replace(plan, token=token, worker_id="prefill-0")
            assert await forge(impostor) == ["PERMISSION_DENIED"]
            prefill = members["prefill-0"]
            hello = prefill_pb2.Hello(
                worker_id="prefill-0", incarnation=prefill.incarnation, layout=prefill.layout
            )
            pull = prefill_pb2.PullRequest(hello=hello).SerializeToString()
            async with open_channel(
                members["router-0"].endpoint, Credentials(token_file=str(token_file))
            ) as channel:
                assert await status_of(channel, PULL, pull) is grpc.StatusCode.PERMISSION_DENIED
            # As itself, with everything that it has in place of a ticket.
            assert await forge(replace(plan, token=token)) == [
                "welcome",
                "cancel UNAUTHENTICATED missing",
                "cancel UNAUTHENTICATED signature",
                "cancel UNAUTHENTICATED key_id",
            ]
            # The genuine worker fills the transfer.
            expected = deployed.expected(prompt, COUNT)
            assert await reservation.finish() == expected
            again = await deployed.generate(prompt, COUNT)
            assert again.token_ids == expected
            cached = again.last.usage.decode_cached_tokens
            assert cached > 0, "the prefix of the attacked request is in the cache"
            assert client.answers > 0
        await deployed.wait_empty("decode-0")


async def test_a_genuine_ticket_is_of_no_use_to_another_worker_or_for_another_transfer(
    tmp_path: Path,
) -> None:
    """The attacker is a prefill worker that had a task once."""
    token = create_token(load_local_key(), Role.PREFILL, "prefill-9", 600)
    async with suite(tmp_path, prefill_count=1, decode_count=1, settings=SETTINGS) as deployed:
        members = {m.worker_id: m for m in await list_members(deployed.deployment.registry)}
        prefill = members["prefill-0"]
        # It pulls as a worker of its own, and gets the only task that is sent to it.
        own = WorkerRef("prefill-9", "9" * 16)
        token_file = tmp_path / "prefill-9.token"
        token_file.write_text(token)
        async with (
            open_channel(
                members["router-0"].endpoint, Credentials(token_file=str(token_file))
            ) as router,
            grpc.aio.insecure_channel(members["decode-0"].client_endpoint) as decode,
        ):
            call: Any = router.stream_stream(
                PULL,
                request_serializer=prefill_pb2.PullRequest.SerializeToString,
                response_deserializer=prefill_pb2.PullResponse.FromString,
            )()
            hello = prefill_pb2.Hello(
                worker_id=own.worker_id,
                incarnation=own.incarnation,
                model=prefill.model,
                layout=prefill.layout,
            )
            await call.write(prefill_pb2.PullRequest(hello=hello))
            await call.write(prefill_pb2.PullRequest(credit=prefill_pb2.Credit(task_count=1)))
            # One of these goes to it: the genuine worker has the others.
            prompts = [prompt_of(80, 100 + number) for number in range(6)]
            asked = [
                asyncio.create_task(deployed.generate(prompt, 2, placement=REMOTE))
                for prompt in prompts
            ]
            task = (await asyncio.wait_for(call.read(), DEADLINE_S)).task
            assert task.handoff_ticket
            reservation = await reserve(deployed, decode, prompt_of(100, 8), COUNT)
            plan = plan_of(reservation, members, token)
            plan = replace(plan, tickets=[task.handoff_ticket.hex()])
            assert await forge(plan) == ["welcome", "cancel PERMISSION_DENIED transfer_id"]
            # Its old ticket, after it gave the task back unstarted.
            done = prefill_pb2.TaskDone(transfer_id=task.transfer_id, reason="QUEUE_FULL")
            await call.write(prefill_pb2.PullRequest(done=done))
            for prompt, outcome in zip(prompts, await asyncio.gather(*asked), strict=True):
                assert outcome.token_ids == deployed.expected(prompt, 2)
            ended = replace(plan, transfer_id=task.transfer_id)
            assert (await forge(ended))[1].startswith("cancel CANCELLED")
            call.cancel()
            assert await reservation.finish() == deployed.expected(prompt_of(100, 8), COUNT)
        await deployed.wait_empty("decode-0")
